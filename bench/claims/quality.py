"""Quality next to the published figure: python bench/claims/quality.py RESULT --png FILE

Draws one comparison of what `bench/gaps.py --json RESULT` has measured: nothing is trained here.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from diloco_simulator.experiments.plots import quality_chart


def main() -> None:
    """Read a result of bench/gaps.py, print one gap, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    result = json.loads(args.result.read_text(encoding="utf-8"))
    known = {(r["corpus"], r["learners"]): r for r in result["rows"]}
    if (args.corpus, args.learners) not in known:
        parser.error(f"{args.result} knows {', '.join(f'{c} with M = {m}' for c, m in known)}")
    row = known[args.corpus, args.learners]
    losses = fmean(row["test_loss_data_parallel"]), fmean(row["test_loss"])
    print(f"data-parallel {losses[0]:.4f}, Decoupled {losses[1]:.4f} nats per token")
    under = f"M = {args.learners}, {result['steps']} steps of a small model"
    quality_chart(losses, under, args.png)


if __name__ == "__main__":
    main()
