"""An epoch begins because records were lost: what it publishes again, and what it voids."""

from typing import Any

import pytest

from diloco_shared.protocol.messages import COUNT_MAX, Join, TapeCheckpoint, TapeEpoch
from diloco_syncer.events import (
    Append,
    Appended,
    JoinSeen,
    NumberFound,
    Publish,
    PurgeUp,
    Stage,
    Staged,
    Unstage,
    Wanted,
)
from diloco_syncer.members.claims import AGAIN_S, AT_ONCE


def of(effects: list[Any], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


@pytest.mark.parametrize("version", [1, 3])
def test_a_version_above_the_tape_raises_the_epoch(running: Any, version: int) -> None:
    running.step("a", 1, adopted=(version, 0))
    epochs = [r for r in running.tape if isinstance(r, TapeEpoch)]
    assert len(epochs) == 1 and epochs[0].epoch == 1
    again = of(running.effects, Publish)[-2:]
    assert [(p.fragment, p.epoch, p.prev_version) for p in again] == [(0, 1, -1), (1, 1, -1)]


def test_what_was_to_leave_up_stays_once_history_begins_again(running: Any) -> None:
    """After a restore rounds have the same numbers again, and nothing covers those."""
    running.machine.covered = 7
    running.machine.published = (-1, 0)
    running.step("a", 1, adopted=(3, 0))
    assert running.machine.covered is None
    assert PurgeUp(7) not in of(running.effects, PurgeUp)


@pytest.mark.parametrize("staged_first", [True, False])
def test_a_merge_that_an_epoch_voids_is_forgotten(running: Any, staged_first: bool) -> None:
    """I12: whether its merge was computed before the epoch began or after."""
    for learner in "ab":
        running.step(learner, 4)
    running.auto = False
    for learner in "ab":
        running.answer(running.pulls[-1], learner)
    (stage,) = of(running.effects, Stage)
    running.step("a", 1, adopted=(3, 0))
    assert isinstance(of(running.effects, Append)[-1].record, TapeEpoch)
    digest = "0" * 32
    facts = [
        Staged(stage.epoch, stage.round, digest, digest, digest),
        Appended(running.machine.history.seq + 1, 1000.0),
    ]
    for fact in facts if staged_first else reversed(facts):
        assert not of(running.effects, Unstage)
        running.give(fact)
    assert of(running.effects, Unstage) == [Unstage(stage.epoch, stage.round)]


def test_who_says_again_and_again_that_records_were_lost_is_believed_no_more_i11(
    running: Any,
) -> None:
    """Each epoch voids what is under way. Others are believed as before, and it after a while."""
    for _ in range(AT_ONCE + 3):
        running.step("a", 1, adopted=(7, 0))
    assert running.machine.history.epoch == AT_ONCE
    assert running.machine.refused["epoch"] == 3
    running.step("a", 1, epoch=AT_ONCE + 1)
    assert running.machine.history.epoch == AT_ONCE and running.machine.refused["epoch"] == 4
    running.step("b", 1, adopted=(7, 0))
    assert running.machine.history.epoch == AT_ONCE + 1
    running.wait(AGAIN_S)
    running.step("a", 1, adopted=(7, 0))
    assert running.machine.history.epoch == AT_ONCE + 2


def test_a_word_that_nothing_can_follow_now_is_not_used_up(running: Any) -> None:
    running.auto = False
    for _ in range(AT_ONCE + 1):
        running.step("a", 1, adopted=(7, 0))
    assert len(of(running.effects, Append)) == len(running.tape) + 1
    assert not running.machine.refused["epoch"]


@pytest.mark.parametrize("shards", [1, 2])
def test_no_learner_uses_the_numbers_of_epochs_up_i11(driver_of: Any, shards: int) -> None:
    """At the largest number that a message holds no epoch could follow, and no leader lead on."""
    driver = driver_of(shards=shards)
    driver.start("a", "b")
    driver.step("a", 1, epoch=COUNT_MAX)
    driver.step("b", 1, epoch=COUNT_MAX - 1)
    ahead = Join(learner="c", incarnation=0, nonce="n", config=driver.config, epoch=COUNT_MAX)
    driver.give(JoinSeen(ahead))
    assert driver.machine.history.epoch == 0
    assert driver.machine.refused["epoch"] == 3
    assert driver.machine.user_requests.restoring.heard == (0, 0)
    driver.step("a", 1, epoch=300)
    assert driver.machine.history.epoch == 300 + (shards == 1)


def test_records_go_to_the_tape_in_the_order_in_which_they_were_decided(running: Any) -> None:
    """One is under way: what follows waits, the first to come first."""
    running.auto = False
    running.give(Wanted(paused=False, stopping=False, quorum=2, checkpoint=1))
    running.give(NumberFound(0))
    (begun,) = of(running.effects, Append)[-1:]
    assert isinstance(begun.record, TapeCheckpoint)
    running.step("a", 1, adopted=(3, 0))
    running.give(Wanted(paused=False, stopping=False, quorum=1, checkpoint=1))
    told = []
    for _ in range(3):
        running.tape.append(of(running.effects, Append)[-1].record)
        told.append(running.tape[-1].kind)
        running.give(Appended(len(running.tape), 1000.0))
    assert told == ["checkpoint", "epoch", "setting"]
