"""Servers of a test: a program hears from somebody who is no server of ours, or a broken one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

# A connection whose other end is gone ends by itself within a moment; one that waits for something
# else is ended.
ENDS_S = 1.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def peer(serve: Serve, port: int = 0) -> AsyncIterator[int]:
    """The port of this machine on which `serve` answers each connection; 0: any.

    No connection outlives the block: one that was left open would fail whatever test runs when it
    is collected.
    """
    serving: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:
            pass  # asyncio's own callback cannot take it
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(accepted, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0)  # who was just accepted begins
        if serving:
            await asyncio.wait(serving, timeout=ENDS_S)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)  # and its transport is closed
