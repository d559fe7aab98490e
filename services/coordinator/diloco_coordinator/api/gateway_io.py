"""What every request passes: a limit on bodies, counts, the audit log, and headers for browsers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diloco_coordinator.access import ASKING, Asking
from diloco_coordinator.api.audit_io import Audit

# A run's specification is a few kilobytes.
BODY_BYTES_MAX = 1 << 20
# The page brings its own scripts and styles, asks only this server, and sits in nobody's frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # States are of the moment, and the page must match the server it came with.
    "Cache-Control": "no-store",
}
# Whoever stands between might take the other one, and see another request behind this one.
_IN_TWO_WAYS = "the length of a body is said by Content-Length or Transfer-Encoding, not by both"
_TOO_LARGE = f"a body may have {BODY_BYTES_MAX} bytes at most"


class Gateway:
    """ASGI middleware; `requests` counts (method, status class).

    `recognise`: who sent a request that was refused before its route asked for the token.
    """

    def __init__(
        self,
        app: ASGIApp,
        requests: Counter[tuple[str, str]],
        recognise: Callable[[Scope], Asking | None],
        audit: Audit | None = None,
    ) -> None:
        self.app = app
        self.requests = requests
        self.recognise = recognise
        self.audit = audit or Audit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        taken, answered = 0, False
        declared = Headers(scope=scope).get("content-length", "0")
        in_two_ways = "transfer-encoding" in Headers(scope=scope) and declared != "0"

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            if in_two_ways:
                raise HTTPException(400, _IN_TWO_WAYS, headers={"Connection": "close"})
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                # Whatever was declared: what counts is what comes.
                if taken > BODY_BYTES_MAX or _too_large(declared):
                    raise HTTPException(413, _TOO_LARGE)
            return message

        async def marked(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                await self._note(scope, message["status"])
                status = f"{message['status'] // 100}xx"
                # Methods are an open set: others share a name, so that the count stays bounded.
                method = scope["method"]
                method = method if method in _METHODS else "other"
                self.requests[method, status] += 1
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        before = ASKING.set(None)
        try:
            await self.app(scope, limited, marked)
        finally:
            ASKING.reset(before)
            if not answered:  # a mistake of ours, which is answered outside
                await self._note(scope, 500)

    async def _note(self, scope: Scope, status: int) -> None:
        state: dict[str, Any] = scope.get("state", {})
        asking, route = state.get("asking"), scope.get("route")
        if asking is None and status >= 400:  # too large, or no JSON: nobody looked at the token
            asking = self.recognise(scope)
        if asking is not None and route is not None:
            await self.audit.note(asking, scope["method"], route.path, status)


_METHODS = {"GET", "HEAD", "POST", "PATCH", "DELETE"}


def _too_large(declared: str) -> bool:
    return not (declared.isascii() and declared.isdigit()) or int(declared[:20]) > BODY_BYTES_MAX
