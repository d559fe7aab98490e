"""Sums with one order on every machine: the same inputs give the same bits.

numpy's own sum over contiguous values depends on the width of the processor's vectors. Here rows
of fixed width are added one after another, element by element, then halves are added to halves.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

WIDTH = 4096  # a power of two; a row of doubles is 32 KB and stays in the first-level cache
BLOCK = 1 << 16  # values worked on at once, whole rows: in doubles they fill half a megabyte


def blocks(size: int, offset: int = 0) -> list[slice]:
    """`size` values from `offset` on, cut into slices of BLOCK; the last may be shorter."""
    stop = offset + size
    return [slice(a, min(a + BLOCK, stop)) for a in range(offset, stop, BLOCK)]


def sum_of_squares(values_F: NDArray[np.float32]) -> float:
    """Sum of x^2 in double precision; inf or nan when a value is."""
    return sum_of_squares_in(values_F[where] for where in blocks(values_F.size))


def sum_of_squares_in(parts: Iterable[NDArray[np.float32]]) -> float:
    """The same, to the bit, of values that come in parts cut by `blocks`."""
    total = np.zeros(WIDTH, dtype=np.float64)
    for part_B in parts:
        squares = part_B.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(squares, squares, out=squares)
        for row in range(0, squares.size, WIDTH):
            part = squares[row : row + WIDTH]
            total[: part.size] += part
    half = WIDTH
    while half > 1:
        half //= 2
        total = total[:half] + total[half:]
    return float(total[0])


def norm(values_F: NDArray[np.float32]) -> float:
    """Euclidean norm, order-fixed."""
    return float(np.sqrt(sum_of_squares(values_F)))


def norm_in(parts: Iterable[NDArray[np.float32]]) -> float:
    """The same, to the bit, of values that come in parts cut by `blocks`."""
    return float(np.sqrt(sum_of_squares_in(parts)))
