"""Decoupled against data-parallel at equal tokens, each side at its own best inner rate.

    python bench/quality.py [--learners 4] [--steps 3000] [--json FILE]

Same model (nano), corpus (the standard library's source), data streams and schedule shape; the
rate of each side is chosen on one grid by validation loss, and the test loss of that choice is
reported beside it. One process, one thread, one seed: differences below half a percent are noise.
"""

import argparse
import json
import math
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

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
    # One thread: the figures do not depend on what else the machine does.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    began = time.monotonic()
    # The most promising rates first; one process a core, one thread a process.
    rates = sorted(GRID, key=lambda rate: abs(rate - 1.6e-2))
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        ours = [pool.submit(_decoupled, args, rate) for rate in rates]
        theirs = [pool.submit(_reference, args, rate) for rate in rates]
        decoupled = [task.result() for task in ours]
        reference = [task.result() for task in theirs]
    if max(r["tokens"] for r in decoupled) > reference[0]["tokens"]:
        raise SystemExit("data-parallel saw fewer tokens: raise EXTRA_STEPS")
    best = min(decoupled, key=lambda r: r["val_loss"])
    ideal = min(reference, key=lambda r: r["val_loss"])
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
        "decoupled": decoupled,
        "data_parallel": reference,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "command": f"python bench/quality.py --learners {args.learners} --steps {args.steps}",
        "seconds": round(time.monotonic() - began),
    }
    _table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _decoupled(args: argparse.Namespace, rate: float) -> dict[str, Any]:
    from diloco_simulator.commands import spec_of
    from diloco_simulator.train import Fleet, Setting

    spec = spec_of(args.preset, args.steps, args.seed, rate)
    result = Fleet(spec, Setting(args.learners)).run()
    print(f"decoupled      rate {rate:.1e}  validation {result['val_loss']:.4f}", flush=True)
    return result


def _reference(args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Data-parallel at `rate`, on no fewer tokens."""
    from diloco_learner.data_parallel import train_data_parallel
    from diloco_simulator.commands import spec_of

    spec = spec_of(args.preset, args.steps + EXTRA_STEPS, args.seed, rate)
    result = train_data_parallel(spec, args.learners, rate=rate)
    print(f"data-parallel  rate {rate:.1e}  validation {result['val_loss']:.4f}", flush=True)
    return result


def _table(result: dict[str, Any]) -> None:
    print(f"\n{'rate':>8}  {'decoupled':>10}  {'data-parallel':>14}")
    for rate in GRID:
        ours = next(r for r in result["decoupled"] if math.isclose(r["inner_rate"], rate))
        theirs = next(r for r in result["data_parallel"] if math.isclose(r["inner_rate"], rate))
        print(f"{rate:8.1e}  {ours['val_loss']:10.4f}  {theirs['val_loss']:14.4f}")
    figures = result["figures"]
    print(
        f"best against best: {100 * figures['gap']:+.2f} % (validation), "
        f"{100 * figures['test_gap']:+.2f} % (test); preset {result['preset']}, "
        f"M = {result['learners']}, {result['steps']} steps, seed {result['seed']}"
    )


if __name__ == "__main__":
    main()
