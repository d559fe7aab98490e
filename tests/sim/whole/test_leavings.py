"""Nothing is left of a run that was deleted: what stays on the hub or on a disk is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_coordinator.runs import ending_io as ending
from diloco_shared.process import serving
from diloco_simulator.worlds import watched_run
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played

SHORT = Options.calm(learners=2, quorum=1, steps=24, safety_s=10.0, snapshot_every_rounds=2)
Break = Callable[[pytest.MonkeyPatch], None]


def world() -> WorldResult:
    return played(Case(1, SHORT))


def of_keys(kept: str) -> Break:
    """Those of one bucket stay."""
    others = [bucket for bucket in ending.OF_RUNS if bucket != kept]
    return lambda patch: patch.setattr(ending, "OF_RUNS", others)


def of_status(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "shards_of", lambda record: 0)


def of_files(kept: str) -> Break:
    """Nobody removes the files of one kind."""
    remove = serving.remove_deleted

    async def but_these(bus: Any, folder: Path) -> None:
        if folder.name != kept:
            await remove(bus, folder)

    return lambda patch: patch.setattr(serving, "remove_deleted", but_these)


FAULTS: dict[str, tuple[Break, str]] = {
    "leases of data": (of_keys("shards"), "shards sim."),
    "places in the data": (of_keys("places"), "places sim."),
    "lives": (of_keys("incarnations"), "incarnations sim."),
    "status": (of_status, "status sim"),
    "snapshots": (of_files("snapshots"), "snapshots/sim."),
    "checkpoints of learners": (of_files("checkpoints"), "checkpoints/sim."),
}


def test_nothing_is_left_of_a_run() -> None:
    found = world()
    assert found.violations == [] and found.looks["deletion"] == 1


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_of_a_run_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, left = FAULTS[fault]
    monkeypatch.setattr(watched_run, "LEFTOVERS_S", 20.0)
    breaks(monkeypatch)
    violations = world().violations
    assert any(v.startswith("deletion at ") and left in v for v in violations), violations
