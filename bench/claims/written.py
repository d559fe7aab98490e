"""What every claim's script writes: its figures, and how they came about."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runs import surroundings


def write(file: Path, figures: dict[str, Any], seed: int, **more: Any) -> None:
    """One JSON object; `figures` are what a claim may quote."""
    body = {"figures": figures, **more, "seed": seed, **surroundings(sys.argv[0])}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
