"""What a learner must have saved that was told to stop."""

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_learner.recovery.checkpoint_io import sequence_of
from diloco_simulator.checkers.polite_ends import PoliteEnds, Told
from diloco_simulator.checkers.promises import Report

EPOCH, LIFE, STEPS = 4, 3, 119


class Process(SimpleNamespace):
    """A key of a table."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(("of", "good"), [(EPOCH - 1, True), (EPOCH, False)])
def test_moments_are_saved_as_those_of_their_own_epoch(of: int, good: bool) -> None:
    """A learner has heard of a newer one, and not from all shards."""
    exchange = SimpleNamespace(
        epoch=EPOCH, moments_epoch=EPOCH - 1, counters=SimpleNamespace(step=STEPS)
    )
    left = SimpleNamespace(outcome="withdrawn")
    work = SimpleNamespace(
        checkpoints=SimpleNamespace(newest=sequence_of(of, LIFE, STEPS)),
        context=SimpleNamespace(incarnation=LIFE),
        spec=SimpleNamespace(folder="r"),
        stop_s=6.0,
    )
    trained: Any = SimpleNamespace(
        loop=SimpleNamespace(exchange=exchange, left=left),
        work=work,
        steps=STEPS,
        last_moments=None,
        state=SimpleNamespace(left_at=10.0),
    )
    process: Any = Process(frozen=False, killed=False, thawed_at=0.0)
    machine: Any = SimpleNamespace(kept={})
    told = Told(machine, process, 10.0, 8.0, True)
    report = Report(lambda promise, text: None)
    broker: Any = None
    ends = PoliteEnds(report, broker, lambda what: None, lambda host, at: 0.0, True)
    ends.trained[process] = trained
    assert (ends._leaves(told) == "") == good
