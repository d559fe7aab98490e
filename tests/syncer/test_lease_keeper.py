"""The lease's keeper on a bus: links that are slow, and answers that never come."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from waiting import until

from diloco_shared import ambient
from diloco_shared.bus.port import BusError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import LeaderLease
from diloco_shared.protocol.wire import decode
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.leadership.lease_io import LeaseKeeper

pytestmark = pytest.mark.virtual

LEASE_S = 3.0
PLACE = subjects.LEASES, subjects.leader_lease("r", 0)


class Slow(MemoryBus):
    """A link on which every request takes `slow_s`."""

    slow_s = 0.0

    async def append(self, *given: object, **more: object) -> int:
        await asyncio.sleep(self.slow_s)
        return await super().append(*given, **more)  # type: ignore[arg-type]

    async def last_raw(self, *given: str) -> object:  # type: ignore[override]
        await asyncio.sleep(self.slow_s)
        return await super().last_raw(*given)


class Late(MemoryBus):
    """While it is away, what it is given stays under way, and arrives before the next write."""

    away = False

    def __init__(self, broker: MemoryBroker, client: str) -> None:
        super().__init__(broker, client)
        self.under_way: list[Callable[[], Awaitable[int]]] = []

    async def append(self, *given: object, **more: object) -> int:
        write = partial(super().append, *given, **more)  # type: ignore[arg-type]
        if self.away:
            self.under_way.append(write)
            raise BusError("away")
        while self.under_way:
            await self.under_way.pop()()
        return await write()


def keeper(bus: MemoryBus, me: str = "s") -> LeaseKeeper:
    return LeaseKeeper(bus, "r", me, f"boot-{me}", f"lock-{me}", LEASE_S)


async def holder(bus: MemoryBus) -> str:
    entry = await bus.kv_get(*PLACE)
    assert entry is not None and entry.value is not None
    return decode(entry.value, LeaderLease).holder


async def test_a_lease_that_was_there_before_is_taken_over_a_slow_link() -> None:
    """Its key has a mark of deletion: the write, what is there, and the write again."""
    bus = Slow(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.LEASES)
    await bus.kv_put(*PLACE, b"of before")
    await bus.kv_delete(*PLACE)
    bus.slow_s = 0.6
    mine = keeper(bus)
    mine.fit("")
    keeping, began = asyncio.create_task(mine.keep()), ambient.monotonic()
    await until(lambda: mine.leading)
    assert ambient.monotonic() - began < 3 * LEASE_S, "before the mark has gone by itself"
    for _ in range(100):  # and is kept
        await asyncio.sleep(0.1)
        assert mine.leading
    keeping.cancel()


async def test_a_lease_whose_renewal_was_not_answered_is_given_back() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "s")
    await bus.ensure_bucket(subjects.LEASES)
    mine = keeper(bus)
    mine.fit("")
    keeping = asyncio.create_task(mine.keep())
    await until(lambda: mine.leading)
    lost: list[str] = []

    def fault(client: str, operation: str, subject: str) -> Fate:
        if not lost and operation == "append":
            lost.append(subject)
            return "lose_answer"
        return "deliver"

    broker.fault = fault
    await until(lambda: lost)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await mine.give_back()
    assert await holder(bus) == ""


async def test_a_renewal_that_comes_through_late_is_given_back_too() -> None:
    """The server is back just now: it takes what was said before, after it was asked."""
    bus = Late(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.LEASES)
    mine = keeper(bus)
    mine.fit("")
    keeping = asyncio.create_task(mine.keep())
    await until(lambda: mine.leading)
    bus.away = True
    await until(lambda: bus.under_way)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    bus.away = False
    await mine.give_back()
    assert not bus.under_way, "the renewal came through"
    assert await holder(bus) == ""


async def test_one_that_stands_by_asks_nothing_when_it_ends() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "s")
    asked: list[str] = []

    def fault(client: str, operation: str, subject: str) -> Fate:
        asked.append(operation)
        return "deliver"

    broker.fault = fault
    await keeper(bus).give_back()
    assert asked == []
