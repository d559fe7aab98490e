"""Buses to test: the in-memory one always, the real one in live runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

import pytest

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Bus
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

T = TypeVar("T")
Open = Callable[[], AbstractAsyncContextManager[tuple[Bus, Bus]]]


async def soon(awaitable: Awaitable[T]) -> T:
    """Await what must happen; a limit far above what it takes."""
    async with asyncio.timeout(20):
        return await awaitable


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live)])
def open_buses(request: pytest.FixtureRequest) -> Open:
    """Opens two clients of one fresh broker or server."""

    @asynccontextmanager
    async def memory() -> AsyncIterator[tuple[Bus, Bus]]:
        broker = MemoryBroker()
        one, two = MemoryBus(broker, "one"), MemoryBus(broker, "two")
        yield one, two
        await one.close()
        await two.close()

    if request.param == "memory":
        return memory
    server = request.getfixturevalue("nats_server")

    @asynccontextmanager
    async def real() -> AsyncIterator[tuple[Bus, Bus]]:
        async with AsyncExitStack() as stack:
            one = await NatsBus.connect(server.url, name="one")
            stack.push_async_callback(one.close)
            two = await NatsBus.connect(server.url, name="two")
            stack.push_async_callback(two.close)
            yield one, two

    return real
