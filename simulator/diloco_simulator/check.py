"""`python -m diloco_simulator.check --seeds 300`: many seeded worlds, every violation printed.

With `--crash-points 50` also one small world again and again, in which a process dies at its first
place to die, its fiftieth, its hundredth … of every role (worlds/crash_points.py).

Thousands of worlds take hours. With `--json FILE` the totals are there after every few worlds, and
`--further` adds to them: what was broken off goes on from its newest seed.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

from diloco_shared.durable import replace
from diloco_simulator import shrink
from diloco_simulator.coverage.required import ENOUGH, SOON, RequiredStates
from diloco_simulator.worlds import crash_points, found
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options, fresh_seed
from diloco_simulator.worlds.world import WorldResult, played

_SHOWN = ("crashes", "hangs", "partitions", "failovers", "recoveries", "refused")
# Between two lines that say how far it has come, in seconds.
PROGRESS_S = 20.0
# Between two looks of a worker at whether the process that it works for lives, in seconds.
PARENT_S = 1.0
COMMAND = "python -m diloco_simulator.check"


@dataclass(slots=True)
class Task:
    """A world to play: its name, and the command that plays it again."""

    case: Case
    name: str
    again: str
    place: str = ""  # the role of which somebody dies, "nobody" for the small world without


def seeds(args: argparse.Namespace) -> list[Task]:
    """The worlds of all seeds."""
    given = {"syncers": args.syncers, "shards": args.shards}
    said = "".join(f" --{name} {n}" for name, n in given.items() if n is not None)
    changes = {name: n for name, n in given.items() if n is not None}
    if args.shards is not None:
        changes["fragments"] = 2 * args.shards
    return [
        Task(
            Case.drawn(seed, Options.drawn(seed).changed(**changes)),
            f"seed-{seed}",
            f"{COMMAND} --seeds 1 --workers 1 --from {seed}{said}",
        )
        for seed in range(args.first, args.first + args.seeds)
    ]


def place(role: str, n: int) -> Task:
    """The small world in which a process dies at its n-th place."""
    name = f"{role}-dies-at-{n}" if role else "nobody-dies"
    again = f"{COMMAND} --seeds 0 --workers 1 --dies {role or 'nobody'} {n}"
    return Task(crash_points.case(role, n), name, again, place=role or "nobody")


def places(every: int) -> Iterator[Task]:
    """The small world without a death, and with one at each `every`-th place of every role."""
    yield place("", 0)
    for role, n in crash_points.places(every, crash_points.play().passings):
        yield place(role, n)


def play(task: Task) -> WorldResult:
    """In a worker."""
    return played(task.case)


def verdicts(everything: list[Task], workers: int) -> Iterator[WorldResult]:
    """In the order of the tasks. A world is the same in whatever process it is played."""
    if workers == 1:
        yield from map(play, everything)
        return
    # What libraries begin in threads of their own does not live on in a fork.
    spawned = get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(everything) or 1),
        mp_context=spawned,
        initializer=_ends_with,
        initargs=(os.getpid(),),
    )
    with pool:
        yield from pool.map(play, everything)


def _ends_with(parent: int) -> None:
    """This worker does, whatever ends that process: nobody else would ever stop it."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        os._exit(1)

    Thread(target=look, daemon=True).start()


@dataclass(slots=True)
class Sums:
    """Over all worlds that were played."""

    seeds: int = 0
    pieces: list[list[int]] = field(default_factory=list)  # [first seed, seeds], one for each call
    violations: int = 0  # worlds that broke a promise
    rounds: int = 0
    virtual_s: float = 0.0
    states: RequiredStates = field(default_factory=RequiredStates)
    places: Counter[str] = field(default_factory=Counter)

    def add(self, task: Task, verdict: WorldResult) -> None:
        """One more."""
        self.violations += bool(verdict.violations)
        self.virtual_s += verdict.virtual_s
        self.states.add(verdict.counts, verdict.looks)
        if task.place:
            self.places[task.place] += 1
        else:
            self.seeds, self.rounds = self.seeds + 1, self.rounds + verdict.rounds
            self.pieces[-1][1] += 1

    def further(self, result: dict[str, Any]) -> None:
        """What an earlier call has found counts too. KeyError for what is no such file."""
        self.seeds, self.violations = result["seeds"], result["violations"]
        self.rounds, self.virtual_s = result["rounds"], result["virtual_s"]
        self.pieces, self.places = result["pieces"], Counter(result["crash_points"])
        self.states.counts = Counter(result["counts"])
        self.states.worlds = Counter(result["coverage"])
        self.states.looks = Counter(result["looks"])

    def result(self) -> dict[str, Any]:
        """As a file says it: the named counters; `coverage`: how many worlds reached each state;
        `missing`: of those that must be reached; `looks`: how often every promise was checked;
        `counts`: everything that happened."""
        counts, worlds = self.states.counts, self.states.worlds
        return {
            "seeds": self.seeds,
            "pieces": self.pieces,
            "violations": self.violations,
            "rounds": self.rounds,
            "virtual_s": round(self.virtual_s),
            "crashes": counts["crashes"],
            "hangs": counts["hangs"],
            "partitions": counts["partitions"],
            "failovers": counts["failovers"],
            "recoveries": counts["told: recovered"],
            "refused": counts["refused: told"],
            "coverage": dict(sorted(worlds.items(), key=lambda of: (-of[1], of[0]))),
            "missing": self.states.missing(self.seeds),
            "looks": dict(sorted(self.states.looks.items())),
            "counts": dict(sorted(counts.items())),
            "crash_points": dict(self.places),
        }


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--fresh", action="store_true", help="begin where nobody has looked yet")
    parser.add_argument("--keep", type=Path, help="write worlds that break a promise there")
    parser.add_argument(
        "--shrink", action="store_true", help="of each promise, keep the least that breaks it"
    )
    parser.add_argument("--kept", type=Path, help="play such a file again, and nothing else")
    parser.add_argument("--json", type=Path, help="write the totals there")
    parser.add_argument("--further", action="store_true", help="add to the totals that are there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--syncers", type=int, help="this many in every world")
    parser.add_argument("--shards", type=int, choices=(1, 2), help="of the syncer, in every world")
    parser.add_argument(
        "--crash-points", type=int, metavar="EVERY", help="every so many places to die, too"
    )
    parser.add_argument("--dies", nargs=2, metavar=("ROLE", "N"), help="one place to die")
    args = parser.parse_args()
    if args.shrink and not args.keep:
        parser.error("--shrink says how worlds are kept: give --keep too")
    if args.further and not args.json:
        parser.error("--further adds to the totals in a file: give --json too")
    if args.workers < 1:
        parser.error("--workers: one at least")
    if args.dies and args.dies[0] not in (*crash_points.ROLES, "nobody"):
        parser.error(f"--dies ROLE is one of {', '.join(crash_points.ROLES)}")
    if args.fresh:
        args.first = fresh_seed()
        print(f"seeds from {args.first}", flush=True)
    return args


def tasks(args: argparse.Namespace) -> Iterable[Task]:
    """All that is asked for."""
    if args.dies:
        role, n = args.dies
        yield place("" if role == "nobody" else role, int(n))
    yield from chain(seeds(args), places(args.crash_points) if args.crash_points else ())


def show(task: Task, verdict: WorldResult) -> None:
    """Print what a world broke, and how to see it again."""
    for violation in verdict.violations:
        print(f"{task.name:>11}  {violation}", flush=True)
    if verdict.violations:
        print(f"{'':>11}  again: {task.again}", flush=True)


def check(args: argparse.Namespace) -> Sums:
    """Play all, print what breaks, keep and shrink it."""
    sums, kept = begun(args), dict[str, tuple[Path, Case]]()  # the first of each promise
    before = sums.seeds + sums.places.total()
    began = said = time.monotonic()
    everything = list(tasks(args))
    for task, verdict in zip(everything, verdicts(everything, args.workers), strict=True):
        sums.add(task, verdict)
        show(task, verdict)
        if args.keep and verdict.violations:
            path = found.keep(args.keep, task.case, verdict.violations, task.name)
            kept.setdefault(shrink.promise(verdict.violations[0]), (path, task.case))
        if (now := time.monotonic()) > said + PROGRESS_S:
            said, n = now, sums.seeds + sums.places.total() - before
            write(args, sums)
            far = f"{n} of {len(everything)} worlds, {sums.violations} broken"
            print(f"{far} ({now - began:.0f} s)", file=sys.stderr, flush=True)
    write(args, sums)  # shrinking takes minutes, and may be broken off
    for path, case in kept.values() if args.shrink else ():
        shrink.shrink_kept(path, case, shrink.WORLDS_MAX)
    return sums


def begun(args: argparse.Namespace) -> Sums:
    """Totals to add to. SystemExit where those of earlier calls cannot be read."""
    sums = Sums()
    if args.further and args.json.exists():
        try:
            sums.further(json.loads(args.json.read_text("utf-8")))
        except (ValueError, KeyError) as error:
            sys.exit(f"{args.json} has no totals of this program ({error!r}): name another file")
    args.first = behind(sums.pieces, args.first)
    sums.pieces.append([args.first, 0])
    return sums


def behind(pieces: list[list[int]], first: int) -> int:
    """The first seed from `first` on that no piece has played: none counts twice."""
    for begun_at, seeds in sorted(pieces):
        if begun_at <= first < begun_at + seeds:
            first = begun_at + seeds
    return first


def write(args: argparse.Namespace, sums: Sums) -> None:
    """As a whole: what is broken off leaves what was found before."""
    if args.json:
        replace(args.json, json.dumps(sums.result(), indent=2) + "\n")


def main() -> None:
    """Exit status 1 if any world broke a promise, or enough worlds missed what they must reach."""
    args = arguments()
    if args.kept:
        verdict = played(found.read(args.kept))
        show(Task(found.read(args.kept), args.kept.stem, found.again(args.kept)), verdict)
        sys.exit(1 if verdict.violations else 0)
    began = time.monotonic()
    sums = check(args)
    result = sums.result()
    report(sums, result, time.monotonic() - began)
    write(args, sums)
    sys.exit(1 if sums.violations or not complete(args, sums) else 0)


def report(sums: Sums, result: dict[str, Any], seconds: float) -> None:
    """What was reached, the rarest last, then one line of totals."""
    if sums.seeds > 1:
        sums.states.report()
    points = "  ".join(f"{n} of a {role}" for role, n in sums.places.items() if role != "nobody")
    if points:
        print(f"places to die: {points}")
    figures = "  ".join(f"{name} {result[name]}" for name in ("seeds", "violations", *_SHOWN))
    print(f"{figures}  {sums.virtual_s:.0f} virtual s  ({seconds:.0f} s)")


def complete(args: argparse.Namespace, sums: Sums) -> bool:
    """Whether enough seeds as they are drawn have reached what they must, and fewer have checked
    every promise."""
    seeds = max(args.seeds, sums.seeds)
    if seeds < SOON or args.syncers is not None or args.shards is not None:
        return True
    enough = seeds >= ENOUGH
    missing = sums.states.missing(seeds) if enough else sums.states.unchecked(seeds)
    if missing:
        print(f"{ENOUGH if enough else SOON} worlds must reach, and did not: {', '.join(missing)}")
    return not missing


if __name__ == "__main__":
    main()
