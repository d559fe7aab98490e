"""The syncer process: registers, waits for a run, leads it or stands by, waits for the next."""

import asyncio
from collections.abc import Iterator
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import Field

from diloco_shared import ambient
from diloco_shared.bus.port import Bus
from diloco_shared.checkpoints.place_threads_io import PlaceThreads
from diloco_shared.numerics.merge import warm
from diloco_shared.process import serving
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.process.faults import leaves
from diloco_shared.process.membership import DataFolder
from diloco_shared.process.serving import Worker
from diloco_shared.process.settings import WorkerSettings
from diloco_shared.reach.checkpoint_roots import root_of_run
from diloco_shared.reach.local import OutOfReach
from diloco_syncer.context import RunContext
from diloco_syncer.leadership.candidate_io import Candidate
from diloco_syncer.leadership.leader_io import Leader
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.machine import Machine
from diloco_syncer.snapshots.snapshots_io import SNAPSHOTS, SnapshotStore, folder_of


class Settings(WorkerSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    payload_bytes_max: int | None = Field(
        None,
        ge=1 << 20,
        description="Encoded contributions held in memory at once; what the run needs if not set.",
    )


log = structlog.get_logger()


class Syncer(Worker[Settings]):
    """Works for one shard of one run at a time."""

    role, kept, unfit = "syncer", SNAPSHOTS, "ineligible"

    def __init__(self, settings: Settings, control: Bus, data: Bus, folder: DataFolder) -> None:
        super().__init__(settings, control, data, folder)
        self.candidate: Candidate | None = None
        self.place_threads = PlaceThreads()

    @property
    def leader(self) -> Leader | None:
        """While this process leads."""
        return None if self.candidate is None else self.candidate.leader

    def room(self) -> DiskRoom | None:
        return None if self.candidate is None else self.candidate.snapshots.room

    async def tell(self, kind: str, text: str) -> None:
        if self.candidate is not None:
            await self.candidate.tell(kind, text)

    def detail(self) -> dict[str, Any]:
        record, leader = self.membership.record, self.leader
        detail: dict[str, Any] = {"run": record.run, "duty": record.state}
        if leader is not None:
            state, reason = leader.machine.announcer.state(ambient.monotonic())
            detail |= {"state": state, "reason": reason, "term": leader.machine.history.term}
        elif record.reason:
            detail |= {"reason": record.reason}
        return detail

    def metrics(self) -> Iterator[Metric]:
        leader = self.leader
        if leader is None:
            return
        h = leader.machine.history
        rounds = CounterMetricFamily("diloco_rounds", "Closed rounds", labels=["run", "outcome"])
        rounds.add_metric([h.spec.name, "committed"], h.committed)
        rounds.add_metric([h.spec.name, "skipped"], h.skipped)
        yield rounds
        refused = CounterMetricFamily("diloco_refused", "Refused input", labels=["run", "kind"])
        for kind, count in (h.refused + leader.machine.refused).items():
            refused.add_metric([h.spec.name, kind], count)
        yield refused
        yield from _watched(leader.machine)
        yield from _storage(leader)

    async def serve_runs(self, tasks: asyncio.TaskGroup) -> None:
        """Work for the assigned run; an assignment that ends or changes ends that.

        What only a fresh process can mend ends this one.
        """
        # Before it can lead: compiling holds up no lease and no round.
        await asyncio.to_thread(warm)
        work: asyncio.Task[None] | None = None
        try:
            async for run in self.membership.assignments():
                if work is not None and not work.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                self.faults.works_for(run)
                await self._shows(run)
                work = tasks.create_task(self._work_for(run)) if run else None
        finally:
            if work is not None:
                work.cancel()

    async def _shows(self, run: str) -> None:
        shard = self.membership.shard
        self.membership.update(run=run, shard=shard, state="idle", reason="", tape_seq=0)
        await self.membership.refresh()

    async def _work_for(self, run: str) -> None:
        await self._work(run)
        while self.membership.worked_for():
            await self._shows(run)
            await self._work(run)

    async def _work(self, run: str) -> None:
        shard = self.membership.shard
        spec = await self.spec_of(run)
        if spec is None:
            return
        me = self.membership.record
        lease_s = spec.membership.leader_lease_s

        def show(state: str, reason: str, tape_seq: int) -> None:
            shown = {"state": state, "reason": reason[:500]} if state else {}
            self.membership.update(**shown, tape_seq=tape_seq)

        places, named = self.settings.checkpoint_places, spec.keeping.run_checkpoint_root
        try:
            # Links are followed, on a disk that may hang.
            root = await asyncio.to_thread(root_of_run, named, places) if named else places[0]
        except OutOfReach as error:
            # Only another setting mends it, and that is read at the next start.
            log.error("unfit", run=run, reason=str(error))
            show("ineligible", f"keeping.run_checkpoint_root: {error}", 0)
            return
        context = RunContext(
            spec=spec,
            shard=shard,
            me=me.id,
            control=self.control,
            data=self.data,
            folder=self.folder.path,
            snapshots=SnapshotStore(folder_of(self.folder.path, spec.folder, shard)),
            checkpoint_root=root,
            place_threads=self.place_threads,
            payload_bytes_max=self.settings.payload_bytes_max,
            checkpoint_places=places,
        )
        keeper = LeaseKeeper(self.control, run, me.id, me.boot, me.lock, lease_s, shard)
        self.candidate = candidate = Candidate(context, keeper, show)
        try:
            outcome = await candidate.run()
            log.info("run over", run=run, outcome=outcome)
        except* Exception as fault:
            await self._tell_failed(candidate, fault)
            raise
        finally:
            self.candidate = None
            self.membership.update(run="", state="idle", reason="")

    async def _tell_failed(self, candidate: Candidate, fault: BaseException) -> None:
        """Why it stops leading, for people: the process ends with it."""
        first = leaves(fault)[0]
        text = f"{self.settings.id} stops leading: {type(first).__name__}: {first}"
        await candidate.tell("lead-failed", text)


def _watched(machine: Machine) -> Iterator[Metric]:
    """Whether the run stands still for no reason, and for how long no round was closed."""
    now, run = ambient.monotonic(), machine.spec.name
    stuck = GaugeMetricFamily("diloco_stuck", "No progress, no reason known", labels=["run"])
    stuck.add_metric([run], machine.announcer.state(now)[0] == "stuck")
    yield stuck
    since = GaugeMetricFamily("diloco_seconds_since_round", "Since a round closed", labels=["run"])
    since.add_metric([run], machine.announcer.watchdog.seconds_since_round(now))
    yield since


def _storage(leader: Leader) -> Iterator[Metric]:
    """What the run's streams hold and may, and what is full."""
    run = leader.spec.name
    held = GaugeMetricFamily("diloco_stream_bytes", "Held by a stream", labels=["run", "stream"])
    limit = GaugeMetricFamily(
        "diloco_stream_bytes_max", "Limit of a stream; 0: none", labels=["run", "stream"]
    )
    for kind, use in leader.status_writer.storage.streams.items():
        held.add_metric([run, kind], use.bytes)
        limit.add_metric([run, kind], use.limit)
    full = GaugeMetricFamily(
        "diloco_full", "1: a stream or a disk takes nothing more", labels=["run", "place"]
    )
    room = leader.machine.room
    for place in ("UP", "DN", "TAPE", "hub"):
        full.add_metric([run, place], float(place in room.full))
    full.add_metric([run, "snapshots"], float(bool(room.snapshot_failed)))
    waited = CounterMetricFamily(
        "diloco_merges_waited_seconds",
        "Merges waited until what they replace was written",
        labels=["run", "for"],
    )
    for writes, seconds in leader.numbers.waited_s.items():
        waited.add_metric([run, writes], seconds)
    yield from (held, limit, full, waited)


async def serve(settings: Settings) -> None:
    """Connect and run until the process is told to stop."""
    await serving.serve(settings, Syncer)
