"""/v1/runs: create, list, show, change, stop, delete; rounds and metrics of a run."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

from fastapi import APIRouter, Body, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from diloco_coordinator.access import asker, sees
from diloco_coordinator.api.auth_io import Guard, must, must_see
from diloco_coordinator.api.look_io import Look
from diloco_coordinator.api.problems_io import Problem, invalid, spec_of
from diloco_coordinator.api.repeating_io import Repeatable, until_written
from diloco_coordinator.api.sse_io import EventStreams
from diloco_coordinator.api.uses_io import Uses
from diloco_coordinator.api.vaults_io import Vaults
from diloco_coordinator.api.views import (
    PHASES,
    jsonable,
    over_view,
    quorum_consequence,
    recovery_views,
)
from diloco_coordinator.runs.ending_io import delete_run
from diloco_coordinator.runs.reasons import cannot_go_on
from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import run_id_of
from diloco_shared import ambient
from diloco_shared.budget import assumed, limits, streams
from diloco_shared.budget.job import Job
from diloco_shared.budget.terms import shown
from diloco_shared.bus.port import (
    BusError,
    Conflict,
    Refused,
    StorageInfo,
    StreamFull,
    TooFewNodes,
)
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.checking import Invalid, check
from diloco_shared.checkpoints.checkpoints_io import CheckpointError, begun_from
from diloco_shared.checkpoints.needed_io import bare, weights_in
from diloco_shared.checkpoints.vault_io import VaultError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Restore, RunRecord
from diloco_shared.reach.checkpoint_roots import root_of_run
from diloco_shared.reach.local import OutOfReach
from diloco_shared.spec.run import OF_CHECKPOINT, RunSpec, written

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[int, Query(ge=0)]
Desired = Literal["running", "paused", "stopped"]
# What each of the three asks for, in the reference of the API; and what is told of it.
WISHES: dict[Desired, str] = {
    "running": "Let a paused run go on.",
    "paused": "Pause the run.",
    "stopped": "Stop the run for good.",
}
DOING: dict[Desired, str] = {"running": "resuming", "paused": "pausing", "stopped": "stopping"}
IfMatch = Annotated[str, Header(max_length=100)]
Key = Annotated[str, Header(max_length=200)]
# Looks at whether everybody has left a run that is to be deleted: it takes a second or two.
LEAVE_LOOKS, LEAVE_LOOK_S = 50, 0.1
# Whoever has not left a run by so many seconds after its deletion was first asked for hangs.
LEAVE_S_MAX = 30.0


class Change(BaseModel):
    """What may be changed on a live run."""

    model_config = ConfigDict(extra="forbid")
    quorum: int = Field(ge=1, le=1024, description="K: contributions a merge needs.")


def _taken(name: str) -> Problem:
    text = f"there is a run {name!r} already: choose another name, or delete it"
    return Problem(409, "The name is taken", text)


def _same(record: RunRecord, run_id: str) -> None:
    """409 where another run has the name by now."""
    if run_id_of(record) != run_id:
        text = f"{record.name!r} was submitted anew meanwhile: look at it and decide again"
        raise Problem(409, "The run is another one by now", text)


def _may_need(spec: RunSpec, quorum: int) -> None:
    most = spec.membership.learners_max
    if quorum > most:
        text = f"must not exceed membership.learners_max ({most}): no round could ever commit"
        raise invalid("change", [{"path": "quorum", "message": text}])


def _no_room(job: Job, storage: StorageInfo) -> dict[str, str]:
    """The fault of a run that the message server cannot hold."""
    given, needs = limits(job), streams(job)
    most = max(needs, key=lambda kind: given[kind])
    each = ", ".join(f"{kind} {shown(size)}" for kind, size in given.items())
    of_all = f" of {shown(storage.bytes_max)}" if storage.bytes_max else ""
    # A setting makes no stream smaller than the floor.
    lower = f", or change {needs[most].lower}" if needs[most].bytes >= given[most] else ""
    text = (
        f"the run's streams take {sum(given.values())} bytes ({each}), and the message server has "
        f"no room for them: {shown(storage.reserved)}{of_all} are promised to other streams. "
        f"Delete runs that are over, or raise the server's max_file_store{lower}"
    )
    return {"path": "(whole)", "message": text}


def _too_few_nodes(copies: int, error: TooFewNodes) -> dict[str, str]:
    """The fault of a run that wants more copies than the hub has nodes."""
    text = (
        f"the hub has no {copies} nodes that could each keep a copy ({error}). Give 1, see that "
        "all nodes of the hub are there, or make a hub of more nodes ('diloco hub init' with "
        "--node HOST, once for each) and move to it with a backup (docs/how-to/three-nodes.md)"
    )
    return {"path": "keeping.replicas", "message": text}


class Runs:
    """The routes, over one registry."""

    def __init__(
        self,
        registry: Registry,
        guard: Guard,
        streams: EventStreams,
        checkpoints: str = "",
        places: Sequence[str] = (),
    ) -> None:
        self.registry = registry
        self.checkpoints = checkpoints  # where those of most runs are, and archived tapes
        self.places = (checkpoints, *places)  # all where those of a run may be
        self.vaults = Vaults()
        self.uses = Uses()
        self.streams = streams
        self.leaving: dict[str, float] = {}  # by id: since when a run is to be deleted
        # By name: held while a run is made or removed. As many as requests hold or wait for.
        self.changing = WeakValueDictionary[str, asyncio.Lock]()
        self.router = APIRouter(prefix="/v1/runs", tags=["runs"])
        add = self.router.add_api_route
        add("", self.create, methods=["POST"], status_code=201, **guard.begin)
        add("", self.index, methods=["GET"], **guard.look)
        add("/{run}", self.show, methods=["GET"], **guard.look)
        add("/{run}", self.change, methods=["PATCH"], **guard.act)
        add("/{run}", self.delete, methods=["DELETE"], status_code=204, **guard.act)
        verbs: tuple[tuple[str, Desired], ...] = (
            ("pause", "paused"),
            ("resume", "running"),
            ("stop", "stopped"),
        )
        for verb, desired in verbs:
            add(f"/{{run}}/{verb}", self._verb(desired), methods=["POST"], name=verb, **guard.act)
        add("/{run}/begin-again", self.begin_again, methods=["POST"], status_code=202, **guard.act)
        add("/{run}/metrics", self.metrics, methods=["GET"], **guard.look)
        add("/{run}/recoveries", self.recoveries, methods=["GET"], **guard.look)
        add("/{run}/stream", self.stream, methods=["GET"], **guard.look)

    def record(self, run: str) -> RunRecord:
        """The run, or a 404 that names the known ones."""
        if run not in self.registry.runs:
            token = asker()
            known = ", ".join(r for r in sorted(self.registry.runs) if sees(token, r)) or "none"
            raise Problem(404, "No such run", f"there is no run {run[:63]!r}; known: {known}")
        return self.registry.runs[run]

    def view(self, record: RunRecord) -> dict[str, Any]:
        """A run as the API shows it."""
        return Look(self.registry).view(record)

    def etag(self, run: str) -> str:
        """Of what a user may change: the record, not the progress."""
        return f'"{self.registry.revisions.get((subjects.RUNS, run), 0)}"'

    async def create(
        self,
        response: Response,
        body: Annotated[dict[str, Any], Body()],
        idempotency_key: Key = "",
    ) -> dict[str, Any]:
        """Submit a run. 422 names the path of every fault, 409 says the name is taken."""
        must("operate", str(body.get("name") or "")[:63])
        with self.uses.using(bare(weights_in(body))):
            return await self._created(response, body, idempotency_key)

    async def _created(
        self, response: Response, body: dict[str, Any], idempotency_key: str
    ) -> dict[str, Any]:
        spec = await self.checked(body)
        run_id = ambient.token(6)
        asked = (
            Repeatable(self.registry, idempotency_key, body, spec.name) if idempotency_key else None
        )
        if asked is not None and await asked.came_before(run_id):
            record = self._replayed(response, spec.name)
        else:
            try:
                undone = partial(asked.forget, run_id) if asked is not None else None
                record = await self.begin(spec, run_id=run_id, undone=undone)
            except Problem:
                # The same request may have come twice at once, and the other one was faster.
                if asked is None or not await asked.was_made():
                    raise
                record = self._replayed(response, spec.name)
        response.headers["Location"] = f"/v1/runs/{spec.name}"
        response.headers["ETag"] = self.etag(spec.name)
        return self.view(record)

    def _replayed(self, response: Response, run: str) -> RunRecord:
        response.headers["Idempotency-Replayed"] = "true"
        return self.record(run)

    async def checked(self, body: dict[str, Any]) -> RunSpec:
        """A specification; 422 names the path of every fault. Large ones take a while to count.

        One that begins from a run-wide checkpoint gets its model and its digest here.
        """
        model = body.get("model")
        try:
            named = str(model.get("weights", "")) if isinstance(model, dict) else ""
            if isinstance(model, dict) and named.startswith(OF_CHECKPOINT):
                must_see(named.removeprefix(OF_CHECKPOINT))
                begun = partial(begun_from, model, self.checkpoints, self.places)
                body = {**body, "model": await self.vaults.plainly(begun)}
            spec = await asyncio.to_thread(check, body)
            if named := spec.keeping.run_checkpoint_root:
                await self.vaults.plainly(partial(root_of_run, named, self.places))
            return spec
        except OutOfReach as error:
            fault = {"path": "keeping.run_checkpoint_root", "message": str(error)}
            raise invalid("run", [fault]) from None
        except (CheckpointError, VaultError) as error:
            fault = {"path": "model.weights", "message": str(error)}
            raise invalid("run", [fault]) from None
        except Invalid as error:
            faults = [{"path": f.path, "message": f.message} for f in error.faults]
            raise invalid("run", faults) from None

    def checkpoints_of(self, spec: RunSpec) -> str:
        """Where those of a run are. Not for an event loop: a folder's links are followed.

        Raises CheckpointError where they may not be: the setting was another one at submission.
        """
        try:
            return root_of_run(spec.keeping.run_checkpoint_root, self.places)
        except OutOfReach as error:
            raise CheckpointError(f"keeping.run_checkpoint_root: {error}") from None

    async def root_of(self, spec: RunSpec) -> str:
        """`checkpoints_of`, for an event loop. A run that names no place needs no thread: one that
        hangs is none of its."""
        if not spec.keeping.run_checkpoint_root:
            return self.checkpoints
        return await self.vaults.plainly(partial(self.checkpoints_of, spec))

    async def begin(
        self,
        spec: RunSpec,
        restore: Restore | None = None,
        first: Callable[[], Awaitable[None]] | None = None,
        run_id: str = "",
        undone: Callable[[], Awaitable[None]] | None = None,
    ) -> RunRecord:
        """Create a run, perhaps with a checkpoint to begin with; 409 says the name is taken.

        `first`: what has to be done under its name before anybody may work for it. `run_id`: one
        that no run has had. `undone`: told before a run that cannot be made is removed again.
        """
        must("operate", spec.name)
        spec = spec.model_copy(update={"id": run_id or ambient.token(6)})
        record = RunRecord(
            name=spec.name,
            spec=written(spec),
            desired="running",
            quorum=spec.algorithm.quorum,
            created_at=ambient.wall(),
            restore=restore,
            phase="submitting",
        )
        async with self._alone(spec.name):
            await self.free(spec.name)
            try:
                await self.registry.create_run(record)
            except Conflict:
                raise _taken(spec.name) from None
            try:
                record = await self._made(record, spec, first)
            except Conflict:  # another coordinator took the same submission up
                raise _taken(spec.name) from None
            except (
                StreamFull,
                TooFewNodes,
                Refused,
                Problem,
            ) as error:  # without an answer it may be repeated as it is
                with contextlib.suppress(BusError):
                    if undone is not None:
                        await undone()
                    await delete_run(self.registry, spec.name, spec.id)
                if isinstance(error, StreamFull):
                    storage = await self.registry.bus.storage()
                    raise invalid("run", [_no_room(assumed(spec), storage)]) from None
                if isinstance(error, TooFewNodes):
                    raise invalid("run", [_too_few_nodes(spec.keeping.replicas, error)]) from None
                raise
        return record

    def _alone(self, name: str) -> asyncio.Lock:
        """One at a time, lest two requests for one name undo each other's steps. Those for other
        names go on: a large run takes minutes to be removed. Whoever holds it asks the message
        server alone, which answers each question within a limit, or the place of a checkpoint,
        likewise."""
        return self.changing.setdefault(name, asyncio.Lock())

    async def free(self, name: str) -> None:
        """409 for a name that is taken, also by a run that is not mirrored here.

        It may be another coordinator's of a moment ago, or be written by another release: what is
        kept under its name is nobody's to change or remove.
        """
        there = name in self.registry.runs or await self.registry.look_for_run(name)
        known = self.registry.runs.get(name)
        if known is not None and known.phase != "submitting":
            raise _taken(name)  # a submission that was cut off holds no name
        if there and known is None:
            text = (
                f"the message server has a run {name!r} that cannot be read here: another release "
                "submitted it. Choose another name"
            )
            raise Problem(409, "The name is taken", text)

    async def _made(
        self, record: RunRecord, spec: RunSpec, first: Callable[[], Awaitable[None]] | None
    ) -> RunRecord:
        """What a run needs before anybody may work for it: its streams, for one."""
        # Whoever checked the specification has counted it: that is not done again.
        needed, copies = limits(assumed(spec)), spec.keeping.replicas
        await ensure_run_streams(self.registry.bus, spec.name, needed, replicas=copies)
        if first is not None:
            await first()
        source = record.restore.source if record.restore else ""
        text = f"run {spec.name} submitted" + (f" from {source}" if source else "")
        # Before anybody works for it: what was told of such a run until now is shown no more. The
        # streams may have taken long, and another submission may have the name by now.
        there = await self.registry.look_for_run(spec.name)
        if not there or not self.registry.is_run(spec.name, spec.id):
            raise Conflict(f"{spec.name} is another run by now")
        await self.registry.tell(spec.name, "run-created", text, {})
        record = record.model_copy(update={"phase": "there"})
        await self.registry.update_run(record)
        return record

    async def index(
        self, limit: Limit = 100, after: str = "", brief: bool = False
    ) -> dict[str, Any]:
        """Runs in order of their names; `next` is the cursor of the following page.

        `brief` leaves out what is long: `spec`, `status`, `speeds`, `releases` and `budget`.
        """
        token = asker()
        names = sorted(n for n in self.registry.runs if n > after and sees(token, n))
        page, look = names[:limit], Look(self.registry)
        return {
            "runs": [look.view(self.registry.runs[n], brief=brief) for n in page],
            "next": page[-1] if len(names) > limit else None,
        }

    async def show(self, run: str, response: Response) -> dict[str, Any]:
        """One run. Its ETag changes with what a user may change, not with its progress."""
        view = self.view(self.record(run))
        response.headers["ETag"] = self.etag(run)
        return view

    def _verb(self, desired: Desired) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
        async def act(run: str, response: Response, if_match: IfMatch = "") -> dict[str, Any]:
            told = (f"run-{desired}", f"{DOING[desired]} run {run}")
            view = await self.update(run, if_match, told=told, desired=desired)
            response.headers["ETag"] = self.etag(run)
            return view

        act.__doc__ = WISHES[desired]
        return act

    async def update(
        self,
        run: str,
        if_match: str,
        changing: Callable[[RunRecord], dict[str, Any]] | None = None,
        run_id: str = "",
        told: tuple[str, str] | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        """Compare-and-set changes into the record, and try again if it changed meanwhile.

        `changing` tells them of a record where they depend on it; `run_id`: of the run that the
        caller has looked at, and not of a later one of its name. `told`: kind and text of an event,
        which is told of a change alone. Else whoever repeats a wish pushes out other events.
        """
        run_id = run_id or run_id_of(self.record(run))

        async def updated() -> dict[str, Any]:
            record = self.record(run)
            _same(record, run_id)
            wanted = changes if changing is None else changing(record)
            if if_match not in ("", "*", self.etag(run)):
                raise Problem(
                    412,
                    "The run changed meanwhile",
                    f"its ETag is {self.etag(run)}, not {if_match}: look at it and decide again",
                )
            self._may_change(record, wanted)
            changed = record.model_copy(update=wanted)
            if changed == record:
                # Of the mirror, which may be behind: perhaps it was otherwise since.
                await self.registry.look_for_run(run)
                if self.registry.runs.get(run) == record:
                    return self.view(record)
                raise Conflict(f"the record of {run} changed meanwhile")
            await self.registry.update_run(changed)
            if told is not None:
                await self.registry.tell(run, *told, {})
            return self.view(self.record(run))  # somebody may have written after us

        return await until_written(run, updated)

    def _may_change(self, record: RunRecord, changes: dict[str, Any]) -> None:
        if record.phase != "there":
            why = PHASES[record.phase].text
            raise Problem(409, "The run is not there", f"{record.name!r}: {why}")
        status = self.registry.statuses.get(record.name)
        if status is not None and status.state in ("finished", "stopped"):
            if changes.get("desired") == "stopped" and status.state == "stopped":
                return  # as it is
            raise Problem(409, "The run is over", f"{record.name!r} is {status.state}")
        if record.desired == "stopped" and changes.get("desired") != "stopped":
            raise Problem(
                409, "The run is stopped", f"{record.name!r} was stopped and cannot go on"
            )
        if "quorum" in changes:  # else nothing is asked of a specification: anything can be stopped
            _may_need(spec_of(record), changes["quorum"])

    async def change(
        self, run: str, change: Change, response: Response, if_match: IfMatch = ""
    ) -> dict[str, Any]:
        """Change the quorum of a live run; its tape records it."""
        view = await self.update(run, if_match, quorum=change.quorum)
        view["consequence"] = quorum_consequence(run, change.quorum, view["status"])
        response.headers["ETag"] = self.etag(run)
        return view

    async def begin_again(self, run: str) -> dict[str, Any]:
        """A new epoch from the published parameters, for a run whose state no syncer has.

        409 while a syncer leads, or may lead: that one has more than is published.
        """
        view = self.view(self.record(run))
        if not cannot_go_on(view["syncers"]):
            text = f"a syncer leads {run!r}, or is about to, or none has looked for its state yet"
            raise Problem(409, "The run need not begin again", text)
        run_id = run_id_of(self.record(run))
        info = await self.registry.bus.stream_info(subjects.tape_stream(run))
        if not info.last_seq:  # which would be no wish
            raise Problem(409, "The run need not begin again", f"the tape of {run!r} is empty")
        told = ("begin-again", f"beginning a new epoch of run {run} from its published parameters")
        return await self.update(run, "", run_id=run_id, told=told, begin_again=info.last_seq)

    async def delete(self, run: str) -> None:
        """Remove a run that is over, with everything the bus keeps of it."""
        record = self.record(run)
        self._may_delete(record)
        await self._left(record)
        run_id = run_id_of(record)

        async def deleted() -> None:
            if now := self.registry.runs.get(run):
                _same(now, run_id)  # "deleted" would seem to speak of this one
                self._may_delete(now)  # its submission may have ended meanwhile
            await delete_run(self.registry, run, run_id)

        async with self._alone(run):  # again if its record changed: it is known anew then
            await until_written(run, deleted)

    def _may_delete(self, record: RunRecord) -> None:
        run = record.name
        if not self.registry.over(run):
            stopping = "it is being stopped: try again" if record.desired == "stopped" else ""
            text = stopping or f"stop {run!r} before deleting it"
            raise Problem(409, "The run is not over", text)

    async def _left(self, record: RunRecord) -> None:
        """Until nobody works for it any more: what they write last would outlive it.

        Not for ever: a run that is over holds nobody, and what comes later is refused by its id.
        """
        run, now = record.name, ambient.monotonic()
        known = {run_id_of(r) for r in self.registry.runs.values()}
        self.leaving = {r: since for r, since in self.leaving.items() if r in known}
        since = self.leaving.setdefault(run_id_of(record), now)
        for _ in range(LEAVE_LOOKS):
            if not self.registry.working(run) or ambient.monotonic() - since > LEAVE_S_MAX:
                return
            await asyncio.sleep(LEAVE_LOOK_S)
        who = ", ".join(self.registry.working(run))
        text = f"{who} still work for {run!r}: try again; from {LEAVE_S_MAX:.0f} s on nobody is"
        raise Problem(409, "The run is not left yet", f"{text} waited for")

    async def metrics(self, run: str) -> dict[str, Any]:
        """Validation loss and samples of the training loss per learner over time.

        Evaluations are the run's own, and thinned where there are many. Each says at which step it
        was: of a long run the first may be gone. `history` begins with this coordinator, and is
        thinned.
        Of more than 32 learners a sample has `loss_range` (min, median, max) in place of `loss`.
        """
        self.record(run)
        events, status = self.registry.told.after(0, run), self.registry.statuses.get(run)
        return {
            "evaluations": [{"at": e.at, **e.data} for _, e in events if e.kind == "evaluation"],
            "history": self.registry.histories.of(run),
            "status": None if status is None else jsonable(status.model_dump(mode="json")),
        }

    async def recoveries(self, run: str) -> dict[str, Any]:
        """How learners came back, or came new: each phase in seconds, and rounds until merged."""
        self.record(run)
        events = self.registry.told.after(0, run)
        return {"recoveries": recovery_views(events, self.registry.statuses.get(run))}

    async def stream(self, run: str) -> StreamingResponse:
        """The run as it changes (server-sent events); ends when the run is over or deleted."""
        run_id = run_id_of(self.record(run))

        def now() -> dict[str, Any] | None:
            record = self.registry.runs.get(run)
            there = record is not None and run_id_of(record) == run_id
            return self.view(record) if record is not None and there else None

        return self.streams.states(f"{run}.{run_id}", now, over_view)
