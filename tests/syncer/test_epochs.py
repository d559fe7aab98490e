"""An epoch begins because records were lost: what it publishes again, and what it voids."""

from typing import Any

import pytest

from diloco_shared.protocol.messages import TapeEpoch
from diloco_syncer.events import Append, Appended, Publish, Stage, Staged, Unstage


def of(effects: list[Any], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


@pytest.mark.parametrize("version", [1, 3])
def test_a_version_above_the_tape_raises_the_epoch(running: Any, version: int) -> None:
    running.step("a", 1, adopted=(version, 0))
    epochs = [r for r in running.tape if isinstance(r, TapeEpoch)]
    assert len(epochs) == 1 and epochs[0].epoch == 1
    again = of(running.effects, Publish)[-2:]
    assert [(p.fragment, p.epoch, p.prev_version) for p in again] == [(0, 1, -1), (1, 1, -1)]


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
