"""Charts are written whatever the figures are; a person looks at them before they are committed."""

from pathlib import Path

from diloco_simulator.goodput_model import Failures
from diloco_simulator.goodput_table import table
from diloco_simulator.plots import bandwidth_chart, goodput_chart

PNG = b"\x89PNG\r\n\x1a\n"


def test_charts_are_written(tmp_path: Path) -> None:
    one, other = tmp_path / "new" / "goodput.png", tmp_path / "bandwidth.png"
    goodput_chart(table(Failures(), seeds=1, horizon_s=100.0), one)
    bandwidth_chart([("Data-parallel", 198.0, 196.0), ("Decoupled", 0.84, 0.86)], other)
    assert one.read_bytes().startswith(PNG)
    assert other.read_bytes().startswith(PNG)
