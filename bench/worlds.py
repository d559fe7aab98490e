"""The lots of simulated worlds whose outputs are kept, as a table for the documentation.

python bench/worlds.py docs/results
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from folders import markdown

HEAD = ("output", "worlds", "rounds", "crashes", "broke a promise")
SUMS = ("seeds", "rounds", "crashes", "violations")


def later(folder: Path) -> Sequence[Path]:
    """The outputs `sim_N.json` of a folder, by N: in the order in which they were made."""
    found = ((re.fullmatch(r"sim_(\d+)\.json", file.name), file) for file in folder.iterdir())
    return [file for _, file in sorted((int(match[1]), file) for match, file in found if match)]


def table(files: Sequence[Path]) -> str:
    """A row for each output of `make sim`, and one for all of them."""
    outputs = [json.loads(file.read_text("utf-8")) for file in files]
    rows = [
        (f"[{file.stem}]({file.name})", *_figures([output]))
        for file, output in zip(files, outputs, strict=True)
    ]
    return markdown(HEAD, [*rows, ("all", *_figures(outputs))])


def _figures(outputs: Sequence[dict[str, Any]]) -> Sequence[str]:
    return [f"{sum(output[name] for output in outputs):,}" for name in SUMS]


if __name__ == "__main__":
    print(table(later(Path(sys.argv[1]))))
