"""Figures of a race from the times of steps (bench/racing/timeline.py)."""

import pytest
from racing import timeline


def ticks(begin: float, end: float, step: float = 0.25) -> list[float]:
    return [begin + n * step for n in range(round((end - begin) / step))]


def test_speed_counts_only_what_everybody_was_there_for() -> None:
    workers = {"a": ticks(0, 10), "b": ticks(5, 20, 0.5)}
    # From b's third step (at 6) to a's last (at 9.75): 15 steps of a, 8 of b.
    assert timeline.speed(workers, 2) == pytest.approx((15 + 8) / 3.75)
    with pytest.raises(ValueError, match="no more than 40 steps"):
        timeline.speed(workers, 40)


def test_a_worker_that_never_slowed_is_at_full_speed_at_once() -> None:
    steps = ticks(0, 40)
    assert timeline.full_speed_after(steps, 12.0, 40.0) == 0.0
    assert timeline.lost(steps, 12.0, 40.0) == pytest.approx(0.0)
    assert timeline.longest_pause(steps, 12.0, 40.0) == pytest.approx(0.25)


def test_a_pause_counts_until_what_is_left_of_it_is_a_tenth_of_a_window() -> None:
    steps = ticks(0, 12) + ticks(18, 40)
    # Six seconds without a step; one second of them may lie in the window.
    assert timeline.full_speed_after(steps, 12.0, 40.0) == pytest.approx(5.0, abs=0.3)
    assert timeline.lost(steps, 12.0, 40.0) == pytest.approx(6.0)
    assert timeline.longest_pause(steps, 12.0, 40.0) == pytest.approx(6.0)


def test_who_never_steps_again_is_never_at_full_speed() -> None:
    steps = ticks(0, 12)
    assert timeline.full_speed_after(steps, 12.0, 40.0) is None
    assert timeline.lost(steps, 12.0, 40.0) == pytest.approx(28.0)
