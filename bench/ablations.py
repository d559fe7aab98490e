"""What each part of the method is worth: one setting changed at a time, each at its own best rate.

    python bench/ablations.py [--only H merge] [--steps 1500] [--json FILE]

M learners train nano as in bench/gaps.py, whose search it uses: for every setting the inner rate is
bracketed by factors of two on the validation split, and the best loss counts. `difference` is
relative to the setting it was changed from; a run whose last merges came late took more tokens than
its budget, which is said. One seed: differences below about half a per cent may be chance. Beside
it stands how many times fewer bytes than data-parallel's it sends and receives.

A merge is adopted when it arrives: what is varied as tau is how long the links make that take.

Weights by tokens^2 / steps and by tokens are the same thing as long as all learners have batches of
one size, so that only equal weights are compared with them, with two learners at half speed.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaps import Case, experiment, reduction, search
from runs import keep, surroundings

MIXED = (1.0, 1.0, 0.5, 0.5)
# Seconds one way, steps of 1 s: what is merged is adopted so many steps after it was contributed.
LINKS = {"1": 0.1, "2": 0.3, "3": 0.45, "5": 0.7, "8": 1.2}
# Later merges end a run later: by less than this share, and nobody needs to be told.
TOKENS_SAME = 0.02
Changes = dict[str, Any]  # section.field -> value

# By group: what is compared with the first of its settings, which is the preset as it is.
GROUPS: dict[str, dict[str, Changes]] = {
    "merge": {"rda": {}, "mean": {"algorithm.merge": "mean"}},
    "H": {
        "24": {},
        "6": {"algorithm.sync_every_steps": 6},
        "12": {"algorithm.sync_every_steps": 12},
        "48": {"algorithm.sync_every_steps": 48},
        "96": {"algorithm.sync_every_steps": 96},
    },
    "P": {
        "6": {},
        "1": {"algorithm.fragments": 1},
        "2": {"algorithm.fragments": 2},
        "12": {"algorithm.fragments": 12},
    },
    "tau": {
        "1": {},
        "2": {},
        "3": {"algorithm.overlap_steps": 3},
        "5": {"algorithm.overlap_steps": 5},
        "8": {"algorithm.overlap_steps": 8},
    },
    "alpha": {"0": {}, "0.25": {"algorithm.alpha": 0.25}, "0.5": {"algorithm.alpha": 0.5}},
    "alpha, tau 5": {
        "0": {"algorithm.overlap_steps": 5},
        "0.25": {"algorithm.overlap_steps": 5, "algorithm.alpha": 0.25},
        "0.5": {"algorithm.overlap_steps": 5, "algorithm.alpha": 0.5},
    },
    "outer": {
        "0.7/0.8": {},
        "1/0": {"algorithm.outer_rate": 1.0, "algorithm.outer_momentum": 0.0},
        "0.7/0.6": {"algorithm.outer_momentum": 0.6},
        "0.7/0.9": {"algorithm.outer_momentum": 0.9},
        "0.4/0.8": {"algorithm.outer_rate": 0.4},
        "settles from 0.4": {"algorithm.outer_settle_from": 0.4},
        "never settles": {"algorithm.outer_settle_from": 1.0},
    },
    "codec": {
        "bf16": {},
        "fp32": {"algorithm.codec_up": "fp32", "algorithm.codec_down": "fp32"},
        "int8": {"algorithm.codec_up": "int8", "algorithm.codec_down": "int8"},
        "int4": {"algorithm.codec_up": "int4", "algorithm.codec_down": "int4"},
        "e3m0": {"algorithm.codec_up": "e3m0", "algorithm.codec_down": "e3m0"},
        "int4 without error feedback": {
            "algorithm.codec_up": "int4",
            "algorithm.codec_down": "int4",
            "algorithm.error_feedback": False,
        },
    },
    "weights": {"tokens^2/steps": {}, "equal": {"algorithm.weighting": "equal"}},
}


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--corpus", default="stdlib", help="stdlib, a folder or a file")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step, of all learners")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--preset", default="long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--any-sources", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.seeds = [args.seed]
    cases = {(g, name): case_of(g, name, args) for g in args.only for name in GROUPS[g]}
    tried = search(dict.fromkeys(cases.values()), args)
    rows = [row(g, name, cases, tried, args) for g, name in cases]
    for r in rows:
        fewer = f"{r['reduction']:6.0f} x fewer bytes"
        more = f"  {r['tokens']:.2f} x the tokens" if abs(r["tokens"] - 1) > TOKENS_SAME else ""
        print(
            f"{r['group']:>8}  {r['setting']:<28} rate {r['rate']:.1e}  val {r['val_loss']:.4f}  "
            f"{100 * r['difference']:+6.2f} %  {fewer}{more}"
        )
    if args.json:
        about = {"learners": args.learners, "batch": args.batch, "steps": args.steps}
        about |= {"preset": args.preset, "seed": args.seed, **surroundings(__file__)}
        keep(args.json, {"rows": rows, **about})


def case_of(group: str, name: str, args: argparse.Namespace) -> Case:
    """A setting of a group, on equal learners but where their weights are compared."""
    changes = tuple((where, json.dumps(v)) for where, v in GROUPS[group][name].items())
    case = Case(args.corpus, args.learners, "decoupled", args.preset, args.batch, changes)
    if group == "weights":
        return replace(case, speeds=MIXED)
    if "tau" in group:
        return replace(case, one_way_s=LINKS[name if group == "tau" else "5"])
    return case


def row(
    group: str,
    name: str,
    cases: dict[tuple[str, str], Case],
    tried: dict[Case, dict[float, dict[str, Any]]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A setting at its best rate, beside the first of its group."""
    case, first = cases[group, name], cases[group, next(iter(GROUPS[group]))]
    losses = {rate: r["val_loss"] for rate, r in sorted(tried[case].items())}
    best, base = (min(tried[c].values(), key=lambda r: r["val_loss"]) for c in (case, first))
    rate = min(losses, key=lambda r: losses[r])
    return {
        "group": group,
        "setting": name,
        "rate": rate,
        "val_loss": losses[rate],
        "difference": losses[rate] / base["val_loss"] - 1,
        "tokens": best["tokens"] / base["tokens"],
        "by_rate": {f"{r:g}": loss for r, loss in losses.items()},
        "reduction": reduction(experiment(case, args.steps, args.seed, rate).spec, args.learners),
    }


if __name__ == "__main__":
    main()
