"""Curves keep their beginning, thin out, and stay bounded."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from diloco_coordinator.runs.history import RUNS_MAX, SAMPLES_MAX, Histories, useful_share


def test_a_curve_of_any_length_is_bounded_and_keeps_both_ends(status: Callable[..., Any]) -> None:
    """I12."""
    histories = Histories()
    reports = 9 * SAMPLES_MAX
    for second in range(reports):
        histories.add(status(at=float(second)))
        assert len(histories.of("demo")) <= 2 * SAMPLES_MAX
    times = [s["at"] for s in histories.of("demo")]
    assert len({b - a for a, b in pairwise(times)}) == 1, "none is left out between others"
    assert times[0] == 0.0
    assert reports - times[-1] <= 16, "the last point is one spacing old at most"


def test_samples_keep_their_distance(status: Callable[..., Any]) -> None:
    histories = Histories()
    for tenth in range(25):
        histories.add(status(at=tenth / 10))
    assert [s["at"] for s in histories.of("demo")] == [0.0, 1.0, 2.0]


def test_a_leader_whose_clock_is_behind_does_not_end_the_curve(status: Callable[..., Any]) -> None:
    histories = Histories()
    for at in (100.0, 101.0, 40.0, 40.5, 41.0, 42.0):
        histories.add(status(at=at))
    assert [s["at"] for s in histories.of("demo")] == [100.0, 101.0, 40.0, 41.0, 42.0]


def test_runs_are_bounded_and_the_idlest_goes_first(status: Callable[..., Any]) -> None:
    """I12."""
    histories = Histories()
    histories.add(status(run="first"))
    for n in range(RUNS_MAX):
        histories.add(status(run=f"r{n}"))
        if n == 0:
            histories.add(status(run="first", at=200.0))
    assert histories.of("r0") == [] and len(histories.of("first")) == 2


def test_useful_work_is_a_share(status: Callable[..., Any]) -> None:
    assert useful_share(status(tokens_processed=4000, tokens_useful=1000)) == 0.25
    assert useful_share(status(tokens_processed=0, tokens_useful=0)) is None
