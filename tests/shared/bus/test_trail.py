"""A reader whose stream lost its end, and was filled again before it is back, misses nothing."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from shared.bus.conftest import Open, soon

from diloco_shared.bus.deliveries import YIELDED_MAX, Trail
from diloco_shared.bus.nats.api import nanoseconds
from diloco_shared.bus.port import Bus, StreamSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

SPEC = StreamSpec("S", ("s.>",), 1 << 20, synced=False)


async def fill(bus: Bus, *texts: str, subject: str = "s.a") -> None:
    for text in texts:
        await bus.append(subject, text.encode())


async def took(messages: Any, count: int) -> list[str]:
    return [(await soon(anext(messages))).payload.decode() for _ in range(count)]


async def test_a_stream_that_is_another_one_is_read_from_where_it_differs(
    open_buses: Open,
) -> None:
    async with open_buses() as (one, two):
        await two.ensure_stream(SPEC)
        await fill(two, "1", "2", "3")
        reading: AbstractAsyncContextManager[Any] = one.read("S", "s.a")
        async with reading as messages:
            assert await took(messages, 3) == ["1", "2", "3"]
            await two.delete_stream("S")
            await two.ensure_stream(SPEC)
            await fill(two, "a", "b", "c", "d")
            assert await took(messages, 4) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_what_took_the_place_of_a_lost_end_is_read(lost: int) -> None:
    broker = MemoryBroker()
    one, two = MemoryBus(broker, "one"), MemoryBus(broker, "two")
    await two.ensure_stream(SPEC)
    await fill(two, "1", "2", "3", "4")
    async with one.read("S", "s.a") as messages:
        assert await took(messages, 4) == ["1", "2", "3", "4"]
        one.disconnect()
        broker.lose("S", lost)
        await fill(two, *"abcde"[:lost], "z")
        one.reconnect()
        assert await took(messages, lost + 1) == [*"abcde"[:lost], "z"]


async def test_all_is_read_that_took_the_place_of_an_end_of_which_nothing_is_left() -> None:
    """As where a hub is put back from a backup: others wrote to it before this reader was back, and
    what it had read before is not there to tell where the stream differs."""
    broker = MemoryBroker()
    one, two = MemoryBus(broker, "one"), MemoryBus(broker, "two")
    await two.ensure_stream(SPEC)
    await fill(two, *"123456789")
    await two.purge("S", "s.>", below_seq=9)
    async with one.read("S", "s.a") as messages:
        assert await took(messages, 1) == ["9"]
        one.disconnect()
        broker.lose("S", 1)
        await two.delete_stream("S")
        await two.ensure_stream(SPEC)
        await fill(two, *"abc")
        one.reconnect()
        assert await took(messages, 3) == [*"abc"]


def test_where_a_reader_goes_on() -> None:
    fresh, trail = Trail[str](), Trail[str]()
    trail.add(7, "g")
    assert fresh.resumes_at(9, 5, same=0, differs=False) == 5, "it was told where to begin"
    assert trail.resumes_at(8, 12, same=7, differs=False) == 8
    assert trail.resumes_at(12, 12, same=7, differs=False) == 8, "others' messages, once more"
    assert trail.resumes_at(8, 12, same=0, differs=False) == 8, "what it read was removed"
    assert trail.resumes_at(8, 5, same=0, differs=False) == 1
    assert trail.resumes_at(8, 12, same=0, differs=True) == 1
    assert trail.resumes_at(8, 5, same=3, differs=True) == 4


async def test_what_was_removed_says_nothing() -> None:
    broker = MemoryBroker()
    one, two = MemoryBus(broker, "one"), MemoryBus(broker, "two")
    await two.ensure_stream(SPEC)
    await fill(two, "1", "2", "3")
    async with one.read("S", "s.a") as messages:
        assert await took(messages, 3) == ["1", "2", "3"]
        await two.purge("S", "s.>")
        await fill(two, "4")
        assert await took(messages, 1) == ["4"]


def test_a_trail_is_bounded_and_forgets_what_was_replaced() -> None:
    trail: Trail[str] = Trail()
    for seq in range(1, 2 * YIELDED_MAX):
        trail.add(seq, "old")
    assert len(trail.newest_first) == YIELDED_MAX and trail.newest_first[0] == 2 * YIELDED_MAX - 1
    newest = trail.newest_first
    assert not trail.same(newest[0], "new") and not trail.same(newest[1], "new")
    assert trail.same(newest[2], "old")
    assert trail.newest_first == newest[2:]


@pytest.mark.parametrize(
    ("moment", "ns"),
    [
        ("1970-01-01T00:00:01.000000002Z", 1_000_000_002),
        ("1970-01-01T00:01:00.5Z", 60_500_000_000),
        ("1970-01-01T00:00:09Z", 9_000_000_000),
    ],
)
def test_the_servers_moments(moment: str, ns: int) -> None:
    assert nanoseconds(moment) == ns
