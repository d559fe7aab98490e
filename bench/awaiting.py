"""How much of the product's awaiting code worlds of whole processes execute.

    python bench/awaiting.py [--seeds 30] [--from 0] [--least 0.85] [--json FILE]
    python bench/awaiting.py --table FILE

What awaits is what the order of events can break: lines in bodies of `async def`, and of those the
statements that hold an `await`, an `async for` or an `async with`. Worlds are played under
`coverage`. Exit status 1 below `--least` of the lines that speak to no socket, or if a world breaks
a promise.
"""

import argparse
import ast
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage

sys.path.insert(0, str(Path(__file__).parent))

from folders import by_folder, folder, markdown, percent
from runs import keep, surroundings

ROOT = Path(__file__).resolve().parents[1]
PLACES = (
    "services/syncer/diloco_syncer",
    "services/learner/diloco_learner",
    "services/coordinator/diloco_coordinator",
    "shared/diloco_shared",
)
# What speaks to a real server over a socket. Worlds have a bus in memory in its place; live tests
# and fuzzing play these.
SOCKETS = ("bus/nats/", "hub/nats_")
COMPUTING = "services/learner/diloco_learner/training/computing_io.py"
# What starts a real process, and what serves its sockets and signals: a world starts the same
# applications without them. Live tests play these. They count as not executed in the share that
# must be reached, and are left out in one beside it.
STARTERS = {
    "services/learner/diloco_learner/__main__.py:_live": "signals, and the way out of a process",
    "services/learner/diloco_learner/app.py:serve": "connects over a socket",
    f"{COMPUTING}:OnThisMachine.handed": "of the next one",
    f"{COMPUTING}:OnThisMachine.train": "a thread, a device",
    "services/syncer/diloco_syncer/app.py:serve": "connects over a socket",
    "services/coordinator/diloco_coordinator/app.py:serve": "a socket, and the web server on it",
    "services/coordinator/diloco_coordinator/api/listening_io.py:answer_on": "the web server",
    "services/coordinator/diloco_coordinator/api/listening_io.py:Certificate.keep": "its files",
    "shared/diloco_shared/process/health.py:HealthServer.start": "the web server of health",
    "shared/diloco_shared/process/health.py:HealthServer._serve": "the web server of health",
    "shared/diloco_shared/process/health.py:HealthServer.close": "the web server of health",
    "shared/diloco_shared/process/loop_watch.py:LoopWatch.keep": "how late a real loop is",
    "shared/diloco_shared/process/connecting.py:connected": "connects over a socket",
    "shared/diloco_shared/process/serving.py:serve": "connects over a socket",
    "shared/diloco_shared/process/serving.py:_run": "signals, and the web server of health",
    "shared/diloco_shared/process/stopping.py:until_stopped": "signals",
}
# Functions shown that no world executes; the JSON has all of them.
SHOWN = 40

Lines = set[int]


@dataclass(frozen=True)
class Function:
    """An `async def`: its statements' first lines, and those of statements that wait."""

    name: str
    lines: frozenset[int]
    waits: frozenset[int]


@dataclass(frozen=True)
class Share:
    """Of one file, or of several."""

    lines: int = 0
    executed: int = 0
    waits: int = 0
    waited: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(
            self.lines + other.lines,
            self.executed + other.executed,
            self.waits + other.waits,
            self.waited + other.waited,
        )

    @property
    def of_lines(self) -> float:
        return self.executed / self.lines if self.lines else 1.0

    @property
    def of_waits(self) -> float:
        return self.waited / self.waits if self.waits else 1.0


def functions(source: str, statements: Iterable[int]) -> list[Function]:
    """Of one file. `statements`: first lines of all that can be executed in it.

    A function within another is part of it, unless it awaits itself.
    """
    known = frozenset(statements)
    found = []
    for name, node in _async_defs(ast.parse(source), ()):
        lines, waits = Lines(), Lines()
        for statement in node.body:
            _collect(statement, lines, waits)
        # A docstring, a bare annotation and `nonlocal` are statements that nobody executes.
        found.append(Function(name, known & lines, known & waits))
    return [f for f in found if f.lines]


def _async_defs(
    node: ast.AST, outer: tuple[str, ...]
) -> Iterator[tuple[str, ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        names = (*outer, child.name) if named else outer  # type: ignore[attr-defined]
        if isinstance(child, ast.AsyncFunctionDef):
            yield ".".join(names), child
        yield from _async_defs(child, names)


def _collect(statement: ast.stmt, lines: Lines, waits: Lines) -> None:
    """The statement and those in it; it waits if something of its own does, not of theirs."""
    lines.add(statement.lineno)
    if isinstance(statement, ast.AsyncFor | ast.AsyncWith):
        waits.add(statement.lineno)
    if isinstance(statement, ast.AsyncFunctionDef):
        return  # counted by itself
    left: list[ast.AST] = list(ast.iter_child_nodes(statement))
    while left:
        node = left.pop()
        if isinstance(node, ast.stmt):
            _collect(node, lines, waits)
            continue
        if isinstance(node, ast.Await) or (isinstance(node, ast.comprehension) and node.is_async):
            waits.add(statement.lineno)
        left += ast.iter_child_nodes(node)


def product(places: Sequence[str] = PLACES) -> dict[str, list[Function]]:
    """Every file of the product in which something awaits."""
    found = {}
    for path in sorted(p for place in places for p in (ROOT / place).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "async def" not in source:
            continue
        _, statements, _, _, _ = coverage.Coverage(data_file=None).analysis2(str(path))
        if of_file := functions(source, statements):
            found[path.relative_to(ROOT).as_posix()] = of_file
    return found


def measured(play: Any, files: Sequence[str]) -> tuple[Any, dict[str, Lines]]:
    """What `play` returns, and the lines of `files` that it executed."""
    watched = coverage.Coverage(data_file=None, include=[str(ROOT / f) for f in files])
    watched.start()
    try:
        result = play()
    finally:
        watched.stop()
    executed = {}
    for file in files:
        _, statements, _, missing, _ = watched.analysis2(str(ROOT / file))
        executed[file] = set(statements) - set(missing)
    return result, executed


def one(task: tuple[int, Sequence[str]]) -> tuple[int, list[str], dict[str, Lines]]:
    """A world in a worker: its seed, what it broke, and what it executed."""
    from diloco_simulator.worlds import world

    seed, files = task
    found, executed = measured(lambda: world.one(seed), files)
    return seed, found.violations, executed


def share(of: Iterable[Function], executed: Lines) -> Share:
    """Of one file's functions."""
    lines = {line for f in of for line in f.lines}
    waits = {line for f in of for line in f.waits}
    return Share(len(lines), len(lines & executed), len(waits), len(waits & executed))


def speaks_to_sockets(file: str) -> bool:
    """Whether no world can reach it, as SOCKETS says."""
    return any(place in file for place in SOCKETS)


def missing(of: dict[str, list[Function]], executed: dict[str, Lines]) -> list[dict[str, Any]]:
    """Functions of which something was not executed, those with the most first."""
    found = [
        {
            "function": f"{file}:{f.name}",
            "lines": len(f.lines),
            "missing": sorted(f.lines - executed[file]),
        }
        for file, functions_ in of.items()
        for f in functions_
        if f.lines - executed[file] and not speaks_to_sockets(file)
    ]
    return sorted(found, key=lambda f: (-len(f["missing"]), f["function"]))


def starts(file: str, function: Function) -> bool:
    """Whether it only starts or serves a real process, as STARTERS says."""
    return f"{file}:{function.name}" in STARTERS


def result_of(of: dict[str, list[Function]], executed: dict[str, Lines]) -> dict[str, Any]:
    """The table, totals, and what is missing."""
    files = {file: share(functions_, executed[file]) for file, functions_ in of.items()}
    everything = sum(files.values(), Share())
    reachable = sum((s for f, s in files.items() if not speaks_to_sockets(f)), Share())
    worlds = {file: [f for f in fs if not starts(file, f)] for file, fs in of.items()}
    begun = (
        share(fs, executed[file]) for file, fs in worlds.items() if not speaks_to_sockets(file)
    )
    apart = {
        f"{file}:{f.name}": {"lines": len(f.lines), "why": STARTERS[f"{file}:{f.name}"]}
        for file, fs in of.items()
        for f in fs
        if starts(file, f)
    }
    return {
        "all": _shown(everything),
        "without_sockets": _shown(reachable),
        "without_starters": _shown(sum(begun, Share())),
        "starters": apart,
        "files": {file: _shown(s) for file, s in files.items()},
        "missing": missing(of, executed),
    }


def _shown(s: Share) -> dict[str, Any]:
    return {
        "lines": s.lines,
        "executed": s.executed,
        "share": round(s.of_lines, 4),
        "waits": s.waits,
        "waited": s.waited,
        "share_of_waits": round(s.of_waits, 4),
    }


def show(result: dict[str, Any]) -> None:
    """The table, worst files first."""
    files = sorted(result["files"].items(), key=lambda item: (item[1]["share"], item[0]))
    rows = [
        *files,
        ("all", result["all"]),
        ("without sockets", result["without_sockets"]),
        ("without sockets and starters", result["without_starters"]),
    ]
    print("awaiting lines  executed  share   statements that wait  executed  share")
    for name, s in rows:
        print(
            f"{s['lines']:>14}  {s['executed']:>8}  {s['share']:>5.0%}   "
            f"{s['waits']:>20}  {s['waited']:>8}  {s['share_of_waits']:>5.0%}  {name}"
        )
    print("starters, which worlds do without:")
    for name, starter in result["starters"].items():
        print(f"{starter['lines']:>4} {name}: {starter['why']}")
    print("executed by no world, the longest first:")
    for f in result["missing"][:SHOWN]:
        lines = ", ".join(map(str, f["missing"][:12]))
        print(f"{len(f['missing']):>4} of {f['lines']:<4} {f['function']}  ({lines})")


def table(result: dict[str, Any], least: float = 0.85) -> str:
    """By folder of the product; for those below `least` the files of which most is missing."""
    files = {name: (s["lines"], s["executed"]) for name, s in result["files"].items()}
    rows = []
    for name, (lines, executed) in by_folder(files.items()).items():
        told = _most_missing(files, name) if executed < least * lines else ""
        rows.append((name, str(lines), str(executed), percent(executed, lines), told))
    whole = (("all", result["all"]), ("all without sockets", result["without_sockets"]))
    for name, s in whole:
        share = percent(s["executed"], s["lines"], 1)
        rows.append((name, str(s["lines"]), str(s["executed"]), share, ""))
    head = ("part of the product", "awaiting lines", "executed", "share", "where lines are missing")
    return markdown(head, rows)


def _most_missing(files: dict[str, tuple[int, int]], of: str, shown: int = 3) -> str:
    left = {f: lines - done for f, (lines, done) in files.items() if folder(f) == of}
    worst = sorted((f for f in left if left[f]), key=lambda f: (-left[f], f))
    told = [
        f"`{Path(f).name}`: {left[f]}{', sockets' if speaks_to_sockets(f) else ''}"
        for f in worst[:shown]
    ]
    more = len(worst) - shown
    return "; ".join([*told, *([f"and {more} more"] if more > 0 else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--least", type=float, default=0.0, help="share of lines, else failure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print a table of this output, and do no more")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    began, of = time.monotonic(), product()
    executed: defaultdict[str, Lines] = defaultdict(set)
    broken = 0
    tasks = [(seed, tuple(of)) for seed in range(args.first, args.first + args.seeds)]
    with ProcessPoolExecutor(args.workers) as pool:
        for seed, violations, lines_of in pool.map(one, tasks):
            broken += bool(violations)
            for violation in violations:
                print(f"seed {seed:>6}  {violation}", flush=True)
            for file, lines in lines_of.items():
                executed[file] |= lines
    result = result_of(of, executed)
    show(result)
    print(f"worlds {args.seeds}  broken {broken}  ({time.monotonic() - began:.0f} s)")
    if args.json:
        whole = surroundings(__file__) | {"seeds": args.seeds, "from": args.first} | result
        keep(args.json, whole, indent=1)
    sys.exit(1 if broken or result["without_sockets"]["share"] < args.least else 0)


if __name__ == "__main__":
    main()
