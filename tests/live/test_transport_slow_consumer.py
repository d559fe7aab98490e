"""Consumers slower than their senders: what is dropped is counted, what is kept is not lost."""

import asyncio

import psutil
import pytest
from live.gate import Gate, connected, goes_through
from waiting import until

from diloco_shared.bus.deliveries import SERVE_LIMIT
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Delivery, StreamSpec, Unavailable
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live

MIB = 1 << 20
BLOCK = 512 * 1024
SPEC = StreamSpec("S", ("s.>",), 256 * MIB)
# What the server may hold for one connection that does not read (64 MiB), and itself.
SERVER_BYTES_MAX = 400 * MIB


async def test_a_slow_subscriber_keeps_the_newest_and_counts_the_rest(
    nats_server: NatsServer,
) -> None:
    sent, limit = 1000, 16
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        async with bus.subscribe("news", limit=limit) as news:
            for number in range(sent):
                await other.publish("news", b"%d" % number)
            await until(lambda: bus.traffic.dropped.get("news", 0) == sent - limit)
            kept = [int((await anext(news)).payload) for _ in range(limit)]
            assert kept == [*range(sent - limit, sent)]
            await other.publish("news", b"next")
            assert (await anext(news)).payload == b"next"
        assert bus.connected


async def test_a_slow_reader_is_sent_no_more_than_it_asked_for(nats_server: NatsServer) -> None:
    messages, batch = 64, 8
    async with (
        Gate(nats_server) as gate,
        connected(gate.url) as bus,
        connected(nats_server.url) as other,
    ):
        await bus.ensure_stream(SPEC)
        for number in range(messages):
            await other.append("s.a", bytes([number]) * BLOCK)
        async with bus.read("S", "s.a", batch=batch) as reading:
            assert (await anext(reading)).seq == 1
            # It reads no more, but its connection lives: what it asked for comes, then silence.
            for _ in range(20):
                await bus.stream_info("S")
            assert gate.down <= (batch + 1) * (BLOCK + 1024) + MIB
            rest = [await anext(reading) for _ in range(messages - 1)]
            assert [m.seq for m in rest] == [*range(2, messages + 1)]
            assert all(m.payload == bytes([m.seq - 1]) * BLOCK for m in rest)
        assert bus.traffic.dropped == {}


async def test_one_that_reads_nothing_is_cut_off_and_comes_back(nats_server: NatsServer) -> None:
    """The server does not hold back for it without limit, others notice nothing, and of what a
    stream keeps it misses nothing."""
    async with (
        Gate(nats_server) as gate,
        connected(gate.url) as bus,
        connected(nats_server.url) as other,
    ):
        await bus.ensure_stream(SPEC)
        async with bus.subscribe("flood", limit=8), bus.read("S", "s.a") as reading:
            await other.append("s.a", b"0")
            assert (await anext(reading)).payload == b"0"
            gate.shut(up=False)
            await flood_until_cut(nats_server, other)
            await other.append("s.a", b"1")
            server = psutil.Process(nats_server.pid)
            assert server.memory_info().rss < SERVER_BYTES_MAX
            gate.open()
            assert (await anext(reading)).payload == b"1"
            assert bus.reconnects >= 1
            await goes_through(bus, "S", "s.next", bytes(range(256)) * 8192)


async def flood_until_cut(server: NatsServer, sender: NatsBus) -> None:
    """Publish until the server says that somebody was too slow; 256 MiB must be enough."""
    for _ in range(512):
        await sender.publish("flood", bytes(BLOCK))
        await sender.stream_info("S")  # the server has seen it
        if "Slow Consumer" in server.log_path.read_text():
            return
    pytest.fail("the server held 256 MiB for a connection that reads nothing")


async def test_a_handler_that_hangs_does_not_take_others_with_it(nats_server: NatsServer) -> None:
    """Requests beyond what is answered at once are counted; the rest is answered when it wakes."""
    woken, begun = asyncio.Event(), []

    async def slow(request: Delivery) -> bytes:
        begun.append(request)
        await woken.wait()
        return b"done"

    async with (
        connected(nats_server.url) as bus,
        connected(nats_server.url) as other,
        bus.serve("work", slow),
    ):
        asking = [
            asyncio.create_task(other.request("work", b"", timeout_s=30))
            for _ in range(SERVE_LIMIT)
        ]
        await until(lambda: len(begun) == SERVE_LIMIT)
        while not bus.traffic.dropped.get("work"):
            with pytest.raises(Unavailable):
                await other.request("work", b"", timeout_s=0.2)
        woken.set()
        assert await asyncio.gather(*asking) == [b"done"] * SERVE_LIMIT
        assert await other.request("work", b"", timeout_s=5) == b"done"
