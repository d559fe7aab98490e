"""Merging pseudo-gradients (paper section 3.5): radial-directional averaging, or the mean.

    RDA({delta_m, w_m}) = [sum w_m |delta_m| / sum w_m] * phi(sum w_m phi(delta_m) / sum w_m)

with phi(x) = x / |x|, phi(0) = 0, per tensor; embeddings use the weighted mean. Its norm does not
shrink as M grows, so one outer rate serves all M. Where directions cancel, the mean stands in.
Every operation is one numpy call in a fixed order of learners: the same inputs, the same bits.
Scalars are summed by fsum, which rounds once: sum() of floats differs between Python versions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.fragments import Piece
from diloco_shared.numerics.sums import norm

Values = NDArray[np.float32]
# Gives the decoded delta of the m-th contribution. Called once or twice each, so that a caller
# need not hold all of them decoded.
Deltas = Callable[[int], Values]

# A mean direction shorter than this has no direction: contributions cancel to rounding error.
DIRECTION_MIN = 1e-6


def weighted_mean(deltas: Deltas, weights: Sequence[float], size: int) -> Values:
    """sum w_m delta_m / sum w_m as fp32 of shape (size,), accumulated in double."""
    total = math.fsum(weights)
    mean = np.zeros(size, dtype=np.float64)
    for m, w in enumerate(weights):
        if w > 0:
            mean += deltas(m).astype(np.float64) * (w / total)
    return mean.astype(np.float32)


def rda(deltas: Deltas, weights: Sequence[float], size: int) -> Values:
    """Radial-directional average of one tensor as fp32 of shape (size,)."""
    total = math.fsum(weights)
    norms = [norm(deltas(m)) if w > 0 else 0.0 for m, w in enumerate(weights)]
    able = [m for m, w in enumerate(weights) if w > 0 and norms[m] > 0]
    if not able:
        return np.zeros(size, dtype=np.float32)
    if len(able) == 1 and sum(1 for w in weights if w > 0) == 1:
        return deltas(able[0]).astype(np.float32)
    radius = math.fsum(w * n for w, n in zip(weights, norms, strict=True)) / total
    direction = np.zeros(size, dtype=np.float64)
    for m in able:
        direction += deltas(m).astype(np.float64) * (weights[m] / total / norms[m])
    length = norm(direction.astype(np.float32))
    if length < DIRECTION_MIN:
        return weighted_mean(deltas, weights, size)
    return (direction * (radius / length)).astype(np.float32)


def merge(
    deltas: Sequence[Values],
    weights: Sequence[float],
    pieces: Sequence[Piece],
    rule: Literal["rda", "mean"],
) -> Values:
    """Merge M pseudo-gradients of one fragment, each fp32 of shape (F,), piece by piece.

    The caller sorts contributions by learner; weights are non-negative with a positive sum.
    """
    assert len(deltas) == len(weights) and sum(weights) > 0
    merged_F = np.empty(sum(p.size for p in pieces), dtype=np.float32)
    for piece in pieces:
        where = slice(piece.offset, piece.offset + piece.size)
        average = weighted_mean if piece.embedding or rule == "mean" else rda
        merged_F[where] = average(_part(deltas, where), weights, piece.size)
    return merged_F


def _part(deltas: Sequence[Values], where: slice) -> Deltas:
    def part(m: int) -> Values:
        return deltas[m][where]

    return part
