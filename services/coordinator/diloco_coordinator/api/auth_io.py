"""Every request passes `Guard`: whose its bearer token is, and whether that one may do it.

The administrator's token is in a file (admin_token_io.py), all others are records on the bus.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from diloco_coordinator.access import (
    ADMIN,
    ASKING,
    TOKENS_MAX,
    Asking,
    Door,
    Keyring,
    Meter,
    Scope,
    TokenRecord,
    asker,
    digest,
    hindrance,
    origin_of,
    sees,
)
from diloco_coordinator.api.admin_token_io import FILE, AdminToken
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.bus.port import BusError
from diloco_shared.protocol.checkpoints import parse_reference

# A page asks about three times a second, the command less; several of them share a token.
REQUESTS_PER_S, REQUESTS_BURST = 100.0, 300
# Per origin: so many failed attempts at once, and so many a minute. Who mistypes needs few.
FAILURES_BURST, FAILURES_PER_MINUTE = 20, 20.0
# How exactly is known when a token was used last, in seconds: one write each time.
USED_S = 600.0
# Parts of paths that say what a request is about, for the audit log.
_ABOUT = ("run", "member", "name", "number", "folder", "export")

_bearer = HTTPBearer(auto_error=False, description="A token of the cluster")


class Guard:
    """Lets requests with a good bearer token that may do it through."""

    def __init__(self, registry: Registry, admin: AdminToken | str) -> None:
        self.admin = AdminToken(None, admin) if isinstance(admin, str) else admin
        self._registry = registry
        # The mirror's own dictionary: a revoked token stops working at once.
        self._keyring = Keyring(registry.tokens)
        self._meter = Meter(REQUESTS_PER_S, REQUESTS_BURST)
        self._door = Door(Meter(FAILURES_PER_MINUTE / 60, FAILURES_BURST))
        self._noted: dict[str, float] = {}  # name -> when its use was noted last
        self._noting: set[asyncio.Task[None]] = set()
        # For routes: who may look, who may act, and who may act once it is known on what.
        self.look = self._routes("read")
        self.act = self._routes("operate")
        self.begin = self._routes("operate", later=True)

    def _routes(self, scope: Scope, *, later: bool = False) -> dict[str, Any]:
        return {"dependencies": [Depends(self.needs(scope, later=later))]}

    def needs(self, scope: Scope, *, later: bool = False) -> Callable[..., Awaitable[None]]:
        """A dependency: 401 without a good token, 403 if it may not, 429 too often.

        What it may depends on the run or the member in the path. `later`: on what is in the body,
        and the route calls `must` once it knows.

        Async, since FastAPI runs all others in threads, where two would meet in a meter.
        """

        async def check(
            request: Request,
            given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
        ) -> None:
            self._check(request, given.credentials if given else "", scope, later)

        check.scope, check.later = scope, later  # type: ignore[attr-defined]  # for the tests
        return check

    def recognise(self, scope: MutableMapping[str, Any]) -> Asking | None:
        """Who sent a request that was refused before its token was asked for: for the audit log.

        None where its route asks for none. Nobody is let in by this, and no failure counts.
        """
        dependant = getattr(scope.get("route"), "dependant", None)
        checks = [d.call for d in dependant.dependencies] if dependant else []
        needed = next((c.scope for c in checks if hasattr(c, "scope")), None)
        if needed is None:
            return None
        request = Request(scope)
        _, _, token = request.headers.get("authorization", "").partition(" ")
        asking = self._asking(request, token, needed)
        asking.token = self._find(asking) if asking.given else None
        return asking

    def _asking(self, request: Request, token: str, scope: Scope) -> Asking:
        address = request.client.host if request.client else ""
        asking = Asking(address, scope, digest(token) if token else "")
        asking.target |= {k: v for k, v in request.path_params.items() if k in _ABOUT}
        return asking

    def _check(self, request: Request, token: str, scope: Scope, later: bool) -> None:
        asking = self._asking(request, token, scope)
        request.state.asking = asking  # for the audit log
        found = self._holder(asking)
        wait_s = self._meter.admit(found.name, ambient.monotonic())
        _wait(wait_s, f"the token {found.name!r} may ask {REQUESTS_PER_S:g} times/s")
        ASKING.set(asking)
        self._note_use(found)
        if later:
            return _refuse(hindrance(found.everywhere, scope, now=ambient.wall()))
        member = request.path_params.get("member")
        run = request.path_params.get("run")
        if member is not None:
            run = self._registry.assigned.get(member, "")
        return _refuse(hindrance(found, scope, run, member, now=ambient.wall()))

    def _holder(self, asking: Asking) -> TokenRecord:
        """Whose a token is: 401 if it is nobody's or has expired, 429 after many failures.

        The door is for those who may guess. Whoever has 256 random bits right did not, though they
        have expired: such a request is no failed attempt, and waits for none of others.
        """
        origin = origin_of(asking.address)
        found = self._find(asking) if asking.given else None
        if found is None or self._guessable(found, asking.given):
            _wait(
                self._door.knock(origin, found.name if found else "", ambient.monotonic()),
                "too many requests without a good token came from this address",
            )
        asking.token = found
        if found is None:
            raise _unknown(
                "send 'Authorization: Bearer <token>'; the admin token is in the file "
                f"'{FILE}' of the coordinator's data folder"
            )
        if found.expired(ambient.wall()):
            raise _unknown(
                f"the token {found.name!r} has expired: ask an administrator for another"
            )
        return found

    def _guessable(self, found: TokenRecord, given: str) -> bool:
        """Whether somebody chose the token: all but the administrator's are made here."""
        return found.name == ADMIN and self.admin.guessable(given)

    def _find(self, asking: Asking) -> TokenRecord | None:
        return self._keyring.find(asking.given, self.admin.digests(), ambient.wall())

    def good(self, asking: Asking | None) -> bool:
        """Whether what is still being told to a token's owner may go on. None: nobody asked."""
        if asking is None:
            return True
        found = self._find(asking)
        return found is not None and not found.expired(ambient.wall())

    def _note_use(self, token: TokenRecord) -> None:
        """Now and then, in the background: nobody waits for it, and a failure is no matter."""
        now = ambient.wall()
        last = max(token.used_at or 0.0, self._noted.get(token.name, 0.0))
        if not token.digest or now - last < USED_S:
            return
        if len(self._noted) > 2 * TOKENS_MAX:  # of tokens that are long gone
            self._noted.clear()
        self._noted[token.name] = now
        task = asyncio.get_running_loop().create_task(self._used(token, now))
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    async def _used(self, token: TokenRecord, now: float) -> None:
        there = self._registry.tokens.get(token.name)
        if there is not None:
            with suppress(BusError):
                await self._registry.update_token(there, there.model_copy(update={"used_at": now}))


def must(scope: Scope, run: str | None = None, member: str | None = None) -> None:
    """403 unless the token in use may do this, which the body of its request asks for."""
    asking = ASKING.get()
    if asking is None or asking.token is None:
        return  # nobody asked: the coordinator does it of itself
    if run:
        asking.target["as" if asking.target.get("run", run) != run else "run"] = run
    if member is not None:
        asking.target["member"] = member
    _refuse(hindrance(asking.token, scope, run, member, now=ambient.wall()))


def must_see(checkpoint: str) -> None:
    """403 unless the token in use may read a checkpoint's run: FOLDER/NUMBER, or an address.

    What is no reference to a checkpoint is for others to complain about.
    """
    token = asker()
    try:
        root, folder, _ = parse_reference(checkpoint)
    except ValueError:
        return
    if token is not None and token.runs and root:
        text = "; an address of its own may lead to anybody's"
        _refuse(f"the token {token.name!r} is limited to the runs {' '.join(token.runs)}{text}")
    run = run_of_folder(folder)
    if not sees(token, run):
        _refuse(f"the token in use may not read the run {run!r}, whose checkpoint this is")


def run_of_folder(folder: str) -> str:
    """The run whose checkpoints lie in a folder: its name has no dot, and its id follows one."""
    return folder.partition(".")[0]


def _refuse(why: str) -> None:
    if why:
        raise Problem(403, "The token does not allow this", why)


def _unknown(why: str) -> Problem:
    return Problem(401, "A token is needed", why, headers={"WWW-Authenticate": "Bearer"})


def _wait(seconds: float, why: str) -> None:
    if seconds:
        raise Problem(
            429,
            "Too many requests",
            f"{why}: wait {seconds:.1f} s",
            headers={"Retry-After": str(int(seconds) + 1)},
        )
