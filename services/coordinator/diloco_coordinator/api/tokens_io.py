"""/v1/tokens, /v1/access and /v1/audit: who may do what, and who did what."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from diloco_coordinator.access import (
    ADMIN,
    ASKING,
    DAY_S,
    EXPIRY_DAYS,
    EXPIRY_DAYS_MAX,
    OVERLAP_S,
    OVERLAP_S_MAX,
    PATTERNS_MAX,
    SCOPES,
    TOKENS_MAX,
    Pattern,
    Scope,
    TokenRecord,
    actor,
    digest,
)
from diloco_coordinator.api.admin_token_io import new_token
from diloco_coordinator.api.audit_io import Audit
from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.problems_io import Problem, invalid
from diloco_coordinator.audit import row_view
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.bus.port import Conflict
from diloco_shared.bus.repeating import CONFLICTS_MAX, against_others
from diloco_shared.protocol.subjects import Id

Limit = Annotated[int, Query(ge=1, le=1000)]
# Losing a compare-and-set that often means that somebody writes without end.
# Never shown.
_HIDDEN = {"digest", "previous_digest", "earlier"}


class TokenRequest(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid")
    name: Id = Field(description="Its name, by which it is revoked and noted.")
    scopes: tuple[Scope, ...] = Field(
        min_length=1, max_length=len(SCOPES), description="What it may do."
    )
    runs: tuple[Pattern, ...] = Field(
        (), max_length=PATTERNS_MAX, description="Limit it to these runs; a * ends a beginning."
    )
    sites: tuple[Pattern, ...] = Field(
        (), max_length=PATTERNS_MAX, description="Limit it to these members, likewise."
    )
    expires_in_s: float | None = Field(
        None,
        gt=0,
        le=EXPIRY_DAYS_MAX * DAY_S,
        allow_inf_nan=False,
        description=f"Seconds for which it is good; {EXPIRY_DAYS:g} days if nothing is said.",
    )
    expires_at: float | None = Field(
        None, allow_inf_nan=False, description="Or when it ends, in seconds since 1970."
    )
    never: bool = Field(False, description="Or that it never ends.")

    def end(self, now: float) -> float | None:
        """When it ends; 422 for what cannot be."""
        said = [self.expires_in_s is not None, self.expires_at is not None, self.never]
        if sum(said) > 1:
            raise _wrong("expires_in_s", "give one of expires_in_s, expires_at and never")
        if self.never:
            return None
        if self.expires_at is None:
            return now + (self.expires_in_s or EXPIRY_DAYS * DAY_S)
        if not now < self.expires_at <= now + EXPIRY_DAYS_MAX * DAY_S:
            text = f"must be in the future, and within {EXPIRY_DAYS_MAX:g} days"
            raise _wrong("expires_at", text)
        return self.expires_at


class RotateRequest(BaseModel):
    """How long the old secret stays good beside the new one."""

    model_config = ConfigDict(extra="forbid")
    overlap_s: float = Field(
        OVERLAP_S,
        ge=0,
        le=OVERLAP_S_MAX,
        allow_inf_nan=False,
        description="Seconds for which both are good.",
    )


class TokenRoutes:
    """The routes, over one registry and one audit log."""

    def __init__(self, registry: Registry, guard: Guard, audit: Audit, *, chaos: bool) -> None:
        self.registry = registry
        self.guard = guard
        self.audit = audit
        self.chaos_on = chaos
        # Two at once would each write down the same token as the one before, and one of the new
        # ones would be good for nothing. Each takes as long as the disk does for two small files.
        self._rotating_admin = asyncio.Lock()
        self.router = APIRouter(prefix="/v1")
        may = [Depends(guard.needs("administer"))]
        rule: dict[str, Any] = {"tags": ["tokens"], "dependencies": may}
        add = self.router.add_api_route
        add("/access", self.access, methods=["GET"], tags=["tokens"], **guard.look)
        add("/tokens", self.index, methods=["GET"], **rule)
        add("/tokens", self.make, methods=["POST"], status_code=201, **rule)
        add("/tokens/{name}", self.revoke, methods=["DELETE"], status_code=204, **rule)
        add("/tokens/{name}/rotate", self.rotate, methods=["POST"], **rule)
        add("/audit", self.rows, methods=["GET"], tags=["audit"], dependencies=may)

    async def access(self) -> dict[str, Any]:
        """What the token in use may do, and whether faults are allowed here at all."""
        asking = ASKING.get()
        assert asking is not None and asking.token is not None, "no route is open to nobody"
        shown = asking.token.model_dump(include={"name", "scopes", "runs", "sites", "expires_at"})
        return {**shown, "chaos": self.chaos_on}

    async def index(self) -> dict[str, Any]:
        """What each may do, and when it was used last; the tokens themselves are not kept."""
        found = self.registry.tokens
        return {"tokens": [_view(found[name]) for name in sorted(found)]}

    async def make(self, request: TokenRequest) -> dict[str, Any]:
        """Make a token. It is shown this once."""
        asking = ASKING.get()
        if asking is not None:
            asking.target["name"] = request.name
        if request.name == ADMIN:
            raise _wrong("name", f"{ADMIN!r} is the name of the token in the coordinator's file")
        if "administer" in request.scopes and (request.runs or request.sites):
            text = "whoever administers can make any token: it cannot be limited to runs or sites"
            raise _wrong("scopes", text)
        if len(self.registry.tokens) >= TOKENS_MAX:
            raise Problem(409, "Too many tokens", f"{TOKENS_MAX} exist: revoke some first")
        token, now = new_token(), ambient.wall()
        record = TokenRecord(
            name=request.name,
            scopes=request.scopes,
            runs=request.runs,
            sites=request.sites,
            digest=digest(token),
            created_at=now,
            created_by=actor(),
            expires_at=request.end(now),
        )
        try:
            await self.registry.put_token(record)
        except Conflict:
            text = f"there is a token {request.name!r} already: choose another name, or revoke it"
            raise Problem(409, "The name is taken", text) from None
        return {**_view(record), "token": token}

    async def rotate(
        self, name: str, body: Annotated[RotateRequest | None, Body()] = None
    ) -> dict[str, Any]:
        """A new secret under the same name, shown this once; the old one stays good for a while.

        It is good for as long again as the old one was made for. `admin` is the token in the
        coordinator's file: the new one is written there as well.
        """
        overlap_s = (body or RotateRequest.model_validate({})).overlap_s
        if name == ADMIN:
            return await self._rotate_admin(overlap_s)

        async def rotated() -> dict[str, Any]:
            record, token = self._find(name), new_token()
            changed = record.rotated(digest(token), ambient.wall(), overlap_s)
            await self.registry.update_token(record, changed)
            return {**_view(changed), "token": token}

        try:  # again if it is used meanwhile, which is noted in it
            return await against_others(rotated)
        except Conflict:
            text = f"{CONFLICTS_MAX} attempts lost: others write {name!r} too, try again"
            raise Problem(409, "The token keeps changing", text) from None

    async def _rotate_admin(self, overlap_s: float) -> dict[str, Any]:
        admin = self.guard.admin
        if admin.path is None:
            raise Problem(409, "Nothing to rotate", "this coordinator's token is in no file")
        try:
            async with self._rotating_admin:
                token = await asyncio.to_thread(admin.rotate, overlap_s)
        except OSError as error:
            text = (
                f"{admin.path} cannot be written ({error.strerror}): put another token there "
                "yourself, and the old one on a second line for as long as it is to be good; the "
                "coordinator notices within a second"
            )
            raise Problem(409, "The file cannot be written", text) from None
        until = ambient.wall() + overlap_s if overlap_s else 0.0
        return {"name": ADMIN, "scopes": SCOPES, "previous_until": until, "token": token}

    async def revoke(self, name: str) -> None:
        """The token stops working at once, and so does one that it replaces."""
        if name == ADMIN:
            text = "the administrator's token is in a file: rotate it with an overlap of 0 instead"
            raise Problem(409, "Not to be revoked", text)
        self._find(name)
        await self.registry.delete_token(name)

    def _find(self, name: str) -> TokenRecord:
        if name not in self.registry.tokens:
            known = ", ".join(sorted(self.registry.tokens)) or "none"
            text = f"there is no token {name[:63]!r}; known: {known}"
            raise Problem(404, "No such token", text)
        return self.registry.tokens[name]

    async def rows(
        self,
        after: Annotated[int, Query(ge=0)] = 0,
        limit: Limit = 200,
        actor: Annotated[str, Query(max_length=63)] = "",
    ) -> dict[str, Any]:
        """Who changed what, and who was refused: the newest rows, oldest first.

        `after` goes on from a row's `seq`. Older rows than the last thousand are in the files
        `audit.jsonl*` of the coordinator's data folder.
        """
        return {"rows": [row_view(row) for row in self.audit.trail.newest(limit, after, actor)]}


def _view(record: TokenRecord) -> dict[str, Any]:
    return record.model_dump(exclude=_HIDDEN)


def _wrong(path: str, message: str) -> Problem:
    return invalid("token", [{"path": path, "message": message}])
