"""Decoupled against data-parallel at equal tokens over the number of learners, on any corpora.

    python bench/gaps.py [--corpora stdlib book.txt] [--learners 1 2 4] [--seeds 0 1] [--json FILE]

For every corpus and number of learners each side's inner rate is chosen by validation loss on the
first seed, on a grid that grows by factors of two until the best rate has a worse one on either
side; every seed then runs at that rate. Reported is the *test* loss: the gap is the mean over seeds
of (Decoupled / data-parallel) - 1, with its spread. Beside it stands how many times fewer bytes
Decoupled sends and receives than a ring all-reduce of bf16 gradients at every step (computed from
sizes; bench/bytes.py measures that at the sockets).

M learners share one batch of `--batch` sequences a step, so that every M has trained on the same
number of tokens in the same number of steps: data-parallel is one run for all M, as in the
published comparison (arXiv 2503.09799).

`--ours algorithm.outer_settle_from=0.7` changes a setting of Decoupled runs, `--theirs inner.b2=1`
one of data-parallel, `--both` one of both; values are JSON.

Same model (nano), samples and schedule shape on both sides. Results are kept: what is interrupted
goes on where it was. `--any-sources` counts what an earlier version of the code found.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runs import keep, results_of, surroundings

from diloco_cli.report import data_parallel_bytes
from diloco_learner.training.trainer import Program
from diloco_shared.numerics import codec
from diloco_shared.spec.run import RunSpec
from diloco_simulator.commands import spec_of
from diloco_simulator.experiments.bulk import Experiment

METHODS = ("decoupled", "data-parallel")
# Where the search begins: what the best rates of small models were so far.
RATES = {"decoupled": (4e-3, 8e-3), "data-parallel": (8e-3, 1.6e-2)}
# No rate beyond these is tried: training diverges above, and stands still below.
RATE_LEAST, RATE_MOST = 5e-4, 0.13
# The last rounds of a Decoupled run take a few steps more than its budget; data-parallel gets them
# too, so that it never sees fewer tokens.
EXTRA_STEPS = 24
# Sequences of one pass: a larger batch is accumulated. The gradient is the same, and what one pass
# touches stays in a core's cache: 32 sequences of nano cost 28 ms at once, 21 ms in four.
PASS = 8
# Validation loss of DiLoCo with 35M parameters relative to data-parallel (arXiv 2503.09799).
PUBLISHED = {2: 0.007, 4: 0.020, 8: 0.039}


@dataclass(frozen=True)
class Case:
    """One side of one comparison."""

    corpus: str
    learners: int  # of data-parallel 1: it takes the same steps whatever their number
    method: str
    preset: str
    batch: int  # sequences of all learners and one step
    changes: tuple[tuple[str, str], ...]  # (section.field, value as JSON)
    speeds: tuple[float, ...] = (1.0,)
    one_way_s: float = 0.1  # a step takes 1 s


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--corpora", nargs="+", default=["stdlib"], help="stdlib, folders, files")
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--batch", type=int, default=32, help="sequences a step, of all learners")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--preset", default="long")
    parser.add_argument("--ours", nargs="+", type=change, default=[], metavar="SETTING=VALUE")
    parser.add_argument("--theirs", nargs="+", type=change, default=[], metavar="SETTING=VALUE")
    parser.add_argument("--both", nargs="+", type=change, default=[], metavar="SETTING=VALUE")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--any-sources", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if any(args.batch % m for m in args.learners):
        parser.error(f"--batch {args.batch} cannot be shared equally by {args.learners} learners")
    cases = {
        case_of(corpus, m, method, args): None
        for corpus in args.corpora
        for m in args.learners
        for method in METHODS
    }
    tried = search(cases, args)
    rates = {case: min(found, key=lambda r: found[r]["val_loss"]) for case, found in tried.items()}
    runs = {
        (case, seed): experiment(case, args.steps, seed, rates[case])
        for case in cases
        for seed in args.seeds
    }
    found = results_of(list(runs.values()), args.workers, any_sources=args.any_sources)
    results = {where: found[e.key()] for where, e in runs.items()}
    rows = [row(corpus, m, args, results, rates) for corpus in args.corpora for m in args.learners]
    _table(rows)
    if args.json:
        body = {
            "figures": {f"gap_{r['corpus']}_m{r['learners']}": r["gap"] for r in rows},
            "rows": rows,
            "by_rate": [
                {"corpus": Path(c.corpus).name, "learners": c.learners, "method": c.method}
                | {"val_loss": {f"{rate:g}": x["val_loss"] for rate, x in sorted(seen.items())}}
                for c, seen in tried.items()
            ],
            "steps": args.steps,
            "preset": args.preset,
            "batch": args.batch,
            "changes": {name: dict(getattr(args, name)) for name in ("ours", "theirs", "both")},
            "seeds": args.seeds,
            **surroundings(__file__),
        }
        keep(args.json, body)


def change(text: str) -> tuple[str, str]:
    """section.field=value; ValueError if it is not, or the value is not JSON."""
    where, equals, value = text.partition("=")
    if not equals or where.count(".") != 1:
        raise ValueError(text)
    json.loads(value)
    return where, value


def case_of(corpus: str, m: int, method: str, args: argparse.Namespace) -> Case:
    decoupled = method == "decoupled"
    own = args.ours if decoupled else args.theirs
    changes = (*args.both, *own)
    return Case(corpus, m if decoupled else 1, method, args.preset, args.batch, changes)


def search(
    cases: Iterable[Case], args: argparse.Namespace
) -> dict[Case, dict[float, dict[str, Any]]]:
    """Per case: what every rate tried gave on the first seed, the best one inside the grid.

    Of `args`: steps, seeds, workers, any_sources.
    """
    tried: dict[Case, dict[float, dict[str, Any]]] = {case: {} for case in cases}
    wanted = [(case, rate) for case in tried for rate in RATES[case.method]]
    while wanted:
        runs = {
            (case, rate): experiment(case, args.steps, args.seeds[0], rate) for case, rate in wanted
        }
        found = results_of(list(runs.values()), args.workers, any_sources=args.any_sources)
        for (case, rate), e in runs.items():
            tried[case][rate] = found[e.key()]
        wanted = [(case, rate) for case, seen in tried.items() for rate in _beyond(seen)]
    return tried


def _beyond(seen: dict[float, dict[str, Any]]) -> list[float]:
    """The next rate to try, if the best one so far is at an edge."""
    best = min(seen, key=lambda rate: seen[rate]["val_loss"])
    if best == max(seen) and 2 * best <= RATE_MOST:
        return [2 * best]
    if best == min(seen) and best / 2 >= RATE_LEAST:
        return [best / 2]
    return []


def experiment(case: Case, steps: int, seed: int, rate: float) -> Experiment:
    """One training run."""
    reference = case.method == "data-parallel"
    body = spec_of(case.preset, steps + EXTRA_STEPS * reference, seed, rate).model_dump(mode="json")
    body["data"]["source"] = case.corpus
    own = case.batch // case.learners
    parts = own // PASS if own % PASS == 0 else 1
    body["inner"] |= {"batch_sequences": own // parts, "accumulation": parts}
    for where, value in case.changes:
        section, field = where.split(".")
        body[section][field] = json.loads(value)
    spec = RunSpec.model_validate(body)
    method: Literal["data-parallel", "decoupled"] = "data-parallel" if reference else "decoupled"
    return Experiment(spec, case.learners, method, speeds=case.speeds, one_way_s=case.one_way_s)


def row(
    corpus: str,
    m: int,
    args: argparse.Namespace,
    results: dict[tuple[Case, int], dict[str, Any]],
    rates: dict[Case, float],
) -> dict[str, Any]:
    """One comparison over all seeds."""
    ours, theirs = (case_of(corpus, m, method, args) for method in METHODS)
    pairs = [(results[ours, s], results[theirs, s]) for s in args.seeds]
    if any(a["tokens"] > b["tokens"] for a, b in pairs):
        raise SystemExit("data-parallel saw fewer tokens: raise EXTRA_STEPS")
    gaps = [a["test_loss"] / b["test_loss"] - 1 for a, b in pairs]
    return {
        "corpus": Path(corpus).stem,
        "learners": m,
        "rate": rates[ours],
        "rate_data_parallel": rates[theirs],
        "test_loss": [a["test_loss"] for a, _ in pairs],
        "test_loss_data_parallel": [b["test_loss"] for _, b in pairs],
        "gap": statistics.fmean(gaps),
        "gap_spread": statistics.stdev(gaps) if len(gaps) > 1 else None,
        "val_gap": statistics.fmean(a["val_loss"] / b["val_loss"] - 1 for a, b in pairs),
        "published": PUBLISHED.get(m),
        "reduction": reduction(experiment(ours, args.steps, 0, rates[ours]).spec, m),
        "rounds": [a["rounds"] for a, _ in pairs],
        "virtual_s": [a["virtual_s"] for a, _ in pairs],
    }


def reduction(spec: RunSpec, learners: int) -> float | None:
    """Bytes of data-parallel over those of Decoupled, both directions; None for one learner."""
    if learners == 1:
        return None
    a, sizes_P = spec.algorithm, Program.build(spec).layout.sizes
    up = sum(codec.bytes_of(a.codec_up, n) for n in sizes_P)
    key = sum(codec.bytes_of(a.keyframe_codec, n) for n in sizes_P)
    delta = sum(codec.bytes_of(a.codec_down, n) for n in sizes_P)
    down = (key + (a.keyframe_every - 1) * delta) / a.keyframe_every
    step = 2 * data_parallel_bytes(1, learners, sum(sizes_P))
    return a.sync_every_steps * step / (up + down)


def _table(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'corpus':>16} {'M':>3} {'rates':>16} {'Decoupled':>10} {'data-par.':>10} "
        f"{'gap (test)':>17} {'published':>10} {'fewer bytes':>12}"
    )
    for r in rows:
        rates = f"{r['rate']:.1e} {r['rate_data_parallel']:.1e}"
        spread = "" if r["gap_spread"] is None else f" ± {100 * r['gap_spread']:.2f}"
        published = "" if r["published"] is None else f"{100 * r['published']:+.1f} %"
        fewer = "" if r["reduction"] is None else f"{r['reduction']:.0f} x"
        ours = statistics.fmean(r["test_loss"])
        theirs = statistics.fmean(r["test_loss_data_parallel"])
        gap = f"{100 * r['gap']:+.2f}{spread} %"
        print(
            f"{r['corpus']:>16} {r['learners']:>3} {rates:>16} {ours:10.4f} {theirs:10.4f} "
            f"{gap:>17} {published:>10} {fewer:>12}"
        )


if __name__ == "__main__":
    main()
