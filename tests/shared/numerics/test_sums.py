"""Sums of squares: one order, so one result, however the values are cut up."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_shared.numerics import sums
from diloco_shared.numerics.sums import BLOCK, WIDTH, blocks, norm, norm_in, sum_of_squares

EDGES = [1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH - 1, 5 * WIDTH + 17]


def values(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_blocks_do_not_change_the_bits(
    monkeypatch: pytest.MonkeyPatch, size: int, rows: int
) -> None:
    whole = sum_of_squares(values(size))
    monkeypatch.setattr(sums, "BLOCK", rows * WIDTH)
    assert sum_of_squares(values(size)) == whole


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 17])
def test_parts_cut_by_blocks_sum_like_the_whole(size: int) -> None:
    x = values(size + 5)
    where = blocks(size, offset=5)
    assert sum(part.stop - part.start for part in where) == size
    assert norm_in(x[part] for part in where) == norm(x[5:])


@pytest.mark.parametrize("size", EDGES)
def test_the_sum_is_right(size: int) -> None:
    exact = math.fsum(float(x) ** 2 for x in values(size))
    assert sum_of_squares(values(size)) == pytest.approx(exact, rel=1e-13)


def test_the_order_is_the_documented_one() -> None:
    """Rows added one after another, then halves to halves: spelled out in plain Python."""
    x = values(2 * WIDTH + 5)
    rows = [0.0] * WIDTH
    for i, value in enumerate(x):
        rows[i % WIDTH] += float(value) * float(value)
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [rows[i] + rows[half + i] for i in range(half)]
    assert sum_of_squares(x) == rows[0]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30))
def test_a_strided_view_sums_like_a_copy(numbers: list[float]) -> None:
    x = np.array([[n, 0.0] for n in numbers], np.float32).reshape(-1, 2)[:, 0]
    assert sum_of_squares(x) == sum_of_squares(x.copy())


def test_norms_by_hand() -> None:
    assert norm(np.array([3.0, 4.0], np.float32)) == 5.0
    assert norm(np.zeros(3, np.float32)) == 0.0
    # Squares that fp32 could not hold.
    assert norm(np.full(4, 1e38, np.float32)) == pytest.approx(2e38)
    assert norm(np.full(4, 1e-40, np.float32)) == pytest.approx(2e-40, rel=1e-4)


def test_what_is_not_finite_shows() -> None:
    assert math.isinf(norm(np.array([1.0, np.inf], np.float32)))
    assert math.isnan(norm(np.array([1.0, np.nan], np.float32)))
