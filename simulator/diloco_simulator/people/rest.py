"""A user's requests to the coordinator of a world: its own API, without a socket.

Straight to the application: a client's connection for each request would take more time than the
answers, and would hand out a stream of events only when it is complete.
"""

import asyncio
import json
from collections.abc import Coroutine, MutableMapping
from typing import Any

from diloco_simulator.virtual_loop import Hosted
from diloco_simulator.worlds.processes import TOKEN, CoordinatorApp, Host

ADDRESS = "http://coordinator"
# As the product's own client waits, in virtual seconds.
TIMEOUT_S = 10.0


class NoAnswer(Exception):
    """The process is dead, stands still, died over it, or takes too long: nobody knows."""


class RestCalls:
    """To whatever process runs under the coordinator's name."""

    def __init__(self, machine: Host) -> None:
        self.machine = machine
        self.under_way: set[asyncio.Task[None]] = set()
        self.posted: set[asyncio.Task[None]] = set()  # those of them that may make something

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """(status, what it says) of `/v1` and `path`, or a whole address. Raises NoAnswer."""
        path = path.removeprefix(ADDRESS) if path.startswith(ADDRESS) else f"/v1{path}"
        exchange = await self._exchanged(_Exchange(method, path, body, headers or {}), TIMEOUT_S)
        if not exchange.over.is_set():
            raise NoAnswer(f"{method} {path}: no answer")
        return exchange.status, exchange.content()

    async def fetch(self, path: str) -> tuple[int, bytes]:
        """(status, content) of a file below `/v1`. Raises NoAnswer."""
        exchange = await self._exchanged(_Exchange("GET", f"/v1{path}"), TIMEOUT_S)
        if not exchange.over.is_set():
            raise NoAnswer(f"{path}: no whole answer")
        return exchange.status, b"".join(exchange.said)

    async def listen(
        self,
        path: str,
        query: str,
        seconds: float,
        method: str = "GET",
        body: dict[str, Any] | None = None,
    ) -> tuple[int, str]:
        """(status, what it says) of a stream of events below `/v1`, until it ends or so long."""
        exchange = await self._exchanged(_Exchange(method, f"/v1{path}?{query}", body), seconds)
        return exchange.status, b"".join(exchange.said).decode()

    async def _exchanged(self, exchange: "_Exchange", seconds: float) -> "_Exchange":
        """It goes on when nobody waits for the answer any more, as behind a server."""
        process, app = self.machine.process, self.machine.app
        if process is None or not isinstance(app, CoordinatorApp) or not app.listens:
            raise NoAnswer("nobody listens")
        task = self._run(process, exchange.carried_out(app))
        app.answering.add(task)
        task.add_done_callback(app.answering.discard)
        if exchange.scope["method"] == "POST":
            self.posted.add(task)
            task.add_done_callback(self.posted.discard)
        try:
            async with asyncio.timeout(seconds):
                await exchange.over.wait()
        except TimeoutError:
            exchange.gone.set()
        return exchange

    def _run(self, process: Hosted, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = process.run(work)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return task


class _Exchange:
    """One request and its answer in pieces, as a server hands them over."""

    def __init__(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.body = b"" if body is None else json.dumps(body).encode()
        said = {
            "host": "coordinator",
            "authorization": f"Bearer {TOKEN}",
            "content-type": "application/json",
            "content-length": str(len(self.body)),
        } | {name.lower(): value for name, value in (headers or {}).items()}
        path, _, query = path.partition("?")
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in said.items()],
            "client": ("user", 1),
            "server": ("coordinator", 80),
        }
        self.asked = False
        self.status, self.kind = 0, b""  # nothing was answered
        self.said: list[bytes] = []
        self.over, self.gone = asyncio.Event(), asyncio.Event()

    async def carried_out(self, app: CoordinatorApp) -> None:
        """By the application; where it fails before it has answered, the status is 500."""
        try:
            await app.coordinator.api(self.scope, self._receive, self._send)
        except Exception as error:
            if not self.said:
                self.status = 500
                self.said.append(json.dumps({"detail": repr(error)}).encode())
                self.kind = b"application/json"
        self.over.set()

    async def _receive(self) -> dict[str, Any]:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.kind = dict(message["headers"]).get(b"content-type", b"")
        elif message["type"] == "http.response.body":
            self.said.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.over.set()

    def content(self) -> Any:
        """Of a whole answer."""
        content = b"".join(self.said)
        if b"json" not in self.kind:
            return content.decode() or None
        return json.loads(content) if content else None
