"""A stream at its limit refuses and forgets nothing; freed, everybody who waits goes on."""

import asyncio
import random
from dataclasses import replace

import pytest
from live.gate import Gate, connected, goes_through

from diloco_shared.bus.blobs import GaveUp, get_blob, put_blob
from diloco_shared.bus.port import Bus, StreamFull, StreamSpec
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live

MIB = 1 << 20
SPEC = StreamSpec("S", ("s.>",), 8 * MIB)
CHUNK = 128 * 1024
OLD, NEW = random.Random(1).randbytes(5 * MIB), random.Random(2).randbytes(5 * MIB + 7)


async def filled(bus: Bus) -> None:
    """Return when the stream has no room for one more chunk."""
    while True:
        try:
            await bus.append("s.probe", bytes(CHUNK))
        except StreamFull:
            return
        await bus.purge("S", "s.probe")
        await asyncio.sleep(0.02)


async def test_a_put_waits_for_room(nats_server: NatsServer) -> None:
    async with (
        Gate(nats_server) as gate,
        connected(gate.url) as bus,
        connected(nats_server.url) as other,
    ):
        await bus.ensure_stream(SPEC)
        old = await put_blob(bus, "s.old", OLD, chunk_bytes=CHUNK)
        putting = asyncio.create_task(put_blob(bus, "s.new", NEW, chunk_bytes=CHUNK))
        await filled(other)
        sent = gate.up
        assert not putting.done()
        assert (await other.stream_info("S")).bytes <= SPEC.bytes_max
        # Nothing was thrown away to make room.
        assert await get_blob(other, "S", old, timeout_s=20) == OLD
        # Who waits does not hammer: refused chunks come again at their own, growing, distance.
        assert gate.up - sent < len(NEW)
        await other.purge("S", "s.old")
        await other.purge("S", "s.probe")
        new = await putting
        assert (await bus.stream_info("S")).messages == new.chunks
        assert await get_blob(bus, "S", new, timeout_s=20) == NEW
        await other.purge("S", "s.new")
        await goes_through(bus, "S", "s.next", OLD)


async def test_two_that_cannot_fit_give_up_and_say_why(nats_server: NatsServer) -> None:
    """Neither can end: at their deadlines both do, and purged they leave nothing behind."""
    half = replace(SPEC, bytes_max=SPEC.bytes_max // 2)
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        await bus.ensure_stream(half)
        outcomes = await asyncio.gather(
            put_blob(bus, "s.old", OLD, chunk_bytes=CHUNK, deadline_s=2),
            put_blob(other, "s.new", NEW, chunk_bytes=CHUNK, deadline_s=2),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [GaveUp, GaveUp]
        assert all("maximum bytes" in str(outcome) for outcome in outcomes)
        await other.purge("S", "s.old")
        await other.purge("S", "s.new")
        assert (await bus.stream_info("S")).messages == 0
        for owner, subject, payload in (
            (bus, "s.next", OLD[:MIB]),
            (other, "s.after", OLD[MIB:][:MIB]),
        ):
            await goes_through(owner, "S", subject, payload)


async def test_a_full_stream_survives_a_kill(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        await bus.ensure_stream(SPEC)
        old = await put_blob(bus, "s.old", OLD, chunk_bytes=CHUNK)
        putting = asyncio.create_task(put_blob(bus, "s.new", NEW, chunk_bytes=CHUNK))
        await filled(other)
        await nats_server.kill()
        await nats_server.start()
        assert await get_blob(other, "S", old, timeout_s=20) == OLD
        await other.purge("S", "s.old")
        await other.purge("S", "s.probe")
        new = await putting
        assert (await bus.stream_info("S")).messages == new.chunks
        assert await get_blob(bus, "S", new, timeout_s=20) == NEW
