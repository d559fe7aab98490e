"""Merging pseudo-gradients (paper section 3.5): radial-directional averaging, or the mean.

    RDA({delta_m, w_m}) = [sum w_m |delta_m| / sum w_m] * phi(sum w_m phi(delta_m) / sum w_m)

with phi(x) = x / |x|, phi(0) = 0, per tensor; embeddings use the weighted mean. Its norm does not
shrink as M grows, so one outer rate serves all M. Where directions cancel, the mean stands in. Of
a tensor cut by rows each piece is merged by itself: its rows lie in fragments of other rounds.

Every operation is one numpy call in a fixed order of learners: the same inputs, the same bits.
Scalars are summed by fsum, which rounds once: sum() of floats differs between Python versions.
Work goes block by block, so that contributions may be decoded as they are read: beside the result
a merge holds one piece in double precision (8 bytes per value) and a few blocks, whatever M is.
"""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.fragments import Piece
from diloco_shared.numerics.sums import blocks, norm_in

Values = NDArray[np.float32]

# A mean direction shorter than this has no direction: contributions cancel to rounding error.
DIRECTION_MIN = 1e-6


class Delta(Protocol):
    """A pseudo-gradient of a fragment, read by slice: an fp32 array, or what decodes on demand.

    Every value is read once, or twice under RDA.
    """

    def __getitem__(self, where: slice, /) -> Values: ...


def merge(
    deltas: Sequence[Delta],
    weights: Sequence[float],
    pieces: Sequence[Piece],
    rule: Literal["rda", "mean"],
) -> Values:
    """Merge M pseudo-gradients of one fragment to fp32 of shape (F,), piece by piece.

    The caller sorts contributions by learner; weights are non-negative with a positive sum. What
    weighs nothing is not read.
    """
    assert len(deltas) == len(weights) and math.fsum(weights) > 0
    able = [m for m, w in enumerate(weights) if w > 0]
    deltas, weights = [deltas[m] for m in able], [weights[m] for m in able]
    merged_F = np.empty(sum(p.size for p in pieces), dtype=np.float32)
    for piece in pieces:
        average = weighted_mean if piece.embedding or rule == "mean" else rda
        average(deltas, weights, blocks(piece.size, piece.offset), merged_F)
    return merged_F


def weighted_mean(
    deltas: Sequence[Delta], weights: Sequence[float], where: Sequence[slice], out_F: Values
) -> None:
    """sum w_m delta_m / sum w_m, accumulated in double, into the slices `where` of `out_F`."""
    shares = _shares(weights)
    for block in where:
        out_F[block] = _combine(deltas, shares, block)


def rda(
    deltas: Sequence[Delta], weights: Sequence[float], where: Sequence[slice], out_F: Values
) -> None:
    """Radial-directional average of one piece into the slices `where` of `out_F`."""
    if len(deltas) == 1:
        for block in where:
            out_F[block] = deltas[0][block]
        return
    norms = [norm_in(delta[block] for block in where) for delta in deltas]
    able = [m for m, n in enumerate(norms) if n > 0]  # phi(0) = 0: the others have no direction
    shares = [share / n for share, n in zip(_shares(weights), norms, strict=True) if n > 0]
    direction = [_combine([deltas[m] for m in able], shares, block) for block in where]
    length = norm_in(part_B.astype(np.float32) for part_B in direction)
    if length < DIRECTION_MIN:
        weighted_mean(deltas, weights, where, out_F)
        return
    total = math.fsum(weights)
    radius = math.fsum(w * n for w, n in zip(weights, norms, strict=True)) / total
    for block, part_B in zip(where, direction, strict=True):
        out_F[block] = part_B * (radius / length)


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def _combine(
    deltas: Sequence[Delta], factors: Sequence[float], block: slice
) -> NDArray[np.float64]:
    """sum factor_m delta_m over one block, in double and in the given order."""
    sum_B = np.zeros(block.stop - block.start, dtype=np.float64)
    for delta, factor in zip(deltas, factors, strict=True):
        sum_B += delta[block].astype(np.float64) * factor
    return sum_B
