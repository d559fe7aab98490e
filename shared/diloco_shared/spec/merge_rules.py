"""Rules by which several pseudo-gradients of one tensor become one (paper section 3.5).

A rule sees lengths and weights, never values. It says what each contribution is multiplied by
before all are added, and what their sum is multiplied by once its length is known; or how many
values are left out of every coordinate's mean. The passes over memory (numerics/merge_kernels.py)
are the same for all rules. Whatever a rule has no answer for is the weighted mean: a robust rule
must have one for everything. A rule of your own is a class here and a line in RULES;
`algorithm.merge` names it.

`rda` and `mean` are the paper's, and trust every contribution that the gate lets through: one
learner that lies about its weight, or many times the usual length within the gate's tolerance, can
outvote all others. `clipped`, `trimmed` and `median` are robust: no contribution counts for more
than WEIGHT_MOST times the median weight of its round, and none moves the result at will. What each
withstands, and what it costs, was measured (docs/results/poisoned.md).
"""

import math
from collections.abc import Sequence
from statistics import median

# A mean direction shorter than this has no direction: contributions cancel to rounding error.
DIRECTION_MIN = 1e-6
# Norms of what RDA merges: one over them, and its products with values, are normal fp32 numbers
# wherever they matter.
NORM_MIN, NORM_MAX = 2.0**-60, 2.0**60
# Under a robust rule, what a contribution weighs at most, in median weights of its round. Learners
# of one run that are twice as fast as the usual one still count in full; who lies about its
# counters gains no more than that.
WEIGHT_MOST = 2.0


class MergeRule:
    """For one tensor of M contributions, of which none weighs nothing; by itself the mean."""

    @property
    def embeddings(self) -> "MergeRule | None":
        """By which embeddings are merged; None: the weighted mean."""
        return None

    def weights(self, weights_M: Sequence[float]) -> Sequence[float]:
        """What contributions weigh that claim these weights."""
        return weights_M

    def left_out(self, learners: int) -> int:
        """How many of the largest values of each coordinate are left out, and of the smallest as
        many, of embeddings too. Where that is not 0, the rest is averaged and nothing else asked.
        """
        return 0

    def factors(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        """What each contribution is multiplied by, by its share of all weight; None: the mean."""
        return None

    def scale(
        self, weights_M: Sequence[float], norms_M: Sequence[float], length: float, settled: float
    ) -> float | None:
        """What a sum of that length is multiplied by; None: `instead` of it.

        `settled`: how far the run's end has begun, from 0 to 1 (`Nesterov.settled`).
        """
        return 1.0

    def instead(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        """Where `scale` is None, what each contribution is multiplied by; None: the mean."""
        return None


def bounded(weights_M: Sequence[float]) -> list[float]:
    """None above WEIGHT_MOST times the median weight: what a liar claims beyond counts nothing."""
    most = WEIGHT_MOST * median(weights_M)
    return [min(w, most) for w in weights_M]


def mergeable(norm: float) -> bool:
    """Whether a contribution of this length has a direction in fp32."""
    return NORM_MIN <= norm <= NORM_MAX


def shortened(norms_M: Sequence[float]) -> list[float]:
    """None above the median length."""
    most = median(norms_M)
    return [min(n, most) for n in norms_M]


class Radial(MergeRule):
    """Radial-directional averaging: the mean length times the direction of the mean direction."""

    def factors(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        # What has no length has no direction: phi(0) = 0.
        if not all(n == 0 or mergeable(n) for n in norms_M):
            return None
        return [s / n if n else 0.0 for s, n in zip(shares_M, norms_M, strict=True)]

    def scale(
        self, weights_M: Sequence[float], norms_M: Sequence[float], length: float, settled: float
    ) -> float | None:
        """The mean length of contributions over `length`, that of the sum (paper section 3.5).

        As `settled` goes to 1, so does the divisor. None for a sum too short to have a direction.
        """
        if length < DIRECTION_MIN:
            return None
        total = math.fsum(weights_M)
        radius = math.fsum(w * n for w, n in zip(weights_M, norms_M, strict=True)) / total
        return radius * ((1 - settled) / length + settled)


class ClippedMean(MergeRule):
    """The mean of contributions of which none is longer than the median one."""

    def weights(self, weights_M: Sequence[float]) -> Sequence[float]:
        return bounded(weights_M)

    def factors(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        lengths = shortened(norms_M)
        return [
            s * k / n if mergeable(n) else 0.0
            for s, k, n in zip(shares_M, lengths, norms_M, strict=True)
        ]


class Clipped(Radial):
    """Radial-directional averaging of contributions of which none is longer than the median one.

    In a direction all contributions have one length anyway, so this bounds the radius. Embeddings,
    which have the mean, are clipped one by one, and so is a tensor whose directions cancel. A
    length that fp32 leaves no room for gives no direction. Nothing leads to the mean of what was
    not clipped, which one long contribution would outweigh.
    """

    @property
    def embeddings(self) -> MergeRule:
        return ClippedMean()

    def weights(self, weights_M: Sequence[float]) -> Sequence[float]:
        return bounded(weights_M)

    def factors(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        return [s / n if mergeable(n) else 0.0 for s, n in zip(shares_M, norms_M, strict=True)]

    def scale(
        self, weights_M: Sequence[float], norms_M: Sequence[float], length: float, settled: float
    ) -> float | None:
        return super().scale(weights_M, shortened(norms_M), length, settled)

    def instead(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        # Who answers last can choose that directions cancel; of a tensor of one value they do so
        # by themselves. Where all are of one length nothing is clipped: that is the mean.
        if max(norms_M) == median(norms_M):
            return None
        return ClippedMean().factors(shares_M, norms_M)


class Trimmed(MergeRule):
    """Each coordinate's weighted mean without its largest and its smallest values.

    A fifth of the contributions is left out at each end, and at least one of three or more; with
    two nothing can be left out, and the mean is what remains. As many lying learners as are left
    out at one end cannot move any coordinate out of the range of the honest ones.
    """

    def weights(self, weights_M: Sequence[float]) -> Sequence[float]:
        return bounded(weights_M)

    def left_out(self, learners: int) -> int:
        return max(learners // 5, 1) if learners > 2 else 0


class Median(Trimmed):
    """The same with as many left out as can be: each coordinate's median.

    Of an even number the mean of the two in the middle. It withstands any minority, and averages
    least.
    """

    def left_out(self, learners: int) -> int:
        return (learners - 1) // 2


# By the name that `algorithm.merge` gives; None is the weighted mean, for which nothing need be
# known beforehand.
RULES: dict[str, MergeRule | None] = {
    "rda": Radial(),
    "mean": None,
    "clipped": Clipped(),
    "trimmed": Trimmed(),
    "median": Median(),
}


def named(name: str) -> MergeRule | None:
    """The rule of that name. ValueError with all names where there is none."""
    if name not in RULES:
        raise ValueError(f"{name[:40]!r} is not one of {', '.join(RULES)}")
    return RULES[name]
