"""Curves keep their beginning, thin out, and stay bounded."""

import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from diloco_coordinator.runs import history
from diloco_coordinator.runs.history import (
    LEARNERS_MAX,
    RUNS_MAX,
    SAMPLES_MAX,
    VALUES_MAX,
    Histories,
    useful_share,
)


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


def learners(count: int) -> dict[str, Any]:
    """Of a status: the losses of so many learners are 0, 1, 2 …"""
    return {f"learner-{n}": {"state": "stepping", "loss": float(n)} for n in range(count)}


def test_of_many_learners_a_sample_has_three_losses(status: Callable[..., Any]) -> None:
    histories = Histories()
    histories.add(status(learners=learners(LEARNERS_MAX)))
    few, no_range = histories.of("demo")[0]["loss"], histories.of("demo")[0]["loss_range"]
    assert len(few) == LEARNERS_MAX and no_range is None
    more = learners(LEARNERS_MAX + 1) | {"new": {"state": "joining", "loss": None}}
    histories.add(status(at=200.0, learners=more))
    many = histories.of("demo")[1]
    assert many["loss"] == {}
    assert many["loss_range"] == {"min": 0.0, "median": LEARNERS_MAX / 2, "max": LEARNERS_MAX}
    new = {f"new-{n}": {"state": "joining", "loss": None} for n in range(LEARNERS_MAX + 1)}
    histories.add(status(at=300.0, learners=new))
    assert histories.of("demo")[2]["loss_range"] is None


def test_all_runs_together_are_bounded_in_memory(
    status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: the largest curve is thinned, and each keeps its beginning."""
    monkeypatch.setattr(history, "VALUES_MAX", 2000)
    histories = Histories()
    of_run = status(learners=learners(LEARNERS_MAX))
    tracemalloc.start()
    for second in range(100):
        for run in ("a", "b", "c"):
            shown = {m: {"loss": second + 0.5} for m in of_run.learners}
            changes = {"run": run, "at": float(second), "learners": shown}
            histories.add(of_run.model_copy(update=changes))
            assert histories.values <= 2000
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert histories.values == sum(c.values for c in histories.curves.values())
    assert all(histories.of(run)[0]["at"] == 0.0 for run in "abc")
    assert min(len(histories.of(run)) for run in "abc") >= 5
    assert taken / histories.values * VALUES_MAX < 10e6, "all that histories may take, in bytes"
    for run in "abc":
        histories.forget(run)
    assert histories.values == 0


def test_useful_work_is_a_share(status: Callable[..., Any]) -> None:
    assert useful_share(status(tokens_processed=4000, tokens_useful=1000)) == 0.25
    assert useful_share(status(tokens_processed=0, tokens_useful=0)) is None
