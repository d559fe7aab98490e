"""Decoupled against data-parallel at equal tokens, each side at its own best inner rate.

    python bench/quality.py [--learners 4] [--steps 3000] [--json FILE]

Same model (nano), corpus (the standard library's source), data streams and schedule shape; the
rate of each side is chosen on one grid by validation loss, and the test loss of that choice is
reported beside it. One process, one thread, one seed: differences below half a percent are noise.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from runs import FOLDER, results_of, surroundings

from diloco_simulator.commands import spec_of
from diloco_simulator.experiments import Experiment

GRID = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
# The last rounds of a Decoupled run take a few steps more than its budget; data-parallel gets them
# too, so that it never sees fewer tokens.
EXTRA_STEPS = 24


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="long")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ours = [decoupled(args, rate) for rate in GRID]
    theirs = [reference(args, rate) for rate in GRID]
    results = results_of([*ours, *theirs], args.workers)
    found = [results[e.key()] for e in ours]
    reached = [results[e.key()] for e in theirs]
    if max(r["tokens"] for r in found) > reached[0]["tokens"]:
        raise SystemExit("data-parallel saw fewer tokens: raise EXTRA_STEPS")
    best = min(found, key=lambda r: r["val_loss"])
    ideal = min(reached, key=lambda r: r["val_loss"])
    result = {
        "figures": {
            "val_loss_decoupled": best["val_loss"],
            "val_loss_data_parallel": ideal["val_loss"],
            "gap": best["val_loss"] / ideal["val_loss"] - 1,
            "test_gap": best["test_loss"] / ideal["test_loss"] - 1,
        },
        "learners": args.learners,
        "steps": args.steps,
        "seed": args.seed,
        "preset": args.preset,
        "decoupled": found,
        "data_parallel": reached,
        **surroundings(__file__),
    }
    _table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def decoupled(args: argparse.Namespace, rate: float) -> Experiment:
    """Ours at `rate`."""
    return Experiment(spec_of(args.preset, args.steps, args.seed, rate), args.learners)


def reference(args: argparse.Namespace, rate: float) -> Experiment:
    """Data-parallel at `rate`, on no fewer tokens."""
    spec = spec_of(args.preset, args.steps + EXTRA_STEPS, args.seed, rate)
    return Experiment(spec, args.learners, "data-parallel")


def _table(result: dict[str, Any]) -> None:
    print(f"\n{'rate':>8}  {'decoupled':>10}  {'data-parallel':>14}")
    for rate, ours, theirs in zip(GRID, result["decoupled"], result["data_parallel"], strict=True):
        print(f"{rate:8.1e}  {ours['val_loss']:10.4f}  {theirs['val_loss']:14.4f}")
    figures = result["figures"]
    print(
        f"best against best: {100 * figures['gap']:+.2f} % (validation), "
        f"{100 * figures['test_gap']:+.2f} % (test); preset {result['preset']}, "
        f"M = {result['learners']}, {result['steps']} steps, seed {result['seed']}"
    )
    print(f"single results are kept in {FOLDER} and not computed again")


if __name__ == "__main__":
    main()
