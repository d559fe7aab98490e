"""`python -m diloco_simulator.check --seeds 2000`: many seeded worlds, every violation printed."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from diloco_simulator.scenario import Verdict, play

_SHOWN = ("crashes", "hangs", "partitions", "failovers", "recoveries", "refused")


def again(seed: int) -> str:
    """The command that plays one seed."""
    return f"python -m diloco_simulator.check --seeds 1 --from {seed} --workers 1"


def totals(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Sums over all seeds; the named counters, and `counts` with everything that happened."""
    counts: Counter[str] = Counter()
    seeds = bad = rounds = 0
    for v in verdicts:
        seeds, rounds, bad = seeds + 1, rounds + v.rounds, bad + bool(v.violations)
        counts.update(v.counts)
    return {
        "seeds": seeds,
        "violations": bad,
        "rounds": rounds,
        "crashes": counts["syncer crashes"] + counts["learner crashes"],
        "hangs": counts["syncer hangs"] + counts["learner hangs"],
        "partitions": counts["partitions"],
        "failovers": counts["failovers"],
        "recoveries": counts["recoveries"],
        "refused": counts["refused"],
        "counts": dict(sorted(counts.items())),
    }


def main() -> None:
    """Exit status 1 if any seed broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--json", type=Path, help="write the totals there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    began = time.monotonic()
    verdicts: list[Verdict] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for v in pool.map(play, range(args.first, args.first + args.seeds), chunksize=8):
            verdicts.append(v)
            for violation in v.violations:
                print(f"seed {v.seed:>6}  {violation}", flush=True)
            if v.violations:
                print(f"             again: {again(v.seed)}", flush=True)
    result = totals(verdicts)
    figures = "  ".join(f"{name} {result[name]}" for name in ("seeds", "violations", *_SHOWN))
    print(f"{figures}  ({time.monotonic() - began:.0f} s)")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if result["violations"] else 0)


if __name__ == "__main__":
    main()
