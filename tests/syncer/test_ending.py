"""A stop ends a run within its time, whatever the run waits for."""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_shared.protocol.messages import Pull, TapeEnd, TapeInit, TapeRound
from diloco_shared.protocol.records import Restore
from diloco_syncer.events import (
    Append,
    Appended,
    Drop,
    Ended,
    InitSeen,
    Led,
    Publish,
    Published,
    SendBeat,
    SnapshotDone,
    Stage,
    Wanted,
)
from diloco_syncer.leadership.ending import STOP_S

STOP = Wanted(paused=False, stopping=True, quorum=2)


def of(effects: Any, kind: Any) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def ended(driver: Any) -> bool:
    return bool(driver.tape) and isinstance(driver.tape[-1], TapeEnd)


def pulled(driver: Any) -> Pull:
    """Both have taken their steps, and a round is pulled."""
    driver.step("a", 8)
    driver.step("b", 8)
    driver.wait(0.1)
    pull: Pull = driver.pulls[0]
    return pull


def test_a_round_that_waits_for_a_hung_learner_is_skipped(running: Any) -> None:
    """K = 2, one of two learners hangs: the open round never gets its quorum."""
    running.step("a", 8)
    assert [r.phase.value for r in running.machine.rounds.open] == ["collecting"]
    running.give(STOP)
    running.wait(STOP_S - 0.5)
    assert not ended(running), "it may come back"
    running.wait(0.6)
    assert ended(running) and running.tape[-1].outcome == "stopped"
    (skipped,) = running.rounds
    assert (skipped.outcome, skipped.quorum) == ("skipped", 2)
    assert "b is suspect" in skipped.quorum_reason
    assert skipped.quorum_s > 0 and skipped.sync_s == 0
    assert any(isinstance(e, Ended) for e in running.effects)


@pytest.mark.parametrize("quorum, outcome", [(2, "skipped"), (1, "committed")])
def test_a_pull_that_a_hung_learner_does_not_answer(
    driver_of: Callable[..., Any], quorum: int, outcome: str
) -> None:
    """What has come is merged if it is enough."""
    driver = driver_of(quorum=quorum, pull_timeout_s_min=60.0, pull_timeout_s_max=60.0)
    driver.start("a", "b")
    pull = pulled(driver)
    driver.give(Wanted(paused=False, stopping=True, quorum=quorum))
    driver.answer(pull, "a")
    driver.wait(STOP_S + 0.1)
    assert ended(driver)
    assert driver.rounds[0].outcome == outcome


def test_a_publication_that_no_stream_takes_is_not_waited_for(running: Any) -> None:
    pull = pulled(running)
    running.answer(pull, "a")
    # From here on nothing is ever published.
    answer = running._answer
    running._answer = lambda e: [] if isinstance(e, Publish) else answer(e)
    running.answer(pull, "b")
    assert running.rounds[-1].outcome == "committed"
    running.give(STOP)
    running.wait(STOP_S + 0.1)
    assert ended(running)
    assert any(isinstance(e, Ended) for e in running.effects)
    # Whoever leads next publishes it, from the tape.
    r = running.rounds[-1]
    later = running.machine.handle(Led("s2", running.now + 1000.0, (0, 0)), running.now)
    wanted = [(e.fragment, e.version) for e in later if isinstance(e, Publish)]
    assert (r.fragment, r.version) in wanted


def test_bootstrapping_ends_at_once_and_what_comes_late_begins_nothing(driver: Any) -> None:
    driver.lead()
    driver.join("a")
    driver.join("b")
    beat = [e.beat for e in driver.effects if isinstance(e, SendBeat)][-1]
    assert (beat.state, beat.initializer) == ("bootstrapping", "a")
    driver.give(STOP)
    assert ended(driver)
    late = ("up.t.a.init.0.0", "up.t.a.init.0.1")
    told = driver.give(InitSeen("a", 0, driver.machine.history.config_hash, (), late, (), (), True))
    assert told == [Drop(subject) for subject in late], "nobody will ever read them"
    assert not any(isinstance(r, TapeInit) for r in driver.tape)


def test_waiting_for_learners_that_never_join_ends_at_once(driver: Any) -> None:
    driver.lead()
    driver.give(STOP)
    assert ended(driver)


def test_a_restore_that_never_comes_is_not_waited_for(running: Any) -> None:
    wish = Restore(serial=1, source="t/000001")
    running.give(Wanted(paused=False, stopping=True, quorum=2, restore=wish))
    assert not ended(running)
    running.wait(STOP_S + 0.1)
    assert ended(running)


def test_history_that_goes_on_where_it_had_ended_has_an_end_of_its_own(running: Any) -> None:
    running.give(STOP)
    running.wait(STOP_S + 0.1)
    ending, rounds = running.machine.ending, running.machine.rounds
    assert ended(running) and ending.told and ending.due and rounds.stopped
    ending.restored()
    assert not (ending.told or ending.due or rounds.stopped)


def test_while_learners_train_a_stop_waits_for_its_time_even_between_rounds(running: Any) -> None:
    for learner in "ab":
        running.step(learner, 1)
    running.give(STOP)
    running.wait(STOP_S - 0.5)
    for learner in "ab":
        running.step(learner, 1)
    assert not ended(running)
    running.wait(0.6)
    assert ended(running)


def test_a_paused_run_stops(running: Any) -> None:
    running.give(Wanted(paused=True, stopping=False, quorum=2))
    running.step("a", 8, state="paused")
    running.step("b", 8, state="paused")
    running.give(STOP)
    running.wait(STOP_S + 0.1)
    assert ended(running)


def test_the_next_leader_of_a_stop_has_its_own_time(running: Any) -> None:
    running.step("a", 8)
    running.give(STOP)
    assert running.machine.history.stopping and not ended(running)
    history = running.machine.history
    running.machine = type(running.machine)(running.spec, history)
    running.now += 20.0
    running.give(Led("s2", 1000.0 + running.now, (0, 0)))
    running.step("a", 1)
    running.step("b", 0)
    running.step("a", 20)
    running.wait(STOP_S + 0.1)
    assert ended(running)


def test_a_merge_under_way_is_recorded_before_the_end(driver_of: Callable[..., Any]) -> None:
    """What this process computes itself ends by itself: the end waits, and nothing more opens."""
    running = driver_of(overlap_steps=8)  # two rounds in flight
    running.start("a", "b")
    pull = pulled(running)
    running.answer(pull, "a")
    answer, staged = running._answer, []

    def answered(effect: Any) -> list[Any]:
        if isinstance(effect, Stage):
            staged.append(effect)
            return []
        found: list[Any] = answer(effect)
        return found

    running._answer = answered
    running.answer(pull, "b")
    running.give(STOP)
    running.wait(STOP_S + 1.0)
    there = [r.n for r in running.machine.rounds.open]
    for learner in ("a", "b", "a", "b"):
        running.step(learner, 8)
    assert not ended(running)
    assert [r.n for r in running.machine.rounds.open] == there
    running._answer = answer
    running._answer(staged[0])
    assert ended(running)
    outcomes = [r.outcome for r in running.rounds]
    assert outcomes == ["committed"] + ["skipped"] * (len(there) - 1) and len(there) > 1


def test_pause_takes_effect_before_there_are_parameters(driver: Any) -> None:
    driver.lead()
    driver.join("a")
    driver.join("b")
    driver.give(Wanted(paused=True, stopping=False, quorum=2))
    beat = [e.beat for e in driver.effects if isinstance(e, SendBeat)][-1]
    assert (beat.state, beat.initializer) == ("paused", "")
    driver.give(Wanted(paused=False, stopping=False, quorum=2))
    driver.wait(1.1)
    beat = [e.beat for e in driver.effects if isinstance(e, SendBeat)][-1]
    assert (beat.state, beat.initializer) == ("bootstrapping", "a")


def test_nothing_opens_after_a_stop_has_had_its_time(running: Any) -> None:
    running.step("a", 8)
    running.give(STOP)
    running.wait(STOP_S + 0.1)
    for _ in range(10):
        running.step("a", 4)
        running.step("b", 4)
    assert len([r for r in running.tape if isinstance(r, TapeRound)]) == 1


def test_nothing_opens_while_the_end_is_on_its_way_to_the_tape(running: Any) -> None:
    """Its record would not be taken any more, and the end would wait for it without end."""
    running.now += 6.0  # longer than b's lease
    running.step("a", 8)
    running.auto = False
    running.give(STOP)
    for end in (False, True):
        record = of(running.effects, Append)[-1].record
        assert isinstance(record, TapeEnd) == end
        if end:
            running.step("b", 8)
            assert not running.machine.rounds.open
        running.tape.append(record)
        running.give(Appended(len(running.tape), 1000.0 + running.now))
    assert of(running.effects, Ended)


def test_no_record_follows_the_end_that_is_on_its_way_to_the_tape(running: Any) -> None:
    """Such as that of a snapshot which is durable just then."""
    running.now += 6.0  # longer than both leases
    running.auto = False
    running.give(STOP)
    while not isinstance(of(running.effects, Append)[-1].record, TapeEnd):
        running.tape.append(of(running.effects, Append)[-1].record)
        running.give(Appended(len(running.tape), 1000.0 + running.now))
    running.give(SnapshotDone(len(running.tape), -1, "here"))
    seen = running.give(Appended(len(running.tape) + 1, 1000.0 + running.now))
    assert of(seen, Ended) and not of(seen, Append)
    assert not running.machine.to_append


def test_what_is_open_at_the_end_is_void(running: Any) -> None:
    pull = pulled(running)
    running.answer(pull, "a")
    h = running.machine.history
    end = TapeEnd(term=h.term, outcome="stopped", reason="", versions=tuple(h.versions), at=1.0)
    running.machine.appending = end
    seen = running.give(Appended(len(running.tape) + 1, 1000.0 + running.now))
    assert not running.machine.rounds.open
    assert len(of(seen, Drop)) == 1
    assert of(seen, Ended)


def test_published_after_the_end_changes_nothing(running: Any) -> None:
    running.give(STOP)
    running.wait(STOP_S + 0.1)
    before = len(running.tape)
    running.give(Published(0, -1, 0, 0, True))
    assert len(running.tape) == before
