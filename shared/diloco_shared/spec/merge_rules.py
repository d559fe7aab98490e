"""Rules by which several pseudo-gradients of one tensor become one (paper section 3.5).

A rule sees lengths and weights, never values. It says what each contribution is multiplied by
before all are added, and what their sum is multiplied by once its length is known. The passes over
memory (numerics/merge_kernels.py) are the same for all rules. Whatever a rule has no answer for is
the weighted mean. A rule of your own is a class here and a line in RULES; `algorithm.merge` names
it.
"""

import math
from collections.abc import Sequence
from typing import Protocol

# A mean direction shorter than this has no direction: contributions cancel to rounding error.
DIRECTION_MIN = 1e-6
# Norms of what RDA merges: one over them, and its products with values, are normal fp32 numbers
# wherever they matter.
NORM_MIN, NORM_MAX = 2.0**-60, 2.0**60


class MergeRule(Protocol):
    """For one tensor of M contributions, of which none weighs nothing."""

    def factors(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        """What each contribution is multiplied by, by its share of all weight; None: the mean."""

    def scale(
        self, weights_M: Sequence[float], norms_M: Sequence[float], length: float, settled: float
    ) -> float | None:
        """What a sum of that length is multiplied by; None: the mean instead.

        `settled`: how far the run's end has begun, from 0 to 1 (`Nesterov.settled`).
        """


class Radial:
    """Radial-directional averaging: the mean length times the direction of the mean direction."""

    def factors(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        # What has no length has no direction: phi(0) = 0.
        if not all(n == 0 or NORM_MIN <= n <= NORM_MAX for n in norms_M):
            return None
        return [s / n if n else 0.0 for s, n in zip(shares_M, norms_M, strict=True)]

    def scale(
        self, weights_M: Sequence[float], norms_M: Sequence[float], length: float, settled: float
    ) -> float | None:
        if length < DIRECTION_MIN:
            return None
        total = math.fsum(weights_M)
        radius = math.fsum(w * n for w, n in zip(weights_M, norms_M, strict=True)) / total
        return radius * ((1 - settled) / length + settled)


# By the name that `algorithm.merge` gives; None is the weighted mean, for which nothing need be
# known beforehand.
RULES: dict[str, MergeRule | None] = {"rda": Radial(), "mean": None}


def named(name: str) -> MergeRule | None:
    """The rule of that name. ValueError with all names where there is none."""
    if name not in RULES:
        raise ValueError(f"{name[:40]!r} is not one of {', '.join(RULES)}")
    return RULES[name]
