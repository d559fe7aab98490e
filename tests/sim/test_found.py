"""Worlds that once broke a promise, as they were then: options and all (docs/simulation.md)."""

from pathlib import Path

import pytest

from diloco_simulator import found
from diloco_simulator.ends import one
from diloco_simulator.options import Options
from diloco_simulator.scenario import play

FOLDER = Path(__file__).parent / "found"
KEPT = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.json"))]


@pytest.mark.whole
@pytest.mark.parametrize("path", KEPT)
def test_a_kept_world_is_sound(path: Path) -> None:
    verdict = play(*found.read(path))
    assert verdict.violations == [], f"python -m diloco_simulator.check --kept {path}"


@pytest.mark.whole
def test_short_runs_follow_each_other() -> None:
    """On the product's own syncers, coordinator and handlers; in some, a leader is killed."""
    worlds = [one(seed, runs=3) for seed in range(3)]
    assert [v for w in worlds for v in w.violations] == []
    assert sum(w.ended for w in worlds) == 9
    assert sum(w.killed for w in worlds) > 0


def test_a_kept_world_is_read_as_it_was_written(tmp_path: Path) -> None:
    options = Options.drawn(12)
    path = found.keep(tmp_path, 12, options, ["what it broke"])
    assert found.read(path) == (12, options)
