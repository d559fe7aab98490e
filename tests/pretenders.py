"""Servers of a test: a program hears from somebody who is no server of ours, or a broken one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

# A connection whose other end is gone ends by itself within a moment; one that waits for something
# else is ended.
ENDS_S = 1.0
# Of the loop, in which asyncio goes on accepting whom it has begun to accept.
ACCEPTING_TURNS = 3
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def peer(serve: Serve, port: int = 0) -> AsyncIterator[int]:
    """The port of this machine on which `serve` answers each connection; 0: any.

    No connection outlives the block: one that was left open would fail whatever test runs when it
    is collected.
    """
    serving = set[asyncio.Task[None]]()
    accepted = list[asyncio.StreamWriter]()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.transport.abort()

    # No coroutine: of one that is cancelled before its first turn nothing would close the writer.
    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        serving.add(asyncio.create_task(served(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(ACCEPTING_TURNS):
            await asyncio.sleep(0)
        if serving:
            await asyncio.wait(serving, timeout=ENDS_S)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for writer in accepted:
            writer.transport.abort()
        await asyncio.sleep(0)  # and their transports are closed
