"""How long a round waits for whoever has not answered yet."""

from types import SimpleNamespace
from typing import Any

from syncer.conftest import spec

from diloco_syncer.rounds.grace import Timings, stragglers_s
from diloco_syncer.rounds.stragglers import Stragglers


def test_whoever_was_left_out_is_given_a_step_of_its_own() -> None:
    """Its step lasts longer than four transfers: asked for no longer, it would never answer."""
    slow = SimpleNamespace(
        answer=SimpleNamespace(or_zero=0.0), missed=0, progress=SimpleNamespace(step_s=16.0)
    )
    roster: Any = SimpleNamespace(members={"slow": slow}, usual_step_s=lambda now: 1.0)
    timings = Timings()
    timings.transfer.update(2.5)
    stragglers = Stragglers(spec().algorithm, roster, timings)
    asked: Any = SimpleNamespace(participants={"slow": 0, "gone": 0})
    assert stragglers.slowest_s(asked, 0.0) == 2.5, "nothing is known of it yet"
    slow.missed = 1
    assert stragglers.slowest_s(asked, 0.0) == 18.5
    assert stragglers.misses(asked) == {"slow": 0}
    slow.missed = 4
    assert stragglers.misses(asked) == {"slow": 3}, "else its upload would never be there in time"
    slow.answer.or_zero = 30.0
    assert stragglers.slowest_s(asked, 0.0) == 30.0


def test_before_there_was_an_answer_a_step_is_what_one_takes() -> None:
    """Of a large model a step takes longer than the least time that a pull gives."""

    def stepping(step_s: float) -> SimpleNamespace:
        return SimpleNamespace(
            answer=SimpleNamespace(or_zero=0.0), missed=0, progress=SimpleNamespace(step_s=step_s)
        )

    both = {"a": stepping(9.0), "b": stepping(7.0)}
    roster: Any = SimpleNamespace(members=both, usual_step_s=lambda now: 7.0)
    timings = Timings()
    stragglers = Stragglers(spec().algorithm, roster, timings)
    asked: Any = SimpleNamespace(participants={"a": 0, "b": 0, "gone": 0})
    assert stragglers.slowest_s(asked, 0.0) == 9.0
    timings.transfer.update(4.0)
    assert stragglers.slowest_s(asked, 0.0) == 4.0, "what answers took is known"


def test_what_builds_on_a_rounds_own_version_is_no_answer_to_it(driver_of: Any) -> None:
    """It was begun after the round: how long it took would look like a slow learner."""
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    for learner in "ab":
        driver.step(learner, 4)
    (pull,) = driver.pulls
    driver.answer(pull, "a")
    driver.wait(4.0)
    (record,) = driver.rounds
    assert {v.learner: v.outcome for v in record.verdicts}["b"] == "missed"
    member = driver.machine.roster.members["b"]
    driver.answer(pull, "b", base=record.version)
    assert member.answer.or_zero == 0.0
    driver.answer(pull, "b", base=record.version - 1)
    assert member.answer.or_zero == 4.0, "one that was only late tells how long it took"
    assert driver.machine.refused["late"] == 2


def test_a_round_leaves_ever_more_time_to_whoever_misses_one_after_another(driver_of: Any) -> None:
    """An upload over a slow link is given up with its round: none would ever arrive."""
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    given_s = dict[int, float]()
    for n in range(3):
        for learner in "ab":
            driver.step(learner, 4)
        pull = next(pull for pull in driver.pulls if pull.round == n)
        assert "b" in pull.participants
        given_s[n] = pull.timeout_s
        driver.answer(pull, "a")
        while len(driver.rounds) <= n:
            driver.wait(2.0)
            driver.step("b")  # it lives, and its answer is on its way
        assert {v.learner: v.outcome for v in driver.rounds[n].verdicts}["b"] == "missed"
    assert given_s[2] >= 2 * given_s[0], "it has missed two in a row"


def test_the_rest_have_what_is_left_of_the_overlap_counted_from_the_opening() -> None:
    roster: Any = SimpleNamespace(members={}, step_s=lambda now: 2.0, usual_step_s=lambda now: 2.0)
    timings, algorithm = Timings(), spec(overlap_steps=20, grace_factor=1.0).algorithm
    timings.transfer.update(0.5)
    slack_s = stragglers_s(
        factor=algorithm.grace_factor, overlap_steps=20, step_s=2.0, timings=timings
    )
    stragglers = Stragglers(algorithm, roster, timings)
    pulled: Any = SimpleNamespace(opened_at=100.0, pulled_at=101.0, unanswered=(), kept={})
    assert slack_s > 4.0, "more than an answer takes"
    assert stragglers.until(pulled, 101.0) == 100.0 + slack_s
    pulled.pulled_at = 200.0
    assert stragglers.until(pulled, 200.0) == 200.0 + 2.5, "a step and a transfer, at least"


def test_the_first_answer_that_comes_too_late_ends_the_distrust_of_waits_in_vain(
    driver_of: Any,
) -> None:
    """They were for what a learner says; from then on it is measured, and lateness counts."""
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    for learner in "ab":
        driver.step(learner, 4)
    (pull,) = driver.pulls
    driver.answer(pull, "a")
    driver.wait(4.0)
    member = driver.machine.roster.members["b"]
    for left in (0, 3):
        member.in_vain = 3
        driver.answer(pull, "b", base=driver.rounds[0].version - 1)
        assert member.in_vain == left
    driver.machine.rounds.stragglers.in_time("b")
    assert (member.missed, member.spent, member.in_vain) == (0, 0, 0)
