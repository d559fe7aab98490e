"""From settings to a connection: the one way for services, helpers of theirs, and commands."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Bus
from diloco_shared.process.settings import HubSettings, WorkerSettings


async def connection(settings: HubSettings, name: str, **more: Any) -> NatsBus:
    """To the bus that the settings name; the caller closes it. Raises Unavailable.

    `name`: what the server shows for it. `more`: how long to try, and what carries payloads, as
    `NatsBus.to` takes it.
    """
    return await NatsBus.to(settings.hub, name=name, **more)


@asynccontextmanager
async def connected(settings: HubSettings, name: str, **more: Any) -> AsyncIterator[Bus]:
    """The same, until the context ends."""
    bus = await connection(settings, name, **more)
    try:
        yield bus
    finally:
        await bus.close()


def connected_for_data(settings: WorkerSettings, name: str) -> AbstractAsyncContextManager[Bus]:
    """The same, for payloads: as fast, and on as many connections, as the settings say."""
    return connected(
        settings,
        name,
        connections=settings.connections,
        uplink_bytes_per_s=settings.uplink_bytes_per_s,
        downlink_bytes_per_s=settings.downlink_bytes_per_s,
    )
