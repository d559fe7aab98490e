"""/v1/members and /v1/events."""

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from diloco_coordinator.access import asker, sees
from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.look_io import Look, cut_off
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.api.sse_io import EventStreams, going_on
from diloco_coordinator.api.views import event_view, member_view
from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.bus.port import BusError

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[int, Query(ge=0)]
# It has 16 characters; another release may make longer ones.
Mark = Annotated[str, Query(max_length=64)]
# Of a sequence: 64 bits. Python reads no number of thousands of digits.
DIGITS_MAX = 20


class Members:
    """The routes, over one registry."""

    def __init__(self, registry: Registry, guard: Guard, streams: EventStreams) -> None:
        self.registry = registry
        self.streams = streams
        self.router = APIRouter(prefix="/v1")
        add = self.router.add_api_route
        add("/members", self.index, methods=["GET"], tags=["members"], **guard.look)
        one = "/members/{member}"
        add(one, self.show, methods=["GET"], tags=["members"], **guard.look)
        gone: dict[str, Any] = {"methods": ["DELETE"], "status_code": 204}
        add(one, self.forget, tags=["members"], **guard.act, **gone)
        for method, name, wanted in (("POST", "drain", True), ("DELETE", "undrain", False)):
            tell: dict[str, Any] = {"methods": [method], "name": name, **guard.act}
            add(f"{one}/drain", self._drain(wanted), tags=["members"], **tell)
        add("/events", self.events, methods=["GET"], tags=["events"], **guard.look)
        add("/events/stream", self.stream, methods=["GET"], tags=["events"], **guard.look)

    # --- members -------------------------------------------------------------------------------

    def _find(self, member: str) -> MemberNote:
        notes = self.registry.roll.notes
        if member not in notes:
            known = ", ".join(self._shown(Look(self.registry))) or "none"
            text = f"there is no member {member[:63]!r}; known: {known}"
            raise Problem(404, "No such member", text)
        return notes[member]

    def _shown(self, look: Look) -> list[str]:
        """Members that the token in use may be told of: none of a run that it may not see."""
        token = asker()
        return [
            m for m in sorted(self.registry.roll.notes) if sees(token, look.assigned.get(m, ""))
        ]

    def _view(self, member: str) -> dict[str, Any]:
        self._find(member)
        return member_view(*Look(self.registry).known(member))

    async def index(self) -> dict[str, Any]:
        """Every process that is or was a member, and is not forgotten.

        `speed` of a learner that trains: tokens per second, utilisation of its devices, memory and
        wait for data, as it said within the last ten seconds; null where it is not known.
        `cut_off`: why what is told may be old by now, as while the message server is away; else
        empty. `now`: the time by the coordinator's clock, in seconds since 1970, as `gone_since` of
        a member is.
        """
        look = Look(self.registry)
        known = [look.known(m) for m in self._shown(look)]
        # A thousand of them take a while to write down.
        views = await asyncio.to_thread(lambda: [member_view(*of_one) for of_one in known])
        return {
            "members": views,
            "cut_off": cut_off(self.registry.bus),
            "now": ambient.wall(),
        }

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
            before = self._find(member).drained
            await self.registry.drain(member, wanted)
            if before == wanted:
                return self._view(member)  # as it was: there is nothing to tell
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

    async def events(
        self, run: str = "", after: After = 0, mark: Mark = "", limit: Limit = 200
    ) -> dict[str, Any]:
        """Events after the cursor `after`, oldest first; `next` is the cursor to go on with.

        `mark` goes with `next`, and tells the event there from others that may get its number.
        `again`: the message server lost events up to the cursor, or was put back from a backup.
        What is told now came instead, and some of it may have been told before. Whoever gives no
        `mark` is not told so once others have come up to the cursor; nor is whoever asks with a
        cursor that is 20,000 events or more behind the newest one of all runs.
        """
        token, registry, asked = asker(), self.registry, after
        with suppress(BusError):  # whoever asks again is told then
            after = await going_on(registry, after, mark)
        newer = registry.told.after(after, run)
        found = [(seq, e) for seq, e in newer if sees(token, e.run)][:limit]
        again = after < asked
        if found:
            after, mark = found[-1][0], registry.told.mark(found[-1][0])
        elif again:
            mark = ""  # what is there may be an event that this token must not see
        return {
            "events": [event_view(seq, e) for seq, e in found],
            "next": after,
            "mark": mark,
            "again": again,
        }

    async def stream(
        self, run: str = "", after: After = 0, last_event_id: Annotated[str, Header()] = ""
    ) -> StreamingResponse:
        """Events as they happen (server-sent events), after `after` or the Last-Event-ID."""
        if last_event_id.isascii() and last_event_id.isdigit():
            after = max(after, int(last_event_id[:DIGITS_MAX]))
        return self.streams.events(after, run)
