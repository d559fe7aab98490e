"""A bus in memory whose hub is far away, and not always there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import TypeVar

from diloco_shared.edges.bus import Delivery, Stored
from diloco_shared.edges.memory_broker import MemoryBroker
from diloco_shared.edges.memory_bus import MemoryBus

T = TypeVar("T")


class FarBus(MemoryBus):
    """A client some way off: every message takes a seeded time, one way."""

    def __init__(self, broker: MemoryBroker, name: str, rng: Random, delay_s: float) -> None:
        super().__init__(broker, name)
        self.rng, self.delay_s = rng, delay_s

    def _way_s(self) -> float:
        return self.rng.expovariate(1 / self.delay_s)

    async def _call(
        self, operation: str, subject: str, timeout_s: float, work: Callable[[], T]
    ) -> T:
        await asyncio.sleep(self._way_s())
        done = await super()._call(operation, subject, timeout_s, work)
        await asyncio.sleep(self._way_s())
        return done

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.connected:
            self._count_out(subject, payload)
            loop = asyncio.get_running_loop()
            loop.call_later(self._way_s(), self.broker.publish, Delivery(subject, payload))

    @asynccontextmanager
    async def _reading(
        self, stream: str, subject: str, start_seq: int, *, plain: bool
    ) -> AsyncIterator[AsyncIterator[Stored]]:
        async with super()._reading(stream, subject, start_seq, plain=plain) as messages:
            yield self._late(messages)

    async def _late(self, messages: AsyncIterator[Stored]) -> AsyncIterator[Stored]:
        async for stored in messages:
            await asyncio.sleep(self._way_s())
            yield stored
