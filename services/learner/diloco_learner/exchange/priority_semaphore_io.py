"""A semaphore whose permits go to those who need one most: for fetching publications.

downloads = PrioritySemaphore(4)
async with downloads.acquired(rank) as permit:  # the least rank first, among equals the first
    ...
    permit.release()                            # nothing moves: somebody else may have it meanwhile
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Rank = tuple[int, ...]


class Permit:
    """One of a semaphore's permits, until it is released; that may be done twice."""

    def __init__(self, semaphore: "PrioritySemaphore") -> None:
        self._of: PrioritySemaphore | None = semaphore

    def release(self) -> None:
        semaphore, self._of = self._of, None
        if semaphore is not None:
            semaphore.left += 1
            semaphore.pass_on()


class PrioritySemaphore:
    """At most `most` permits are out at a time. Of one event loop."""

    def __init__(self, most: int) -> None:
        self.left = most
        self._came = 0
        self._waiting: list[tuple[Rank, int, asyncio.Future[Permit]]] = []

    @asynccontextmanager
    async def acquired(self, rank: Rank) -> AsyncIterator[Permit]:
        """With a permit, once there is one for `rank`, until the end of the block."""
        self._came += 1
        mine: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, self._came, mine))
        self.pass_on()
        try:
            if not mine.done():  # else nobody else comes between
                await asyncio.wait({mine})
            yield mine.result()
        finally:
            if mine.done():
                mine.result().release()
            else:
                mine.cancel()

    def pass_on(self) -> None:
        """Give what is left to those who still wait."""
        while self.left and self._waiting:
            waiting = heapq.heappop(self._waiting)[-1]
            if not waiting.done():
                self.left -= 1
                waiting.set_result(Permit(self))
