"""Hardware of two generations, with real losses: python bench/claims/mixed.py [--json FILE]

Eight learners, four of them 18 % slower, step times scattered by 10 % (Table 5 of the paper).
Policies differ in K and in the grace window; a fourth row shows a rule that this project does not
have: a round merges only who is ready when it closes, the others' work is overwritten. All process
the same tokens; the goodput is the share of learners' time whose tokens were merged. It comes from
fleets that compute nothing, losses from shorter runs that are trained.
"""

import argparse
from typing import Any, Literal

from fleets import found, options, provenance, shown, spec, spread, tokens_of
from goodput import GENERATIONS, generations
from written import write

from diloco_simulator.experiments.bulk import Experiment

LEARNERS = 8
# Uniform within 17 % either way: a standard deviation of 10 %.
JITTER = 0.17
# Changes to the algorithm, whether only those ready are asked, and what is published: goodput and
# accuracy on text, in per cent.
POLICIES: dict[str, tuple[dict[str, Any], bool, tuple[float, float] | None]] = {
    "K = 8": ({"quorum": LEARNERS}, False, (84, 54.4)),
    "K = 1, no grace": ({"grace_factor": 0.0}, False, (100, 51.4)),
    "K = 1, grace": ({}, False, (100, 55.3)),
    "K = 1, no grace, only who is ready": ({"grace_factor": 0.0}, True, None),
}


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options(parser)
    parser.add_argument("--timed-steps", type=int, default=1000, help="of runs without training")
    parser.add_argument("--timed-seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    rows = [row(name, args) for name in POLICIES]
    # The goodput simulator, where a learner that waits does not step.
    waiting = {k: v for k, v in generations(args.timed_seeds[0]).items() if not k.endswith("_of_8")}
    _table(rows, waiting)
    if args.json:
        figures = {
            f"{name}_{key}": r[name]["mean"]
            for key, r in zip(("k8", "k1_no_grace", "k1_grace", "k1_only_ready"), rows, strict=True)
            for name in ("goodput", "stepping", "merged_per_round", "val_loss", "test_loss")
        }
        write(
            args.json,
            figures | waiting,
            args.timed_seeds[0],
            timed={"steps": args.timed_steps, "seeds": args.timed_seeds},
            rows=rows,
            speeds=GENERATIONS,
            jitter=JITTER,
            **provenance(args),
        )


def row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One policy over all seeds."""
    algorithm, only_ready, published = POLICIES[name]

    def run(seed: int, steps: int, method: Literal["decoupled", "idle"]) -> Experiment:
        return Experiment(
            spec(args, seed, tokens_of(args, steps, LEARNERS), **algorithm),
            LEARNERS,
            method,
            speeds=GENERATIONS,
            jitter=JITTER,
            only_ready=only_ready,
        )

    timed = found(args, *(run(seed, args.timed_steps, "idle") for seed in args.timed_seeds))
    trained = found(args, *(run(seed, args.steps, "decoupled") for seed in args.seeds))
    shares = ("goodput", "stepping", "merged_per_round", "virtual_s", "rounds")
    return {
        "policy": name,
        "algorithm": algorithm,
        "only_ready": only_ready,
        "published_goodput_and_text": published,
        **{key: spread([r[key] for r in timed]) for key in shares},
        **{key: spread([r[key] for r in trained]) for key in ("val_loss", "test_loss")},
    }


def _table(rows: list[dict[str, Any]], waiting: dict[str, float]) -> None:
    print(f"\n{'':<36}{'stepping':>12}{'goodput':>12}{'merged':>13}{'validation loss':>19}"
          f"{'published: goodput, text':>27}")  # fmt: skip
    for r in rows:
        published = r["published_goodput_and_text"]
        told = "" if published is None else f"{published[0]:.0f} %, {published[1]:.1f}"
        print(
            f"{r['policy']:<36}{shown(r['stepping'], 1, 100):>12}{shown(r['goodput'], 1, 100):>12}"
            f"{shown(r['merged_per_round'], 2):>13}{shown(r['val_loss']):>19}{told:>27}"
        )
    print("\nGoodput if learners waited for rounds (goodput simulator):")
    for name, value in waiting.items():
        print(f"  {name:<34}{value:6.1f} %")


if __name__ == "__main__":
    main()
