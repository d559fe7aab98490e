"""`python -m diloco_simulator.check --seeds 2000`: many seeded worlds, every violation printed.

Then one small calm world again and again, in which a process dies before its first effect, its
second, its third … until every place has been tried where a syncer or a learner can die.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from diloco_simulator import found, shrink
from diloco_simulator.coverage import STATES
from diloco_simulator.coverage_required import REQUIRED
from diloco_simulator.options import Options, fresh_seed
from diloco_simulator.scenario import Verdict, play

_SHOWN = ("crashes", "hangs", "partitions", "failovers", "recoveries", "refused")
ROLES = ("leader", "standby", "learner")
# Worlds between two collections of garbage by hand: a few hundred megabytes.
WORLDS_KEPT = 16
# So many seeds reach every state of REQUIRED: fewer may miss one by chance.
ENOUGH = 2000
# Seeds handed to a worker at once.
CHUNK = 8

_played = 0


def again(seed: int, **changed: int | None) -> str:
    """The command that plays one seed; `changed`: options that every world was given."""
    said = "".join(f" --{name} {value}" for name, value in changed.items() if value is not None)
    command = "python -m diloco_simulator.check --seeds 1 --workers 1 --no-crash-points"
    return f"{command} --from {seed}{said}"


def again_at(role: str, n: int) -> str:
    """The command that plays the small world in which a process dies before its n-th effect."""
    return f"python -m diloco_simulator.check --seeds 0 --workers 1 --dies {role} {n}"


def small(role: str = "", n: int = 0) -> Options:
    """The world of the crash points: two learners, a leader and a standby, and every duty; once
    it goes back to a checkpoint."""
    return Options.calm(
        learners=2,
        quorum=1,
        fragments=2,
        steps=18,
        safety_s=20.0,
        syncers=2,
        checkpoint_every_steps=6,
        restores=1,
        snapshot_every_rounds=2,
        keyframe_every=2,
        codec_up="int4",
        codec_down="int8",
        dies_at=(role, n),
    )


def play_one(task: tuple[int, Options | None]) -> Verdict:
    """One world in a worker; reference cycles wait until several worlds are over."""
    global _played
    _played += 1
    if _played % WORLDS_KEPT == 0:
        gc.collect()
    return play(*task)


def totals(verdicts: Iterable[Verdict], points: Iterable[Verdict] = ()) -> dict[str, Any]:
    """Sums over all seeds; the named counters, `counts` with everything that happened, `coverage`:
    how many worlds reached each of the states that are looked for, and `looks`: how often every
    promise was checked. `points`: worlds in which one process died at one place."""
    counts: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    looks: Counter[str] = Counter()
    for v in points:
        reached.update(state for state, n in v.counts.items() if n)
        looks.update(v.looks)
    seeds = bad = rounds = 0
    for v in verdicts:
        seeds, rounds, bad = seeds + 1, rounds + v.rounds, bad + bool(v.violations)
        counts.update(v.counts)
        looks.update(v.looks)
        reached.update(state for state, n in v.counts.items() if n)
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
        "coverage": {state: reached[state] for state in STATES},
        "unreached": [state for state in STATES if not reached[state]],
        "missing": [state for state in REQUIRED if not reached[state]],
        "looks": dict(sorted(looks.items())),
        "counts": dict(sorted(counts.items())),
    }


def show(verdict: Verdict, command: str) -> None:
    """Print what a world broke, and how to see it again."""
    for violation in verdict.violations:
        print(f"seed {verdict.seed:>6}  {violation}", flush=True)
    if verdict.violations:
        print(f"             again: {command}", flush=True)


def crash_points(pool: ProcessPoolExecutor) -> Iterator[tuple[str, int, Verdict]]:
    """(role, n, verdict) of the small world for every effect of every role."""
    points = [(role, n) for role in ROLES for n in range(1, _effects()[role] + 1)]
    tasks = [(1, small(role, n)) for role, n in points]
    for (role, n), verdict in zip(points, pool.map(play_one, tasks, chunksize=CHUNK), strict=True):
        yield role, n, verdict


def _effects() -> Counter[str]:
    """Effects of the small world in which nobody dies, by role."""
    return play(1, small()).effects


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--fresh", action="store_true", help="begin where nobody has looked yet")
    parser.add_argument("--keep", type=Path, help="write worlds that break a promise there")
    parser.add_argument(
        "--shrink", action="store_true", help="of each promise, keep the least that breaks it"
    )
    parser.add_argument("--kept", type=Path, help="play such a file again, and nothing else")
    parser.add_argument("--json", type=Path, help="write the totals there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--syncers", type=int, help="this many in every world")
    parser.add_argument("--shards", type=int, choices=(1, 2), help="of the syncer, in every world")
    parser.add_argument(
        "--no-crash-points", action="store_true", help="seeds alone, not every place to die"
    )
    parser.add_argument("--dies", nargs=2, metavar=("ROLE", "N"), help="one place to die alone")
    args = parser.parse_args()
    if args.shrink and not args.keep:
        parser.error("--shrink says how worlds are kept: give --keep too")
    if args.fresh:
        args.first = fresh_seed()
        print(f"seeds from {args.first}", flush=True)
    return args


def worlds(args: argparse.Namespace) -> list[tuple[int, Options | None]]:
    """(seed, options) of the worlds to play."""
    seeds = range(args.first, args.first + args.seeds)
    changes = {} if args.syncers is None else {"syncers": args.syncers}
    if args.shards is not None:
        changes |= {"shards": args.shards, "fragments": 2 * args.shards}
    if not changes:
        return [(seed, None) for seed in seeds]
    return [(seed, Options.drawn(seed).changed(**changes)) for seed in seeds]


def main() -> None:
    """Exit status 1 if any world broke a promise."""
    args = arguments()
    if args.kept:
        verdict = play(*found.read(args.kept))
        show(verdict, f"python -m diloco_simulator.check --kept {args.kept}")
        sys.exit(1 if verdict.violations else 0)
    began = time.monotonic()
    verdicts: list[Verdict] = []
    at_points: list[Verdict] = []
    points: Counter[str] = Counter()
    kept: dict[str, tuple[Path, int, Options]] = {}  # the first of each promise
    broken = 0
    with ProcessPoolExecutor(args.workers, initializer=gc.disable) as pool:
        tasks = worlds(args)
        for v, (seed, options) in zip(
            pool.map(play_one, tasks, chunksize=CHUNK), tasks, strict=True
        ):
            verdicts.append(v)
            show(v, again(v.seed, syncers=args.syncers, shards=args.shards))
            if args.keep and v.violations:
                options = options or Options.drawn(seed)
                path = found.keep(args.keep, seed, options, v.violations)
                kept.setdefault(shrink.promise(v.violations[0]), (path, seed, options))
        if args.dies:
            verdict = play(1, small(args.dies[0], int(args.dies[1])))
            show(verdict, again_at(*args.dies))
            broken += bool(verdict.violations)
        elif not args.no_crash_points:
            for role, n, verdict in crash_points(pool):
                points[role] += 1
                at_points.append(verdict)
                broken += bool(verdict.violations)
                show(verdict, again_at(role, n))
    for path, seed, options in kept.values() if args.shrink else ():
        shrink.shrink_kept(path, seed, options)
    result = totals(verdicts, at_points)
    result["violations"] += broken
    result["crash_points"] = dict(points)
    report(result, time.monotonic() - began)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    complete = args.seeds >= ENOUGH and not args.no_crash_points and args.syncers is None
    if complete and args.shards is None and result["missing"]:
        print(f"states that must be reached were not: {', '.join(result['missing'])}")
        sys.exit(1)
    sys.exit(1 if result["violations"] else 0)


def report(result: dict[str, Any], seconds: float) -> None:
    """The coverage, rarest first, then one line of totals."""
    by_rarity = sorted(result["coverage"].items(), key=lambda item: (item[1], item[0]))
    for state, seeds in by_rarity if result["seeds"] > 1 else ():
        print(f"{seeds:>7} seeds  {state}")
    for state in result["unreached"] if result["seeds"] > 1 else ():
        print(f"no seed reached: {state}")
    looks = "  ".join(f"{name} {n}" for name, n in result["looks"].items())
    print(f"checks made: {looks}")
    points = "  ".join(f"{n} of a {role}" for role, n in result["crash_points"].items())
    if points:
        print(f"places to die: {points}")
    figures = "  ".join(f"{name} {result[name]}" for name in ("seeds", "violations", *_SHOWN))
    print(f"{figures}  ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
