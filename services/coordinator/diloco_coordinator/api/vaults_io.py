"""The places of checkpoints, asked on threads of their own: one that hangs holds up nothing else.

A place may be a share or a bucket far away, and a thread that waits for it cannot be ended. On the
threads that everything else uses, a few such requests would hold up every other one.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

from diloco_coordinator.api.problems_io import Problem
from diloco_shared.checkpoints.checkpoints_io import CheckpointError
from diloco_shared.checkpoints.place_threads_io import DaemonThreads

T = TypeVar("T")

# Questions at once, of all places: each is a read or two.
THREADS_MAX = 4
# Seconds that a read may take, a listing, which reads every manifest of a page, and a removal.
ASK_S_MAX, LIST_S_MAX, REMOVE_S_MAX = 30.0, 60.0, 300.0
RETRY_S = 30


class Vaults:
    """Asks places of checkpoints, and lists one of them at a time."""

    def __init__(self) -> None:
        self._threads = _Threads(THREADS_MAX)
        self._listing = _Threads(1)

    async def ask(self, read: Callable[[], T]) -> T:
        """What the place answers. 404 and 503 with its own words, and 503 where it says nothing."""
        with problems():
            return await self.plainly(read)

    async def plainly(self, read: Callable[[], T]) -> T:
        """What the place answers, or what it raises; 503 where it says nothing."""
        return await _answered(self._threads, read, ASK_S_MAX)

    async def listed(self, read: Callable[[], T]) -> T:
        """The same, of all that lies there: others wait until this has been read."""
        with problems():
            return await _answered(self._listing, read, LIST_S_MAX)

    async def removed(self, remove: Callable[[], T]) -> T:
        """The same, of what takes as long as there are files."""
        with problems():
            return await _answered(self._threads, remove, REMOVE_S_MAX)


class _Threads:
    """So many at once; a process that ends waits for none of them."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._threads = DaemonThreads()

    async def run(self, work: Callable[[], T]) -> T:
        """What it returns or raises; whoever is cancelled leaves it behind, and its place taken."""
        await self._free.acquire()
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work)
        doing.add_done_callback(self._over)
        await asyncio.wait({doing})
        return doing.result()

    def _over(self, done: "asyncio.Future[Any]") -> None:
        self._free.release()
        done.exception()  # of what was left behind nobody asks


async def _answered(threads: _Threads, read: Callable[[], T], seconds_max: float) -> T:
    asking = copy_context()  # whose request it is
    try:
        async with asyncio.timeout(seconds_max) as limit:
            return await threads.run(lambda: asking.run(read))
    except TimeoutError:
        if not limit.expired():
            raise  # the place's own
        text = (
            f"their place has said nothing for {seconds_max:.0f} s, or other requests wait for "
            "it: see that it can be reached from the coordinator's machine, and ask again"
        )
        headers = {"Retry-After": str(RETRY_S)}
        title = "The checkpoints do not answer"
        raise Problem(503, title, text, headers=headers) from None


@contextmanager
def problems() -> Iterator[None]:
    """What a place says of what is wrong, as an answer."""
    try:
        yield
    except CheckpointError as error:
        raise Problem(404, "No such checkpoint", str(error)) from None
    except OSError as error:
        raise Problem(503, "The checkpoints cannot be reached", str(error)) from None
