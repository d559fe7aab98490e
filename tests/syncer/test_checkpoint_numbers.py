"""A checkpoint begins above all numbers that are taken, and not while its run goes back."""

from typing import Any

import pytest

from diloco_shared.protocol.messages import TapeCheckpoint, TapeRestore
from diloco_shared.protocol.records import Restore
from diloco_syncer.events import Append, FindNumber, Led, Loaded, NumberFound, Sealed, Wanted
from diloco_syncer.machine import Machine


def wanted(checkpoint: int, restore: Restore | None = None) -> Wanted:
    return Wanted(paused=False, stopping=False, quorum=2, checkpoint=checkpoint, restore=restore)


def of(effects: Any, kind: Any) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def begun(driver: Any) -> list[int]:
    return [r.number for r in of(driver.tape, TapeCheckpoint) if r.outcome == "begun"]


@pytest.mark.parametrize(("there", "number"), [(0, 5), (4, 5), (5, 6), (8, 9)])
def test_a_number_that_the_tape_has_lost_does_not_come_again(
    running: Any, there: int, number: int
) -> None:
    """Learners have met its mark and give no other part for it; and what was written lies there."""
    running.there = there
    running.give(wanted(5))
    assert begun(running) == [number]
    running.give(Sealed(number))
    running.give(wanted(5))
    assert begun(running) == [number], "the wish is fulfilled"
    running.there = 20
    running.give(wanted(number + 1))
    assert begun(running) == [number, 21], "it is looked for anew each time"


def test_no_mark_is_set_before_it_is_known_which_numbers_are_taken(running: Any) -> None:
    running.auto = False
    seen = running.give(wanted(5))
    assert of(seen, FindNumber) and not of(seen, Append)
    seen = running.step("a", 0)
    assert not of(seen, FindNumber) and not of(seen, Append), "one look at a time"
    seen = running.give(NumberFound(7))
    assert [e.record.number for e in of(seen, Append)] == [8]
    assert not of(running.step("a", 0), FindNumber), "its record is on its way"


def test_nobody_looks_while_no_checkpoint_is_due(running: Any) -> None:
    running.machine = Machine(running.spec, running.machine.history)
    seen = running.give(Led("s2", 1000.0, (0, 0)))
    assert not of([*seen, *running.step("a", 1)], FindNumber)


def test_one_that_is_made_by_itself_is_above_what_lies_there_too(driver_of: Any) -> None:
    driver = driver_of()
    keeping = driver.spec.keeping.model_copy(update={"run_checkpoint_every_steps": 4})
    driver.spec = driver.spec.model_copy(update={"keeping": keeping})
    driver.__post_init__()
    driver.there = 3
    driver.start("a", "b")
    for learner in ("a", "b"):
        driver.step(learner, 4)
    for learner in ("a", "b"):
        driver.answer(driver.pulls[-1], learner)
    assert begun(driver) == [4]


def test_none_is_begun_before_the_run_has_gone_back(running: Any) -> None:
    """With several syncer shards another one may have gone back already."""
    wish, meta = Restore(serial=1, source="t/000001"), running.machine.history.meta()
    running.give(wanted(2, wish))
    assert begun(running) == []
    running.give(Loaded(wish, "t", {**meta, "checkpoint_at": 1.0}, "d" * 32))
    kinds = [r.kind for r in running.tape if isinstance(r, TapeCheckpoint | TapeRestore)]
    assert kinds == ["restore", "checkpoint"]


def test_one_is_begun_once_the_run_cannot_go_back(running: Any) -> None:
    wish = Restore(serial=1, source="t/000001")
    running.give(wanted(1, wish))
    running.give(Loaded(wish, fault="damaged"))
    assert begun(running) == [1]
