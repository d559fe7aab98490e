"""Batches of the shards that this learner has leased; never waits for a lease.

The asyncio side leases shards one ahead and hands them over by `grant`. If the next one is not
there in time, the present one is read again: repeating a little data is better than stopping.
A shard read to its end stays this learner's, and part of its cursor, until that is known to be
merged: should this process die before, somebody must read the rest again.
"""

import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_learner.data.shards import Cut, ShardReader
from diloco_shared.protocol.messages import Cursor

# Of the finished shards, the newest that a cursor tells: as many as a message takes.
FINISHED_TOLD = 16


class Batches:
    """Read by the train thread; the asyncio side calls `grant`, `revoke` and `close`."""

    def __init__(self, cut: Cut, sequences: int) -> None:
        self.cut = cut
        self.sequences = sequences
        # Readers, and whether their shard is leased; at most one ahead of the present one.
        self.granted: deque[tuple[ShardReader, bool]] = deque()
        self.reader: ShardReader | None = None
        self.lock = threading.Lock()  # held for a few assignments, never while anything waits
        self.finished: tuple[tuple[int, int], ...] = ()  # (shard, passes), oldest first
        self.leased = True  # the present shard; else somebody else may be reading it
        self.repeats = 0  # whole shards read again at once
        self.unleased = 0  # sequences read of a shard that somebody else may be reading

    def grant(self, shard: int, sequences: int, passes: int, *, leased: bool = True) -> None:
        """A shard to be read from `sequences` on; not leased only for want of another."""
        self.granted.append((ShardReader(self.cut, shard, sequences, passes), leased))

    def revoke(self, shard: int) -> None:
        """The lease is lost: read on from another shard as soon as there is one."""
        with self.lock:
            kept = deque(g for g in self.granted if g[0].shard != shard)
            if self.reader is None and not kept:
                # The first one: whoever was told that there is something to read reads it.
                kept = deque((reader, False) for reader, _ in self.granted)
            self.granted = kept
            self.finished = tuple(f for f in self.finished if f[0] != shard)
            if self.reader is not None and self.reader.shard == shard:
                self.leased = False

    def close(self, shard: int, passes: int) -> None:
        """A finished shard is merged to its end, or given up: it is no longer this learner's."""
        with self.lock:
            self.finished = tuple(f for f in self.finished if f != (shard, passes))

    @property
    def wants(self) -> bool:
        """Whether another lease should be sought."""
        return len(self.granted) < 1

    @property
    def ready(self) -> bool:
        return self.reader is not None or bool(self.granted)

    @property
    def cursor(self) -> Cursor | None:
        """Everything read so far; what is merged with it need not be read again."""
        if self.reader is None:
            return None
        return self.reader.cursor.model_copy(update={"finished": self.finished[-FINISHED_TOLD:]})

    def take(self) -> NDArray[Any]:
        """The next batch, shape (sequences, L + 1)."""
        parts: list[NDArray[Any]] = []
        missing = self.sequences
        while missing:
            part = self._reader().take(missing)
            parts.append(part)
            missing -= len(part)
            self.unleased += len(part) * (not self.leased)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _reader(self) -> ShardReader:
        with self.lock:
            reader = self.reader
            if reader is not None and reader.left and (self.leased or not self.granted):
                return reader
            if self.granted:
                if reader is not None and self.leased:
                    self.finished = (*self.finished, (reader.shard, reader.passes))
                self.reader, self.leased = self.granted.popleft()
            else:
                assert reader is not None, "take() before the first lease"
                self.reader = ShardReader(self.cut, reader.shard, 0, reader.passes + 1)
                self.repeats += 1
            return self.reader
