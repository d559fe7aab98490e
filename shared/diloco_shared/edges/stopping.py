"""SIGTERM and SIGINT as an ordinary end of the main task."""

import asyncio
import signal
from collections.abc import Coroutine


async def until_stopped(work: Coroutine[object, object, None]) -> None:
    """Run `work`; a stop signal cancels it and returns once it has cleaned up."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
