"""Element by element: the innermost loops of a merge.

Each is a kernel of its own, for there the compiler sees that it can vectorise it, and all that is
read far away is read in one loop: the processor looks ahead in every array while it computes. B
counts the values at hand. Arrays that are written overlap with no others.
"""

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.codec.kernels import INF, MAGNITUDE, as_bits, widen
from diloco_shared.numerics.compiled import kernel

Values = NDArray[np.float32]
Halves = NDArray[np.uint16]

# Of bf16 patterns, in 32 bits: mixed with Python's integers they would be worked on in 64.
HALF, ONE, TIE, SIGN, QUIET = (np.int32(x) for x in (16, 1, 0x7FFF, 0x8000, 0x7FC0))


@kernel
def fill(value: np.float32, out_B: Values) -> None:
    """out <- value."""
    for i in range(out_B.size):
        out_B[i] = value


@kernel
def copy(values_B: Values, out_B: Values) -> None:
    """out <- values."""
    for i in range(values_B.size):
        out_B[i] = values_B[i]


@kernel
def multiply(values_B: Values, scale: float) -> None:
    """values <- values * scale, multiplied in fp64 and rounded once."""
    for i in range(values_B.size):
        values_B[i] = np.float32(np.float64(values_B[i]) * scale)


@kernel
def subtract(a_B: Values, b_B: Values, out_B: Values) -> None:
    """out <- a - b."""
    for i in range(a_B.size):
        out_B[i] = a_B[i] - b_B[i]


@kernel
def add_to(values_B: Values, out_B: Values) -> None:
    """out <- values + out."""
    for i in range(values_B.size):
        out_B[i] = values_B[i] + out_B[i]


@kernel
def rebase(now_B: Values, then_B: Values, out_B: Values) -> None:
    """out <- out + (now - then)."""
    for i in range(now_B.size):
        out_B[i] += now_B[i] - then_B[i]


@kernel
def add_one(part_B: Values, factor: np.float32, sum_B: Values) -> None:
    """sum <- sum + factor * part, rounded after each operation."""
    for i in range(part_B.size):
        sum_B[i] += part_B[i] * factor


@kernel
def add_four_bf16(
    a_B: Halves, b_B: Halves, c_B: Halves, d_B: Halves, factor_K: Values, sum_B: Values
) -> None:
    """sum <- sum + all four, each times its factor, of shape (4,): first a and b, then c and d.

    `a_B` to `d_B` are bit patterns of bf16.
    """
    a, b, c, d = factor_K[0], factor_K[1], factor_K[2], factor_K[3]
    for i in range(a_B.size):
        two = (sum_B[i] + widen(a_B[i]) * a) + widen(b_B[i]) * b
        sum_B[i] = (two + widen(c_B[i]) * c) + widen(d_B[i]) * d


@kernel
def order(low_B: Values, high_B: Values, low_share_B: Values, high_share_B: Values) -> None:
    """Exchange values that are the wrong way round, and their shares; of equal values the larger
    share is the higher one, so that the order of learners decides nothing."""
    for i in range(low_B.size):
        a, b, s, t = low_B[i], high_B[i], low_share_B[i], high_share_B[i]
        wrong = (b < a) | ((b == a) & (t < s))
        low_B[i] = b if wrong else a
        high_B[i] = a if wrong else b
        low_share_B[i] = t if wrong else s
        high_share_B[i] = s if wrong else t


@kernel
def add_weighted(value_B: Values, share_B: Values, sum_B: Values, total_B: Values) -> None:
    """sum <- sum + share * value, and total <- total + share."""
    for i in range(value_B.size):
        sum_B[i] += value_B[i] * share_B[i]
        total_B[i] += share_B[i]


@kernel
def divide_within(low_B: Values, high_B: Values, total_B: Values, sum_B: Values) -> None:
    """Sums become means, none outside of its bounds; of both zeros the positive one."""
    for i in range(sum_B.size):
        mean = sum_B[i] / total_B[i]
        mean = low_B[i] if mean < low_B[i] else mean
        mean = high_B[i] if mean > high_B[i] else mean
        sum_B[i] = mean + np.float32(0)


@kernel
def descend(
    descent: np.float32,
    scale: float,
    master_B: Values,
    anchor_B: Values,
    new_B: Values,
    rest_B: Values,
) -> None:
    """Plain SGD. `new_B` holds a gradient that `scale` belongs to, then the new parameters;
    `rest_B` how far those are from the anchor."""
    for i in range(new_B.size):
        new = master_B[i] + descent * np.float32(np.float64(new_B[i]) * scale)
        new_B[i] = new
        rest_B[i] = new - anchor_B[i]


@kernel
def accelerate(
    step: tuple[np.float32, np.float32],
    scale: float,
    master_B: Values,
    trace_B: Values,
    anchor_B: Values,
    new_B: Values,
    new_trace_B: Values,
    rest_B: Values,
) -> None:
    """The same with momentum, looking ahead (Nesterov)."""
    descent, momentum = step
    for i in range(new_B.size):
        gradient = np.float32(np.float64(new_B[i]) * scale)
        trace = gradient + momentum * trace_B[i]
        new_trace_B[i] = trace
        new = master_B[i] + descent * (gradient + momentum * trace)
        new_B[i] = new
        rest_B[i] = new - anchor_B[i]


@kernel
def to_bf16(values_B: Values, out_B: Halves) -> None:
    """Patterns, to nearest, ties to even, NaN staying NaN; and the values that they stand for."""
    for i in range(values_B.size):
        bits = as_bits(values_B[i])
        high = np.int32(bits >> HALF)
        nearest = np.int32(np.int32(np.int32(bits + TIE) + np.int32(high & ONE)) >> HALF)
        quiet = np.int32(np.int32(high & SIGN) | QUIET)
        half = np.int32(quiet if np.int32(bits & MAGNITUDE) > INF else nearest)
        out_B[i] = np.uint16(half)
        values_B[i] = widen(half)
