"""TAPE holds what no snapshot covers, and little more: a leader that archives nothing is seen."""

import pytest

from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.history import archiving_io as archiving
from diloco_syncer.history.archiving_io import TapeArchiver

CALM = Options.calm(learners=2, quorum=1, steps=180, safety_s=5.0, snapshot_every_rounds=3)
FEW = {f"{archiving.__name__}.RECORDS_IN_STREAM": 4}

pytestmark = pytest.mark.whole


def world() -> WorldResult:
    return played(Case(1, CALM, FEW))


def test_what_snapshots_cover_leaves_the_tape() -> None:
    assert world().violations == []


def test_a_leader_that_archives_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TapeArchiver, "want", lambda self: None)
    violations = world().violations
    assert any(v.startswith("I12 at ") and "TAPE holds " in v for v in violations), violations[:5]
