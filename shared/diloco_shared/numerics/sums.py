"""Sums with one order on every machine: the same inputs give the same bits.

numpy's own sum over contiguous values depends on the width of the processor's vectors. Here rows
of fixed width are added one after another, element by element, then halves are added to halves.
"""

import numpy as np
from numpy.typing import NDArray

WIDTH = 4096  # a power of two; a row of doubles is 32 KB and stays in the first-level cache
BLOCK = 1 << 20  # values converted to double at once: bounds the extra memory to 8 MB


def sum_of_squares(values_F: NDArray[np.float32]) -> float:
    """Sum of x^2 in double precision; inf or nan when a value is."""
    total = np.zeros(WIDTH, dtype=np.float64)
    for start in range(0, values_F.size, BLOCK):
        squares = values_F[start : start + BLOCK].astype(np.float64)
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
