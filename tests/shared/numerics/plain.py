"""The merge, the outer step and the publication again in plain numpy, operation by operation.

The reference that compiled kernels must equal bit for bit: one rounding per operation, learners in
order, squares in lanes, everything decoded first.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics import codec
from diloco_shared.spec.fragmentation import Piece

f32, f64 = np.float32, np.float64
Values = NDArray[np.float32]

WIDTH, RANGE = 512, 1 << 16


def norm(values_N: Values, offset: int) -> float:
    """Norm of values that begin at place `offset` of their fragment."""
    sums, stop = [], offset + values_N.size
    for start in sorted({offset, *range(offset // RANGE * RANGE + RANGE, stop, RANGE)}):
        lanes = np.zeros(WIDTH, f64)
        x = np.zeros(RANGE, f64)
        end = min(start // RANGE * RANGE + RANGE, stop)
        x[start % RANGE : (end - 1) % RANGE + 1] = values_N[start - offset : end - offset]
        for row in (x * x).reshape(-1, WIDTH):
            lanes += row
        half = WIDTH
        while half > 1:
            half //= 2
            lanes = lanes[:half] + lanes[half:]
        sums.append(float(lanes[0]))
    return float(np.sqrt(math.fsum(sums)))


def combine(deltas: Sequence[Values], factors: Sequence[float]) -> Values:
    """Sum of factor times delta, in order."""
    total = np.full(deltas[0].shape, -0.0, f32)
    for delta, factor in zip(deltas, factors, strict=True):
        if factor != 0:
            total += delta * f32(factor)
    return total


def rda(deltas: Sequence[Values], weights: Sequence[float], offset: int) -> Values:
    """Radial-directional average of one piece, with its fallbacks."""
    total = math.fsum(weights)
    shares = [f32(w / total) for w in weights]
    norms = [norm(d, offset) for d in deltas]
    if len(deltas) == 1 or any(n > 0 and not 2.0**-60 <= n <= 2.0**60 for n in norms):
        return combine(deltas, shares)
    factors = [float(s) / n if n > 0 else 0.0 for s, n in zip(shares, norms, strict=True)]
    direction = combine(deltas, factors)
    length = norm(direction, offset)
    if length < 1e-6:
        return combine(deltas, shares)
    radius = math.fsum(w * n for w, n in zip(weights, norms, strict=True)) / total
    return (direction.astype(f64) * (radius / length)).astype(f32)


def trimmed(deltas: Sequence[Values], weights: Sequence[float], left_out: int) -> Values:
    """Each coordinate's weighted mean without its outermost values; equal ones by their shares."""
    total = math.fsum(weights)
    shares = np.array([w / total for w in weights], f32)
    value_MxF = np.stack(deltas)
    share_MxF = np.broadcast_to(shares[:, None], value_MxF.shape)
    order = np.lexsort((share_MxF, value_MxF), axis=0)[left_out : len(deltas) - left_out]
    values, parts = (np.take_along_axis(x, order, 0) for x in (value_MxF, share_MxF))
    weight = np.zeros(values.shape[1], f32)
    for part in parts:
        weight += part
    summed = np.full(values.shape[1], -0.0, f32)
    for value, part in zip(values, parts, strict=True):
        summed += value * part
    mean = summed / weight
    mean = np.where(mean < values[0], values[0], mean)
    return np.where(mean > values[-1], values[-1], mean) + f32(0)


def merge(
    deltas: Sequence[Values], weights: Sequence[float], pieces: Sequence[Piece], rule: str
) -> Values:
    """The merged pseudo-gradient of a fragment."""
    able = [m for m, w in enumerate(weights) if w > 0]
    weights = [weights[m] for m in able]
    shares = [f32(w / math.fsum(weights)) for w in weights]
    merged = []
    for p in pieces:
        parts = [deltas[m][p.offset : p.offset + p.size] for m in able]
        if p.embedding or rule == "mean":
            merged.append(combine(parts, shares))
        else:
            merged.append(rda(parts, weights, p.offset))
    return np.concatenate(merged)


def step(
    master: Values, trace: Values | None, delta: Values, rate: float, momentum: float
) -> tuple[Values, Values | None]:
    """One Nesterov step; without a trace, plain SGD."""
    if trace is None:
        return master + f32(-rate) * delta, None
    trace = delta + f32(momentum) * trace
    return master + f32(-rate) * (delta + f32(momentum) * trace), trace


def publish(master: Values, anchor: Values, name: str, *, keyframe: bool) -> tuple[bytes, Values]:
    """The payload of a publication and the new anchor."""
    payload = codec.encode(name, master if keyframe else master - anchor)
    decoded = codec.decode(name, payload, master.size)
    return payload, decoded if keyframe else anchor + decoded
