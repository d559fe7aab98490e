"""/v1/runs: create, list, show, change, stop, delete; rounds and metrics of a run."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco_coordinator.edges.problems import Problem, invalid
from diloco_coordinator.edges.registry import Registry
from diloco_coordinator.views import event_view, round_views, run_view
from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Conflict, Refused
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import RunRecord, RunStatus
from diloco_shared.protocol.wire import decode_tape

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[int, Query(ge=0)]
Desired = Literal["running", "paused", "stopped"]


class Change(BaseModel):
    """What may be changed on a live run."""

    model_config = ConfigDict(extra="forbid")
    quorum: int = Field(ge=1, le=1024)


class Runs:
    """The routes, over one registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.router = APIRouter(prefix="/v1/runs", tags=["runs"])
        add = self.router.add_api_route
        add("", self.create, methods=["POST"], status_code=201)
        add("", self.index, methods=["GET"])
        add("/{run}", self.show, methods=["GET"])
        add("/{run}", self.change, methods=["PATCH"])
        add("/{run}", self.delete, methods=["DELETE"], status_code=204)
        for verb, desired in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
            add(f"/{{run}}/{verb}", self._verb(desired), methods=["POST"], name=verb)
        add("/{run}/rounds", self.rounds, methods=["GET"])
        add("/{run}/metrics", self.metrics, methods=["GET"])

    def record(self, run: str) -> RunRecord:
        """The run, or a 404 that names the known ones."""
        if run not in self.registry.runs:
            known = ", ".join(sorted(self.registry.runs)) or "none"
            raise Problem(404, "No such run", f"there is no run {run!r}; known: {known}")
        return self.registry.runs[run]

    def view(self, record: RunRecord) -> dict[str, Any]:
        r = self.registry
        members = sorted(m for m, run in r.assigned.items() if run == record.name)
        return run_view(record, r.statuses.get(record.name), r.waiting.get(record.name), members)

    async def create(self, body: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        """Submit a run. 422 names the path of every fault, 409 says the name is taken."""
        try:
            spec = RunSpec.model_validate(body)
        except ValidationError as error:
            raise invalid("run", error) from None
        record = RunRecord(
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            desired="running",
            quorum=spec.algorithm.quorum,
            created_at=time.time(),
        )
        try:
            await self.registry.put_run(record, new=True)
        except Conflict:
            raise Problem(
                409,
                "The name is taken",
                f"there is a run {spec.name!r} already: choose another name, or delete it",
            ) from None
        await self.registry.tell(spec.name, "run-created", f"run {spec.name} submitted", {})
        return self.view(record)

    async def index(self, limit: Limit = 100, after: str = "") -> dict[str, Any]:
        """Runs in order of their names; `next` is the cursor of the following page."""
        names = sorted(n for n in self.registry.runs if n > after)
        page = names[:limit]
        return {
            "runs": [self.view(self.registry.runs[n]) for n in page],
            "next": page[-1] if len(names) > limit else None,
        }

    async def show(self, run: str, response: Response) -> dict[str, Any]:
        """One run."""
        view = self.view(self.record(run))
        status = self.registry.statuses.get(run)
        response.headers["ETag"] = f'"{0 if status is None else status.at}"'
        return view

    def _verb(self, desired: str) -> Any:
        async def act(run: str) -> dict[str, Any]:
            record = self.record(run)
            if record.desired == "stopped" and desired != "stopped":
                raise Problem(409, "The run is stopped", f"{run!r} was stopped and cannot go on")
            status: RunStatus | None = self.registry.statuses.get(run)
            if status is not None and status.state in ("finished", "stopped"):
                raise Problem(409, "The run is over", f"{run!r} is {status.state}")
            changed = record.model_copy(update={"desired": desired})
            await self.registry.put_run(changed, new=False)
            await self.registry.tell(run, f"run-{desired}", f"{run} shall be {desired}", {})
            return self.view(changed)

        act.__doc__ = f"The run shall be {desired}."
        return act

    async def change(self, run: str, change: Change) -> dict[str, Any]:
        """Change the quorum of a live run; its tape records it."""
        changed = self.record(run).model_copy(update={"quorum": change.quorum})
        await self.registry.put_run(changed, new=False)
        return self.view(changed)

    async def delete(self, run: str) -> None:
        """Remove a run that is over, with everything the bus keeps of it."""
        self.record(run)
        if not self.registry.over(run):
            raise Problem(409, "The run is not over", f"stop {run!r} before deleting it")
        await self.registry.delete_run(run)

    async def rounds(self, run: str, after: After = 0, limit: Limit = 100) -> dict[str, Any]:
        """Closed rounds from the tape: who was merged, who was not, and why."""
        self.record(run)
        try:
            stored = await self.registry.bus.fetch(
                subjects.tape_stream(run), subjects.tape(run, 0), start_seq=after + 1
            )
        except Refused:
            stored = []  # no syncer has taken the run yet: it has no tape
        views = round_views((s.seq, decode_tape(s.payload)) for s in stored)
        page = views[:limit]
        return {"rounds": page, "next": page[-1]["seq"] if len(views) > limit else None}

    async def metrics(self, run: str) -> dict[str, Any]:
        """History of the validation loss, and the newest status."""
        self.record(run)
        status = self.registry.statuses.get(run)
        evaluations = [
            event_view(seq, e)
            for seq, e in self.registry.events
            if e.run == run and e.kind == "evaluation"
        ]
        return {
            "evaluations": [{"at": e["at"], **e["data"]} for e in evaluations],
            "status": None if status is None else self.view(self.record(run))["status"],
        }
