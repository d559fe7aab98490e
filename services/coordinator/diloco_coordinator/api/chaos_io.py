"""/v1/chaos: faults on purpose, and what became of them."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from pydantic import BaseModel, ConfigDict, Field, model_validator

from diloco_coordinator.access import asker, digest, sees
from diloco_coordinator.api.auth_io import Guard, must
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.api.repeating_io import other_request
from diloco_coordinator.api.views import fault_views
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.bus.port import Unavailable
from diloco_shared.process.chaos import planned
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Fault, FaultKind, FaultReply
from diloco_shared.protocol.wire import WireError, decode, encode

# Targets that are not members: the supervisor inflicts their faults.
OTHER_TARGETS = ("nats",)


class FaultRequest(BaseModel):
    """One fault: now, after seconds, or at an inner step of a learner."""

    model_config = ConfigDict(extra="forbid")
    kind: FaultKind = Field(description="What shall happen.")
    target: str = Field(max_length=63, description="Name of the member that it shall hit.")
    run: str = Field("", max_length=63, description="By default the run the target works for.")
    at_step: int | None = Field(None, ge=0, le=2**53, description="At this step of a learner.")
    after_s: float = Field(
        0.0, ge=0, le=86_400, allow_inf_nan=False, description="So many seconds from now."
    )
    duration_s: float = Field(
        0.0, ge=0, le=3600, allow_inf_nan=False, description="Seconds that hang and slow last."
    )
    factor: float = Field(
        1.0, ge=1, le=1000, allow_inf_nan=False, description="So many times slower."
    )

    @model_validator(mode="after")
    def _of_this_kind(self) -> "FaultRequest":
        """Whoever says more than the fault has means another one."""
        if self.duration_s and self.kind not in ("hang", "slow"):
            raise ValueError(f"duration_s is for hang and slow: {self.kind} has no end")
        if self.factor != 1.0 and self.kind != "slow":
            raise ValueError(f"factor is for slow, not for {self.kind}")
        if self.at_step is not None and self.after_s:
            raise ValueError("give at_step or after_s, not both")
        return self


class Chaos:
    """The routes, over one registry; `on` only where the deployment turned chaos on."""

    def __init__(self, registry: Registry, guard: Guard, *, on: bool) -> None:
        self.registry = registry
        self.on = on
        self.router = APIRouter(prefix="/v1/chaos", tags=["chaos"])
        may = [Depends(guard.needs("fault", later=True))]
        self.router.add_api_route(
            "", self.inflict, methods=["POST"], status_code=202, dependencies=may
        )
        self.router.add_api_route("", self.inflicted, methods=["GET"], **guard.look)

    async def inflict(
        self,
        request: FaultRequest,
        idempotency_key: Annotated[str, Header(max_length=200)] = "",
    ) -> dict[str, Any]:
        """Ask a process to inflict a fault on itself; 202 once it is armed."""
        if request.target in OTHER_TARGETS:
            must("fault")  # the message server is everybody's
        else:
            must("fault", self.registry.assigned.get(request.target, ""), request.target)
        if not self.on:
            raise Problem(
                403,
                "No faults are allowed here",
                "start with 'diloco up --chaos', or every service with DILOCO_CHAOS=1",
            )
        name = digest(idempotency_key)[:12] if idempotency_key else ambient.unique()[:12]
        # Before anything else: who was killed by the first request is no target of its repeat.
        if (known := self._known(request, f"fault-{name}")) is not None:
            return {k: known[k] for k in ("id", "kind", "target", "when")}
        fault = self._fault(request, f"fault-{name}")
        try:
            answer = await self.registry.bus.request(subjects.chaos(fault.target), encode(fault))
            reply = decode(answer, FaultReply)
        except Unavailable:
            raise Problem(
                503, "The target does not answer", f"{fault.target!r} did not confirm the fault"
            ) from None
        except WireError as error:
            raise Problem(502, "The target speaks another language", str(error)) from None
        if not reply.accepted:
            raise Problem(409, "The fault was refused", reply.reason)
        await self.registry.tell(
            fault.run,
            "fault-planned",
            f"{fault.target} {planned(fault)} {reply.reason}",
            {**fault.model_dump(), "when": reply.reason, "at": ambient.wall()},
        )
        return {"id": fault.id, "kind": fault.kind, "target": fault.target, "when": reply.reason}

    def _known(self, request: FaultRequest, name: str) -> dict[str, Any] | None:
        """What this very request has inflicted already; 422 if another one had its key."""
        views = fault_views(self.registry.events)
        known = next((view for view in views if view["id"] == name), None)
        if known is None:
            return None
        asked = request.model_dump() | {"at_step": _at_step(request)}
        if not request.run:
            del asked["run"]  # the target's of then, which may work for another one by now
        if any(known[field] not in (None, value) for field, value in asked.items()):
            raise other_request()
        return known

    def _fault(self, request: FaultRequest, name: str) -> Fault:
        r = self.registry
        # The supervisor harms the message server for us, and nobody would start it again.
        members = [m for m, record in r.roll.living.items() if record.role != "supervisor"]
        if request.target not in (*members, *OTHER_TARGETS):
            token, assigned = asker(), r.assigned
            seen = (m for m in members if sees(token, assigned.get(m, "")))
            known = ", ".join(sorted([*seen, *OTHER_TARGETS]))
            text = (
                f"there is no living target {request.target!r}; known: {known}. Who was just "
                "started is known within some seconds: try again then"
            )
            raise Problem(404, "No such target", text)
        run = r.assigned.get(request.target, "")
        if request.run not in ("", run):
            text = f"{request.target!r} works for {run or 'no run'}, not for {request.run!r}"
            raise Problem(409, "Another run's target", text)
        return Fault(
            id=name,
            kind=request.kind,
            target=request.target,
            run=run,
            at_step=_at_step(request),
            after_s=request.after_s,
            duration_s=request.duration_s,
            factor=request.factor,
        )

    async def inflicted(self) -> dict[str, Any]:
        """Every fault that was planned, with when it was applied and healed."""
        token = asker()
        return {"faults": fault_views(e for e in self.registry.events if sees(token, e[1].run))}


def _at_step(request: FaultRequest) -> int:
    """As a `Fault` says it."""
    return -1 if request.at_step is None else request.at_step
