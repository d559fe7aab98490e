"""Troubles that once broke a promise, kept as worlds: each comes about, and nothing breaks."""

import json
from pathlib import Path

import pytest

from diloco_simulator.worlds import found
from diloco_simulator.worlds.world import played

FOLDER = Path(__file__).parent / "found"
# Each third one is played by `make test-long`: CI has twenty minutes.
KEPT = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if n % 3 == 2 else [])
    for n, path in enumerate(sorted(FOLDER.glob("*.json")))
]


def test_each_names_what_it_must_reach() -> None:
    assert KEPT
    assert all(json.loads(path.read_text())["reached"] for path in FOLDER.iterdir())


@pytest.mark.whole
@pytest.mark.parametrize("path", KEPT)
def test_a_kept_world_is_sound_and_meets_its_trouble(path: Path) -> None:
    verdict = played(found.read(path))
    assert verdict.violations == [], found.again(path)
    must = json.loads(path.read_text(encoding="utf-8"))["reached"]
    assert [state for state in must if not verdict.counts[state]] == []
