"""Several corpora read as one, in exact shares.

Whose turn the i-th draw is follows from i and the weights alone: among the first i draws a corpus
has its share of them to within one for each corpus before it, and after as many draws as the
weights add up to exactly its weight. Which windows of that corpus come, and in which order, is for
the reader (`diloco_learner.data.shards`): it gets the number of the draw within its corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from diloco_shared.corpora.prepared import Corpus
from diloco_shared.corpora.sequences import Tokens
from diloco_shared.corpora.splits import Split

# Whole weights add up to at most this, so that products with the number of a draw stay below 2^63.
PARTS_MAX = 1 << 20
# Draws of one sequence: more than anybody trains on.
DRAWS_MAX = 1 << 42
# A corpus of smaller share would be drawn less than once in this many.
SHARE_MIN = 1 / PARTS_MAX


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The same proportions in whole numbers, exact where they add up to at most PARTS_MAX.

    Raises ValueError for what is no weight, and for a share that is too small.
    """
    if not weights or not all(np.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"weights must be numbers above 0, not {list(weights)}")
    # As they are written: 0.1 is a tenth.
    exact = [Fraction(str(float(w))) for w in weights]
    scale = lcm(*(w.denominator for w in exact))
    whole = [int(w * scale) for w in exact]
    common = gcd(*whole)
    whole = [w // common for w in whole]
    if (total := sum(whole)) > PARTS_MAX:
        whole = [w * PARTS_MAX // total for w in whole]
        if not all(whole):
            raise ValueError(f"a weight is less than {SHARE_MIN:.0e} of all: leave that corpus out")
    return tuple(whole)


@dataclass(frozen=True, slots=True)
class Interleave:
    """Whose turn each draw is. `weights`: whole numbers above 0."""

    weights: tuple[int, ...]

    def at(self, draws_S: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each draw the corpus, and how many draws of that corpus came before; (S,) each."""
        left_S = np.asarray(draws_S, np.int64)
        assert not len(left_S) or 0 <= left_S.min() <= left_S.max() < DRAWS_MAX
        whose_S = np.full(len(left_S), len(self.weights) - 1)
        within_S = left_S.copy()
        undecided_S = np.ones(len(left_S), bool)
        rest = sum(self.weights)
        for corpus, weight in enumerate(self.weights[:-1]):
            # Of the draws that no earlier corpus has, this one gets evenly spread ones.
            before_S = left_S * weight // rest
            its_S = undecided_S & ((left_S + 1) * weight // rest > before_S)
            whose_S[its_S], within_S[its_S] = corpus, before_S[its_S]
            undecided_S &= ~its_S
            left_S = np.where(undecided_S, left_S - before_S, left_S)
            rest -= weight
        within_S[undecided_S] = left_S[undecided_S]
        return whose_S, within_S

    def counts(self, draws: int) -> tuple[int, ...]:
        """How many of the first so many draws each corpus has."""
        found, left, rest = [], draws, sum(self.weights)
        for weight in self.weights:
            its = left * weight // rest
            found.append(its)
            left, rest = left - its, rest - weight
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Mixed:
    """One split of several corpora."""

    parts: tuple[Tokens, ...]
    weights: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def interleave(self) -> Interleave:
        """Whose turn each draw is."""
        return Interleave(self.weights)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several corpora of one vocabulary with whole weights, in the place of one."""

    corpora: tuple[Corpus, ...]
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.corpora) != len(self.weights) or not self.corpora:
            raise ValueError(f"{len(self.corpora)} corpora and {len(self.weights)} weights")

    def split(self, name: Split) -> Mixed:
        """A split of all of them."""
        parts = tuple(corpus.split(name) for corpus in self.corpora)
        return Mixed(parts, self.weights, tuple(corpus.name for corpus in self.corpora))

    @property
    def train(self) -> Mixed:
        """What is trained on."""
        return self.split("train")

    @property
    def validation(self) -> Mixed:
        """What is looked at during training."""
        return self.split("validation")

    @property
    def test(self) -> Mixed:
        """What is looked at in the end."""
        return self.split("test")

    @property
    def vocabulary(self) -> int:
        """Of the tokenizer with the most tokens: they all have the same one where it is known."""
        return max(corpus.vocabulary for corpus in self.corpora)
