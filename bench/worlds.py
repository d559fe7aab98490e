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
# Outputs that have a row each: nobody reads more.
NEWEST = 4
SUMS = ("seeds", "rounds", "crashes", "violations")


def later(folder: Path) -> Sequence[Path]:
    """The outputs `sim_N.json` of a folder, by N: in the order in which they were made."""
    found = ((re.fullmatch(r"sim_(\d+)\.json", file.name), file) for file in folder.iterdir())
    return [file for _, file in sorted((int(match[1]), file) for match, file in found if match)]


def table(files: Sequence[Path]) -> str:
    """A row for each of the newest outputs of `make sim`, one for those before, and one for all."""
    outputs = {file: json.loads(file.read_text("utf-8")) for file in files}
    before, newest = files[:-NEWEST], files[-NEWEST:]
    rows = [(_link(file), *_figures([outputs[file]])) for file in newest]
    if before:
        count = f"the {len(before)} before, {_link(before[0])} to {_link(before[-1])}"
        rows.insert(0, (count, *_figures([outputs[file] for file in before])))
    return markdown(HEAD, [*rows, ("all", *_figures(list(outputs.values())))])


def _link(file: Path) -> str:
    return f"[{file.stem}]({file.name})"


def _figures(outputs: Sequence[dict[str, Any]]) -> Sequence[str]:
    return [f"{sum(output[name] for output in outputs):,}" for name in SUMS]


if __name__ == "__main__":
    print(table(later(Path(sys.argv[1]))))
