"""Sums of squares with one order on every machine: the same values give the same bits.

A fragment is cut at multiples of RANGE and at the ends of its pieces. Within such a segment,
squares go to WIDTH lanes by their place in the fragment, one after another, in double precision;
then halves of the lanes are added to halves. The sums of segments are added by fsum, which rounds
once. So threads may take ranges in any order, and vectors may have any width.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.compiled import kernel
from diloco_shared.spec.fragmentation import Piece

STRIDE = 2048  # values worked on at once: four contributions and their sum take 80 KB
WIDTH = 512  # lanes, 4 KB; a power of two that divides STRIDE
RANGE = 1 << 16  # values one thread takes at least; a multiple of STRIDE

Values = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Segments(NamedTuple):
    """The segments of a fragment, in order: within one range and one piece each."""

    start_S: NDArray[np.int64]
    stop_S: NDArray[np.int64]
    piece_S: NDArray[np.int64]
    first_R: NDArray[np.int64]  # (ranges + 1,): the first segment of every range

    @property
    def ranges(self) -> int:
        return self.first_R.size - 1


def cut(pieces: Sequence[Piece]) -> Segments:
    """Segments of the pieces of one fragment, which lie one after another from 0 on."""
    starts = np.array([p.offset for p in pieces], np.int64)
    size = sum(p.size for p in pieces)
    bounds = np.arange(0, size, RANGE, dtype=np.int64)
    start_S = np.union1d(starts, bounds)
    return Segments(
        start_S,
        np.append(start_S[1:], size),
        np.searchsorted(starts, start_S, side="right") - 1,
        np.append(np.searchsorted(start_S, bounds), start_S.size),
    )


@kernel
def add_squares(values_S: Values, lanes_W: Doubles) -> None:
    """Add the squares of STRIDE values to the lanes."""
    for row in range(0, STRIDE, WIDTH):
        row_W = values_S[row : row + WIDTH]
        for i in range(WIDTH):
            x = np.float64(row_W[i])
            lanes_W[i] += x * x


@kernel
def fold(lanes_W: Doubles) -> float:
    """Sum of the lanes, halves added to halves; they hold rubbish afterwards."""
    half = WIDTH
    while half > 1:
        half //= 2
        for i in range(half):
            lanes_W[i] += lanes_W[half + i]
    return float(lanes_W[0])


def by_piece(squares_S: Doubles, piece_S: NDArray[np.int64], pieces: int) -> Doubles:
    """Sums of squares of every piece from those of the segments; inf or nan when a value is."""
    ends = np.searchsorted(piece_S, np.arange(pieces + 1))
    parts = squares_S.tolist()
    return np.array([math.fsum(parts[a:b]) for a, b in itertools.pairwise(ends)], np.float64)
