"""Hosts' own connections to a real message server: what each of them carried, and what came."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from learner.hosts.fragments import Fragment
from learner.hosts.test_carrying import SUBJECT, Island, ready, soon
from waiting import until

from diloco_learner.hosts.receiving_io import SharedLanes
from diloco_learner.hosts.shares import share_of
from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_simulator.hub.broker import MemoryBroker

pytestmark = pytest.mark.live

STREAM = StreamSpec("UP-r", ("up.r.>",), 1 << 30)


@asynccontextmanager
async def connected(server: NatsServer, hosts: int) -> AsyncIterator[tuple[Island, list[NatsBus]]]:
    """An island of which each host is connected by itself; the first bus is that of process 0."""
    async with AsyncExitStack() as stack:
        buses = []
        for n in range(hosts):
            buses.append(await NatsBus.connect(server.url, name=f"host-{n}"))
            stack.push_async_callback(buses[n].close)
        island = Island(MemoryBroker(), chunk_bytes=CHUNK_BYTES)
        for n in range(1, hosts):
            island.add(n, _connected(buses[n]))
        await until(lambda: ready(island, hosts - 1), "connected carriers")
        await buses[0].ensure_stream(STREAM)
        try:
            yield island, buses
        finally:
            for task in island.tasks:
                task.cancel()
            await asyncio.gather(*island.tasks, return_exceptions=True)


def _connected(bus: NatsBus) -> Any:
    @asynccontextmanager
    async def connect() -> AsyncIterator[NatsBus]:
        yield bus

    return connect


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("bf16", 2),
        pytest.param("bf16", 4, marks=pytest.mark.long),
        pytest.param("int4", 4, marks=pytest.mark.long),
    ],
)
async def test_each_connection_carries_its_part_and_the_hub_holds_what_one_would_store(
    nats_server: NatsServer, name: str, hosts: int
) -> None:
    fragment = Fragment(name, (24 << 20) // (2 if name == "bf16" else 1), hosts)
    payload = fragment.payload
    async with connected(nats_server, hosts) as (island, buses):
        before = [bus.traffic.socket_bytes_out for bus in buses]
        blob = await island.contribution(fragment).put(buses[0], SUBJECT, soon())
        up = [b.traffic.socket_bytes_out - was for b, was in zip(buses, before, strict=True)]
        shared = await _stored(buses[0])
        await buses[0].delete_stream("UP-r")
        await buses[0].ensure_stream(STREAM)
        assert await put_blob(buses[0], SUBJECT, payload) == blob
        assert await _stored(buses[0]) == shared

        assert blob is not None
        buses[0].lanes = SharedLanes(buses[0], buses[0].lanes, island.carriers)
        before = [bus.traffic.socket_bytes_in for bus in buses]
        assert bytes(await get_blob(buses[0], "UP-r", blob)) == payload
        down = [b.traffic.socket_bytes_in - was for b, was in zip(buses, before, strict=True)]

    chunks = [len(one) for one in _shares(fragment)]
    even = [1 / hosts] * hosts
    for what, carried, due in (
        ("up", up, [n / blob.chunks for n in (blob.chunks - sum(chunks), *chunks)]),
        ("down", down, even),
    ):
        shares = [size / len(payload) for size in carried]
        print(name, what, [round(share, 3) for share in shares])
        for share, own in zip(shares, due, strict=True):
            # What is not answered in time is sent once more.
            assert own - 0.02 <= share <= own + 0.1, "each its own, and no other's"


@pytest.mark.long
async def test_process_0_carries_its_part_of_moments_alone(nats_server: NatsServer) -> None:
    """Of 24 MiB of them, from two hosts; stored as one process would."""
    fragment = Fragment("fp32", (24 << 20) // 4, 2)
    async with connected(nats_server, 2) as (island, buses):
        before = [bus.traffic.socket_bytes_out for bus in buses]
        state = island.state(fragment)
        blob = await state.store(buses[0], SUBJECT)
        shares = [
            (b.traffic.socket_bytes_out - was) / blob.bytes
            for b, was in zip(buses, before, strict=True)
        ]
        print("moments up", [round(share, 3) for share in shares])
        assert bytes(await get_blob(buses[0], "UP-r", blob)) == fragment.payload
        state.let_go()
    theirs = sum(map(len, _shares(fragment))) / blob.chunks
    for share, own in zip(shares, (1 - theirs, theirs), strict=True):
        assert own - 0.02 <= share <= own + 0.1, "each its own, and no other's"


def _shares(fragment: Fragment) -> list[tuple[int, ...]]:
    """Chunks of each host but process 0, which stores its own and those that lie over borders."""
    lying = fragment.lying
    return [
        share_of(lying.stretches(host), lying.size, CHUNK_BYTES).chunks
        for host in range(1, fragment.hosts)
    ]


async def _stored(bus: NatsBus) -> set[tuple[Any, ...]]:
    """What the stream holds, wherever in it."""
    stored = await bus.fetch("UP-r", "up.r.>")
    return {(s.subject, s.payload, *sorted(s.headers.items())) for s in stored}
