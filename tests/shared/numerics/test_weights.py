"""Weights of contributions: tokens squared over steps."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics.merge import weight


def test_tokens_squared_over_steps() -> None:
    assert weight(600, 6) == 60_000.0
    # Quantity times quality: 600 tokens of 100 per step.
    assert weight(600, 6) == 600 * (600 / 6)
    # Twice the steps at one batch size: twice the weight. Twice the batch: four times.
    assert weight(1200, 12) == 2 * weight(600, 6)
    assert weight(1200, 6) == 4 * weight(600, 6)


def test_other_rules_leave_out_what_a_learner_is_worth() -> None:
    assert weight(600, 6, "tokens") == weight(600, 12, "tokens") == 600.0
    assert weight(600, 6, "equal") == weight(7, 1, "equal") == 1.0
    assert weight(0, 6, "equal") == weight(600, 0, "tokens") == 0.0


@pytest.mark.parametrize(("tokens", "steps"), [(0, 0), (0, 5), (5, 0), (-1, 5), (5, -1)])
def test_nothing_done_weighs_nothing(tokens: int, steps: int) -> None:
    assert weight(tokens, steps) == 0.0


@examples(50)
@given(st.integers(1, 2**40), st.integers(1, 2**20))
def test_more_tokens_never_weigh_less_and_more_steps_never_more(tokens: int, steps: int) -> None:
    assert 0 < weight(tokens, steps) <= weight(tokens + 1, steps)
    assert weight(tokens, steps + 1) <= weight(tokens, steps)
