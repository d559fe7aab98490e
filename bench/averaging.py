"""Averages of published versions, instead of a run that settles or on top of it.

    python bench/averaging.py [--learners 4] [--rates 8e-3 1.6e-2] [--json FILE]

Every fragment's last k versions are averaged after the run, which itself is not changed: the
validation loss of the mean over k (k = 1: the run's own result), by inner rate and by the share of
the run from which merges settle to plain averages (`outer_settle_from`; 1: never). Model, samples
and batch as in bench/gaps.py, one seed. Nothing is remembered: about four minutes of a core a run.
"""

import argparse
import itertools
import json
import os
import signal
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from gaps import Case, experiment
from numpy.typing import NDArray
from runs import keep, surroundings

from diloco_learner.training.trainer import evaluate_anchors
from diloco_shared.process.stopping import dies_with_parent
from diloco_shared.protocol.messages import TapeEnd, TapeRecord, TapeRound
from diloco_simulator.experiments.bulk import SINGLE_THREAD, Experiment
from diloco_simulator.experiments.train import Fleet

Values = NDArray[np.float32]
COUNTS = (1, 2, 4, 8, 12, 16, 24, 32)


class RememberingFleet(Fleet):
    """Keeps every version of every fragment."""

    def __init__(self, experiment: Experiment) -> None:
        P = experiment.spec.algorithm.fragments
        self.versions: list[dict[int, Values]] = [{} for _ in range(P)]
        super().__init__(experiment.spec, experiment.setting)

    def _recorded(self, record: TapeRecord) -> None:
        super()._recorded(record)
        if isinstance(record, TapeRound | TapeEnd):
            self._look()

    def _look(self) -> None:
        for p, fragment in self.store.fragments.items():
            self.versions[p].setdefault(fragment.version, fragment.anchor.copy())

    def losses(self) -> dict[int, float]:
        """Validation loss of the mean of the last k versions, by k."""
        self.run()
        self._look()
        held = self._held("validation")
        return {
            k: evaluate_anchors(self.program, [mean(known, k) for known in self.versions], held)
            for k in COUNTS
        }


def mean(versions: dict[int, Values], k: int) -> Values:
    """Of the last `k`, summed in fp64."""
    last = [versions[v] for v in sorted(versions)[-k:]]
    total: Values = np.stack(last).mean(axis=0, dtype=np.float64).astype(np.float32)
    return total


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[8e-3, 1.6e-2])
    parser.add_argument("--settle", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = list(itertools.product(args.settle, args.rates))
    os.environ["XLA_FLAGS"] = SINGLE_THREAD
    ends = dies_with_parent(signal.SIGTERM)
    with ProcessPoolExecutor(args.workers, get_context("spawn"), initializer=ends) as pool:
        found = list(pool.map(losses_of, cases, itertools.repeat(args)))
    rows = [
        {"settle_from": settle, "rate": rate, "val_loss": losses}
        for (settle, rate), losses in zip(cases, found, strict=True)
    ]
    _table(rows)
    if args.json:
        best = {
            f"settle_{s:g}": least(r for r in rows if r["settle_from"] == s) for s in args.settle
        }
        body = {
            "figures": best,
            "rows": rows,
            "learners": args.learners,
            "steps": args.steps,
            "seed": args.seed,
            **surroundings(__file__),
        }
        keep(args.json, body)


def losses_of(case: tuple[float, float], args: argparse.Namespace) -> dict[int, float]:
    """One run, in a process of its own."""
    settle, rate = case
    changes = (("algorithm.outer_settle_from", json.dumps(settle)),)
    of = Case("stdlib", args.learners, "decoupled", "long", 32, changes)
    return RememberingFleet(experiment(of, args.steps, args.seed, rate)).losses()


def least(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The least loss without averaging and with, each at its best rate."""
    seen = [r["val_loss"] for r in rows]
    return {
        "of_the_run": min(losses[1] for losses in seen),
        "of_an_average": min(min(losses.values()) for losses in seen),
    }


def _table(rows: list[dict[str, Any]]) -> None:
    print("Validation loss of the mean of every fragment's last k versions, by k")
    print(f"{'settles from':>13}{'inner rate':>12}" + "".join(f"{k:>8}" for k in COUNTS))
    for r in rows:
        losses = "".join(f"{r['val_loss'][k]:8.4f}" for k in COUNTS)
        print(f"{r['settle_from']:>13g}{r['rate']:>12.1e}{losses}")


if __name__ == "__main__":
    main()
