"""Norm outliers (ARCHITECTURE.md, A round: the gate): robust z-scores per fragment, one-sided.

How long a contribution is depends on its steps. Were they independent, it would grow with the root
of their number; did all go one way, with the number itself. Honest learners lie between the two,
so a contribution is an outlier only by both measures: per root step a learner that is much faster
than most would be one, and per step one that is much slower. What is scaled is too long by both.

Where learners keep a share of their own parameters on adoption (`algorithm.alpha` above 0), their
contributions hold that share of how far they are from what is published, besides their steps. That
has no part in the steps: of few ones it would look too long by both measures. There a contribution
is an outlier only if it is too long as a whole, too.

Before there are norms enough to say what is usual, and besides, what is many times as long as most
of its own round is an outlier too (`far`), by the same measures.

Steps are what the learner says, and only its own reports contradict it. Who claims n times its
steps may send n times the length; under `rda` and `mean` its weight is n times as high already.
"""

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.merge import norms
from diloco_shared.spec.fragmentation import Piece

# Norms remembered per fragment: drift over a run must not look like an outlier.
HISTORY = 256
# Makes the median absolute deviation of a normal distribution its standard deviation.
MAD_TO_SIGMA = 1.4826
# Deviations below this share of the median are noise, whatever the spread so far.
SPREAD_MIN = 0.05
# So many times the median of its own round is an outlier, whatever was seen before. Among honest
# learners the longest per root step was 5.0 times the median, where one of six was six times as
# fast as the others (docs/results/poisoned.md): a sixth of this.
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


class Norm(NamedTuple):
    """How long a contribution is, and of how many inner steps: one at least."""

    length: float
    steps: int

    @property
    def per_root_step(self) -> float:
        """What independent steps leave the same."""
        return self.length / math.sqrt(self.steps)

    @property
    def per_step(self) -> float:
        """What steps of one direction leave the same."""
        return self.length / self.steps


def far(values: Mapping[str, float]) -> dict[str, float]:
    """How many times the median of one round's values the far ones are.

    Zeros do not count for the median: learners that skipped their steps say nothing of the others.
    """
    if len(values) < FAR_LEARNERS_MIN:
        return {}
    usual = _middle(values.values())
    return {learner: value / usual for learner, value in values.items() if value > FAR * usual}


def _middle(values: Iterable[float]) -> float:
    """The median of those above 0, the lower one of two; 0 if there are none."""
    return median_low([v for v in values if v > 0] or [0.0])


def _if_few(outliers: Iterable[str], of: int) -> frozenset[str]:
    """Nobody where half of a round or more would be: who would be right?"""
    found = frozenset(outliers)
    return frozenset() if 2 * len(found) >= of else found


def _among(known: Mapping[str, float], values: dict[str, float]) -> dict[str, float]:
    """The values of those who are known."""
    return {learner: value for learner, value in values.items() if learner in known}


class Past:
    """What one measure of contributions was, per fragment."""

    def __init__(self, *, samples_min: int, z_max: float) -> None:
        self.samples_min = samples_min
        self.z_max = z_max
        self.seen: dict[int, deque[float]] = {}

    def record(self, fragment: int, value: float) -> None:
        """Remember a value, merged or refused: an honest jump becomes normal in time."""
        if math.isfinite(value):
            self.seen.setdefault(fragment, deque(maxlen=HISTORY)).append(value)

    def beyond(self, fragment: int, values: Mapping[str, float]) -> dict[str, float]:
        """Robust z of those of one round's values that are above the limit.

        Measured from what is usual: the median of those seen, or of the round's own where that is
        higher. All learners' norms rise together after warm-up, and a round of a large fleet fills
        the history with what was before.
        """
        seen = self.seen.get(fragment, deque())
        if len(seen) < self.samples_min or not values:
            return {}
        median = float(np.median(seen))
        spread = MAD_TO_SIGMA * float(np.median([abs(x - median) for x in seen]))
        # With zeros: of learners that skipped their steps, one that lies may be all that is left.
        usual = max(median, median_low(values.values())) or _middle(values.values())
        spread = max(spread, SPREAD_MIN * usual, sys.float_info.min)
        scores = {learner: (value - usual) / spread for learner, value in values.items()}
        return {learner: z for learner, z in scores.items() if z > self.z_max}

    def to_lists(self) -> dict[str, list[float]]:
        return {str(p): list(seen) for p, seen in self.seen.items()}

    def take(self, lists: Mapping[str, list[float]]) -> None:
        """The inverse of `to_lists`. Of each fragment the newest HISTORY values are kept."""
        self.seen = {int(p): deque(seen, maxlen=HISTORY) for p, seen in lists.items()}


class NormHistory:
    """Norms of every contribution seen, per fragment, by all measures."""

    def __init__(self, *, samples_min: int, z_max: float, keeps: bool = False) -> None:
        """`keeps`: learners keep a share of their own parameters when they adopt published ones."""
        self.per_root_step = Past(samples_min=samples_min, z_max=z_max)
        self.per_step = Past(samples_min=samples_min, z_max=z_max)
        self.whole = Past(samples_min=samples_min, z_max=z_max) if keeps else None

    def record(self, fragment: int, norm: Norm) -> None:
        """Remember a norm, merged or refused."""
        self.per_root_step.record(fragment, norm.per_root_step)
        self.per_step.record(fragment, norm.per_step)
        if self.whole is not None:
            self.whole.record(fragment, norm.length)

    def outliers(self, fragment: int, norms: Mapping[str, Norm]) -> dict[str, str]:
        """Who is one in this round, and why in words: by what was seen, and by the round itself.

        None by what was seen if half or more would be one in any way; none at all if half or more
        are far of the round.
        """
        root_M = {learner: n.per_root_step for learner, n in norms.items()}
        step_M = {learner: n.per_step for learner, n in norms.items()}
        times, times_per_step = far(root_M), far(step_M)
        z = self.per_root_step.beyond(fragment, root_M)
        z_per_step = self.per_step.beyond(fragment, step_M)
        if self.whole is not None:
            whole_M = {learner: n.length for learner, n in norms.items()}
            times = _among(far(whole_M), times)
            z = _among(self.whole.beyond(fragment, whole_M), z)
        there = _if_few(times.keys() & times_per_step.keys(), len(norms))
        both = _if_few(there | (z.keys() & z_per_step.keys()), len(norms))
        why = {
            m: f"{root_M[m]:.3g} has robust z {z[m]:.1f}, per step {step_M[m]:.3g} has "
            f"{z_per_step[m]:.1f}"
            for m in both - there
        }
        beyond = {
            m: f"{root_M[m]:.3g} is {times[m]:.3g} times the round's median, per step "
            f"{step_M[m]:.3g} is {times_per_step[m]:.3g} times"
            for m in there
        }
        return dict(sorted((why | beyond).items()))

    def to_lists(self) -> dict[str, dict[str, list[float]]]:
        """By the names of keys in a snapshot; what an older one did not say is left out again."""
        lists = {"norms": self.per_root_step.to_lists()}
        if self.whole is not None and self.whole.seen:
            lists["norms_whole"] = self.whole.to_lists()
        return lists | ({"norms_per_step": self.per_step.to_lists()} if self.per_step.seen else {})

    @classmethod
    def from_lists(
        cls,
        lists: Mapping[str, Mapping[str, list[float]]],
        *,
        samples_min: int,
        z_max: float,
        keeps: bool = False,
    ) -> Self:
        """The inverse of `to_lists`, from whatever else is there besides.

        An older snapshot does not say all: until it is known, what was seen refuses nobody.
        """
        self = cls(samples_min=samples_min, z_max=z_max, keeps=keeps)
        self.per_root_step.take(lists["norms"])
        self.per_step.take(lists.get("norms_per_step", {}))
        if self.whole is not None:
            self.whole.take(lists.get("norms_whole", {}))
        return self
