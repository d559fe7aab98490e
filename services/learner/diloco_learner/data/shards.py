"""Virtual data shards: equal samples of the training sequences, each read in a seeded order.

A mixture of corpora is cut corpus by corpus, and a shard holds an equal sample of each of them,
read in exact shares.

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

from diloco_shared.corpora.mix import Interleave, Mixed
from diloco_shared.corpora.sequences import Tokens, windows
from diloco_shared.protocol.messages import Cursor


@dataclass(frozen=True, slots=True)
class ShardCut:
    """How a sequence of tokens is cut into shards of sequences of context + 1 tokens."""

    tokens: NDArray[Any] | Tokens
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

    def places(self, shard: int, passes: int, first: int, last: int) -> NDArray[np.int64]:
        """Where sequences `first` to `last` of a reading lie, for `at`; shape (last - first,)."""
        order = self.order(shard, passes)
        return np.fromiter((order[i] for i in range(first, last)), np.int64)

    def at(self, places_S: NDArray[np.int64]) -> NDArray[np.int32]:
        """The sequences at these places, shape (S, L + 1)."""
        return windows(self.tokens, places_S * self.context, self.context + 1)


@dataclass(frozen=True, slots=True)
class MixedCut:
    """How a mixture is cut: each corpus into as many shards; see ShardCut.

    A pass over a shard takes as many sequences as the shard has of all corpora together, each
    corpus by its weight. So a small corpus of large weight comes round several times in a pass, in
    another order every time, and of a large one of small weight the next pass reads the rest:
    nothing of a corpus is read again before all of its part of the shard was read.
    """

    cuts: tuple[ShardCut, ...]
    interleave: Interleave

    @property
    def shards(self) -> int:
        return self.cuts[0].shards

    @property
    def context(self) -> int:
        return self.cuts[0].context

    @property
    def sequences_per_shard(self) -> int:
        return sum(cut.sequences_per_shard for cut in self.cuts)

    def places(self, shard: int, passes: int, first: int, last: int) -> NDArray[np.int64]:
        """As ShardCut.places; a place counts through the corpora, one after another."""
        whose_S, draw_S = self.interleave.at(np.arange(first, last))
        drawn_before = self.interleave.counts(self.sequences_per_shard)
        places_S = np.empty(last - first, np.int64)
        for corpus, cut in enumerate(self.cuts):
            rows = np.flatnonzero(whose_S == corpus)
            turn_S, index_S = np.divmod(
                draw_S[rows] + passes * drawn_before[corpus], cut.sequences_per_shard
            )
            for turn in np.unique(turn_S):
                order, here = cut.order(shard, int(turn)), turn_S == turn
                found = (order[int(i)] for i in index_S[here])
                places_S[rows[here]] = np.fromiter(found, np.int64) + self._begins[corpus]
        return places_S

    @property
    def _begins(self) -> NDArray[np.int64]:
        """The first place of each corpus, and behind the last one."""
        sizes = [cut.sequences_per_shard * cut.shards for cut in self.cuts]
        return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def at(self, places_S: NDArray[np.int64]) -> NDArray[np.int32]:
        """The sequences at these places, shape (S, L + 1)."""
        begins = self._begins
        whose_S = np.searchsorted(begins, places_S, side="right") - 1
        found = np.empty((len(places_S), self.context + 1), np.int32)
        for corpus in np.unique(whose_S):
            rows = whose_S == corpus
            found[rows] = self.cuts[corpus].at(places_S[rows] - begins[corpus])
        return found


Cut = ShardCut | MixedCut


def cut_of(
    tokens: NDArray[Any] | Tokens | Mixed, shards: int, context: int, seed: int
) -> ShardCut | MixedCut:
    """How a corpus, or a mixture, is cut into shards. ValueError if it is too small for them."""
    if not isinstance(tokens, Mixed):
        return ShardCut(tokens, shards, context, seed)
    cuts = []
    for number, (part, name) in enumerate(zip(tokens.parts, tokens.names, strict=True)):
        try:
            # Of another order each, so that equally large ones are not read in step.
            cuts.append(ShardCut(part, shards, context, (seed + number * 104_729) % 2**32))
        except ValueError as error:
            raise ValueError(f"of {name}, {error}") from None
    return MixedCut(tuple(cuts), tokens.interleave)


# Sequences whose places are looked up together: some milliseconds of work. A whole shard may hold
# a million, whose look-up would hold up every other thread of the process for seconds.
LOOKED_UP = 256


class ShardReader:
    """Reads one shard from a cursor to its end."""

    def __init__(self, cut: Cut, shard: int, sequences: int = 0, passes: int = 0) -> None:
        if not 0 <= shard < cut.shards:
            raise ValueError(f"shard {shard} of {cut.shards}")
        self.cut = cut
        self.shard = shard
        self.passes = passes
        self.consumed = min(sequences, cut.sequences_per_shard)
        self._known_from, self._places = self.consumed, np.empty(0, np.int64)
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
        if first + min(sequences, self.left) > len(self._places):
            self._look_up(max(sequences, LOOKED_UP))
            first = 0
        places = self._places[first : first + sequences]
        self.consumed += len(places)
        return self.cut.at(places)

    def _look_up(self, sequences: int) -> None:
        """Know where the next ones begin, as far as the shard goes."""
        last = min(self.consumed + sequences, self.cut.sequences_per_shard)
        self._places = self.cut.places(self.shard, self.passes, self.consumed, last)
        self._known_from = self.consumed
