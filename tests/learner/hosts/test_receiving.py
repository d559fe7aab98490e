"""Several hosts fetch one payload: each a run of chunks, and process 0 what they do not bring."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.hosts.test_carrying import SUBJECT, Island, an_island, own_bus
from waiting import NotYet, until

from diloco_learner.hosts.carrying_io import Carriers
from diloco_learner.hosts.link_io import BadFrame
from diloco_learner.hosts.receiving_io import (
    ChunkRun,
    SharedLanes,
    fetched_by_all,
    places_of,
    runs_of,
)
from diloco_shared.bus.blobs import BlobIncomplete, get_blob, put_blob
from diloco_shared.bus.port import Stored
from diloco_shared.protocol.chunks import CHECK_BYTES, HEADER_DIGEST, HEADER_INDEX, Incoming, cut
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.virtual

PAYLOAD = bytes(range(256)) * 400
CHUNK_BYTES = 1000
CHUNKS = 103


def shared(island: Island, bus: MemoryBus) -> MemoryBus:
    """Process 0's bus, of which the island's hosts carry a part."""
    bus.lanes = SharedLanes(bus, None, island.carriers)
    return bus


def test_a_chunk_is_where_it_was_stored_first() -> None:
    def head(seq: int, digest: str, index: str) -> Stored:
        return Stored("s", b"", {HEADER_DIGEST: digest, HEADER_INDEX: index}, seq)

    heads = [
        head(2, "a", "1"),
        head(3, "b", "0"),
        Stored("s", b"", {}, 4),
        head(5, "a", "none"),
        head(6, "a", "0"),
        head(7, "a", "1"),
    ]
    assert places_of(heads, "a") == {1: 2, 0: 6}


@given(st.permutations(range(12)), st.sets(st.integers(0, 11), min_size=1), st.integers(1, 5))
def test_runs_lie_one_behind_the_other_and_cover_what_is_wanted(
    order: list[int], wanted: set[int], hosts: int
) -> None:
    places = {index: 100 + seq for seq, index in enumerate(order)}
    runs = runs_of(places, sorted(wanted), hosts)
    assert [places[n] for run in runs for n in run.chunks] == sorted(places[n] for n in wanted)
    assert all(run.start_seq == places[run.chunks[0]] for run in runs)
    sizes = [len(run.chunks) for run in runs]
    assert len(runs) == min(hosts, len(wanted)) and max(sizes) - min(sizes) <= 1


def test_nothing_is_shared_out_before_all_of_it_is_there() -> None:
    assert runs_of({0: 1, 1: 2}, [0, 1, 2], 2) == []
    assert runs_of({0: 1, 1: 2}, [0, 1], 2) == [ChunkRun(1, (0,)), ChunkRun(2, (1,))]


async def test_every_host_fetches_its_run_and_no_chunk_comes_twice(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = shared(island, await own_bus(broker))
        blob = await put_blob(bus_alone(broker), SUBJECT, PAYLOAD, chunk_bytes=CHUNK_BYTES)
        before = bus.traffic.bytes_in
        assert await get_blob(bus, "UP-r", blob, timeout_s=30) == PAYLOAD
        own = bus.traffic.bytes_in - before
        others = [island.hosts[n].bus.traffic.bytes_in for n in (1, 2)]  # type: ignore[union-attr]
        assert own + sum(others) == len(PAYLOAD)
        for size in (own, *others):
            assert abs(size - len(PAYLOAD) / 3) <= CHUNK_BYTES
        assert not island.carriers.lent


def bus_alone(broker: MemoryBroker) -> MemoryBus:
    return MemoryBus(broker, "syncer")


def deaf(client: str) -> Callable[[str, str, str], Fate]:
    """A host whose requests are lost."""

    def fault(who: str, operation: str, subject: str) -> Fate:
        return "lose_request" if (who, operation) == (client, "api") else "deliver"

    return fault


async def test_what_a_host_cannot_fetch_process_0_does(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = shared(island, await own_bus(broker))
        blob = await put_blob(bus_alone(broker), SUBJECT, PAYLOAD, chunk_bytes=CHUNK_BYTES)
        island.hosts[2].bus = None
        assert await get_blob(bus, "UP-r", blob, timeout_s=30) == PAYLOAD
        assert 2 not in island.carriers.ready(), "it is not asked again soon"


async def test_a_chunk_that_was_damaged_on_its_way_is_fetched_again(
    broker: MemoryBroker,
) -> None:
    async with an_island(broker) as island:
        bus = shared(island, await own_bus(broker))
        blob = await put_blob(bus_alone(broker), SUBJECT, PAYLOAD, chunk_bytes=CHUNK_BYTES)
        came, damaged = island.carriers.came, list[int]()

        def damages(index: int, number: int, indices: tuple[int, ...], data: bytes) -> None:
            if not damaged:
                damaged.append(indices[0])
                data = (
                    data[: CHECK_BYTES * len(indices)]
                    + b"?"
                    + data[1 + CHECK_BYTES * len(indices) :]
                )
            came(index, number, indices, data)

        island.carriers.came = damages  # type: ignore[method-assign,assignment]
        assert await get_blob(bus, "UP-r", blob, timeout_s=30) == PAYLOAD
        assert damaged and bus.traffic.refused["chunk", "check"] == 1


async def test_what_is_not_wanted_any_more_is_not_fetched(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = shared(island, await own_bus(broker))
        blob = await put_blob(bus_alone(broker), SUBJECT, PAYLOAD, chunk_bytes=CHUNK_BYTES)
        broker.fault = deaf("host-2")
        incoming = Incoming(blob, lambda size: memoryview(bytearray(size)))
        fetching = asyncio.ensure_future(get_blob(bus, "UP-r", blob, into=incoming))

        def most_is_here() -> bool:
            if incoming.received < CHUNKS * 2 // 3:
                raise NotYet(incoming.received)
            return True

        await until(most_is_here, "what the others fetch")
        fetching.cancel()
        await asyncio.wait({fetching})
        assert not incoming.lent and not island.carriers.lent
        await until(lambda: not island.hosts[2].working, "that it has let go")
        # What came is kept, and the rest is fetched by whoever goes on.
        broker.fault = None
        assert await get_blob(bus, "UP-r", blob, into=incoming, timeout_s=30) == PAYLOAD


async def test_where_a_host_dies_nobody_waits_for_its_run(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = shared(island, await own_bus(broker))
        blob = await put_blob(bus_alone(broker), SUBJECT, PAYLOAD, chunk_bytes=CHUNK_BYTES)
        broker.fault = deaf("host-2")
        fetching = asyncio.ensure_future(get_blob(bus, "UP-r", blob, patience_s=30))
        await until(lambda: bool(island.carriers.lent), "that something is lent")
        island.dies(2)
        island.carriers.known[2].connected = False
        assert await fetching == PAYLOAD


async def test_small_payloads_and_half_ones_are_fetched_by_process_0_alone(
    broker: MemoryBroker,
) -> None:
    async with an_island(broker) as island:
        bus = shared(island, await own_bus(broker))
        small = await put_blob(bus_alone(broker), SUBJECT, b"small", chunk_bytes=1)
        assert await get_blob(bus, "UP-r", small, timeout_s=30) == b"small"
        blob = await put_blob(bus_alone(broker), SUBJECT + "9", PAYLOAD, chunk_bytes=CHUNK_BYTES)
        await bus.purge("UP-r", SUBJECT + "9", below_seq=50)
        with pytest.raises(BlobIncomplete):
            await get_blob(bus, "UP-r", blob, patience_s=0.3)
        assert all(island.hosts[n].bus.traffic.bytes_in == 0 for n in (1, 2))  # type: ignore[union-attr]


async def test_what_process_0_sends_it_sends_alone_also_without_lanes(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = await own_bus(broker)
        fetched_by_all(bus, island.carriers, shared_min=2)
        assert isinstance(bus.lanes, SharedLanes) and island.carriers.traffic is bus.traffic
        blob = await put_blob(bus, SUBJECT, b"small", chunk_bytes=1)
        assert all(island.hosts[n].bus.traffic.bytes_out == 0 for n in (1, 2))  # type: ignore[union-attr]
        assert await get_blob(bus, "UP-r", blob, timeout_s=30) == b"small"
        assert all(island.hosts[n].bus.traffic.bytes_in > 0 for n in (1, 2))  # type: ignore[union-attr]


def test_a_frame_with_other_chunks_than_it_says_ends_the_island() -> None:
    blob = cut("s", PAYLOAD, chunk_bytes=CHUNK_BYTES).blob
    carriers = Carriers(lambda index, head: None)
    incoming = Incoming(blob, lambda size: memoryview(bytearray(size)))
    lent = carriers.lend(1, incoming, [3, 4])
    assert incoming.awaited == CHUNKS - 2
    with pytest.raises(BadFrame, match="chunk 3"):
        carriers.came(1, lent.number, (3, 4), b"short")
    assert carriers.over(lent) and incoming.awaited == CHUNKS
    carriers.came(1, lent.number, (4,), b"")  # too late: nobody wants it
