"""What arrives for a learner that recovers: in order, bounded, and what must not be lost is not."""

import asyncio
from typing import Any

from diloco_learner.waiting import essence, heavy, repeated

# Arrivals before they are looked through for what newer ones replace; with an anchor at once.
LOOK_EVERY = 64
# Beyond this many, what the syncer repeats by itself is dropped: as many as the mailbox takes.
EVENTS_MAX = 4096


class Arrivals(asyncio.Queue[Any]):
    """For one reader; `leave` instead of `put`."""

    def __init__(self) -> None:
        super().__init__()
        self._look_at = LOOK_EVERY

    def leave(self, event: Any) -> bool:
        """Leave an event; False if it is dropped."""
        if self.qsize() >= EVENTS_MAX and repeated(event):
            return False
        self.put_nowait(event)
        if heavy(event) or self.qsize() >= self._look_at:
            for kept in essence([self.get_nowait() for _ in range(self.qsize())]):
                self.put_nowait(kept)
            self._look_at = self.qsize() + LOOK_EVERY
        self._look_at = min(self._look_at, self.qsize() + LOOK_EVERY)
        return True
