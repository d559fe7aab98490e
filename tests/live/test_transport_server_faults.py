"""The server dies, or stands still, in the middle of a fragment: nothing lost, nothing doubled."""

import asyncio
import random

import psutil
import pytest
from live.gate import Gate, connected, goes_through

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.port import StreamSpec, TransferProgress
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live

MIB = 1 << 20
SPEC = StreamSpec("S", ("s.>",), 256 * MIB)
NEXT = random.Random(9).randbytes(3 * MIB + 1)
# A payload, what is under way, and what the test itself holds: far below a leak of every resend.
GROWTH_MAX = 96 * MIB


@pytest.mark.parametrize("connections", [1, 4])
async def test_killed_in_the_middle_of_a_put_and_of_a_get(
    nats_server: NatsServer, connections: int
) -> None:
    payload = random.Random(1).randbytes(24 * MIB)
    async with Gate(nats_server) as gate, connected(gate.url, connections) as bus:
        await bus.ensure_stream(SPEC)
        progress = TransferProgress()
        putting = asyncio.create_task(
            put_blob(bus, "s.blob", payload, chunk_timeout_s=1.0, progress=progress)
        )
        await gate.shut_after(up=8 * MIB)
        await killed(nats_server, gate)
        blob = await putting
        assert (await bus.stream_info("S")).messages == blob.chunks == 48
        # What it took before may be lost: put again it is a repeat, or is there at last.
        assert len(set(progress.took.values())) == 2 and progress.life == bus.life
        assert 0 < len(progress.doubtful()) < blob.chunks
        await put_blob(bus, "s.blob", payload, progress=progress, only=progress.doubtful())
        assert progress.stored == blob.chunks and not progress.doubtful()
        assert (await bus.stream_info("S")).messages == blob.chunks

        getting = asyncio.create_task(get_blob(bus, "S", blob, timeout_s=60))
        await gate.shut_after(down=8 * MIB)
        await killed(nats_server, gate)
        assert await getting == payload
        await goes_through(bus, "S", "s.next", NEXT)


async def killed(server: NatsServer, gate: Gate) -> None:
    """SIGKILL while the gate holds back what is under way, then a start on the same store."""
    await server.kill()
    gate.open()
    await server.start()


async def test_killed_under_several_fragments_at_once(nats_server: NatsServer) -> None:
    """Each has its own window: none of them may have lost a place in it."""
    payloads = [random.Random(n).randbytes(6 * MIB) for n in range(4)]
    async with Gate(nats_server) as gate, connected(gate.url) as bus:
        await bus.ensure_stream(SPEC)
        async with asyncio.TaskGroup() as group:
            puts = [
                group.create_task(put_blob(bus, f"s.{n}", payload, window=4, chunk_timeout_s=1.0))
                for n, payload in enumerate(payloads)
            ]
            # Twice: a window that leaks a place each time would be half gone.
            for _ in range(2):
                await gate.shut_after(up=6 * MIB)
                await killed(nats_server, gate)
        blobs = [put.result() for put in puts]
        assert (await bus.stream_info("S")).messages == sum(blob.chunks for blob in blobs)
        for blob, payload in zip(blobs, payloads, strict=True):
            assert await get_blob(bus, "S", blob, timeout_s=30) == payload
        await goes_through(bus, "S", "s.next", NEXT)


async def test_stopped_for_ten_seconds(nats_server: NatsServer) -> None:
    old, new = random.Random(2).randbytes(32 * MIB), random.Random(3).randbytes(32 * MIB)
    async with (
        Gate(nats_server) as up,
        Gate(nats_server) as down,
        connected(up.url) as bus,
        connected(down.url) as other,
    ):
        await bus.ensure_stream(SPEC)
        there = await put_blob(bus, "s.old", old)
        putting = asyncio.create_task(put_blob(bus, "s.new", new, chunk_timeout_s=2.0))
        getting = asyncio.create_task(get_blob(other, "S", there, timeout_s=60))
        await asyncio.gather(up.shut_after(up=8 * MIB), down.shut_after(down=8 * MIB))
        nats_server.pause()
        up.open()
        down.open()
        memory = psutil.Process().memory_info().rss
        await asyncio.sleep(10)  # the fault itself
        assert not putting.done()
        assert not getting.done()
        assert psutil.Process().memory_info().rss < memory + GROWTH_MAX
        nats_server.resume()
        blob = await putting
        assert await getting == old
        assert (await bus.stream_info("S")).messages == there.chunks + blob.chunks
        assert await get_blob(other, "S", blob, timeout_s=30) == new
        await goes_through(bus, "S", "s.next", NEXT)
