"""The syncer process: registers, waits for a run, leads it or stands by, waits for the next."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_shared.config import RunSpec
from diloco_shared.disk_room import DiskRoom
from diloco_shared.edges.bus import Bus
from diloco_shared.edges.crash_points import arm
from diloco_shared.edges.deletion import remove_deleted
from diloco_shared.edges.disk_watch import watch_disk
from diloco_shared.edges.faults import FaultAgent
from diloco_shared.edges.health import Health, HealthServer
from diloco_shared.edges.loop_watch import LoopWatch
from diloco_shared.edges.membership import DataFolder, Membership
from diloco_shared.edges.metrics import disk_metric, traffic_metrics
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.numerics.merge import warm
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode
from diloco_syncer.edges.candidate import Candidate
from diloco_syncer.edges.leader import Leader
from diloco_syncer.edges.lease import LeaseKeeper
from diloco_syncer.edges.outbox import until_done
from diloco_syncer.edges.snapshots import SNAPSHOTS
from diloco_syncer.machine import Machine
from diloco_syncer.settings import Settings

log = structlog.get_logger()


class Syncer:
    """One process under one id."""

    def __init__(self, settings: Settings, control: Bus, data: Bus, folder: DataFolder) -> None:
        self.settings = settings
        self.control = control
        self.data = data
        self.folder = folder
        self.membership = Membership(control, settings.id, "syncer", folder.lock)
        self.faults = FaultAgent(control, settings.id, enabled=settings.chaos)
        self.candidate: Candidate | None = None
        self.ready = False
        self.loop_watch = LoopWatch()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    @property
    def leader(self) -> Leader | None:
        """While this process leads."""
        return None if self.candidate is None else self.candidate.leader

    def _room(self) -> DiskRoom | None:
        return None if self.candidate is None else self.candidate.snapshots.room

    async def _tell(self, kind: str, text: str) -> None:
        if self.candidate is not None:
            await self.candidate.tell(kind, text)

    def health(self) -> Health:
        """Alive while this answers; ready once registered and the bus is there."""
        detail: dict[str, Any] = {
            "id": self.settings.id,
            "bus": "connected" if self.control.connected else "away",
            "run": self.membership.record.run,
        }
        detail |= {"duty": self.membership.record.state} | self.loop_watch.detail()
        leader = self.leader
        if leader is not None:
            state, reason = leader.machine.announcer.state(time.monotonic())
            detail |= {"state": state, "reason": reason, "term": leader.machine.history.term}
        elif self.membership.record.reason:
            detail |= {"reason": self.membership.record.reason}
        if self.membership.record.full:
            detail |= {"full": self.membership.record.full}
        return Health(True, self.ready and self.control.connected, detail)

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics, read off the machine when asked for."""
        yield from traffic_metrics({"control": self.control.traffic, "data": self.data.traffic})
        yield from self.loop_watch.metrics()
        yield disk_metric(self.membership.record)
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

    async def run(self) -> None:
        """Until cancelled."""
        for bucket in subjects.BUCKETS:
            await until_done(lambda b=bucket: self.control.ensure_bucket(b))  # type: ignore[misc]
        await self.membership.register()
        self.ready = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.membership.keep())
            tasks.create_task(self.faults.serve())
            tasks.create_task(remove_deleted(self.control, self.folder.path / SNAPSHOTS))
            tasks.create_task(watch_disk(self.membership, self._room, self._tell))
            # Before it can lead: compiling holds up no lease and no round.
            await asyncio.to_thread(warm)
            await self._serve(tasks)

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        """Work for the assigned run; an assignment that ends or changes ends that.

        What only a fresh process can mend ends this one.
        """
        work: asyncio.Task[None] | None = None
        try:
            async for run in self.membership.assignments():
                if work is not None and not work.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                self.faults.run = run
                self.membership.update(
                    run=run, shard=self.membership.shard, state="idle", reason="", tape_seq=0
                )
                await self.membership.refresh()
                work = tasks.create_task(self._work(run)) if run else None
        finally:
            if work is not None:
                work.cancel()

    async def _work(self, run: str) -> None:
        run_id, shard = self.membership.run_id, self.membership.shard
        entry = await until_done(lambda: self.control.kv_get(subjects.RUNS, run))
        value = None if entry is None else entry.value
        spec = RunSpec.model_validate(decode(value, RunRecord).spec) if value else None
        if spec is None or spec.id != run_id:
            log.error("assigned to a run that does not exist", run=run, id=run_id)
            return
        me = self.membership.record
        lease_s = spec.membership.leader_lease_s

        def show(state: str, reason: str, tape_seq: int) -> None:
            shown = {"state": state, "reason": reason[:500]} if state else {}
            self.membership.update(**shown, tape_seq=tape_seq)

        self.candidate = candidate = Candidate(
            spec,
            LeaseKeeper(self.control, run, me.id, me.boot, me.lock, lease_s, shard),
            self.control,
            self.data,
            self.folder.path,
            show,
            payload_bytes_max=self.settings.payload_bytes_max,
            checkpoint_root=self.settings.checkpoints or str(self.settings.data / "checkpoints"),
            shard=shard,
        )
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
        while isinstance(fault, BaseExceptionGroup):
            fault = fault.exceptions[0]
        text = f"{self.settings.id} stops leading: {type(fault).__name__}: {fault}"
        await candidate.tell("lead-failed", text)


def _watched(machine: Machine) -> Iterator[Metric]:
    """Whether the run stands still for no reason, and for how long no round was closed."""
    now, run = time.monotonic(), machine.spec.name
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
    for kind, use in leader.showing.storage.streams.items():
        held.add_metric([run, kind], use.bytes)
        limit.add_metric([run, kind], use.limit)
    full = GaugeMetricFamily(
        "diloco_full", "1: a stream or a disk takes nothing more", labels=["run", "place"]
    )
    room = leader.machine.room
    for place in ("UP", "DN", "TAPE", "hub"):
        full.add_metric([run, place], float(place in room.full))
    full.add_metric([run, "snapshots"], float(bool(room.snapshot_failed)))
    yield from (held, limit, full)


async def serve(settings: Settings) -> None:
    """Connect and run until the process is told to stop."""
    folder = DataFolder.claim(settings.data, "syncer", settings.id)
    settings = settings.model_copy(update={"id": folder.member})
    arm(settings.crash_at, settings.id, folder.path)
    token = settings.nats_token or None
    control = await NatsBus.connect(settings.nats_url, name=f"{settings.id}-control", token=token)
    data = await NatsBus.connect(
        settings.nats_url,
        name=f"{settings.id}-data",
        token=token,
        connections=settings.connections,
        uplink_bytes_per_s=settings.uplink_bytes_per_s,
        downlink_bytes_per_s=settings.downlink_bytes_per_s,
    )
    syncer = Syncer(settings, control, data, folder)
    health = HealthServer(syncer.health, syncer.registry)
    watching = asyncio.create_task(syncer.loop_watch.keep())
    try:
        port = await health.start(settings.health_host, settings.health_port)
        syncer.membership.update(address=f"{settings.health_host}:{port}")
        await syncer.run()
    finally:
        watching.cancel()
        await health.close()
        await syncer.membership.leave()
        await control.close()
        await data.close()
        folder.release()
