"""Writes that nobody may wait for without end: a vault or a disk that hangs says nothing at all."""

import asyncio
from collections.abc import Callable
from typing import Any

# What has not ended by then hangs: the slowest place worth keeping a state in takes so many bytes a
# second (a disk of this century takes ten times as many), and a bucket may be away for a minute.
STORED_BYTES_PER_S = 10_000_000
STORED_S_MIN = 60.0


class Storing:
    """One place. A write that hangs keeps its thread, so there is at most one of those."""

    def __init__(self) -> None:
        self._hanging: asyncio.Task[Any] | None = None

    async def __call__(self, size: int, write: Callable[..., Any], *args: Any) -> None:
        """`write` so many bytes, in a thread; OSError also once it has taken too long."""
        if self._hanging is not None and not self._hanging.done():
            raise OSError("an earlier one still hangs there")
        limit_s = STORED_S_MIN + size / STORED_BYTES_PER_S
        task = asyncio.create_task(asyncio.to_thread(write, *args))
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            task.result()
            return
        self._hanging = task
        task.add_done_callback(_looked_at)
        raise OSError(f"it was not stored within {limit_s:.0f} s")


def _looked_at(task: "asyncio.Task[Any]") -> None:
    """What became of it nobody asks any more."""
    if not task.cancelled():
        task.exception()
