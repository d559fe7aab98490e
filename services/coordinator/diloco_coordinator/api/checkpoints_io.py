"""/v1/runs/RUN/checkpoints and /v1/checkpoints: make, list, show, restore, remove."""

import json
from functools import partial
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Body, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from diloco_coordinator.access import asker, sees
from diloco_coordinator.api.auth_io import Guard, must, must_see, run_of_folder
from diloco_coordinator.api.problems_io import Problem, invalid, readable, spec_of
from diloco_coordinator.api.runs_io import Runs
from diloco_coordinator.api.vaults_io import problems
from diloco_coordinator.api.views import jsonable
from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import run_id_of
from diloco_shared import ambient
from diloco_shared.bus.port import Bus, Conflict
from diloco_shared.bus.repeating import against_others
from diloco_shared.bus.stored_records import readable as record_in
from diloco_shared.bus.stored_records import write_if
from diloco_shared.checkpoints.checkpoints_io import (
    CheckpointError,
    CheckpointMissing,
    RunCheckpoints,
)
from diloco_shared.checkpoints.needed_io import bare, needed_by_runs, weights_in
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import TAPE, CheckpointManifest, reference
from diloco_shared.protocol.records import Incarnation, Restore, RunRecord
from diloco_shared.protocol.run_states import OVER
from diloco_shared.protocol.subjects import Id
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.optimizers import outer_state_bytes
from diloco_shared.spec.run import RunSpec

log = structlog.get_logger()

# What of a manifest is for people; the rest is found beside the arrays.
_SHOWN = {
    "run",
    "number",
    "reason",
    "at",
    "epoch",
    "stamp",
    "versions",
    "parameters",
    "missing",
    "bytes",
}


Limit = Annotated[int | None, Query(ge=1, le=1000)]
After = Annotated[str, Query(max_length=200)]


class RestoreRequest(BaseModel):
    """Where to restore to."""

    model_config = ConfigDict(extra="forbid")
    as_run: Id | None = Field(None, alias="as", description="A new run of this name.")


class CheckpointRoutes:
    """The routes, over one registry."""

    def __init__(self, registry: Registry, guard: Guard, runs: Runs) -> None:
        self.registry = registry
        self.runs = runs
        self.vaults = runs.vaults
        self.root = runs.checkpoints
        self.router = APIRouter(prefix="/v1", tags=["checkpoints"])
        add = self.router.add_api_route
        add("/checkpoints", self.everywhere, methods=["GET"], **guard.look)
        gone: dict[str, Any] = {"methods": ["DELETE"], "status_code": 204, **guard.act}
        add("/checkpoints/{folder}", self.remove_folder, **gone | guard.begin)
        add("/checkpoints/{folder}/{number}", self.remove_stored, **gone | guard.begin)
        of_run, one = "/runs/{run}/checkpoints", "/runs/{run}/checkpoints/{number}"
        add(of_run, self.index, methods=["GET"], **guard.look)
        add(of_run, self.make, methods=["POST"], status_code=202, **guard.act)
        add(one, self.show, methods=["GET"], **guard.look)
        add(one, self.remove, **gone)
        add(f"{one}/restore", self.restore, methods=["POST"], status_code=202, **guard.act)
        add("/checkpoints/submit", self.submit, methods=["POST"], status_code=201, **guard.begin)

    # --- where ---------------------------------------------------------------------------------

    async def _of(self, run: str) -> tuple[RunCheckpoints, str]:
        """Where a run's checkpoints are, and the name of its folder there."""
        spec = spec_of(self.runs.record(run))
        return self._at(await self.vaults.ask(lambda: self.runs.checkpoints_of(spec))), spec.folder

    def _at(self, root: str) -> RunCheckpoints:
        with problems():
            return RunCheckpoints(root)

    async def _manifest(self, there: RunCheckpoints, ref: str) -> CheckpointManifest:
        return (await self.vaults.ask(lambda: there.manifest(ref)))[0]

    # --- look ----------------------------------------------------------------------------------

    async def everywhere(self, limit: Limit = None, after: After = "") -> dict[str, Any]:
        """Complete checkpoints where most runs keep them; of deleted runs too.

        At most `limit`, with greater references than `after`; `next` is the cursor to go on with,
        and null where these are the last. `tapes` are what is left of the tapes of deleted runs.
        """
        token = asker()
        found = await self._list(self._at(self.root), "", limit, after)
        kinds = ("checkpoints", "damaged", "tapes")
        return found | {k: [c for c in found[k] if sees(token, str(c["run"]))] for k in kinds}

    async def index(self, run: str, limit: Limit = None, after: After = "") -> dict[str, Any]:
        """Complete checkpoints of a run, oldest first; `limit` and `after` as for all runs."""
        there, folder = await self._of(run)
        return await self._list(there, folder, limit, after)

    async def _list(
        self, there: RunCheckpoints, folder: str, limit: int | None, after: str
    ) -> dict[str, Any]:
        """Those that can be read, and the damaged: neither these nor a removed one hide others."""
        token = asker()

        def read() -> dict[str, Any]:
            complete, unfinished = set(there.complete(folder)), set(there.unfinished(folder))
            tapes = set() if folder else self._left_tapes(there)
            known = sorted(ref for ref in complete | unfinished | tapes if ref > after)
            newer = [ref for ref in known if sees(token, run_of_folder(ref))]
            page = newer[:limit]
            found, damaged = [], []
            for ref in (r for r in page if r in complete):
                try:
                    found.append(_view(ref, there.manifest(ref)[0]))
                except CheckpointMissing:
                    pass  # removed since
                except CheckpointError as error:
                    damaged.append({"ref": ref, "run": run_of_folder(ref), "reason": str(error)})
            for ref in (r for r in page if r not in complete | tapes):
                if not self._under_way(ref):
                    text = f"{ref} was never completed, or is half removed, and nothing reads it"
                    damaged.append({"ref": ref, "run": run_of_folder(ref), "reason": text})
            left = [{"ref": ref, "run": run_of_folder(ref)} for ref in page if ref in tapes]
            end = page[-1] if len(page) < len(newer) else None
            return {"checkpoints": found, "damaged": damaged, "tapes": left, "next": end}

        return await self.vaults.listed(read)

    def _left_tapes(self, there: RunCheckpoints) -> set[str]:
        """Archived tapes of runs that are not there any more, as FOLDER/tape: no run removes them,
        and they stay when its last checkpoint goes. Not for an event loop."""
        return {f"{f}/{TAPE}" for f in there.archived() if not _is_of(f, self._known(f))}

    def _known(self, folder: str) -> RunRecord | None:
        """The run of that name; a later one, perhaps."""
        return self.registry.runs.get(run_of_folder(folder))

    def _under_way(self, ref: str) -> bool:
        """Whether a run may be making it right now."""
        folder, _, number = ref.rpartition("/")
        record, status = self._known(folder), self.registry.statuses.get(run_of_folder(folder))
        if not _is_of(folder, record) or status is None:
            return False
        making = status.checkpoint_state == "making" and int(number) == status.checkpoint
        return making or (int(number) > status.checkpoint and status.state not in OVER)

    async def show(self, run: str, number: int) -> dict[str, Any]:
        """One checkpoint, and the specification it was made under."""
        there, folder = await self._of(run)
        ref = reference(folder, number)
        manifest = await self._manifest(there, ref)
        return _view(ref, manifest) | {"spec": jsonable(manifest.spec)}

    # --- act -----------------------------------------------------------------------------------

    async def make(self, run: str) -> dict[str, Any]:
        """Begin a checkpoint of a live run; the run's status tells what becomes of it."""
        record, numbers = self.runs.record(run), list[int]()
        spec = spec_of(record)
        taken = await self.vaults.ask(lambda: self._taken(spec))

        def begun(record: RunRecord) -> dict[str, Any]:
            numbers.append(self._next(record, taken))
            return {"checkpoint": numbers[-1]}

        await self.runs.update(run, "", begun, run_id_of(record))
        return {"run": run, "number": numbers[-1], "ref": reference(spec.folder, numbers[-1])}

    def _taken(self, spec: RunSpec) -> int:
        """The newest number of which anything lies there: the syncer begins above it, too. 0 where
        nobody can look from here. Not for an event loop."""
        try:
            return RunCheckpoints(self.runs.checkpoints_of(spec)).newest(spec.folder)
        except (CheckpointError, OSError) as error:
            log.warning("numbers of checkpoints not looked for", run=spec.name, error=str(error))
            return 0

    def _next(self, record: RunRecord, taken: int) -> int:
        """The number of one that can begin now, above those `taken`; 409 where none can."""
        run, status = record.name, self.registry.statuses.get(record.name)
        if status is None or min(status.versions, default=-1) < 0:
            text = f"{run!r} has no parameters yet: try again once it trains"
            raise Problem(409, "Nothing to keep yet", text)
        first = self.registry.standings.of_shard(record, 0)
        if first is not None and first.state in OVER and status.state not in OVER:
            text = f"syncer shard 0 of {run!r} is {first.state}, and begins no checkpoint any more"
            raise Problem(409, "Part of the run is over", text)
        newest = max(record.checkpoint, status.checkpoint)
        if status.checkpoint_state == "making" or record.checkpoint > status.checkpoint:
            text = f"checkpoint {newest} of {run!r} is being made: wait for it"
            raise Problem(409, "One is being made", text)
        return max(newest, taken) + 1

    async def remove(self, run: str, number: int) -> None:
        """Remove one checkpoint for good. 409 while a run that is not over needs it."""
        await self._remove(*await self._of(run), number)

    async def remove_stored(self, folder: str, number: int) -> None:
        """Remove one by its folder, of a deleted run perhaps. 409 while another run needs it."""
        must("operate", run_of_folder(folder))
        await self._remove(self._at(self.root), folder, number)

    async def remove_folder(self, folder: str) -> None:
        """Remove all that is left of a deleted run: its checkpoints, and its archived tape.

        409 while the run is there, or another one needs a checkpoint of it.
        """
        run = run_of_folder(folder)
        must("operate", run)
        there, _ = await self.vaults.ask(
            lambda: RunCheckpoints.at(reference(folder, 0), self._at(self.root).root)
        )
        # As the hub has it: one that this coordinator cannot read is no run to it.
        entry = await self.registry.bus.kv_get(subjects.RUNS, run)
        record = record_in(entry.value, RunRecord) if entry and entry.value else None
        if entry and entry.value and (record is None or _is_of(folder, record)):
            text = f"{folder} is of the run {run!r}, which is there: delete the run first"
            raise Problem(409, "The run is not deleted", text)
        with self.runs.uses.removing(f"{folder}/"):
            await self._needed_by_none(f"{folder}/")
            await self.vaults.removed(lambda: there.remove_folder(folder))

    async def _remove(self, there: RunCheckpoints, folder: str, number: int) -> None:
        _, ref = await self.vaults.ask(
            lambda: RunCheckpoints.at(reference(folder, number), there.root)
        )
        under_way = self._under_way(ref)

        def remove() -> bool:
            if ref not in there.complete(folder):
                if ref not in there.begun(folder):
                    there.manifest(ref)  # says what there is instead
                if under_way:
                    return False
            there.remove(ref)  # a damaged one too, and what is left of one
            return True

        with self.runs.uses.removing(ref):
            await self._needed_by_none(ref)
            gone = await self.vaults.removed(remove)
        if not gone:
            raise Problem(409, "It is being made", f"checkpoint {ref} is being made: wait for it")

    async def _needed_by_none(self, place: str) -> None:
        """409 where a run that is not over may read a checkpoint again whose reference begins so.

        It may wait for machines yet, and a syncer that has lost its snapshots begins with it anew.
        """
        # As the hub has them: a wish of a moment ago may not be mirrored here.
        for record, needed in await needed_by_runs(self.registry.bus):
            refs = sorted(ref for ref in needed if ref.startswith(place))
            if refs and not self._over(record):
                whose = repr(record.name) if sees(asker(), record.name) else "another run"
                text = (
                    f"{whose} begins with {refs[0]}, went or shall go back to it, or takes its "
                    "weights from it: delete it once that run is over, or has gone back to another "
                    "one"
                )
                raise Problem(409, "A run needs it", text)

    def _over(self, record: RunRecord) -> bool:
        """Whether nobody will work for this very run; one that is being submitted is still to."""
        mirrored = self.registry.runs.get(record.name)
        known = mirrored is not None and run_id_of(mirrored) == run_id_of(record)
        return record.phase != "submitting" and known and self.registry.over(record.name)

    async def restore(
        self, run: str, number: int, request: RestoreRequest, response: Response
    ) -> dict[str, Any]:
        """Go back to a checkpoint: this run itself, or a new one that begins with it."""
        run_id = run_id_of(self.runs.record(run)) if request.as_run is None else ""
        there, folder = await self._of(run)
        ref = reference(folder, number)
        with self.runs.uses.using(ref):
            manifest = await self._manifest(there, ref)
            if request.as_run is None:
                serial = await self._sent_back(run, run_id, ref)
                return {"run": run, "number": number, "serial": serial}
            body = {**manifest.spec, "name": request.as_run}
            await self._begin(body, there, ref, manifest)
        response.headers["Location"] = f"/v1/runs/{request.as_run}"
        return {"run": request.as_run, "number": number, "serial": 1}

    async def _sent_back(self, run: str, run_id: str, ref: str) -> int:
        """The number of the wish that the run's record has now."""
        serials = list[int]()

        def back(record: RunRecord) -> dict[str, Any]:
            # Of two wishes at once the second one has a number of its own.
            self._may_go_back(run)
            before, status = record.restore, self.registry.statuses.get(run)
            known = (before.serial if before else 0, status.restores if status else 0)
            serials.append(max(known) + 1)
            return {"restore": Restore(serial=serials[-1], source=ref)}

        await self.runs.update(run, "", back, run_id)
        return serials[-1]

    def _may_go_back(self, run: str) -> None:
        """A shard of the syncer that is over goes back no more, and the others cannot alone."""
        shards = self.registry.standings.shards.get(run, {}).values()
        over = [s for s in shards if s.state in OVER]
        if 0 < len(over) < len(shards):
            part = f"syncer shard {over[0].shard} of {run!r} is {over[0].state}"
            text = f"{part} and cannot go back: restore as a new run"
            raise Problem(409, "Part of the run is over", text)

    async def submit(
        self, checkpoint: str, body: Annotated[dict[str, Any], Body()], response: Response
    ) -> dict[str, Any]:
        """Submit a run that begins with a checkpoint: FOLDER/NUMBER, or an address of its own.

        An address outside the places of checkpoints is refused, and neither listed nor asked.
        """
        must("operate", str(body.get("name") or "")[:63])
        must_see(checkpoint)
        there, ref = await self.vaults.ask(lambda: self._found(checkpoint))
        with self.runs.uses.using(ref, bare(weights_in(body))):
            manifest = await self._manifest(there, ref)
            record = await self._begin(body, there, ref, manifest)
        response.headers["Location"] = f"/v1/runs/{record.name}"
        return self.runs.view(record)

    def _found(self, checkpoint: str) -> tuple[RunCheckpoints, str]:
        return RunCheckpoints.at(checkpoint, self.root, self.runs.places)

    async def _begin(
        self, body: dict[str, Any], there: RunCheckpoints, ref: str, manifest: CheckpointManifest
    ) -> RunRecord:
        spec = await self.runs.checked(body)
        _fits(spec, manifest)
        await self.runs.free(spec.name)
        own = spec.keeping.run_checkpoint_root or self.root
        source = ref if there.root == own else f"{there.root.rstrip('/')}/{ref}"

        async def seed() -> None:
            """Nobody may begin a life that the ledger of the checkpoint knows."""
            # Whoever else removes some, as the syncer that keeps a few, sees the record from here
            # on. It may have asked the records before.
            await self._manifest(there, ref)
            await seed_incarnations(self.registry.bus, spec.name, manifest.incarnations)

        return await self.runs.begin(spec, Restore(serial=1, source=source), seed)


def _is_of(folder: str, record: RunRecord | None) -> bool:
    """Whether it is the run's. Not by its specification, which another release may have written."""
    return record is not None and folder.partition(".")[2] == run_id_of(record)


def _fits(spec: RunSpec, manifest: CheckpointManifest) -> None:
    """422 for what could never begin with it."""
    errors = []
    fragments = len(manifest.versions)
    if spec.algorithm.fragments != fragments:
        text = f"the checkpoint's parameters are cut into {fragments} fragments"
        errors.append({"path": "algorithm.fragments", "message": text})
    if spec.algorithm.shards != (shards := len(manifest.shards)):
        text = (
            f"the checkpoint is of {shards} syncer shard{'s' if shards > 1 else ''}: set {shards}"
        )
        errors.append({"path": "algorithm.shards", "message": text})
    theirs = readable(manifest.spec, "the checkpoint")
    errors += _other_counting(spec.algorithm, theirs.algorithm)
    for key in ("preset", "factory", "overrides"):
        ours_, theirs_ = getattr(spec.model, key), getattr(theirs.model, key)
        if ours_ != theirs_:
            text = f"another layout: the checkpoint is of {json.dumps(theirs_)}"
            errors.append({"path": f"model.{key}", "message": text})
    if errors:
        raise invalid("run for this checkpoint", errors)


def _other_counting(ours: Algorithm, theirs: Algorithm) -> list[dict[str, str]]:
    """Of settings by which the checkpoint's steps are counted, and its outer state is kept."""
    errors = []
    if ours.sync_every_steps != theirs.sync_every_steps:
        text = (
            f"the checkpoint's steps are counted by merges of which each fragment had one in "
            f"{theirs.sync_every_steps} steps: set {theirs.sync_every_steps}"
        )
        errors.append({"path": "algorithm.sync_every_steps", "message": text})
    state = outer_state_bytes(theirs.outer_optimizer, theirs.outer_momentum)
    if outer_state_bytes(ours.outer_optimizer, ours.outer_momentum) != state:
        text = (
            f"the checkpoint holds {state:g} bytes of outer state per parameter, as "
            f"{theirs.outer_optimizer} with outer_momentum = {theirs.outer_momentum:g} does: take "
            "one that holds as much"
        )
        errors.append({"path": "algorithm.outer_optimizer", "message": text})
    return errors


def _view(ref: str, manifest: CheckpointManifest) -> dict[str, Any]:
    shown = manifest.model_dump(mode="json", include=_SHOWN)
    return jsonable({"ref": ref, **shown, "learners": sorted(manifest.learners)})


async def seed_incarnations(bus: Bus, run: str, newest: dict[str, int]) -> None:
    """Learners of a run to come begin above these; never moves a number back."""
    for learner, number in newest.items():
        if number < 0:
            continue  # its only life is not in the checkpoint: there is nothing to begin above
        try:  # again if somebody is granted one meanwhile: it may be higher by then
            await against_others(partial(_seed, bus, run, learner, number))
        except Conflict:  # its own site does that, to itself alone: others need not wait for it
            log.warning("life not counted on: its key is written without end", learner=learner)


async def _seed(bus: Bus, run: str, learner: str, number: int) -> None:
    place = (subjects.INCARNATIONS, subjects.life_key(run, learner, named=bus.named))
    entry = await bus.kv_get(*place)
    value = None if entry is None else entry.value
    found = record_in(value, Incarnation)  # what nobody can read is replaced
    if found and found.incarnation >= number:
        return
    record = Incarnation(learner=learner, incarnation=number, boot="", at=ambient.wall())
    await write_if(bus, *place, encode(record), entry.revision if entry and value else 0)
