"""Bearer tokens: the admin's from a file that only its owner may read, others from the bus."""

import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from diloco_coordinator.access import Keyring, Meter, Role, allows, digest
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient

FILE = "admin-token"
# A page asks about three times a second, the command less; several of them share a token.
REQUESTS_PER_S, REQUESTS_BURST = 100.0, 300
# Guessing is hopeless anyway; this keeps the log and the CPU quiet. Per address.
REFUSALS_PER_S, REFUSALS_BURST = 2.0, 30

_bearer = HTTPBearer(auto_error=False, description="A token of the cluster")


def admin_token(data: Path) -> str:
    """The token in `<data>/admin-token`, created (mode 0600) if there is none."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = path.read_text(encoding="ascii").strip()
        if token:
            return token
        # The disk was full when it was made: an empty token must not open the door.
        token = new_token()
        path.write_text(token + "\n", encoding="ascii")
        return token
    token = new_token()
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def new_token() -> str:
    """256 random bits, safe in a header."""
    return secrets.token_urlsafe(32)


class Guard:
    """Lets requests with a good bearer token of a sufficient role through."""

    def __init__(self, registry: Registry, token: str) -> None:
        # The mirror's own dictionary: a revoked token stops working at once.
        self._keyring = Keyring(digest(token), registry.tokens)
        self._meter = Meter(REQUESTS_PER_S, REQUESTS_BURST)
        self._refusals = Meter(REFUSALS_PER_S, REFUSALS_BURST)

    def needs(self, role: Role) -> Callable[..., Awaitable[None]]:
        """A dependency: 401 without a good token, 403 without the role, 429 too often.

        Async, since FastAPI runs all others in threads, where two would meet in a meter.
        """

        async def check(
            request: Request,
            given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
        ) -> None:
            self._check(request, given.credentials if given else "", role)

        return check

    def _check(self, request: Request, token: str, needed: Role) -> None:
        now = ambient.monotonic()
        found = self._keyring.role(token) if token else None
        if found is None:
            address = request.client.host if request.client else ""
            _wait(self._refusals.admit(address, now), "too many requests without a good token")
            raise Problem(
                401,
                "A token is needed",
                "send 'Authorization: Bearer <token>'; the admin token is in the file "
                f"'{FILE}' of the coordinator's data folder",
                headers={"WWW-Authenticate": "Bearer"},
            )
        name, role = found
        _wait(
            self._meter.admit(name, now), f"the token {name!r} may ask {REQUESTS_PER_S:g} times/s"
        )
        if not allows(role, needed):
            raise Problem(
                403,
                "The token's role does not allow this",
                f"the token {name!r} has the role {role}; this needs {needed}",
            )
        request.state.token_name, request.state.role = name, role


def _wait(seconds: float, why: str) -> None:
    if seconds:
        raise Problem(
            429,
            "Too many requests",
            f"{why}: wait {seconds:.1f} s",
            headers={"Retry-After": str(int(seconds) + 1)},
        )
