"""Whose turn it is in a mixture: exact shares, and the same for everybody."""

from fractions import Fraction

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.corpora.mix import (
    DRAWS_MAX,
    PARTS_MAX,
    Interleave,
    Mixture,
    whole_weights,
)

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(tuple)


@given(WEIGHTS, st.integers(0, 20))
@examples(100)
def test_after_a_round_every_corpus_has_exactly_its_weight(
    weights: tuple[int, ...], rounds: int
) -> None:
    mix, total = Interleave(weights), sum(weights)
    whose, _ = mix.at(np.arange(rounds * total, (rounds + 1) * total))
    assert tuple(np.bincount(whose, minlength=len(weights))) == weights
    assert mix.counts(rounds * total) == tuple(rounds * w for w in weights)


@given(WEIGHTS, st.integers(1, 300))
@examples(100)
def test_every_beginning_has_its_shares(weights: tuple[int, ...], draws: int) -> None:
    mix, total = Interleave(weights), sum(weights)
    whose, _ = mix.at(np.arange(draws))
    counts = np.bincount(whose, minlength=len(weights))
    assert mix.counts(draws) == tuple(counts)
    for place, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        assert abs(count - Fraction(draws * weight, total)) <= place + 1


@given(WEIGHTS, st.integers(0, 1000))
@examples(100)
def test_draws_of_a_corpus_are_counted_without_a_gap(weights: tuple[int, ...], start: int) -> None:
    mix = Interleave(weights)
    draws = np.arange(start, start + 200)
    whose, within = mix.at(draws)
    before = mix.counts(start)
    for corpus in range(len(weights)):
        mine = within[whose == corpus]
        np.testing.assert_array_equal(mine, before[corpus] + np.arange(len(mine)))
    # Any draw can be asked for by itself, in any order.
    other, inner = mix.at(draws[::-1])
    np.testing.assert_array_equal(other[::-1], whose)
    np.testing.assert_array_equal(inner[::-1], within)


def test_the_last_draws_that_there_may_be_do_not_overflow() -> None:
    mix = Interleave((PARTS_MAX // 2 - 1, 1, PARTS_MAX // 2))
    draws = np.arange(DRAWS_MAX - 8, DRAWS_MAX)
    whose, within = mix.at(draws)
    assert set(whose) <= {0, 1, 2} and within.min() >= 0
    counts = mix.counts(DRAWS_MAX)
    assert sum(counts) == DRAWS_MAX and abs(counts[2] - DRAWS_MAX // 2) < 8


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((1.0,), (1,)),
        ((0.7, 0.3), (7, 3)),
        ((1, 1, 2), (1, 1, 2)),
        ((50, 25, 25), (2, 1, 1)),
        ((0.1, 0.2), (1, 2)),
    ],
)
def test_weights_are_taken_as_they_are_written(
    weights: tuple[float, ...], whole: tuple[int, ...]
) -> None:
    assert whole_weights(weights) == whole


def test_weights_of_many_digits_are_rounded_alike_everywhere() -> None:
    whole = whole_weights((1 / 3, 2 / 3))
    assert sum(whole) <= PARTS_MAX and abs(whole[1] / sum(whole) - 2 / 3) < 1e-5
    with pytest.raises(ValueError, match="leave that corpus out"):
        whole_weights((1e-9, 1.0))


@pytest.mark.parametrize("weights", [(), (0.0,), (1.0, -1.0), (float("nan"),), (float("inf"),)])
def test_what_is_no_weight_is_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weights must be numbers above 0"):
        whole_weights(weights)


def test_a_mixture_of_nothing_is_none() -> None:
    with pytest.raises(ValueError, match="0 corpora and 0 weights"):
        Mixture((), ())
