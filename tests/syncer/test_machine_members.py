"""Members in the syncer's eyes (I10): admitted, silent, giving state, and what they weigh."""

from typing import Any

import pytest

from diloco_shared.protocol.messages import Join
from diloco_syncer.events import (
    JoinSeen,
    ProgressSeen,
    SendBeat,
    SendDonate,
    SendGrant,
    Stage,
    Tell,
)
from diloco_syncer.history import History
from diloco_syncer.machine import Machine


def of(effects: list[Any], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def test_silence_beyond_the_lease_makes_weight_zero_i10(running: Any) -> None:
    running.step("a", 4)
    running.wait(5.5)
    assert running.machine.announcer.state(running.now)[0] == "starved"
    running.step("a", 4)
    assert not running.pulls, "K = 2, one alive"
    assert any("silent" in t.text for t in of(running.effects, Tell))
    running.step("b", 8)
    assert running.pulls[0].participants == ("a", "b")


def test_an_older_incarnation_is_refused_i10(running: Any) -> None:
    running.join("b", incarnation=1)
    before = running.machine.roster.members["b"]
    running.give(ProgressSeen(running.progress("b", 50, incarnation=0)))
    assert running.machine.roster.members["b"] is before
    assert running.machine.refused["incarnation"] == 1
    grant = of(running.join("b", incarnation=0), SendGrant)[-1].grant
    assert grant.nonce == "b-0"  # a repeat of its own old grant, which cannot help it now
    beat = of(running.wait(1.0), SendBeat)[-1].beat
    assert beat.incarnations["b"] == 1


def test_a_newcomer_gets_a_healthy_donor_which_is_asked_until_it_trains(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    for learner in "ab":
        running.answer(running.pulls[0], learner)
    effects = running.join("c")
    grant = of(effects, SendGrant)[0].grant
    assert grant.accepted and grant.donor in ("a", "b") and grant.versions == (1, 0)
    assert of(effects, SendDonate)[0].donate.newcomer == "c"
    running.step("a")
    assert of(running.wait(2.1), SendDonate)
    running.step("c", 1)
    assert not of(running.wait(2.1), SendDonate)


def test_a_donor_that_failed_is_not_named_again_and_none_is_said_so(running: Any) -> None:
    running.step("a", 4)

    def ask(nonce: str, *failed: str) -> Any:
        join = Join(
            learner="c",
            incarnation=0,
            nonce=nonce,
            config=running.config,
            failed_donors=failed,
        )
        return of(running.give(JoinSeen(join)), SendGrant)[0].grant

    assert ask("n1").donor == "a", "b has taken no step yet"
    grant = ask("n2", "a")
    assert grant.accepted and grant.donor == "" and grant.reason == "no healthy donor"


def test_another_layout_is_refused(running: Any) -> None:
    """A model of another shape under the same name, on a learner whose code differs."""
    grant = of(running.join("c", layout="f" * 32), SendGrant)[0].grant
    assert not grant.accepted and "layout: here " in grant.reason


def test_before_there_are_parameters_the_first_to_join_sets_the_layout(driver: Any) -> None:
    driver.lead()
    driver.join("a", layout="e" * 32)
    assert not of(driver.join("b"), SendGrant)[0].grant.accepted
    assert of(driver.join("c", layout="e" * 32), SendGrant)[0].grant.accepted


def test_another_configuration_is_refused_naming_the_differing_keys(running: Any) -> None:
    effects = running.join("c", **{"algorithm.fragments": "9"})
    grant = of(effects, SendGrant)[0].grant
    assert not grant.accepted
    assert "algorithm.fragments: here 2, there 9" in grant.reason


def test_newcomers_at_once_get_donors_of_their_own(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    donors = {of(running.join(name), SendGrant)[0].grant.donor for name in ("c", "d")}
    assert donors == {"a", "b"}


def test_a_draining_learner_is_merged_but_not_waited_for_nor_a_donor(driver_of: Any) -> None:
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    driver.step("b", 2, state="draining")
    assert driver.machine.roster.stepping(driver.now)[0].learner == "a"
    driver.step("a", 4)
    assert driver.pulls[-1].participants == ("a", "b"), "grace is over: nobody else steps"
    driver.answer(driver.pulls[-1], "b")
    driver.answer(driver.pulls[-1], "a")
    assert [v.outcome for v in driver.rounds[-1].verdicts] == ["merged", "merged"]
    assert of(driver.join("c"), SendGrant)[0].grant.donor == "a"


def test_a_new_leader_lets_no_life_in_that_the_tape_knows_to_be_over_i10(running: Any) -> None:
    running.join("b", incarnation=1)
    running.step("a", 4)
    running.step("b", 4, incarnation=1)
    for learner, incarnation in (("a", 0), ("b", 1)):
        running.answer(running.pulls[0], learner, incarnation=incarnation)
    successor = Machine(running.spec, History(running.spec))
    for seq, record in enumerate(running.tape, 1):
        successor.history.apply(record, seq)
    successor = Machine(running.spec, successor.history)
    successor.handle(ProgressSeen(running.progress("b", 50, incarnation=0)), 0.0)
    assert "b" not in successor.roster.members


@pytest.mark.parametrize(
    ("weighting", "share"), [("quality", 1 / 3), ("tokens", 1 / 3), ("equal", 1 / 2)]
)
def test_contributions_weigh_what_the_run_says(
    driver_of: Any, weighting: str, share: float
) -> None:
    driver = driver_of(weighting=weighting)
    driver.start("a", "b")
    driver.step("a", 4)
    driver.step("b", 8)
    (pull,) = driver.pulls
    driver.answer(pull, "a")
    a, b = of(driver.answer(pull, "b"), Stage)[0].contributions
    assert a.weight / (a.weight + b.weight) == pytest.approx(share)


def test_who_is_still_in_an_older_epoch_is_not_asked(driver_of: Any) -> None:
    """It has nothing to give until it has adopted the new one's anchors."""
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    driver.step("a", 0, epoch=2)  # of records that were lost: epoch 3 begins
    for _ in range(5):
        driver.step("a", 1, epoch=3)
        driver.step("b", 1, epoch=0)
    (pull,) = driver.pulls
    assert (pull.epoch, pull.participants) == (3, ("a",))
    driver.answer(pull, "a")
    (record,) = driver.rounds
    assert {v.learner: v.reason for v in record.verdicts}["b"] == "is in epoch 0, the run in 3"
