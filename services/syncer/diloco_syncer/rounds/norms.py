"""Norm outliers (design section 4, the gate): a robust z-score per fragment, one-sided.

Before there are norms enough to say what is usual, and besides, what is many times as long as most
of its own round is one too (`far`).
"""

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Self

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.arrays import Piece
from diloco_shared.numerics.merge import norms

# Norms remembered per fragment: drift over a run must not look like an outlier.
HISTORY = 256
# Makes the median absolute deviation of a normal distribution its standard deviation.
MAD_TO_SIGMA = 1.4826
# Deviations below this share of the median are noise, whatever the spread so far.
SPREAD_MIN = 0.05
# So many times the median of its own round is an outlier, whatever was seen before. The norm per
# root step of a learner grows with the root of its steps at most, and a fresh optimizer's first
# steps are some times the later ones; in honest rounds, warm-up and restarts included, the largest
# was 2.4 times the median (bench/poisoned.py).
FAR = 30.0
# With two, nobody knows who is right.
FAR_LEARNERS_MIN = 3


@dataclass(frozen=True, slots=True)
class Inspected:
    """What an encoded contribution holds."""

    finite: bool
    norm: float  # Euclidean; 0 if not finite
    norms_P: NDArray[np.float64]  # of its pieces: the merge need not read it for them again


def inspect(
    payload: bytes, codec_name: str, values: int, pieces: Sequence[Piece] = ()
) -> Inspected:
    """Look at every value once; ValueError when the payload is not of that codec and size.

    `pieces` are those of the fragment, where they are known; they count if they fit `values`.
    """
    if sum(p.size for p in pieces) != values:
        pieces = (Piece("", (values,), False, 0, values, 0, values),)
    norms_P = norms(codec_name, payload, pieces)
    length = math.sqrt(math.fsum((norms_P * norms_P).tolist()))
    finite = math.isfinite(length)
    return Inspected(finite, length if finite else 0.0, norms_P)


def far(norms: Mapping[str, float]) -> dict[str, float]:
    """How many times the median of one round's norms the far ones are; none if half or more are."""
    if len(norms) < FAR_LEARNERS_MIN:
        return {}
    usual = max(median_low(norms.values()), sys.float_info.min)
    times = {learner: value / usual for learner, value in norms.items() if value > FAR * usual}
    return {} if 2 * len(times) >= len(norms) else times


class NormHistory:
    """Norms per root step of every contribution seen, per fragment."""

    def __init__(self, *, samples_min: int, z_max: float) -> None:
        self.samples_min = samples_min
        self.z_max = z_max
        self.norms: dict[int, deque[float]] = {}

    def record(self, fragment: int, value: float) -> None:
        """Remember a norm, merged or refused: an honest jump becomes normal in time."""
        if math.isfinite(value):
            self.norms.setdefault(fragment, deque(maxlen=HISTORY)).append(value)

    def judge(self, fragment: int, norms: Mapping[str, float]) -> dict[str, float]:
        """Robust z of the outliers among one round's norms; none if half or more would be.

        Measured from what is usual: the median of those seen, or of the round's own where that is
        higher. All learners' norms rise together after warm-up, and a round of a large fleet fills
        the history with what was before.
        """
        seen = self.norms.get(fragment, deque())
        if len(seen) < self.samples_min or not norms:
            return {}
        median = float(np.median(seen))
        spread = MAD_TO_SIGMA * float(np.median([abs(x - median) for x in seen]))
        usual = max(median, median_low(norms.values()))
        spread = max(spread, SPREAD_MIN * usual, sys.float_info.min)
        scores = {learner: (value - usual) / spread for learner, value in norms.items()}
        outliers = {learner: z for learner, z in scores.items() if z > self.z_max}
        return {} if 2 * len(outliers) >= len(norms) else outliers

    def outliers(self, fragment: int, norms: Mapping[str, float]) -> dict[str, str]:
        """Who is one in this round, and why in words: by what was seen, and by the round itself.

        If half or more would be, only what is far of the round.
        """
        there, scores = far(norms), self.judge(fragment, norms)
        if 2 * len({*there, *scores}) >= len(norms):
            scores = {}
        why = {m: f"{norms[m]:.3g} has robust z {z:.1f}" for m, z in scores.items()}
        beyond = {
            m: f"{norms[m]:.3g} is {n:.3g} times the round's median" for m, n in there.items()
        }
        return why | beyond

    def to_lists(self) -> dict[str, list[float]]:
        return {str(p): list(seen) for p, seen in self.norms.items()}

    @classmethod
    def from_lists(
        cls, lists: Mapping[str, list[float]], *, samples_min: int, z_max: float
    ) -> Self:
        """The inverse of `to_lists`. Of each fragment the newest HISTORY norms are kept."""
        self = cls(samples_min=samples_min, z_max=z_max)
        for p, seen in lists.items():
            self.norms[int(p)] = deque(seen, maxlen=HISTORY)
        return self
