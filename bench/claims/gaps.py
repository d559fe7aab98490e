"""Gaps to data-parallel next to the published ones: python bench/claims/gaps.py RESULT --png FILE

Draws what `bench/gaps.py --json RESULT` has measured: nothing is trained here.
"""

import argparse
import json
from pathlib import Path

from diloco_simulator.experiments.plots import gaps_chart


def main() -> None:
    """Read a result of bench/gaps.py, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    gaps_chart(json.loads(args.result.read_text(encoding="utf-8"))["rows"], args.png)


if __name__ == "__main__":
    main()
