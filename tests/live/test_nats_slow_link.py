"""A link so slow that data delays pings beyond their limit: it is used fully and never dropped."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from pretenders import peer

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats import link as nats_link
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live

BYTES_PER_S = 300_000


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(8192):
            await asyncio.sleep(len(data) / BYTES_PER_S)
            writer.write(data)
            await writer.drain()
    except OSError:
        # The other side is gone: so is this one.
        return
    finally:
        writer.close()


@asynccontextmanager
async def slow_link(server: NatsServer) -> AsyncIterator[int]:
    """A port that leads to `server` at BYTES_PER_S in each direction."""

    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(server.host, server.port)
        try:
            await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        finally:
            far_writer.transport.abort()

    async with peer(both) as port:
        yield port


async def test_blobs_and_readers_get_through(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = random.Random(5).randbytes(1 << 20)
    async with AsyncExitStack() as stack:
        near = await NatsBus.connect(nats_server.url, name="near")
        stack.push_async_callback(near.close)
        # The third missed ping ends a connection: 1.5 s, less than one large chunk takes.
        monkeypatch.setattr(nats_link, "_PING_S", 0.5)
        port = await stack.enter_async_context(slow_link(nats_server))
        far = await NatsBus.connect(f"nats://127.0.0.1:{port}", name="far")
        stack.push_async_callback(far.close)
        await near.ensure_stream(StreamSpec("S", ("s.>",), 64 << 20))

        sent = await put_blob(far, "s.up", payload, chunk_bytes=128 * 1024)
        assert await get_blob(near, "S", sent, timeout_s=60) == payload
        held = await put_blob(near, "s.down", payload, chunk_bytes=900 * 1024)
        assert await get_blob(far, "S", held, timeout_s=60) == payload
        async with far.read("S", "s.down") as messages:
            assert [(await anext(messages)).seq for _ in range(2)] == [9, 10]
        assert far.reconnects == 0
