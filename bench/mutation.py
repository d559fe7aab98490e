"""Break the product by machine, everywhere in small ways: do the tests and worlds see it?

    python bench/mutation.py [--only MODULE ...] [--sample N] [--seed K] [--worlds N] [--json FILE]
    python bench/mutation.py --id ID ...
    python bench/mutation.py --table FILE

bench/mutants.py puts in faults that somebody thought of. This makes them from the syntax tree of
each module: another comparison, bound, sign, flag or branch, a step left out, an empty answer. Of
each module N are drawn. A fault is in place while its module is imported, never on disk. The tests
that run its line are run, the fastest first, until one fails; what they do not see is left to
seeded worlds, which play whole services. Who survives is listed: each is a missing test, or a
change that means nothing. Which test runs which line is measured once and kept in
diloco-data/mutation.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mutants
from folders import by_folder, markdown, percent
from mutating.faults import Fault, faults, sampled
from mutating.judging import Verdict
from mutating.nursery import verdicts
from mutating.touching import Touching

ROOT = mutants.ROOT
KEPT = ROOT / "diloco-data" / "mutation"
# What is broken, and the folders of the tests that run it. Services share no code but shared code.
SOURCES = {
    "services/syncer/diloco_syncer": ("syncer",),
    "services/learner/diloco_learner": ("learner",),
    "services/coordinator/diloco_coordinator": ("coordinator",),
    "shared/diloco_shared": ("shared", "syncer", "learner", "coordinator"),
}
# What worlds do not play, by the beginning of a file's or a folder's name: what starts a real
# process, speaks to a socket, or computes a real model.
UNPLAYED = ("__main__", "data_parallel", "lane", "models", "nats")
# Imported before forking, besides the libraries of bench/mutants.py: tests need them.
LIBRARIES = ("coverage", "fastapi", "httpx", "hypothesis", "nats", "pytest", "rich", "structlog")
COLUMNS = ("tests", "worlds", "limit", "survived")


def files(only: Sequence[str]) -> list[str]:
    """Of the product; `only`: modules or files, or the ends of their names."""
    found = []
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not only or any(matches(name, wanted) for wanted in only):
                found.append(name)
    return found


def matches(file: str, wanted: str) -> bool:
    """Whether a file is the one, or in the folder, that is meant: `rounds`, `syncer.leadership`."""
    dotted = f".{mutants.dotted(file)}."
    return file == wanted or f".{wanted}." in dotted


def is_played(file: str) -> bool:
    """Whether a world executes it."""
    return not any(part.startswith(UNPLAYED) for part in Path(file).parts)


def tests(drawn: Sequence[Fault]) -> list[str]:
    """The files of tests that may notice these."""
    touched = [f for s, f in SOURCES.items() if any(d.file.startswith(s) for d in drawn)]
    folders = dict.fromkeys(folder for some in touched for folder in some)
    paths = [p for f in folders for p in sorted((ROOT / "tests" / f).rglob("test_*.py"))]
    return [str(p.relative_to(ROOT)) for p in paths]


def counted(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """How many there were, and who noticed them."""
    by = Counter(v.by or "survived" for v in verdicts)
    return {
        "mutants": by.total(),
        **{column: by[column] for column in COLUMNS},
        "share": share(by.total(), by["survived"]),
    }


def row(name: str, figures: dict[str, Any]) -> str:
    columns = "".join(f"{figures[c]:>9}" for c in ("mutants", *COLUMNS))
    return f"{name:<62}{columns}{figures['share']:>8.0%}"


def result(
    verdicts: Sequence[Verdict], args: argparse.Namespace, seconds: float, before: dict[str, Any]
) -> dict[str, Any]:
    """`before`: what an earlier run said of other modules."""
    drawn = {name: getattr(args, name) for name in ("seed", "sample", "worlds", "budget")}
    seen = dict.fromkeys(v.fault.file for v in verdicts)
    modules = {m: counted(v for v in verdicts if v.fault.file == m) for m in seen}
    survivors = [v.told() for v in verdicts if not v.by]
    if before and all(before[name] == value for name, value in drawn.items()):
        modules = {**before["modules"], **modules}
        survivors = [s for s in before["survivors"] if s["file"] not in seen] + survivors
        seconds += before["seconds"]
    return {
        "figures": summed(modules.values()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **drawn,
        "seconds": round(seconds, 1),
        "modules": dict(sorted(modules.items())),
        "survivors": sorted(survivors, key=lambda s: (s["file"], s["line"], s["column"])),
    }


def summed(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    counts = list(rows)
    total = {column: sum(row[column] for row in counts) for column in ("mutants", *COLUMNS)}
    return {**total, "share": share(total["mutants"], total["survived"])}


def share(number: int, survived: int) -> float:
    return round((number - survived) / number, 3) if number else 1.0


# What an output says of a survivor that is noticed by now: a test was written, or was there.
NOTICED_NOW = ("a real gap", "noticed by")


def table(whole: dict[str, Any]) -> str:
    """By folder of the product: faults, those noticed when they were made, and those noticed now.

    `whole`: an output of several runs. Runs whose faults nobody looked at again are left out.
    """
    runs = [r for r in whole["runs"] if "noticed_with_the_tests_that_are_there_now" in r]
    counts = [
        (file, (f["mutants"], f["mutants"] - f["survived"], f["mutants"] - f["survived"]))
        for r in runs
        for file, f in r["modules"].items()
    ]
    since = [
        (s["file"], (0, 0, int(s["is"].startswith(NOTICED_NOW))))
        for r in runs
        for s in r["survivors"]
    ]
    found = by_folder([*counts, *since])
    total = [sum(column) for column in zip(*found.values(), strict=True)]
    return markdown(
        ("part of the product", "faults", "when made", "today"),
        [
            (name, str(n), f"{then} ({percent(then, n)})", f"{now} ({percent(now, n)})")
            for name, (n, then, now) in [*found.items(), ("all", total)]
        ],
    )


def prepared() -> None:
    """Slow imports and kernels that every child needs, once."""
    for library in (*mutants.LIBRARIES, *LIBRARIES):
        __import__(library)
    mutants.warmed()


def chosen(args: argparse.Namespace) -> list[Fault]:
    """Drawn of each file; by name, from all."""
    found = [fault for file in files(args.only) for fault in sampled(faults(ROOT, file), 0, 0)]
    if args.id:
        return [fault for fault in found if fault.id in args.id]
    by_file: dict[str, list[Fault]] = {}
    for fault in found:
        by_file.setdefault(fault.file, []).append(fault)
    return [f for some in by_file.values() for f in sampled(some, args.sample, args.seed)]


def judge(drawn: Sequence[Fault], touching: Touching, args: argparse.Namespace) -> list[Verdict]:
    """Module by module, with a line for each and for each survivor, written as they come."""
    began = time.monotonic()
    found: list[Verdict] = []
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for file in dict.fromkeys(fault.file for fault in drawn):
        tasks = [(fault, touching.of(fault, args.budget)) for fault in drawn if fault.file == file]
        of_file = verdicts(tasks, args.worlds if is_played(file) else 0)
        found += of_file
        for verdict in of_file:
            if args.id or not verdict.by:
                print(shown(verdict))
        print(row(file, counted(of_file)), flush=True)
        if args.json:
            so_far = result(found, args, time.monotonic() - began, before)
            args.json.write_text(json.dumps(so_far, indent=2) + "\n", encoding="utf-8")
    return found


def shown(verdict: Verdict) -> str:
    fault = verdict.fault
    who = f"{verdict.by}: {verdict.what}" if verdict.by else f"passes {verdict.tests} tests"
    return (
        f"  {fault.id} {fault.file}:{fault.line} {fault.kind} in {fault.scope}: {who}\n"
        f"      {fault.old}  ->  {fault.new}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="modules, or the ends of their names")
    parser.add_argument("--id", nargs="*", default=[], help="these faults, and who sees them")
    parser.add_argument("--sample", type=int, default=12, help="faults of each module; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--worlds", type=int, default=10, help="played for what tests do not see")
    parser.add_argument("--budget", type=float, default=20, help="seconds of tests for each fault")
    parser.add_argument("--tests", nargs="*", default=[], help="files of tests, instead of all")
    parser.add_argument("--json", type=Path, help="write it there, beside other modules")
    parser.add_argument("--table", type=Path, help="print a table of this output, and do no more")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    if not (drawn := chosen(args)):
        sys.exit("there is no such module, or no such fault")
    prepared()
    touching = Touching(ROOT, tuple(SOURCES), KEPT)
    for file in touching.measure(args.tests or tests(drawn)):
        print(f"left out, since it cannot be measured: {file}", file=sys.stderr)
    print(f"{'module':<62}" + "".join(f"{c:>9}" for c in ("mutants", *COLUMNS)) + f"{'share':>8}")
    print(row("all", counted(judge(drawn, touching, args))))


if __name__ == "__main__":
    main()
