"""Decoupled under failures, with real losses: python bench/claims/failures.py [--json FILE]

Every learner dies at random, in the mean as often as its share of 1.2 million chips is interrupted
if a chip is once a year, a step taken for a second. A process that dies is gone; another one starts
some seconds later, recovers from a donor, and goes on; work that was not merged is lost. That
leaves about 88 % of the useful time of a fleet without failures: the published goodput at that
rate.

Three things are compared at equal useful tokens (merged ones; data-parallel's all are):
- the fleet that fails and the one that does not: real machines, real losses, virtual clock;
- *elastic data-parallel* under the same interruptions: its loss is that of data-parallel, since
  failures do not change which tokens it learns from, and its time that of the goodput simulator,
  whose stalls were fitted to the published row (docs/results/goodput.md).

Data-parallel learns more from the same tokens where the model is small and rounds are few, so it
reaches the other's loss with fewer of them: how many, from a run of half the tokens.

The budget of a run that fails is raised until it has as many useful tokens; how far, fleets that
compute nothing tell beforehand, and how goodput scatters over seeds.
"""

import argparse
from math import ceil
from typing import Any, Literal

from fleets import found, options, provenance, reference, shown, spec, spread, tokens_of
from written import write

from diloco_planner.goodput_model import PUBLISHED, YEAR_S, Failures
from diloco_simulator.experiments.bulk import Experiment
from diloco_simulator.experiments.setting import Interruptions
from diloco_simulator.experiments.tally import reached_s
from diloco_simulator.fleets.goodput import Cell, simulate

LEARNERS = 8
CHIPS = 1_200_000
MTBI_S = LEARNERS * YEAR_S / CHIPS
AWAY_S = 11.0  # what an elastic learner needs to go on without a slice (fitted, goodput_model.py)
LOSSES = ("val_loss", "test_loss")
# What is told of every seed and as a spread over them; the second ones of either loss.
OVER_SEEDS = (
    "times_sooner",
    *(
        name.format(loss)
        for loss in LOSSES
        for name in (
            "{}_off",
            "{}_over_data_parallel",
            "data_parallel_{}_half_the_tokens",
            "data_parallel_share_of_tokens_to_this_{}",
            "times_sooner_to_this_{}",
        )
    ),
)
# Other ways to fail, by fleets that compute nothing: (times between interruptions, seconds away).
# 31 s: both stalls of an elastic job, scaling down and up, at every interruption.
VARIANTS = ((1.0, 11.0), (1.0, 31.0), (2.0, 31.0))


def main() -> None:
    """Print tables; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options(parser)
    parser.add_argument("--rate-data-parallel", type=float, default=1.6e-2)
    parser.add_argument("--goodput-seeds", type=int, default=8)
    args = parser.parse_args()
    if not args.seeds:
        parser.error("--seeds: one at least is to be trained")
    goodput = goodputs(args)
    for name, value in goodput.items():
        print(f"{name:<40}{shown(value, 1, 100)} %")
    elastic = elastic_goodput(1.0)
    rows = [with_same_loss(row(seed, args, elastic), args) for seed in args.seeds]
    variants = [variant(times, away_s, args) for times, away_s in VARIANTS]
    figures = figures_of(rows, goodput, elastic)
    _table(rows, variants, figures)
    if args.json:
        write(
            args.json,
            figures,
            args.seeds[0],
            rows=rows,
            goodput=goodput,
            variants=variants,
            interruptions={"learners": LEARNERS, "mtbi_s": MTBI_S, "away_s": AWAY_S},
            rate_data_parallel=args.rate_data_parallel,
            **provenance(args),
        )


def fleet(
    seed: int,
    args: argparse.Namespace,
    tokens: int,
    interruptions: Interruptions | None,
    *,
    idle: bool = False,
) -> Experiment:
    """Eight learners that process `tokens`."""
    method: Literal["idle", "decoupled"] = "idle" if idle else "decoupled"
    run = spec(args, seed, tokens)
    return Experiment(run, LEARNERS, method, interruptions=interruptions, over_time=not idle)


def goodputs(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Over many seeds, from fleets that compute nothing."""
    tokens = tokens_of(args, args.steps, LEARNERS)
    dying = Interruptions(MTBI_S, AWAY_S)
    failing = [fleet(s, args, tokens, dying, idle=True) for s in range(args.goodput_seeds)]
    free = fleet(0, args, tokens, None, idle=True)
    calm, *stormy = found(args, free, *failing)
    whole = calm["goodput"]
    return {
        "goodput without failures": spread([whole]),
        "goodput with failures": spread([r["goodput"] for r in stormy]),
        "goodput relative to that without": spread([r["goodput"] / whole for r in stormy]),
        "share of time in which learners step": spread([r["stepping"] for r in stormy]),
    }


def elastic_goodput(times: float) -> dict[str, float]:
    """Of elastic data-parallel, interrupted `times` as rarely."""
    ((goodput, _),) = simulate([Cell("elastic", CHIPS)], Failures(mtbi_s=times * YEAR_S), seeds=64)
    return {"mean": goodput.mean, "low": goodput.low, "high": goodput.high}


def raised(seed: int, args: argparse.Namespace) -> int:
    """Tokens to process under failures for as many useful ones as without."""
    tokens: int = tokens_of(args, args.steps, LEARNERS)
    free = fleet(seed, args, tokens, None, idle=True)
    (calm,) = found(args, free)
    budget = tokens
    for _ in range(2):
        trial = fleet(seed, args, budget, Interruptions(MTBI_S, AWAY_S), idle=True)
        (tried,) = found(args, trial)
        budget = round(budget * calm["tokens_useful"] / tried["tokens_useful"])
    return budget


def row(seed: int, args: argparse.Namespace, elastic: dict[str, float]) -> dict[str, Any]:
    """One seed: three trainings at equal useful tokens."""
    tokens: int = tokens_of(args, args.steps, LEARNERS)
    free = fleet(seed, args, tokens, None)
    failing = fleet(seed, args, raised(seed, args), Interruptions(MTBI_S, AWAY_S))
    calm, stormy = found(args, free, failing)
    useful = min(calm["tokens_useful"], stormy["tokens_useful"])
    a_step = tokens_of(args, 1, LEARNERS)
    steps = ceil(max(calm["tokens_useful"], stormy["tokens_useful"]) / a_step)
    (theirs,) = found(args, reference(args, seed, args.rate_data_parallel, steps, LEARNERS))
    failing_s = reached_s(stormy["useful_over_time"], useful)
    elastic_s = useful / a_step / elastic["mean"]
    kept = (*LOSSES, "tokens", "tokens_useful")
    times = ("virtual_s", "goodput", "stepping", "interruptions", "recoveries_from_donors")
    return {
        "seed": seed,
        "useful_tokens": useful,
        "without_failures": {k: calm[k] for k in kept + times},
        "with_failures": {k: stormy[k] for k in kept + times},
        "data_parallel": {k: theirs[k] for k in kept[:3]},
        **{f"{loss}_off": stormy[loss] / calm[loss] - 1 for loss in LOSSES},
        **{f"{loss}_over_data_parallel": stormy[loss] / theirs[loss] - 1 for loss in LOSSES},
        "seconds_without_failures": reached_s(calm["useful_over_time"], useful),
        "seconds_with_failures": failing_s,
        "seconds_elastic": elastic_s,
        "times_sooner": elastic_s / failing_s,
    }


def with_same_loss(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """`row`, and how much sooner the fleet that fails is at its loss than elastic data-parallel."""
    theirs = row["data_parallel"]
    steps = theirs["tokens"] // tokens_of(args, 1, LEARNERS)
    half_run = reference(args, row["seed"], args.rate_data_parallel, steps // 2, LEARNERS)
    (half,) = found(args, half_run)
    told = {}
    for loss in LOSSES:
        share = share_of_tokens(row["with_failures"][loss], theirs[loss], half[loss])
        told[f"data_parallel_{loss}_half_the_tokens"] = half[loss]
        told[f"data_parallel_share_of_tokens_to_this_{loss}"] = share
        told[f"times_sooner_to_this_{loss}"] = share * row["times_sooner"]
    return row | told


def share_of_tokens(loss: float, whole: float, half: float) -> float:
    """Share of the tokens with which data-parallel reaches `loss`, log-linear through two runs.

    At most 1: where it never reaches it, nothing is extrapolated.
    """
    return min(1.0, float(0.5 ** ((loss - whole) / (half - whole))))


def variant(times: float, away_s: float, args: argparse.Namespace) -> dict[str, Any]:
    """What other failures would do to both methods' time; nothing is trained."""
    tokens = tokens_of(args, args.steps, LEARNERS)
    dying = Interruptions(times * MTBI_S, away_s)
    fleets = [fleet(s, args, tokens, dying, idle=True) for s in range(2)]
    free = fleet(0, args, tokens, None, idle=True)
    calm, *stormy = found(args, free, *fleets)
    ours = spread([r["goodput"] for r in stormy])
    theirs = elastic_goodput(times)["mean"]
    return {
        "mtbi_s": dying.mtbi_s,
        "away_s": away_s,
        "goodput": ours,
        "goodput_relative": ours["mean"] / calm["goodput"],
        "goodput_elastic": theirs,
        "times_sooner": ours["mean"] / theirs,
    }


def figures_of(
    rows: list[dict[str, Any]], goodput: dict[str, dict[str, Any]], elastic: dict[str, float]
) -> dict[str, Any]:
    """What docs/results/failures.md quotes; losses as shares, over seeds."""
    published = PUBLISHED["elastic", 1, CHIPS] / 100
    return {
        "goodput_relative": goodput["goodput relative to that without"]["mean"],
        "goodput_merged": goodput["goodput with failures"]["mean"],
        "goodput_merged_without_failures": goodput["goodput without failures"]["mean"],
        "goodput_elastic_data_parallel": elastic["mean"],
        "times_sooner_with_published_elastic": spread(
            [r["times_sooner"] * elastic["mean"] / published for r in rows]
        ),
    } | {name: spread([r[name] for r in rows]) for name in OVER_SEEDS}


def _table(
    rows: list[dict[str, Any]], variants: list[dict[str, Any]], figures: dict[str, Any]
) -> None:
    print(f"\n{'':>6}{'validation loss':^34}{'seconds to the same tokens':^32}")
    print(f"{'seed':>6}{'free':>10}{'failing':>10}{'data-par.':>12}{'free':>12}{'failing':>10}"
          f"{'elastic':>10}{'sooner':>9}{'died':>6}")  # fmt: skip
    for r in rows:
        ours, free = r["with_failures"], r["without_failures"]
        print(
            f"{r['seed']:>6}{free['val_loss']:>10.4f}{ours['val_loss']:>10.4f}"
            f"{r['data_parallel']['val_loss']:>12.4f}{r['seconds_without_failures']:>12.0f}"
            f"{r['seconds_with_failures']:>10.0f}{r['seconds_elastic']:>10.0f}"
            f"{r['times_sooner']:>8.2f}x{ours['interruptions']:>6}"
        )
    print("\nOther failures (nothing trained):")
    for v in variants:
        ours, relative, theirs = (
            f"{100 * share:.1f} %"
            for share in (v["goodput"]["mean"], v["goodput_relative"], v["goodput_elastic"])
        )
        print(
            f"  every {v['mtbi_s']:.0f} s, away {v['away_s']:.0f} s: goodput {ours} ({relative} of "
            f"that without failures), elastic {theirs}: {v['times_sooner']:.2f} x"
        )
    print()
    for name, value in figures.items():
        text = shown(value) if isinstance(value, dict) else f"{value:.4f}"
        print(f"{name:<50}{text}")


if __name__ == "__main__":
    main()
