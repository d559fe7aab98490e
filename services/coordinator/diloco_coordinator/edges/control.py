"""/v1/members, /v1/events and /v1/chaos."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from diloco_coordinator.edges.problems import Problem
from diloco_coordinator.edges.registry import Registry
from diloco_coordinator.views import event_view, member_view
from diloco_shared.edges.bus import Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Fault, FaultKind, FaultReply, MemberRecord
from diloco_shared.protocol.wire import decode, encode

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[int, Query(ge=0)]
# A silent event stream says something this often, so that proxies keep it open.
KEEP_ALIVE_S = 15.0
# Targets that are not members: the supervisor inflicts their faults.
OTHER_TARGETS = ("nats",)


class FaultRequest(BaseModel):
    """One fault: now, after seconds, or at an inner step of a learner."""

    model_config = ConfigDict(extra="forbid")
    kind: FaultKind
    target: str
    at_step: int | None = Field(None, ge=0)
    after_s: float = Field(0.0, ge=0, le=86_400)
    duration_s: float = Field(0.0, ge=0, le=3600)
    factor: float = Field(1.0, ge=1, le=1000)


class Control:
    """The routes, over one registry."""

    def __init__(self, registry: Registry, *, chaos: bool) -> None:
        self.registry = registry
        self.chaos_on = chaos
        self.router = APIRouter(prefix="/v1")
        add = self.router.add_api_route
        add("/members", self.members, methods=["GET"], tags=["members"])
        add("/members/{member}", self.member, methods=["GET"], tags=["members"])
        add("/members/{member}", self.forget, methods=["DELETE"], status_code=204, tags=["members"])
        add("/events", self.events, methods=["GET"], tags=["events"])
        add("/events/stream", self.stream, methods=["GET"], tags=["events"])
        add("/chaos", self.inflict, methods=["POST"], status_code=202, tags=["chaos"])
        add("/chaos", self.inflicted, methods=["GET"], tags=["chaos"])

    # --- members -------------------------------------------------------------------------------

    def _find(self, member: str) -> tuple[MemberRecord, float | None]:
        r = self.registry
        if member in r.members:
            return r.members[member], None
        if member in r.gone:
            return r.gone[member]
        known = ", ".join(sorted([*r.members, *r.gone])) or "none"
        raise Problem(404, "No such member", f"there is no member {member!r}; known: {known}")

    def _view(self, member: str) -> dict[str, Any]:
        record, gone = self._find(member)
        run = self.registry.assigned.get(member, "")
        return member_view(record, run, gone, self.registry.statuses.get(run))

    async def members(self) -> dict[str, Any]:
        """Every process that is or was a member since this coordinator began."""
        r = self.registry
        return {"members": [self._view(m) for m in sorted({*r.members, *r.gone})]}

    async def member(self, member: str) -> dict[str, Any]:
        """One member; 404 names the known ones."""
        return self._view(member)

    async def forget(self, member: str) -> None:
        """Remove a member that is gone, and its assignment."""
        _, gone = self._find(member)
        if gone is None:
            raise Problem(409, "The member lives", f"{member!r} is alive: stop its process first")
        await self.registry.bus.kv_delete(subjects.ASSIGNMENTS, member)
        self.registry.gone.pop(member, None)

    # --- events --------------------------------------------------------------------------------

    async def events(self, run: str = "", after: After = 0, limit: Limit = 200) -> dict[str, Any]:
        """Events after the cursor `after`, oldest first."""
        found = [
            event_view(seq, e)
            for seq, e in self.registry.events
            if seq > after and (not run or e.run == run)
        ]
        page = found[:limit]
        return {"events": page, "next": page[-1]["seq"] if page else after}

    async def stream(self, after: After = 0) -> StreamingResponse:
        """Events as they happen (server-sent events)."""
        return StreamingResponse(self._stream(after), media_type="text/event-stream")

    async def _stream(self, after: int) -> AsyncIterator[str]:
        r = self.registry
        while True:
            for seq, event in list(r.events):
                if seq > after:
                    after = seq
                    yield f"id: {seq}\ndata: {json.dumps(event_view(seq, event))}\n\n"
            try:
                async with asyncio.timeout(KEEP_ALIVE_S), r.changed:
                    await r.changed.wait()
            except TimeoutError:
                yield ": still here\n\n"

    # --- chaos ---------------------------------------------------------------------------------

    async def inflict(self, request: FaultRequest) -> dict[str, Any]:
        """Ask a process to inflict a fault on itself; 202 once it is armed."""
        if not self.chaos_on:
            raise Problem(
                403, "Chaos is off", "start the deployment with DILOCO_CHAOS=1 to allow faults"
            )
        r = self.registry
        known = sorted([*r.members, *OTHER_TARGETS])
        if request.target not in known:
            raise Problem(
                404,
                "No such target",
                f"there is no living target {request.target!r}; known: {', '.join(known)}",
            )
        fault = Fault(
            id=f"fault-{uuid.uuid4().hex[:8]}",
            kind=request.kind,
            target=request.target,
            run=r.assigned.get(request.target, ""),
            at_step=-1 if request.at_step is None else request.at_step,
            after_s=request.after_s,
            duration_s=request.duration_s,
            factor=request.factor,
        )
        try:
            answer = await r.bus.request(subjects.chaos(fault.target), encode(fault))
        except Unavailable:
            raise Problem(
                503, "The target does not answer", f"{fault.target!r} did not confirm the fault"
            ) from None
        reply = decode(answer, FaultReply)
        if not reply.accepted:
            raise Problem(409, "The fault was refused", reply.reason)
        await r.tell(
            fault.run,
            "fault-planned",
            f"{fault.kind} on {fault.target} {reply.reason}",
            {**fault.model_dump(), "at": time.time()},
        )
        return {"id": fault.id, "kind": fault.kind, "target": fault.target, "when": reply.reason}

    async def inflicted(self) -> dict[str, Any]:
        """Every fault that was planned, with when it was applied and healed."""
        faults: dict[str, dict[str, Any]] = {}
        for _, e in self.registry.events:
            if e.kind.startswith("fault-") and "id" in e.data:
                fault = faults.setdefault(str(e.data["id"]), {"id": e.data["id"]})
                fault |= {k: e.data.get(k) for k in ("kind", "target", "at_step", "duration_s")}
                fault[e.kind.removeprefix("fault-") + "_at"] = e.at
        return {"faults": list(faults.values())}
