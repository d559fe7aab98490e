"""Batches of the shards that this learner has leased; never waits for a lease.

The asyncio side leases shards ahead, one at least and two batches' worth of small ones, and hands
them over by `grant`. If none is there in time, what this learner still holds is read again, shard
after shard, until there is one: repeating a little data is better than stopping. A shard read to
its end stays this learner's, and part of its cursor, until that is known to be merged: should this
process die before, somebody must read the rest again.
"""

import threading
from collections import Counter, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_learner.data.left_out import LeftOut
from diloco_learner.data.shards import Cut, ShardReader
from diloco_shared.protocol.messages import Cursor

# Of the finished shards, the newest that a cursor tells: as many as a message takes.
FINISHED_TOLD = 16
# Worth of shards leased ahead: where a shard has less than a batch, a step needs several at once.
AHEAD_BATCHES = 2
# Shards leased ahead at most: others want some too.
AHEAD_MAX = 6
# Shards that this learner has in hand at most, for the leader lets nobody have more
# (data_leases_io.py of the syncer).
IN_HAND_MAX = 16


class Batches:
    """Read by the train thread; the asyncio side calls `grant`, `revoke` and `close`."""

    def __init__(self, cut: Cut, sequences: int) -> None:
        self.cut = cut
        self.sequences = sequences
        # Readers, and whether their shard is leased.
        self.granted: deque[tuple[ShardReader, bool]] = deque()
        self.reader: ShardReader | None = None
        self.lock = threading.Lock()  # held for a few assignments, never while anything waits
        # (shard, passes), in the order in which they were first read.
        self.finished: tuple[tuple[int, int], ...] = ()
        self.again = Counter[int]()  # of those, how often each was begun again
        self.leased = True  # the present shard; else somebody else may be reading it
        self.repeating = False  # the present shard, for want of another
        self.repeats = 0  # shards begun again so
        self.left_out = LeftOut()
        self.unleased = 0  # sequences read of a shard that somebody else may be reading

    def grant(self, shard: int, sequences: int, passes: int, *, leased: bool = True) -> None:
        """A shard to be read from `sequences` on; not leased only for want of another."""
        reader = ShardReader(self.cut, shard, sequences, passes)
        with self.lock:
            self.granted.append((reader, leased))

    def revoke(self, shard: int) -> None:
        """The lease is lost: read on from another shard as soon as there is one."""
        with self.lock:
            kept = deque(g for g in self.granted if g[0].shard != shard)
            if self.reader is None and not kept:
                # The first one: whoever was told that there is something to read reads it.
                kept = deque((reader, False) for reader, _ in self.granted)
            self.granted = kept
            self._drop(shard)
            if self.reader is not None and self.reader.shard == shard:
                self.leased = False

    def only_leased(self) -> None:
        """Before the first batch: what was to be read for want of a lease is sought anew."""
        with self.lock:
            self.granted = deque(g for g in self.granted if g[1])

    def _drop(self, shard: int) -> None:
        self.finished = tuple(f for f in self.finished if f[0] != shard)
        del self.again[shard]

    def close(self, shard: int, passes: int) -> bool:
        """Let go of a finished shard, which is merged to its end, or given up: whether it may be.

        Not while it is being read again, nor when it was read to its end once more.
        """
        with self.lock:
            read = self.reader is not None and self.reader.shard == shard and self.leased
            if read or (shard, passes) not in self.finished:
                return False
            self._drop(shard)
            return True

    @property
    def wants(self) -> bool:
        """Whether another lease should be sought."""
        with self.lock:
            ahead = sum(reader.left for reader, _ in self.granted)
            in_hand = len(self.granted) + len(self.finished) + (not self.repeating)
            enough = ahead >= AHEAD_BATCHES * self.sequences or len(self.granted) >= AHEAD_MAX
        return in_hand < IN_HAND_MAX and not enough

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
        """The next batch, shape (sequences, L + 1). Raises Damaged; see LeftOut."""
        parts: list[NDArray[Any]] = []
        missing = self.sequences
        while missing:
            part = self._reader().take(missing, self.left_out)
            parts.append(part)
            missing -= len(part)
            self.unleased += len(part) * (not self.leased)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _reader(self) -> ShardReader:
        with self.lock:
            reader = self.reader
            stays = self.leased and not self.repeating  # though there is another one
            if reader is not None and reader.left and (stays or not self.granted):
                return reader
            if reader is not None and self.leased and not reader.left:
                self._finish(reader.shard, reader.passes)
            self.repeating = not self.granted
            self.reader, self.leased = self._again() if self.repeating else self.granted.popleft()
            return self.reader

    def _finish(self, shard: int, passes: int) -> None:
        if self.repeating:  # it has its place among them
            self.finished = tuple((s, passes if s == shard else p) for s, p in self.finished)
        else:
            self.finished = (*self.finished, (shard, passes))

    def _again(self) -> tuple[ShardReader, bool]:
        """What was read least often of all that this learner holds, from its beginning; what it
        shares with another, if it holds nothing."""
        assert self.reader is not None, "take() before the first lease"
        self.repeats += 1
        if not self.finished:
            return ShardReader(self.cut, self.reader.shard, 0, self.reader.passes + 1), False
        shard, passes = min(self.finished, key=lambda f: self.again[f[0]])
        self.again[shard] += 1
        return ShardReader(self.cut, shard, 0, passes + 1), True
