"""Batches of the shards that this learner has leased; never waits for a lease.

The asyncio side leases shards one ahead and hands them over by `grant`. If the next one is not
there in time, the present one is read again: repeating a little data is better than stopping.
"""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_learner.data.shards import Cut, ShardReader
from diloco_shared.protocol.messages import Cursor


class Batches:
    """Read by the train thread; `grant` is called by the asyncio side."""

    def __init__(self, cut: Cut, sequences: int) -> None:
        self.cut = cut
        self.sequences = sequences
        self.granted: deque[ShardReader] = deque()  # at most two: the present and one ahead
        self.reader: ShardReader | None = None
        self.finished: deque[int] = deque()  # shards read to their end, to be given back
        self.repeats = 0

    def grant(self, shard: int, sequences: int, passes: int) -> None:
        """A leased shard, to be read from `sequences` on."""
        self.granted.append(ShardReader(self.cut, shard, sequences, passes))

    @property
    def wants(self) -> bool:
        """Whether another lease should be sought."""
        return len(self.granted) < 1

    @property
    def ready(self) -> bool:
        return self.reader is not None or bool(self.granted)

    @property
    def cursor(self) -> Cursor | None:
        return None if self.reader is None else self.reader.cursor

    def take(self) -> NDArray[Any]:
        """The next batch, shape (sequences, L + 1)."""
        parts: list[NDArray[Any]] = []
        missing = self.sequences
        while missing:
            part = self._reader().take(missing)
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _reader(self) -> ShardReader:
        if self.reader is not None and self.reader.left:
            return self.reader
        if self.granted:
            if self.reader is not None:
                self.finished.append(self.reader.shard)
            self.reader = self.granted.popleft()
        else:
            assert self.reader is not None, "take() before the first lease"
            self.reader = ShardReader(self.cut, self.reader.shard, 0, self.reader.passes + 1)
            self.repeats += 1
        return self.reader
