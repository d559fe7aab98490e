"""Virtual data shards: equal samples of the training sequences, each read in a seeded order.

A shard is drawn from all over the corpus, not a stretch of it: a learner reads shard after shard,
and stretches (a folder of tables, then one of protocols) make it forget one for the next. Of a
mixture of corpora the shards follow each other in one long row of draws, pass after pass, in which
each corpus has its exact share: however small a shard is, none is left out of the row.

A place is a Cursor: how many sequences of which shard were consumed. Reading happens in the
caller's thread, without workers, so that the next batch is computation and never a wait.
"""

from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from diloco_learner.data.left_out import LeftOut
from diloco_shared.corpora.mix import Interleave, Mixed
from diloco_shared.corpora.sequences import Tokens, windows
from diloco_shared.corpora.token_files import Damaged
from diloco_shared.protocol.messages import Cursor


@dataclass(frozen=True, slots=True)
class ShardCut:
    """How a sequence of tokens is cut into shards of sequences of context + 1 tokens.

    Each shard is dealt as many; those that are left over at the corpus' end go to the first
    shards, one to each, which read it behind the others.
    """

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
    def sequences(self) -> int:
        """Of all shards."""
        return _sequences(self.tokens, self.context)

    @property
    def sequences_per_shard(self) -> int:
        """So many at least; some have one more."""
        return self.sequences // self.shards

    def size(self, shard: int) -> int:
        """Sequences of a shard."""
        return self.sequences_per_shard + (shard < self.sequences % self.shards)

    def order(self, shard: int, passes: int) -> "grain.MapDataset[int]":
        """What the shard is dealt, in the order of its `passes`-th reading."""
        mixed = grain.MapDataset.range(self.sequences_per_shard * self.shards).shuffle(
            seed=self.seed
        )
        return mixed[shard :: self.shards].shuffle(
            seed=(self.seed * 1_000_003 + shard * 7919 + passes + 1) % 2**32
        )

    def places(self, shard: int, passes: int, first: int, last: int) -> NDArray[np.int64]:
        """Where sequences `first` to `last` of a reading lie, for `at`; shape (last - first,)."""
        order, dealt = self.order(shard, passes), self.sequences_per_shard
        left_over = dealt * self.shards + shard
        found = (order[i] if i < dealt else left_over for i in range(first, last))
        return np.fromiter(found, np.int64)

    def at(self, places_S: NDArray[np.int64]) -> NDArray[np.int32]:
        """The sequences at these places, shape (S, L + 1)."""
        return windows(self.tokens, places_S * self.context, self.context + 1)


@dataclass(frozen=True, slots=True)
class MixedCut:
    """How a mixture is cut; see ShardCut.

    A pass over all shards takes as many sequences as the corpora have together, each corpus by its
    weight. So a small corpus of large weight comes round several times in a pass, in another order
    every time, and of a large one of small weight the next pass reads the rest: in the row of
    draws nothing of a corpus is read again before all of it was read.
    """

    parts: tuple[Tokens, ...]
    interleave: Interleave
    shards: int
    context: int
    seed: int

    @property
    def sequences(self) -> int:
        """Of a pass over all shards."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences of each corpus."""
        return tuple(_sequences(part, self.context) for part in self.parts)

    @property
    def sequences_per_shard(self) -> int:
        """So many at least; some have one more."""
        return self.sequences // self.shards

    def size(self, shard: int) -> int:
        """Sequences of a pass over a shard."""
        return self.sequences_per_shard + (shard < self.sequences % self.shards)

    def order(self, corpus: int, turn: int) -> "grain.MapDataset[int]":
        """The sequences of a corpus, in the order of its `turn`-th reading. Corpora have another
        order each, so that equally large ones are not read in step."""
        seed = self.seed + corpus * 104_729
        seed = (seed * 1_000_003 + turn + 1) % 2**32
        return grain.MapDataset.range(self.sizes[corpus]).shuffle(seed=seed)

    def places(self, shard: int, passes: int, first: int, last: int) -> NDArray[np.int64]:
        """As ShardCut.places; a place counts through the corpora, one after another."""
        rest = self.sequences % self.shards
        begin = passes * self.sequences + shard * self.sequences_per_shard + min(shard, rest)
        # Shares are exact after so many draws; a count of passes knows no limit, an array's does.
        rounds, start = divmod(begin + first, sum(self.interleave.weights))
        whose_S, draw_S = self.interleave.at(start + np.arange(last - first))
        places_S, before = np.empty(last - first, np.int64), 0
        for corpus, (size, weight) in enumerate(
            zip(self.sizes, self.interleave.weights, strict=True)
        ):
            rows = np.flatnonzero(whose_S == corpus)
            turns, drawn = divmod(rounds * weight, size)
            turn_S, index_S = np.divmod(drawn + draw_S[rows], size)
            for turn in np.unique(turn_S):
                order, here = self.order(corpus, turns + int(turn)), turn_S == turn
                found = (order[int(i)] for i in index_S[here])
                places_S[rows[here]] = np.fromiter(found, np.int64) + before
            before += size
        return places_S

    def at(self, places_S: NDArray[np.int64]) -> NDArray[np.int32]:
        """The sequences at these places, shape (S, L + 1)."""
        begins = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        whose_S = np.searchsorted(begins, places_S, side="right") - 1
        found = np.empty((len(places_S), self.context + 1), np.int32)
        for corpus in np.unique(whose_S):
            rows = whose_S == corpus
            starts_S = (places_S[rows] - begins[corpus]) * self.context
            found[rows] = windows(self.parts[corpus], starts_S, self.context + 1)
        return found


Cut = ShardCut | MixedCut


def _sequences(tokens: NDArray[Any] | Tokens, context: int) -> int:
    """How many of `context` + 1 tokens there are: each one's last token is the next one's first."""
    return (len(tokens) - 1) // context


def cut_of(
    tokens: NDArray[Any] | Tokens | Mixed, shards: int, context: int, seed: int
) -> ShardCut | MixedCut:
    """How a corpus, or a mixture, is cut into shards.

    ValueError if it is too small for them, or if a whole pass would read nothing of some corpus.
    """
    if not isinstance(tokens, Mixed):
        return ShardCut(tokens, shards, context, seed)
    cut = MixedCut(tokens.parts, tokens.interleave, shards, context, seed)
    for part, name in zip(tokens.parts, _named(tokens), strict=True):
        if _sequences(part, context) < 1:
            raise ValueError(
                f"of {name}, {len(part)} training tokens are too few for a sequence of {context} "
                "tokens: take a longer corpus or a shorter model.context_tokens"
            )
    if cut.sequences_per_shard < 1:
        raise ValueError(
            f"the corpora of data.mixture have {cut.sequences} sequences of {context} tokens, too "
            f"few for {shards} shards: set data.virtual_shards lower"
        )
    _check_drawn(tokens, cut.sequences)
    return cut


def _named(mixed: Mixed) -> list[str]:
    """Its corpora: that of a text is called by where it was prepared, which says nothing."""
    return [f"corpus {n} of data.mixture ({name})" for n, name in enumerate(mixed.names, 1)]


def _check_drawn(mixed: Mixed, sequences: int) -> None:
    """Raises ValueError for a corpus of which a whole pass would read nothing."""
    drawn = mixed.interleave.counts(sequences)
    for name, weight, its in zip(_named(mixed), mixed.weights, drawn, strict=True):
        if not its:
            every = -(-sum(mixed.weights) // weight)
            raise ValueError(
                f"of {name}, nothing would be read: by its weight one of {every} sequences is its "
                f"own, and all corpora have {sequences} together. Give it more weight, or leave it "
                "out"
            )


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
        self.size = cut.size(shard)
        self.consumed = min(sequences, self.size)
        self._known_from, self._places = self.consumed, np.empty(0, np.int64)
        self._look_up(LOOKED_UP)

    @property
    def left(self) -> int:
        """Sequences not yet read."""
        return self.size - self.consumed

    @property
    def cursor(self) -> Cursor:
        return Cursor(shard=self.shard, sequences=self.consumed, passes=self.passes)

    def take(self, sequences: int, left_out: LeftOut | None = None) -> NDArray[np.int32]:
        """Up to `sequences` next sequences, shape (S, L + 1); fewer at the shard's end.

        Damaged ones are counted in `left_out`, and make it fewer as well. Raises Damaged where
        there are too many of them, or nothing counts them.
        """
        first = self.consumed - self._known_from
        if first + min(sequences, self.left) > len(self._places):
            self._look_up(max(sequences, LOOKED_UP))
            first = 0
        places = self._places[first : first + sequences]
        self.consumed += len(places)
        return self.cut.at(places) if left_out is None else self._sound(places, left_out)

    def _sound(self, places_S: NDArray[np.int64], left_out: LeftOut) -> NDArray[np.int32]:
        try:
            found = self.cut.at(places_S)
        except Damaged:
            found = np.concatenate([self._one(place, left_out) for place in places_S])
        else:
            left_out.sound()
        return found

    def _one(self, place: np.int64, left_out: LeftOut) -> NDArray[np.int32]:
        """The sequence there, or none of them."""
        try:
            found = self.cut.at(np.array([place]))
        except Damaged as error:
            left_out.wrong(error)
            return np.empty((0, self.cut.context + 1), np.int32)
        left_out.sound()
        return found

    def _look_up(self, sequences: int) -> None:
        """Know where the next ones begin, as far as the shard goes."""
        last = min(self.consumed + sequences, self.size)
        self._places = self.cut.places(self.shard, self.passes, self.consumed, last)
        self._known_from = self.consumed
