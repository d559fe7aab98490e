"""What learner and syncer are alike in: from settings to a member at work, and all of it away.

Two connections, for control and for data: a link full of chunks never delays a heartbeat.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Generic, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from pydantic import ValidationError

from diloco_shared import VERSION, ambient
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Bus
from diloco_shared.bus.repeating import PROMPT, until_done
from diloco_shared.bus.run_streams import ensure_buckets, spec_of
from diloco_shared.process.chaos import Abilities, FaultAgent
from diloco_shared.process.connecting import closed, connected, connection
from diloco_shared.process.crash_points import arm
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.process.disk_watch import remove_deleted, watch_disk
from diloco_shared.process.health import (
    Health,
    HealthServer,
    bus_state,
    disk_metric,
    traffic_metrics,
)
from diloco_shared.process.loop_watch import HELD_S, LoopWatch
from diloco_shared.process.membership import DataFolder, Registration
from diloco_shared.process.settings import WorkerSettings
from diloco_shared.process.stopping import CLOSES_S
from diloco_shared.protocol.wire import WireError
from diloco_shared.spec.run import RunSpec

log = structlog.get_logger()

S = TypeVar("S", bound=WorkerSettings)


class Worker(ABC, Generic[S]):
    """One process under one id, that works for the runs it is assigned to."""

    role: ClassVar[str]
    kept: ClassVar[str]  # in its data folder: one folder per run
    unfit: ClassVar[str]  # its state where it cannot work for a run
    shortest_hold_s: ClassVar[float] = HELD_S  # of its event loop that is counted

    def __init__(self, settings: S, control: Bus, data: Bus, folder: DataFolder) -> None:
        self.settings = settings
        self.control = control
        self.data = data
        self.folder = folder
        self.membership = Registration(control, settings.id, self.role, folder.lock)
        self.faults = FaultAgent(
            control,
            settings.id,
            enabled=settings.chaos,
            abilities=self.abilities(),
            role=self.role,
        )
        self.ready = False
        self.ends_at = math.inf  # then its connections are closed: see CLOSES_S
        self.loop_watch = LoopWatch(shortest_s=self.shortest_hold_s)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def abilities(self) -> Abilities:
        """What faults it can inflict on itself."""
        return Abilities()

    @abstractmethod
    def room(self) -> DiskRoom | None:
        """Of the present work."""

    @abstractmethod
    async def tell(self, kind: str, text: str) -> None:
        """An event of the present work."""

    @abstractmethod
    def detail(self) -> dict[str, Any]:
        """What a probe is told of the present work."""

    @abstractmethod
    def metrics(self) -> Iterable[Metric]:
        """Of the present work."""

    @abstractmethod
    async def serve_runs(self, tasks: asyncio.TaskGroup) -> None:
        """Until cancelled: one run after the other. What fails ends the process."""

    def health(self) -> Health:
        """Alive while this answers; ready once registered and the bus is there."""
        full, bus = self.membership.record.full, self.control
        detail = {"id": self.settings.id, "bus": bus_state(bus)}
        detail |= self.loop_watch.detail() | self.detail() | ({"full": full} if full else {})
        return Health(self.ready and bus.connected and not bus.ails, detail)

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics, read when asked for."""
        yield from traffic_metrics({"control": self.control.traffic, "data": self.data.traffic})
        yield from self.loop_watch.metrics()
        yield disk_metric(self.membership.record)
        yield from self.metrics()

    async def run(self) -> None:
        """Until cancelled, or until the work fails; then it is no member any more."""
        try:
            await ensure_buckets(self.control)
            await self.membership.register()
            self.ready = True
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.membership.keep())
                tasks.create_task(self.faults.serve())
                tasks.create_task(remove_deleted(self.control, self.folder.path / self.kept))
                tasks.create_task(watch_disk(self.membership, self.room, self.tell))
                await self.serve_runs(tasks)
        finally:
            self.ends_at = ambient.monotonic() + CLOSES_S
            await self.membership.leave()

    async def spec_of(self, run: str) -> RunSpec | None:
        """Of the run that it is assigned to; None if there is none such any more, or none that
        this release can do: then it shows so, until it is exchanged for another one."""
        run_id = self.membership.run_id
        try:
            spec = await until_done(
                lambda: spec_of(self.control, run, run_id), "the run's record", pauses=PROMPT
            )
        except (ValidationError, WireError) as error:
            text = f"this process is of release {VERSION}, and the run is not: {_fault(error)}"
            log.error("unfit", run=run, reason=text)
            self.membership.update(run=run, state=self.unfit, reason=text[:500])
            await self.membership.refresh()
            return None
        if spec is None:
            log.error("assigned to a run that does not exist", run=run, id=run_id)
        return spec


def _fault(error: ValidationError | WireError) -> str:
    """The first of them, with its place: as a rule a setting that is unknown here."""
    if isinstance(error, WireError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def connected_for_data(settings: WorkerSettings, name: str) -> AbstractAsyncContextManager[Bus]:
    """As `connected`, for payloads: as fast, and on as many connections, as the settings say."""
    return connected(settings, name, **_carrying(settings))


def _carrying(settings: WorkerSettings) -> dict[str, Any]:
    return {
        "connections": settings.connections,
        "uplink_bytes_per_s": settings.uplink_bytes_per_s,
        "downlink_bytes_per_s": settings.downlink_bytes_per_s,
    }


async def serve(settings: S, kind: type[Worker[S]], **more: Any) -> None:
    """Take a name, connect, and run until the process is told to stop. `more`: for `kind`."""
    folder = DataFolder.claim(settings.data, kind.role, settings.id, settings.ids)
    settings = settings.model_copy(update={"id": folder.member, "ids": ()})
    arm(settings.crash_at, settings.id, folder.path)
    buses, worker = list[NatsBus](), None
    try:
        buses.append(control := await connection(settings, f"{settings.id}-control"))
        carrying = _carrying(settings)
        buses.append(data := await connection(settings, f"{settings.id}-data", **carrying))
        worker = kind(settings, control, data, folder, **more)
        await _run(worker)
    finally:
        ends_at = math.inf if worker is None else worker.ends_at
        try:
            await closed(buses, min(CLOSES_S, ends_at - ambient.monotonic()))
        finally:
            folder.release()


async def _run(worker: Worker[S]) -> None:
    settings = worker.settings
    health = HealthServer(worker.health, worker.registry)
    watching = asyncio.create_task(worker.loop_watch.keep())
    try:
        port = await health.start(settings.health_host, settings.health_port)
        worker.membership.update(address=f"{settings.health_host}:{port}")
        await worker.run()
    finally:
        watching.cancel()
        await health.close()
