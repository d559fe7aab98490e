"""A standstill that nothing explains is said; whatever explains one is said instead."""

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_shared.spec import quorum
from diloco_shared.spec.quorum import QuorumAnswer
from diloco_syncer.events import BusBack, Led, MergeWaits, Tell, Wanted
from diloco_syncer.history import history
from diloco_syncer.rounds.round import Phase


def state(driver: Any) -> tuple[str, str]:
    found: tuple[str, str] = driver.machine.announcer.state(driver.now)
    return found


def steps_on(driver: Any, seconds: int, *, steps: int = 0) -> None:
    """Both report every second; nobody answers a pull."""
    for _ in range(seconds):
        driver.wait(1.0)
        for learner in ("a", "b"):
            driver.step(learner, steps)


def test_learners_that_step_and_no_round_ever(running: Any) -> None:
    running.machine.rounds.suspended = ""
    running.machine.rounds.stopped = True  # a fault: nothing opens, for no reason
    steps_on(running, 15, steps=1)
    assert state(running)[0] == "running"
    steps_on(running, 60, steps=1)
    shown, why = state(running)
    assert shown == "stuck"
    assert "no reason is known: no round is open" in why
    assert running.machine.announcer.watchdog.seconds_since_round(running.now) > 60
    told = [e.text for e in running.effects if isinstance(e, Tell) and e.kind == "stuck"]
    assert len(told) == 1, "once"


def test_a_learner_in_its_first_step_is_awaited_however_long_its_steps_are(running: Any) -> None:
    """It has yet to say how long one takes: a minute, of a large model."""
    running.machine.rounds.stopped = True
    shown = {}
    for second in range(1, 702):
        running.wait(1.0)
        running.step("a", 0, step_s=0.0)
        running.step("b", 0)
        shown[second] = state(running)[0]
    assert {shown[second] for second in range(1, 600)} == {"running"}
    assert shown[701] == "stuck", "and that does not take for ever"


def test_a_round_that_hangs_is_named_with_whom_it_awaits(running: Any) -> None:
    running.step("a", 8)
    running.step("b", 8)
    running.wait(0.1)
    (r,) = running.machine.rounds.open
    r.deadline = 1e6  # a fault
    steps_on(running, 40)
    assert state(running)[0] == "running", "a deadline of its own explains it"
    r.pulled_at = r.deadline - 1.0
    shown, why = state(running)
    assert shown == "stuck"
    assert "round 0 of fragment 0 pulling for " in why and "awaits a, b" in why


def test_a_round_that_closes_at_its_deadline_moves_while_its_merge_is_computed(
    running: Any,
) -> None:
    running.step("a", 8)
    running.step("b", 8)
    running.wait(0.1)
    (r,) = running.machine.rounds.open
    r.deadline = running.now + 60.5  # a slow link
    steps_on(running, 60)
    r.phase, r.closed_at, r.deadline = Phase.STAGING, running.now, running.now
    assert state(running)[0] == "running", "its merge is being computed"
    steps_on(running, 60)
    assert state(running)[0] == "stuck", "and that does not take for ever"


def test_a_merge_that_waits_for_a_disk_is_no_standstill(running: Any) -> None:
    running.machine.rounds.stopped = True
    running.give(MergeWaits(0, "the disk of snapshots", 1.0))
    steps_on(running, 120, steps=1)
    assert state(running)[0] == "running"
    running.give(MergeWaits(0, "", 120.0))
    steps_on(running, 120, steps=1)
    assert state(running)[0] == "stuck"


def test_a_stated_reason_is_no_standstill_and_patience_begins_after_it(running: Any) -> None:
    running.machine.rounds.stopped = True
    running.give(Wanted(paused=True, stopping=False, quorum=2))
    steps_on(running, 120)
    assert state(running)[0] == "paused"
    running.give(Wanted(paused=False, stopping=False, quorum=2))
    steps_on(running, 5)
    assert state(running)[0] == "running"
    running.wait(120.0)
    assert state(running)[0] == "starved"
    steps_on(running, 2)
    assert state(running)[0] == "running", "they have just come back"


def test_time_without_the_bus_does_not_count(running: Any) -> None:
    running.machine.rounds.stopped = True
    for _ in range(60):
        steps_on(running, 1)
        running.give(BusBack())
    assert state(running)[0] == "running"


def test_learners_on_their_way_are_awaited_and_the_run_is_not_starved(driver: Any) -> None:
    driver.start("a", "b")
    driver.step("a", 0, state="recovering")
    driver.step("b", 0, state="joining")
    assert state(driver) == ("waiting", "for the first step of a, b: they recover or compile")
    driver.step("a", 0)
    assert state(driver) == ("waiting", "for the first step of b: they recover or compile")


def test_a_quorum_that_cannot_be_reached_names_both_ways_out(running: Any) -> None:
    running.give(Wanted(paused=False, stopping=False, quorum=5))
    assert state(running) == (
        "starved",
        "starved (2 train, 5 needed): 3 more learners are needed, or 'diloco quorum t 2'",
    )
    running.wait(6.0)
    assert state(running) == ("starved", "starved (0 train, 5 needed): 5 more learners are needed")


def test_another_k_is_no_way_out_where_the_policy_asks_for_more(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wants_c(k: int) -> Any:
        none = QuorumAnswer(False, 1, "c needed")
        return SimpleNamespace(answer=lambda learners: none)

    monkeypatch.setattr(quorum, "policy", wants_c)
    monkeypatch.setattr(history, "policy", wants_c)
    assert state(running) == ("starved", "starved (2 train, c needed): 1 more learner is needed")


def test_a_fresh_leader_has_not_heard_of_anybody(running: Any) -> None:
    running.machine = type(running.machine)(running.spec, running.machine.history)
    running.give(Led("s2", 1000.0 + running.now, (0, 0)))
    assert state(running)[0] == "waiting"
    running.wait(6.0)
    assert state(running)[0] == "starved"
