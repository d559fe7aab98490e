"""A bus whose connections lead through a proxy that counts, and cuts as it is told."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from pretenders import ACCEPTING_TURNS

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from diloco_shared.hub.nats_server import NatsServer

SPEC = StreamSpec("S", ("s.>",), 64 << 20)
PAYLOAD = random.Random(0).randbytes(3_000_000)


class Proxy:
    """Leads to the server; counts what it carries, and cuts as it is told."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.up = self.down = self.connections = 0
        # From the second connection on (the first is nats-py's): cut after that many bytes a way.
        self.cut_after: int | None = None
        self.cuts = 0
        self.serving: set[asyncio.Task[None]] = set()
        self.accepted: list[asyncio.StreamWriter] = []

    def start(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.append(writer)
        task = asyncio.create_task(self.accept(reader, writer))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        limit = self.cut_after if self.connections > 1 else None
        try:
            far = await asyncio.open_connection(self.server.host, self.server.port)
            try:
                await self._both(reader, writer, *far, limit)
            finally:
                far[1].transport.abort()
        finally:  # also where it is cancelled: a connection must not outlive its test
            writer.transport.abort()

    async def _both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
        limit: int | None,
    ) -> None:
        """Until either way has ended."""
        ways = [
            asyncio.create_task(self._carry(reader, far_writer, True, limit)),
            asyncio.create_task(self._carry(far_reader, writer, False, limit)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.wait(ways)

    async def _carry(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        up: bool,
        limit: int | None,
    ) -> None:
        carried = 0
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if limit is not None and carried + len(data) > limit:
                    self.cuts += 1
                    return
                carried += len(data)
                self.up += len(data) if up else 0
                self.down += 0 if up else len(data)
                sink.write(data)
                await sink.drain()


@asynccontextmanager
async def through(server: NatsServer, **options: Any) -> AsyncIterator[tuple[NatsBus, Proxy]]:
    proxy = Proxy(server)
    listener = await asyncio.start_server(proxy.start, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    bus = await NatsBus.connect(f"nats://127.0.0.1:{port}", name="lanes", **options)
    await bus.ensure_stream(SPEC)
    try:
        yield bus, proxy
    finally:
        await bus.close()
        listener.close()
        for _ in range(ACCEPTING_TURNS):
            await asyncio.sleep(0)
        await asyncio.gather(*proxy.serving)
        for writer in proxy.accepted:  # who came last may have been cancelled before its first turn
            writer.transport.abort()
        await asyncio.sleep(0)
