"""Compute that comes and goes, with real losses: python bench/claims/scavenging.py [--json FILE]

Four learners, and 1, 2, 4 or 12 more for part of the run. They join through recovery from a donor.
At the end of the loan they are told, step no more, and leave once their work is merged. Which part
of the run the published figures are for is not known; two readings are told:
- *half of the tokens* are trained while the loan lasts: without any loss this gives 0.90, 0.83,
  0.75 and 0.625, which are the published ratios. These runs are trained;
- *half of the time* of the run, timed by fleets that compute nothing; so is a loan of the first
  kind that ends without notice, when what was not merged is lost.

Wall-clock is that to the same useful (merged) tokens, relative to four learners alone.
"""

import argparse
from dataclasses import replace
from typing import Any

from fleets import found, options, provenance, shown, spec, spread
from written import write

from diloco_simulator.experiments import Experiment
from diloco_simulator.setting import Loan
from diloco_simulator.tally import reached_s

LEARNERS = 4
EXTRA = (1, 2, 4, 12)
# Relative wall-clock for the same tokens, Decoupled and data-parallel.
PUBLISHED = {1: (0.90, 1.07), 2: (0.83, 1.09), 4: (0.75, 1.02), 12: (0.62, 0.80)}


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options(parser)
    args = parser.parse_args()
    alone = [run(seed, None, args) for seed in args.seeds]
    before = found(args, *alone)
    rows = [row(extra, before, args) for extra in EXTRA]
    losses = spread([r["val_loss"] for r in before])
    _table(rows, losses)
    if args.json:
        names = ("half_of_tokens", "half_of_time", "without_notice", "val_loss_off")
        figures = {
            f"{n}_plus_{100 * r['extra'] // LEARNERS}": r[n]["mean"] for r in rows for n in names
        }
        alone_row = {k: [r[k] for r in before] for k in ("val_loss", "test_loss", "tokens_useful")}
        write(args.json, figures, args.seeds[0], rows=rows, alone=alone_row, **provenance(args))


def run(
    seed: int, loan: Loan | None, args: argparse.Namespace, *, idle: bool = False
) -> Experiment:
    """Four learners and a loan."""
    tokens = args.steps * LEARNERS * 512
    method = "idle" if idle else "decoupled"
    return Experiment(spec(seed, args.rate, tokens), LEARNERS, method, loan=loan, over_time=True)


def loans(extra: int, steps: int) -> tuple[Loan, Loan]:
    """Half of the tokens, and half of the time; both begin after a quarter of the run."""
    share = extra / LEARNERS
    begin_s, length_s = 0.25 * steps, 0.5 * steps / (1 + share)
    whole_s = steps / (1 + 0.5 * share)
    return (
        Loan(extra, begin_s, begin_s + length_s),
        Loan(extra, 0.25 * whole_s, 0.75 * whole_s),
    )


def row(extra: int, before: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """One size of the loan over all seeds."""
    tokens, time = loans(extra, args.steps)
    trained = found(args, *(run(seed, tokens, args) for seed in args.seeds))
    timed = found(args, *(run(seed, time, args, idle=True) for seed in args.seeds))
    abrupt = replace(tokens, notice=False)
    taken = found(args, *(run(seed, abrupt, args, idle=True) for seed in args.seeds))
    ideal = 0.5 + 0.5 / (1 + extra / LEARNERS)
    return {
        "extra": extra,
        "ideal_half_of_tokens": ideal,
        "published": PUBLISHED[extra],
        "half_of_tokens": spread(ratios(trained, before)),
        "half_of_time": spread(ratios(timed, before)),
        "without_notice": spread(ratios(taken, before)),
        "val_loss": spread([r["val_loss"] for r in trained]),
        "test_loss": spread([r["test_loss"] for r in trained]),
        "val_loss_off": spread(
            [r["val_loss"] / b["val_loss"] - 1 for r, b in zip(trained, before, strict=True)]
        ),
        "tokens_useful": [r["tokens_useful"] for r in trained],
        "goodput": spread([r["goodput"] for r in trained]),
        "joined": [r["recoveries_from_donors"] for r in trained],
    }


def ratios(with_loan: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[float]:
    """Seconds to the tokens that both have, with the loan over without."""
    found_ = []
    for helped, alone in zip(with_loan, before, strict=True):
        tokens = min(helped["tokens_useful"], alone["tokens_useful"])
        times = [reached_s(r["useful_over_time"], tokens) for r in (helped, alone)]
        found_.append(times[0] / times[1])
    return found_


def _table(rows: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    print("\nSeconds to the same useful tokens, relative to four learners alone")
    print(f"{'':>8}{'published':>20}{'half of the tokens':>38}{'half of':>10}{'loss against':>18}")
    print(f"{'extra':>8}{'Decoupled':>11}{'DP':>9}{'ideal':>10}{'ours':>10}{'taken':>18}"
          f"{'the time':>10}{'alone':>18}")  # fmt: skip
    for r in rows:
        ours, theirs = r["published"]
        print(
            f"{'+' + format(100 * r['extra'] // LEARNERS) + ' %':>8}{ours:>11.2f}{theirs:>9.2f}"
            f"{r['ideal_half_of_tokens']:>10.3f}{shown(r['half_of_tokens'], 3):>10}"
            f"{shown(r['without_notice'], 3):>18}{shown(r['half_of_time'], 3):>10}"
            f"{shown(r['val_loss_off'], 2, 100) + ' %':>18}"
        )
    print(f"validation loss of four learners alone: {shown(alone)}")


if __name__ == "__main__":
    main()
