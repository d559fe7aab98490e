"""Phases of a learner's return, and rounds until it is merged again."""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_shared.protocol.messages import Progress, RecoveryTimes, TapeRound, Verdict
from diloco_syncer.events import Tell
from diloco_syncer.history.history import History
from diloco_syncer.members.recoveries import RECOVERIES_MAX, ROUNDS_MAX, Recoveries

Report = Callable[..., Progress]


@pytest.fixture
def report(running: Any) -> Report:
    """A report of an incarnation at a step, with its process's times if given."""

    def make(learner: str, incarnation: int, step: int = 0, **times: Any) -> Progress:
        told = RecoveryTimes(**times) if times else None
        made: Progress = running.progress(learner, step, incarnation=incarnation, recovery=told)
        return made

    return make


def closed(running: Any, n: int, at: float, *merged: tuple[str, int]) -> TapeRound:
    verdicts = tuple(
        Verdict(learner=learner, incarnation=incarnation, outcome="merged", reason="in time")
        for learner, incarnation in merged
    )
    return TapeRound(
        epoch=0,
        term=1,
        round=n,
        fragment=0,
        outcome="committed",
        reason="",
        quorum_reason="",
        quorum=1,
        version=n + 1,
        verdicts=verdicts,
        keyframe=False,
        anchor_digest="",
        master_digest="",
        payload_digest="",
        stamp=running.machine.history.stamp,
        quorum_s=0.0,
        grace_s=0.0,
        sync_s=0.0,
        at=at,
    )


def tells(recoveries: Recoveries, record: TapeRound) -> list[Tell]:
    return list(recoveries.closed(record))


def test_every_phase_is_dated_and_rounds_are_counted_from_the_process(
    running: Any, report: Report
) -> None:
    r = Recoveries()
    r.spoke(report("b", 0, 9), 100.0)
    assert r.shown == {}, "it was there before"
    r.silent("b", 105.0)
    for n in range(6):
        assert tells(r, closed(running, n, 100.0 + 2 * n, ("a", 0))) == []
    # Started at 106, seen first at 108, in hand at 109.
    r.spoke(report("b", 1, age_s=2.0, granted_s=1.5), 108.0)
    times = {"granted_s": 1.5, "donor_s": 1.5, "settled_s": 3.0, "stepping_s": 4.0}
    r.spoke(report("b", 1, age_s=3.9, donor="a", attempts=1), 110.1)
    done: dict[str, Any] = {"donor": "a", "source": "donor", "attempts": 1, **times}
    r.spoke(report("b", 1, 3, age_s=5.0, **done), 111.2)
    assert tells(r, closed(running, 6, 112.0, ("a", 0))) == []
    (told,) = tells(r, closed(running, 7, 114.0, ("a", 0), ("b", 1)))
    assert told.kind == "returned"
    assert told.text == (
        "the first work of b (life 1) was merged, in round 7, 4 rounds after its process started"
    )
    (record,) = r.shown.values()
    assert told.data == record.model_dump()
    assert told.data == {
        "learner": "b",
        "incarnation": 1,
        "lost_at": 100.0,
        "detected_at": 105.0,
        "restarted_at": 106.0,
        "joined_at": 107.5,
        "donor_at": 107.5,
        "transferred_at": 109.0,
        "stepping_at": 110.0,
        "contributed_at": 114.0,
        "donor": "a",
        "source": "donor",
        "attempts": 1,
        "rounds": 4,
    }
    # What is over does not change, and is told once.
    r.spoke(report("b", 1, 9, age_s=50.0), 160.0)
    assert (
        tells(r, closed(running, 8, 170.0, ("b", 1))) == []
        and next(iter(r.shown.values())) == record
    )


def test_a_process_that_is_back_before_its_lease_ran_out_is_detected_by_speaking(
    report: Report,
) -> None:
    r = Recoveries()
    r.spoke(report("b", 0, 9), 100.0)
    r.spoke(report("b", 1, age_s=1.0), 102.0)
    (record,) = r.shown.values()
    assert (record.lost_at, record.detected_at, record.restarted_at) == (100.0, 102.0, 101.0)


def test_a_newcomer_has_lost_nothing_and_the_first_ones_are_not_recoveries(
    running: Any, report: Report
) -> None:
    r = Recoveries(History(running.spec))
    r.spoke(report("a", 0, age_s=1.0), 90.0)
    assert not r.shown
    r.history = None
    r.spoke(report("c", 0, age_s=1.0), 102.0)
    assert [(x.learner, x.lost_at, x.detected_at) for x in r.shown.values()] == [("c", 0.0, 0.0)]


def test_a_leader_that_came_later_counts_no_rounds(running: Any, report: Report) -> None:
    r = Recoveries()
    r.spoke(report("b", 1, age_s=30.0), 100.0)
    (told,) = tells(r, closed(running, 5, 101.0, ("b", 1)))
    assert told.data["rounds"] == -1


def test_what_is_kept_is_bounded_i12(running: Any, report: Report) -> None:
    r = Recoveries()
    for n in range(RECOVERIES_MAX + 5):
        r.spoke(report("b", n, age_s=1.0), 100.0 + n)
    assert len(r.shown) == RECOVERIES_MAX and ("b", 4) not in r.shown
    for n in range(ROUNDS_MAX + 5):
        tells(r, closed(running, n, 1000.0 + n))
    assert len(r.rounds) == ROUNDS_MAX and r.complete_since == 1005.0
