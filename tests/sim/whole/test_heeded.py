"""A world sees a product that takes an order and ignores it: pause, quorum, checkpoint or stop.

The product is broken in one place, and a calm world is played in which its user orders something.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco_simulator.people import heeding
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.checkpoints.checkpoints import CheckpointDecisions
from diloco_syncer.checkpoints.restoring import Restoring
from diloco_syncer.history.history import History
from diloco_syncer.leadership import user_requests

CALM = Options.calm(learners=2, quorum=1, steps=60, safety_s=15.0)
WISHES = {"wishes": 1}
# It goes on for longer than a coordinator waits before it ends a run by itself.
STOP = {"stop": True, "steps": 300, "safety_s": 5.0}
Break = Callable[[pytest.MonkeyPatch], None]


def calm(changes: dict[str, Any]) -> WorldResult:
    return played(Case(1, CALM.changed(**changes)))


def ignored(*names: str) -> Break:
    """Settings of these names."""
    setting = user_requests.setting

    def but_these(history: History, wanted: Any, wall: float) -> Any:
        asked = wanted
        if wanted is not None and "paused" in names:
            asked = replace(asked, paused=history.paused)
        if wanted is not None and "quorum" in names:
            asked = replace(asked, quorum=history.quorum)
        if wanted is not None and "stopping" in names:
            asked = replace(asked, stopping=False)
        return setting(history, asked, wall)

    return lambda patch: patch.setattr(user_requests, "setting", but_these)


def of_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """No wish for one arrives."""
    never = property(lambda self: 0, lambda self, number: None)
    patch.setattr(CheckpointDecisions, "wanted", never, raising=False)


def of_restores(patch: pytest.MonkeyPatch) -> None:
    """Each is given up, as if its checkpoint could not be loaded."""
    loaded = Restoring.loaded

    def faulty(self: Restoring, event: Any, now: float, wall: float) -> Any:
        return loaded(self, replace(event, fault="not to be had"), now, wall)

    patch.setattr(Restoring, "loaded", faulty)


def of_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    """No manifest of a checkpoint can be written."""
    sealed = CheckpointDecisions.sealed

    def faulty(self: CheckpointDecisions, event: Any, wall: float) -> Any:
        return sealed(self, replace(event, fault="not to be written"), wall)

    patch.setattr(CheckpointDecisions, "sealed", faulty)


FAULTS: dict[str, tuple[Break, str, dict[str, Any]]] = {
    "a pause": (ignored("paused"), "pause is accepted, and not so", WISHES),
    "another quorum": (ignored("quorum"), "is accepted, and not so", WISHES),
    "a checkpoint": (of_checkpoints, "checkpoint 1 is accepted, and has not begun", WISHES),
    "the way back": (of_restores, "is accepted, and given up", WISHES),
    "what is to be kept": (of_what_is_kept, "fails though all is well", WISHES),
    "a stop": (ignored("stopping"), "is ended by force, and its leader was there", STOP),
}


@pytest.fixture(autouse=True)
def back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heeding, "GOES_BACK", 1.0)


@pytest.mark.whole
def test_what_is_ordered_once_all_is_well_is_so() -> None:
    """Each of it by a record of its own."""
    found = calm(WISHES)
    assert found.violations == []
    assert found.counts["orders once all is well"] == 1
    assert found.counts["desired in force"] >= 2 and found.counts["quorum in force"] >= 1
    assert found.counts["checkpoint in force"] == 1
    assert found.counts["went back once all is well"] == 1
    assert found.looks["commands"] >= 4, "each of them was judged"
    for changes in ({"checkpoints": 1, "steps": 36}, STOP):
        assert calm(changes).violations == []


def test_what_was_so_before_is_no_order_in_force() -> None:
    """A run that was never paused goes on without anybody's doing."""
    found = calm({"steps": 24})
    assert found.counts["desired accepted"] == 1 and not found.counts["desired in force"]


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
def test_an_order_that_is_ignored_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, says, changes = FAULTS[fault]
    breaks(monkeypatch)
    violations = calm(changes).violations
    assert any(v.startswith("commands at ") and says in v for v in violations), violations[:5]
