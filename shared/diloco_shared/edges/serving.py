"""From settings to a process at work: its name, its connections, its health, and all of it away.

Two connections, for control and for data: a link full of chunks never delays a heartbeat.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from diloco_shared.edges.bus import Bus
from diloco_shared.edges.crash_points import arm
from diloco_shared.edges.health import Health, HealthServer
from diloco_shared.edges.loop_watch import LoopWatch
from diloco_shared.edges.membership import DataFolder, Membership
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.edges.process_settings import ProcessSettings, WorkerSettings

S = TypeVar("S", bound=WorkerSettings)


class Worker(Protocol):
    """A process that works for runs."""

    membership: Membership
    loop_watch: LoopWatch
    registry: CollectorRegistry

    def health(self) -> Health: ...

    async def run(self) -> None:
        """Until cancelled."""


@asynccontextmanager
async def connected(settings: ProcessSettings, name: str, **links: Any) -> AsyncIterator[Bus]:
    """The bus that a process is told of, until the context ends. Raises Unavailable.

    `links`: what carries payloads, as `NatsBus.connect` takes it.
    """
    token = settings.nats_token or None
    bus = await NatsBus.connect(settings.nats_url, name=name, token=token, **links)
    try:
        yield bus
    finally:
        await bus.close()


async def serve(settings: S, role: str, make: Callable[[S, Bus, Bus, DataFolder], Worker]) -> None:
    """Take a name, connect, and run what `make` makes until the process is told to stop."""
    folder = DataFolder.claim(settings.data, role, settings.id)
    settings = settings.model_copy(update={"id": folder.member})
    arm(settings.crash_at, settings.id, folder.path)
    try:
        async with (
            connected(settings, f"{settings.id}-control") as control,
            connected(
                settings,
                f"{settings.id}-data",
                connections=settings.connections,
                uplink_bytes_per_s=settings.uplink_bytes_per_s,
                downlink_bytes_per_s=settings.downlink_bytes_per_s,
            ) as data,
        ):
            await _run(make(settings, control, data, folder), settings)
    finally:
        folder.release()


async def _run(worker: Worker, settings: WorkerSettings) -> None:
    health = HealthServer(worker.health, worker.registry)
    watching = asyncio.create_task(worker.loop_watch.keep())
    try:
        port = await health.start(settings.health_host, settings.health_port)
        worker.membership.update(address=f"{settings.health_host}:{port}")
        await worker.run()
    finally:
        watching.cancel()
        await health.close()
        await worker.membership.leave()
