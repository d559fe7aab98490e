"""Inner rates: one place in the schedule for fast, slow and new learners."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics.schedule import inner_rate, position
from diloco_shared.protocol.messages import Stamp
from diloco_shared.spec.run import Inner

quick = examples(60)


def stamp(steps: int, fraction: float = 0.0, per_step: float = 0.01) -> Stamp:
    return Stamp(round=steps, steps=steps, fraction=fraction, fraction_per_step=per_step)


def test_the_warm_up_is_linear_and_ends_at_the_peak() -> None:
    inner = Inner(warmup_steps=4)
    rates = [inner_rate(inner, 2.0, steps, 0.0) for steps in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_the_cosine_falls_from_the_peak_to_the_final_fraction() -> None:
    inner = Inner(warmup_steps=0, final_fraction=0.1)
    assert inner_rate(inner, 2.0, 0, 0.0) == pytest.approx(2.0)
    assert inner_rate(inner, 2.0, 50, 0.5) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert inner_rate(inner, 2.0, 100, 1.0) == pytest.approx(0.2)
    # Beyond the budget nothing rises again.
    assert inner_rate(inner, 2.0, 150, 1.5) == pytest.approx(0.2)


@quick
@given(st.floats(0, 1), st.floats(0, 1))
def test_after_the_warm_up_the_rate_never_rises(a: float, b: float) -> None:
    early, late = min(a, b), max(a, b)
    inner = Inner(warmup_steps=10)
    assert inner_rate(inner, 1.0, 99, late) <= inner_rate(inner, 1.0, 99, early)


def test_a_learner_runs_ahead_of_the_stamp_by_its_own_steps_up_to_the_cap() -> None:
    at = stamp(40, 0.4)
    assert position(at, 0, 6) == pytest.approx((40, 0.4))
    assert position(at, 3, 6) == pytest.approx((43, 0.43))
    # A fast learner waits in the schedule for the run.
    assert position(at, 100, 6) == pytest.approx((46, 0.46))


def test_the_fraction_ends_at_one() -> None:
    assert position(stamp(99, 0.99), 5, 6)[1] == 1.0


@quick
@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1), st.integers(0, 20)), max_size=20),
    st.integers(0, 8),
)
def test_a_position_never_goes_back(seen: list[tuple[int, float, int]], cap: int) -> None:
    """Whatever stamps say, in whatever order they come."""
    here = position(stamp(0), 0, cap)
    for steps, fraction, since in seen:
        new = position(stamp(steps, fraction), since, cap, floor=here)
        assert new[0] >= here[0] and new[1] >= here[1]
        assert new[1] <= 1.0
        assert new[0] <= max(here[0], steps + cap)
        here = new
