"""How a fragment is cut for sums of squares, and that they add up."""

import numpy as np
import pytest

from diloco_shared.numerics.sums import RANGE, STRIDE, WIDTH, add_squares, by_piece, cut, fold
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.fragmentation import Layout


@pytest.mark.parametrize("sizes", [[1], [RANGE], [RANGE + 1], [5, RANGE - 5, 7], [3 * RANGE, 1]])
def test_segments_cover_the_fragment_within_one_range_and_piece_each(sizes: list[int]) -> None:
    tensors = [
        TensorSpec(name=f"t{n}", shape=(size,), embedding=False) for n, size in enumerate(sizes)
    ]
    pieces = Layout.build(tensors, 1).fragments[0]
    segments = cut(pieces)
    assert segments.ranges == -(-sum(sizes) // RANGE)
    assert segments.start_S[0] == 0 and segments.stop_S[-1] == sum(sizes)
    np.testing.assert_array_equal(segments.start_S[1:], segments.stop_S[:-1])
    for start, stop, p in zip(segments.start_S, segments.stop_S, segments.piece_S, strict=True):
        assert start // RANGE == (stop - 1) // RANGE
        assert pieces[p].offset <= start < stop <= pieces[p].offset + pieces[p].size
    for r in range(segments.ranges):
        assert segments.start_S[segments.first_R[r]] == r * RANGE
    assert segments.first_R[-1] == segments.start_S.size


def test_the_order_is_the_documented_one() -> None:
    """Rows added one after another, then halves to halves: spelled out in plain Python."""
    x = np.random.default_rng(0).standard_normal(STRIDE).astype(np.float32)
    rows = [0.0] * WIDTH
    for i, value in enumerate(x):
        rows[i % WIDTH] += float(value) * float(value)
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [rows[i] + rows[half + i] for i in range(half)]
    lanes = np.zeros(WIDTH)
    add_squares(x, lanes)
    assert fold(lanes) == rows[0]


def test_sums_of_pieces_round_once_and_show_what_is_not_finite() -> None:
    squares = np.array([1e16, 1.0, 1.0, 4.0, np.inf, 1.0, np.nan])
    found = by_piece(squares, np.array([0, 0, 0, 1, 2, 2, 3]), 4)
    np.testing.assert_array_equal(found, [1e16 + 2, 4.0, np.inf, np.nan])
