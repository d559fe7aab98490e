"""A port that leads to a server and can be shut, silently or not, in the middle of a transfer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from waiting import until

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Bus
from diloco_shared.hub.nats_server import NatsServer

# Turns of the event loop from a connection that comes to its own task.
ACCEPTING_TURNS = 8
# Read at once; what a shut gate holds is one block each way of every connection.
_BLOCK = 64 * 1024


class Gate:
    """`port` leads to `server` while the gate is open. `up` and `down` count bytes that passed,
    `accepted` connections.
    """

    def __init__(self, server: NatsServer) -> None:
        self.up = self.down = self.accepted = 0
        self.port = 0
        self._server = server
        self._open_up, self._open_down = asyncio.Event(), asyncio.Event()
        # Shuts by itself when so many bytes have passed.
        self._last_up = self._last_down = float("inf")
        self._pairs: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self.open()
        await self._listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cut()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Let pass what waits and what comes."""
        self._last_up = self._last_down = float("inf")
        self._open_up.set()
        self._open_down.set()

    def shut(self, *, up: bool = True, down: bool = True) -> None:
        """Let nothing pass, and tell nobody: as a cable that is pulled."""
        if up:
            self._open_up.clear()
        if down:
            self._open_down.clear()

    async def shut_after(self, *, up: int = 0, down: int = 0) -> None:
        """Let so many more bytes pass one way, then shut both ways, in the middle of a message.

        Cancelled, it shuts nothing later.
        """
        if up:
            self._last_up = self.up + up
        if down:
            self._last_down = self.down + down
        try:
            await until(lambda: not (self._open_up.is_set() or self._open_down.is_set()))
        finally:
            self._last_up = self._last_down = float("inf")

    async def cut(self) -> None:
        """Break every connection, and refuse new ones until `mend`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # A server that closes loses the connection that asyncio was just accepting for it.
            asyncio.get_running_loop().remove_reader(listener.sockets[0].fileno())
            for _ in range(ACCEPTING_TURNS):
                await asyncio.sleep(0)
            listener.close()
        for _ in range(ACCEPTING_TURNS):  # who was just being accepted comes a little later
            for pair in self._pairs:
                pair.cancel()
            await asyncio.gather(*self._pairs, return_exceptions=True)
            await asyncio.sleep(0)

    async def mend(self) -> None:
        """Accept connections again, on the same port."""
        await self._listen()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._listener is None:
            writer.transport.abort()  # the gate was cut meanwhile
            return
        self._pairs.add(task)
        self.accepted += 1
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            ends.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, far_writer, up=True))
                group.create_task(self._carry(far_reader, writer, up=False))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            return  # one side is gone, or the gate was cut
        finally:
            self._pairs.discard(task)
            for end in ends:
                end.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        opened = self._open_up if up else self._open_down
        while data := await reader.read(_BLOCK):
            await opened.wait()
            writer.write(data)
            await writer.drain()
            if up:
                self.up += len(data)
            else:
                self.down += len(data)
            if self.up >= self._last_up or self.down >= self._last_down:
                self.shut()
        raise ConnectionError  # ends the other direction too


@asynccontextmanager
async def connected(
    url: str, connections: int = 1, token: str | None = None
) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(url, name="test", connections=connections, token=token)
    try:
        yield bus
    finally:
        await bus.close()


async def goes_through(bus: Bus, stream: str, subject: str, payload: bytes) -> None:
    """The next fragment is stored once, in every part, and comes back as it was."""
    before = (await bus.stream_info(stream)).messages
    blob = await put_blob(bus, subject, payload, deadline_s=30)
    assert (await bus.stream_info(stream)).messages == before + blob.chunks
    assert await get_blob(bus, stream, blob, timeout_s=30) == payload
