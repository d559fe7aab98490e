"""Whose publication is fetched now: so many at a time, of those who wait the most needed one.

turns = Turns(4)
async with turns.taken(rank) as turn:    # the least rank comes first, among equals the first
    ...
    turn.give_back()                     # nothing moves: somebody else may have it meanwhile
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Rank = tuple[int, ...]


class Turn:
    """One, until it is given back; that may be done twice."""

    def __init__(self, turns: "Turns") -> None:
        self._turns: Turns | None = turns

    def give_back(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.left += 1
            turns.pass_on()


class Turns:
    """Of one event loop."""

    def __init__(self, most: int) -> None:
        self.left = most
        self._came = 0
        self._waiting: list[tuple[Rank, int, asyncio.Future[Turn]]] = []

    @asynccontextmanager
    async def taken(self, rank: Rank) -> AsyncIterator[Turn]:
        """Once it is this one's turn, until the end of the block."""
        self._came += 1
        mine: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, self._came, mine))
        self.pass_on()
        try:
            if not mine.done():  # else nobody else comes between
                await asyncio.wait({mine})
            yield mine.result()
        finally:
            if mine.done():
                mine.result().give_back()
            else:
                mine.cancel()

    def pass_on(self) -> None:
        """Give what is left to those who still wait."""
        while self.left and self._waiting:
            waiting = heapq.heappop(self._waiting)[-1]
            if not waiting.done():
                self.left -= 1
                waiting.set_result(Turn(self))
