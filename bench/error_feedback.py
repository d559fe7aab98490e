"""Four bits up, with and without error feedback, against fp32: loss at equal tokens.

    python bench/error_feedback.py [--learners 4] [--steps 2400] [--json FILE]

Publications travel as fp32 in all runs, so that only the contributions differ. The inner rate is
chosen for fp32 on the first seed by validation loss and used for all; three seeds, paired: a gap
is the mean over seeds of (loss / loss of fp32 with the same seed) - 1.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from runs import keep, results_of, surroundings

from diloco_shared.spec.run import RunSpec
from diloco_simulator.commands import spec_of
from diloco_simulator.experiments.bulk import Experiment

GRID = (4e-3, 8e-3)
# name -> settings of the algorithm beside fp32 publications.
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"codec_up": "fp32"},
    "bf16": {"codec_up": "bf16"},
    "int8": {"codec_up": "int8"},
    "int4": {"codec_up": "int4"},
    "int4 without feedback": {"codec_up": "int4", "error_feedback": False},
    "e3m0": {"codec_up": "e3m0"},
}


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--wires", nargs="+", default=list(WIRES), choices=list(WIRES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    first = {rate: experiment(args, "fp32", 0, rate) for rate in GRID}
    tried = results_of(list(first.values()), args.workers)
    losses = {rate: tried[e.key()]["val_loss"] for rate, e in first.items()}
    rate = min(losses, key=lambda r: losses[r])
    runs = {
        (wire, seed): experiment(args, wire, seed, rate)
        for wire in args.wires
        for seed in range(args.seeds)
    }
    found = results_of(list(runs.values()), args.workers)
    loss = {where: found[e.key()]["val_loss"] for where, e in runs.items()}
    gaps = {
        wire: [loss[wire, s] / loss["fp32", s] - 1 for s in range(args.seeds)]
        for wire in args.wires
    }
    result = {
        "figures": {
            f"{wire.replace(' without feedback', '_no_ef')}_loss_gap": statistics.fmean(g)
            for wire, g in gaps.items()
            if wire not in ("fp32", "int4")
        }
        | {"int4_ef_loss_gap": statistics.fmean(gaps["int4"])},
        "gaps_per_seed": gaps,
        "val_loss": {wire: [loss[wire, s] for s in range(args.seeds)] for wire in args.wires},
        "rounds_per_fragment": args.steps // 24,
        "learners": args.learners,
        "steps": args.steps,
        "inner_rate": rate,
        "val_loss_by_rate": losses,
        "seeds": list(range(args.seeds)),
        **surroundings(__file__),
    }
    _table(result)
    keep(args.json, result)


def experiment(args: argparse.Namespace, wire: str, seed: int, rate: float) -> Experiment:
    """One run over that wire."""
    body = spec_of("long", args.steps, seed, rate).model_dump(mode="json")
    body["algorithm"] |= {"codec_down": "fp32"} | WIRES[wire]
    return Experiment(RunSpec.model_validate(body), args.learners)


def _table(result: dict[str, Any]) -> None:
    print(f"\n{'wire up':>24}  {'validation loss per seed':>30}  {'gap':>8}")
    for wire, losses in result["val_loss"].items():
        gap = statistics.fmean(result["gaps_per_seed"][wire])
        print(f"{wire:>24}  {'  '.join(f'{x:.4f}' for x in losses):>30}  {100 * gap:+7.2f} %")
    print(
        f"M = {result['learners']}, {result['steps']} steps, "
        f"{result['rounds_per_fragment']} rounds per fragment, rate {result['inner_rate']:.1e}"
    )


if __name__ == "__main__":
    main()
