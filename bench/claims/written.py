"""What every claim's script writes: its figures, and how they came about."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runs import keep, surroundings


def write(file: Path, figures: dict[str, Any], seed: int, **more: Any) -> None:
    """One JSON object; `figures` are what a claim may quote."""
    body = {"figures": figures, **more, "seed": seed, **surroundings(sys.argv[0])}
    file.parent.mkdir(parents=True, exist_ok=True)
    keep(file, body)
