"""Virtual data shards: equal samples of the training sequences, each read in a seeded order.

A shard is drawn from all over the corpus, not a stretch of it: a learner reads shard after shard,
and stretches (a folder of tables, then one of protocols) make it forget one for the next. A place
is a Cursor: how many sequences of which shard were consumed. Reading happens in the caller's
thread, without workers, so that the next batch is computation and never a wait.
"""

from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from diloco_shared.protocol.messages import Cursor


@dataclass(frozen=True, slots=True)
class ShardCut:
    """How a token array is cut into shards of sequences of context + 1 tokens."""

    tokens: NDArray[Any]
    shards: int
    context: int
    seed: int

    def __post_init__(self) -> None:
        if self.sequences_per_shard < 1:
            raise ValueError(
                f"{len(self.tokens)} training tokens are too few for {self.shards} shards of "
                f"sequences of {self.context} tokens: set data.virtual_shards lower"
            )

    @property
    def sequences_per_shard(self) -> int:
        return (len(self.tokens) - 1) // self.context // self.shards

    def order(self, shard: int, passes: int) -> "grain.MapDataset[int]":
        """The shard's sequences in the order of its `passes`-th reading."""
        mixed = grain.MapDataset.range(self.sequences_per_shard * self.shards).shuffle(
            seed=self.seed
        )
        return mixed[shard :: self.shards].shuffle(
            seed=(self.seed * 1_000_003 + shard * 7919 + passes + 1) % 2**32
        )


# Sequences whose places are looked up together: some milliseconds of work. A whole shard may hold
# a million, whose look-up would hold up every other thread of the process for seconds.
LOOKED_UP = 256


class ShardReader:
    """Reads one shard from a cursor to its end."""

    def __init__(self, cut: ShardCut, shard: int, sequences: int = 0, passes: int = 0) -> None:
        if not 0 <= shard < cut.shards:
            raise ValueError(f"shard {shard} of {cut.shards}")
        self.cut = cut
        self.shard = shard
        self.passes = passes
        self.consumed = min(sequences, cut.sequences_per_shard)
        self._order = cut.order(shard, passes)
        self._known_from, self._starts = self.consumed, np.empty(0, np.int64)
        self._look_up(LOOKED_UP)

    @property
    def left(self) -> int:
        """Sequences not yet read."""
        return self.cut.sequences_per_shard - self.consumed

    @property
    def cursor(self) -> Cursor:
        return Cursor(shard=self.shard, sequences=self.consumed, passes=self.passes)

    def take(self, sequences: int) -> NDArray[np.int32]:
        """Up to `sequences` next sequences, shape (S, L + 1); fewer at the shard's end."""
        first = self.consumed - self._known_from
        if first + min(sequences, self.left) > len(self._starts):
            self._look_up(max(sequences, LOOKED_UP))
            first = 0
        starts = self._starts[first : first + sequences]
        self.consumed += len(starts)
        offsets_L1 = np.arange(self.cut.context + 1)
        batch: NDArray[np.int32] = self.cut.tokens[starts[:, None] + offsets_L1].astype(np.int32)
        return batch

    def _look_up(self, sequences: int) -> None:
        """Know where the next ones begin, as far as the shard goes."""
        last = min(self.consumed + sequences, self.cut.sequences_per_shard)
        places = (self._order[i] for i in range(self.consumed, last))
        self._starts = np.fromiter(places, np.int64) * self.cut.context
        self._known_from = self.consumed
