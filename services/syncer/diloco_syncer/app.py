"""The syncer process: registers, waits for a run, leads it, waits for the next."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus, BusError
from diloco_shared.edges.faults import FaultAgent
from diloco_shared.edges.health import Health, HealthServer
from diloco_shared.edges.membership import DataFolder, Membership
from diloco_shared.edges.metrics import traffic_metrics
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Event, RunRecord
from diloco_shared.protocol.wire import decode, encode
from diloco_syncer.edges.leader import Leader
from diloco_syncer.edges.outbox import until_done
from diloco_syncer.edges.tape import Deposed
from diloco_syncer.history import TapeFault
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
        self.leader: Leader | None = None
        self.ready = False
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def health(self) -> Health:
        """Alive while this answers; ready once registered and the bus is there."""
        detail: dict[str, Any] = {
            "id": self.settings.id,
            "bus": "connected" if self.control.connected else "away",
            "run": self.membership.record.run,
        }
        if self.leader is not None:
            state, reason = self.leader.machine.announcer.state(time.monotonic())
            detail |= {"state": state, "reason": reason, "term": self.leader.machine.history.term}
        return Health(True, self.ready and self.control.connected, detail)

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics, read off the machine when asked for."""
        yield from traffic_metrics({"control": self.control.traffic, "data": self.data.traffic})
        if self.leader is None:
            return
        h = self.leader.machine.history
        rounds = CounterMetricFamily("diloco_rounds", "Closed rounds", labels=["run", "outcome"])
        rounds.add_metric([h.spec.name, "committed"], h.committed)
        rounds.add_metric([h.spec.name, "skipped"], h.skipped)
        yield rounds
        refused = CounterMetricFamily("diloco_refused", "Refused input", labels=["run", "kind"])
        for kind, count in (h.refused + self.leader.machine.refused).items():
            refused.add_metric([h.spec.name, kind], count)
        yield refused

    async def run(self) -> None:
        """Until cancelled."""
        for bucket in subjects.BUCKETS:
            await until_done(lambda b=bucket: self.control.ensure_bucket(b))  # type: ignore[misc]
        await self.membership.register()
        self.ready = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.membership.keep())
            tasks.create_task(self.faults.serve())
            await self._serve(tasks)

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        """Lead what is assigned; an assignment that ends or changes ends the leading.

        A leader that fails ends the process: only a fresh one, rebuilt from the tape, is safe.
        """
        work: asyncio.Task[None] | None = None
        try:
            async for run in self.membership.assignments():
                if work is not None and not work.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                self.faults.run = run
                self.membership.update(run=run, state="leading" if run else "idle")
                await self.membership.refresh()
                work = tasks.create_task(self._lead(run)) if run else None
        finally:
            if work is not None:
                work.cancel()

    async def _lead(self, run: str) -> None:
        entry = await until_done(lambda: self.control.kv_get(subjects.RUNS, run))
        if entry is None or entry.value is None:
            log.error("assigned to a run that does not exist", run=run)
            return
        spec = RunSpec.model_validate(decode(entry.value, RunRecord).spec)
        self.leader = Leader(
            spec,
            self.settings.id,
            self.control,
            self.data,
            self.folder.path,
            payload_bytes_max=self.settings.payload_bytes_max,
        )
        try:
            outcome = await self.leader.run()
            log.info("run over", run=run, outcome=outcome)
        except* (Deposed, TapeFault, ValueError, OSError) as fault:
            await self._tell_failed(run, fault)
            raise
        finally:
            self.leader = None
            self.membership.update(state="idle")

    async def _tell_failed(self, run: str, fault: BaseException) -> None:
        """Why it stops leading, for people: the process ends with it."""
        while isinstance(fault, BaseExceptionGroup):
            fault = fault.exceptions[0]
        log.error("stops leading", run=run, reason=str(fault))
        event = Event(
            run=run,
            kind="lead-failed",
            source=self.settings.id,
            text=f"{self.settings.id} stops leading: {type(fault).__name__}: {fault}"[:500],
            data={},
            at=time.time(),
        )
        try:
            await self.control.append(subjects.event(run, event.kind), encode(event))
        except BusError as error:
            log.warning("event not written", error=str(error))


async def serve(settings: Settings) -> None:
    """Connect and run until the process is told to stop."""
    folder = DataFolder(settings.data, settings.id)
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
    try:
        port = await health.start(settings.health_host, settings.health_port)
        syncer.membership.update(address=f"{settings.health_host}:{port}")
        await syncer.run()
    finally:
        await health.close()
        await syncer.membership.leave()
        await control.close()
        await data.close()
        folder.release()
