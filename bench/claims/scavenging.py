"""Compute that comes and goes, with real losses: python bench/claims/scavenging.py [--json FILE]

Four learners, and 1, 2, 4 or 12 more for part of the run. They join through recovery from a donor.
At the end of the loan they are told, step no more, and leave once their work is merged. Which part
of the run the published figures are for is not known; two readings are told:
- *half of the tokens* are trained while the loan lasts: without any loss this gives 0.90, 0.83,
  0.75 and 0.625, which are the published ratios;
- *half of the time* of the run.

Told is the wall-clock to the same useful (merged) tokens, relative to four learners alone. It comes
from fleets that compute nothing (nothing in it is random: one seed); losses come from shorter runs
that are trained, with loans of the first kind. *Taken*: a loan of the first kind that ends without
notice, when what was not merged is lost.
"""

import argparse
from dataclasses import replace
from typing import Any

from fleets import found, options, provenance, shown, spec, spread, tokens_of
from written import write

from diloco_simulator.experiments.bulk import Experiment
from diloco_simulator.experiments.setting import Loan
from diloco_simulator.experiments.tally import reached_s

LEARNERS = 4
EXTRA = (1, 2, 4, 12)
# Relative wall-clock for the same tokens, Decoupled and data-parallel.
PUBLISHED = {1: (0.90, 1.07), 2: (0.83, 1.09), 4: (0.75, 1.02), 12: (0.62, 0.80)}


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options(parser)
    parser.add_argument("--timed-steps", type=int, default=6000, help="of runs without training")
    args = parser.parse_args()
    before = found(args, *(run(seed, None, args) for seed in args.seeds))
    rows = [row(extra, before, args) for extra in EXTRA]
    losses = spread([r["val_loss"] for r in before])
    _table(rows, losses)
    if args.json:
        names = ("half_of_tokens", "half_of_time", "half_of_tokens_without_notice")
        figures = {
            f"{name}_plus_{100 * r['extra'] // LEARNERS}": r[name] for r in rows for name in names
        }
        off = {
            f"val_loss_off_plus_{100 * r['extra'] // LEARNERS}": r["val_loss_off"]["mean"]
            for r in rows
        }
        alone_row = {k: [r[k] for r in before] for k in ("val_loss", "test_loss", "tokens_useful")}
        write(
            args.json,
            figures | off,
            0,
            rows=rows,
            alone=alone_row,
            timed_steps=args.timed_steps,
            **provenance(args),
        )


def run(seed: int, loan: Loan | None, args: argparse.Namespace) -> Experiment:
    """Four learners and a loan, trained."""
    run_spec = spec(args, seed, tokens_of(args, args.steps, LEARNERS))
    return Experiment(run_spec, LEARNERS, loan=loan, over_time=True)


def ratio(loan: Loan, args: argparse.Namespace) -> float:
    """Seconds with the loan over seconds without, timed."""
    timed = spec(args, 0, tokens_of(args, args.timed_steps, LEARNERS))
    alone = Experiment(timed, LEARNERS, "idle", over_time=True)
    helped = replace(alone, loan=loan)
    return ratio_of(*found(args, helped, alone))


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
    """One size of the loan."""
    trained = found(args, *(run(s, loans(extra, args.steps)[0], args) for s in args.seeds))
    tokens, time = loans(extra, args.timed_steps)
    pairs = list(zip(trained, before, strict=True))
    return {
        "extra": extra,
        "ideal_half_of_tokens": 0.5 + 0.5 / (1 + extra / LEARNERS),
        "published": PUBLISHED[extra],
        "half_of_tokens": ratio(tokens, args),
        "half_of_tokens_without_notice": ratio(replace(tokens, notice=False), args),
        "half_of_time": ratio(time, args),
        "half_of_tokens_trained": spread([ratio_of(r, b) for r, b in pairs]),
        "val_loss": spread([r["val_loss"] for r in trained]),
        "test_loss": spread([r["test_loss"] for r in trained]),
        "val_loss_off": spread([r["val_loss"] / b["val_loss"] - 1 for r, b in pairs]),
        "tokens_useful": [r["tokens_useful"] for r in trained],
        "goodput": spread([r["goodput"] for r in trained]),
        "joined": [r["recoveries_from_donors"] for r in trained],
    }


def ratio_of(helped: dict[str, Any], alone: dict[str, Any]) -> float:
    """Of the seconds to the tokens that both have."""
    tokens = min(helped["tokens_useful"], alone["tokens_useful"])
    return reached_s(helped["useful_over_time"], tokens) / reached_s(
        alone["useful_over_time"], tokens
    )


def _table(rows: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    print("\nSeconds to the same useful tokens, relative to four learners alone")
    print(f"{'':>8}{'published':>18}{'half of the tokens':>44}{'half of':>10}{'loss against':>18}")
    print(f"{'extra':>8}{'Decoupled':>10}{'DP':>8}{'ideal':>10}{'ours':>8}{'trained':>16}"
          f"{'taken':>10}{'the time':>10}{'alone':>18}")  # fmt: skip
    for r in rows:
        ours, theirs = r["published"]
        extra = f"+{100 * r['extra'] // LEARNERS} %"
        print(
            f"{extra:>8}{ours:>10.2f}{theirs:>8.2f}{r['ideal_half_of_tokens']:>10.3f}"
            f"{r['half_of_tokens']:>8.3f}{shown(r['half_of_tokens_trained'], 3):>16}"
            f"{r['half_of_tokens_without_notice']:>10.3f}{r['half_of_time']:>10.3f}"
            f"{shown(r['val_loss_off'], 2, 100) + ' %':>18}"
        )
    print(f"validation loss of four learners alone: {shown(alone)}")


if __name__ == "__main__":
    main()
