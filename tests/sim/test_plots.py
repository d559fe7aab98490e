"""Charts are written whatever the figures are; a person looks at them before they are committed."""

from pathlib import Path

import pytest

from diloco_planner.goodput_model import Failures
from diloco_simulator.experiments import plots
from diloco_simulator.experiments.plots import (
    bandwidth_chart,
    gaps_chart,
    goodput_chart,
    quality_chart,
)
from diloco_simulator.fleets.goodput_table import table

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.whole
def test_charts_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "DPI", 20)
    names = ("goodput", "bandwidth", "quality", "gaps")
    files = [tmp_path / "new" / f"{name}.png" for name in names]
    goodput_chart(table(Failures(), seeds=1, horizon_s=100.0), files[0])
    bandwidth_chart([("Data-parallel", 198.0, 196.0), ("Decoupled", 0.84, 0.86)], files[1])
    quality_chart((1.2, 1.25), "a small model", files[2])
    row = {"corpus": "a", "learners": 2, "gap": 0.01, "gap_spread": 0.002, "published": 0.007}
    alone = row | {"learners": 1, "gap_spread": None, "published": None}
    gaps_chart([alone, row, row | {"corpus": "b"}], files[3])
    assert all(file.read_bytes().startswith(PNG) for file in files)
