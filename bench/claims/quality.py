"""Quality next to the published figure: python bench/claims/quality.py RESULT.json --png FILE

Draws what `make quality` has measured: nothing is trained here.
"""

import argparse
import json
from pathlib import Path

from diloco_simulator.plots import quality_chart


def main() -> None:
    """Read a result of bench/quality.py, print its gap, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    result = json.loads(args.result.read_text(encoding="utf-8"))
    figures = result["figures"]
    losses = figures["val_loss_data_parallel"], figures["val_loss_decoupled"]
    print(f"data-parallel {losses[0]:.4f}, Decoupled {losses[1]:.4f} nats per token")
    under = f"M = {result['learners']}, {result['steps']} steps of a small model"
    quality_chart(losses, under, args.png)


if __name__ == "__main__":
    main()
