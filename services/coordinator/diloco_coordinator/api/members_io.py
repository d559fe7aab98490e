"""/v1/members, /v1/events, /v1/tokens and /v1/access."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from diloco_coordinator.access import TOKENS_MAX, Role, TokenRecord, digest
from diloco_coordinator.api.auth_io import Guard, new_token
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.api.sse_io import Streams
from diloco_coordinator.api.views import event_view, member_view, syncer_views
from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.bus.port import Conflict
from diloco_shared.protocol.subjects import Id

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[int, Query(ge=0)]


class TokenRequest(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid")
    name: Id
    role: Role


class Members:
    """The routes, over one registry."""

    def __init__(self, registry: Registry, guard: Guard, streams: Streams, *, chaos: bool) -> None:
        self.registry = registry
        self.streams = streams
        self.chaos_on = chaos
        self.router = APIRouter(prefix="/v1")
        look = [Depends(guard.needs("viewer"))]
        act = [Depends(guard.needs("operator"))]
        rule = [Depends(guard.needs("admin"))]
        add = self.router.add_api_route
        add("/members", self.index, methods=["GET"], tags=["members"], dependencies=look)
        one = "/members/{member}"
        add(one, self.show, methods=["GET"], tags=["members"], dependencies=look)
        gone: dict[str, Any] = {"methods": ["DELETE"], "status_code": 204}
        add(one, self.forget, tags=["members"], dependencies=act, **gone)
        for method, name, wanted in (("POST", "drain", True), ("DELETE", "undrain", False)):
            tell: dict[str, Any] = {"methods": [method], "name": name, "dependencies": act}
            add(f"{one}/drain", self._drain(wanted), tags=["members"], **tell)
        add("/events", self.events, methods=["GET"], tags=["events"], dependencies=look)
        add("/events/stream", self.stream, methods=["GET"], tags=["events"], dependencies=look)
        add("/access", self.access, methods=["GET"], tags=["tokens"], dependencies=look)
        add("/tokens", self.tokens, methods=["GET"], tags=["tokens"], dependencies=rule)
        made: dict[str, Any] = {"methods": ["POST"], "status_code": 201}
        add("/tokens", self.make_token, tags=["tokens"], dependencies=rule, **made)
        add("/tokens/{name}", self.revoke, tags=["tokens"], dependencies=rule, **gone)

    # --- members -------------------------------------------------------------------------------

    def _find(self, member: str) -> MemberNote:
        notes = self.registry.roll.notes
        if member not in notes:
            known = ", ".join(sorted(notes)) or "none"
            text = f"there is no member {member[:63]!r}; known: {known}"
            raise Problem(404, "No such member", text)
        return notes[member]

    def _view(self, member: str) -> dict[str, Any]:
        note, registry = self._find(member), self.registry
        run = registry.assigned.get(member, "")
        lag = None
        if run and note.record.role == "syncer":
            mine = (n for m, n in registry.roll.notes.items() if registry.assigned.get(m) == run)
            lag = next(s["lag_records"] for s in syncer_views(mine) if s["id"] == member)
        speed = registry.speed_of(member)
        return member_view(note, run, registry.statuses.get(run), lag, speed)

    async def index(self) -> dict[str, Any]:
        """Every process that is or was a member, and is not forgotten.

        `speed` of a learner that trains: tokens per second, utilisation of its devices, memory and
        wait for data, as it said within the last ten seconds; null where it is not known.
        """
        return {"members": [self._view(m) for m in sorted(self.registry.roll.notes)]}

    async def show(self, member: str) -> dict[str, Any]:
        """One member; 404 names the known ones."""
        return self._view(member)

    async def forget(self, member: str) -> None:
        """Remove a member that is gone, and its assignment."""
        if self._find(member).alive:
            raise Problem(409, "The member lives", f"{member!r} is alive: stop its process first")
        await self.registry.forget(member)

    def _drain(self, wanted: bool) -> Any:
        async def act(member: str) -> dict[str, Any]:
            if self._find(member).record.role not in ("learner", "syncer"):
                role = self._find(member).record.role
                raise Problem(409, "Nothing to drain", f"a {role} works for no run")
            await self.registry.drain(member, wanted)
            text = "gets no more work" if wanted else "may work again"
            kind = "member-drained" if wanted else "member-undrained"
            run = self.registry.assigned.get(member, "")
            await self.registry.tell(run, kind, f"{member} {text}", {"member": member})
            return self._view(member)

        act.__doc__ = (
            "Take a member's work away and give it no more, until undone."
            if wanted
            else "Let a drained member work again."
        )
        return act

    # --- events --------------------------------------------------------------------------------

    async def events(self, run: str = "", after: After = 0, limit: Limit = 200) -> dict[str, Any]:
        """Events after the cursor `after`, oldest first; `next` is the cursor to go on with."""
        found = self.registry.events_after(after, run)[:limit]
        return {
            "events": [event_view(seq, e) for seq, e in found],
            "next": found[-1][0] if found else after,
        }

    async def stream(
        self, run: str = "", after: After = 0, last_event_id: Annotated[str, Header()] = ""
    ) -> StreamingResponse:
        """Events as they happen (server-sent events), after `after` or the Last-Event-ID."""
        if last_event_id.isascii() and last_event_id.isdigit():
            after = max(after, int(last_event_id))
        return self.streams.events(after, run)

    # --- tokens --------------------------------------------------------------------------------

    async def access(self, request: Request) -> dict[str, Any]:
        """What the token in use may do, and whether faults are allowed here at all."""
        state = request.state
        return {"name": state.token_name, "role": state.role, "chaos": self.chaos_on}

    async def tokens(self) -> dict[str, Any]:
        """Names and roles; the tokens themselves are not kept."""
        found = self.registry.tokens
        return {"tokens": [found[n].model_dump(exclude={"digest"}) for n in sorted(found)]}

    async def make_token(self, request: TokenRequest) -> dict[str, Any]:
        """Make a token. It is shown this once."""
        if len(self.registry.tokens) >= TOKENS_MAX:
            raise Problem(409, "Too many tokens", f"{TOKENS_MAX} exist: revoke some first")
        token = new_token()
        record = TokenRecord(
            name=request.name, role=request.role, digest=digest(token), created_at=ambient.wall()
        )
        try:
            await self.registry.put_token(record)
        except Conflict:
            text = f"there is a token {request.name!r} already: choose another name, or revoke it"
            raise Problem(409, "The name is taken", text) from None
        return {**record.model_dump(exclude={"digest"}), "token": token}

    async def revoke(self, name: str) -> None:
        """The token stops working at once."""
        if name not in self.registry.tokens:
            known = ", ".join(sorted(self.registry.tokens)) or "none"
            text = f"there is no token {name[:63]!r}; known: {known}"
            raise Problem(404, "No such token", text)
        await self.registry.delete_token(name)
