"""Break the product on purpose, one small way at a time: do the worlds and tests see it?

`python bench/mutants.py --json FILE [--further]`. Each mutation in mutants.toml is a plausible
fault of product code: a file, an exact old text, a new one, and why somebody might write it. It is
put in place while the module is imported, never on disk. The test that it names must then fail,
which takes seconds. Where it names none, and for all with `--worlds`, seeded worlds of whole
services are played until one breaks a promise. Exit status 1 if one goes unseen. All of them take
an hour or more: FILE is written as they come, and --further leaves out those that it has already.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from faulty.faults import FAULT, SOURCE, Faulty, Finder

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
DATA = Path(__file__).with_suffix(".toml")
# Worlds played before a mutant counts as one that they do not see, at one to twenty seconds each.
# A fault that needs more of them needs a test, or a world of its own.
SEEDS = 40
# Slow imports that every mutant needs and few change; done once, before forking.
LIBRARIES = ("jax", "msgpack", "numba", "numpy", "optax", "pydantic", "safetensors.numpy")
SHARED = "diloco_shared"
# Who computes for less of the time than this waits for something: on a busy machine, too.
IDLE = 0.01


def dotted(file: str) -> str:
    """What a file of the product is imported as."""
    parts = Path(file).with_suffix("").parts
    first = next(n for n, part in enumerate(parts) if part.startswith("diloco_"))
    return ".".join(parts[first:]).removesuffix(".__init__")


@dataclass(frozen=True)
class Mutant:
    """One fault; `test`: what must see it; `world`: options of worlds that make it matter."""

    name: str
    file: str
    old: str
    new: str
    why: str
    test: str = ""
    world: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return dotted(self.file)

    @property
    def digest(self) -> str:
        """Another one once the fault, or what must see it, is another one."""
        told = json.dumps([self.file, self.old, self.new, self.test, self.world], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def source(self) -> str:
        """The file with the fault; ValueError if the old text is not there exactly once."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.name}: its old text is {text.count(self.old)} times in {self.file}, "
                f"not once: adapt {DATA.name} to the code as it is now"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """Who saw a mutant: `by` is worlds, tests or "" for nobody."""

    name: str
    file: str
    why: str
    by: str
    what: str  # the promise that broke and how, or the test
    seeds: int  # worlds played
    seconds: float
    fault: str = ""  # digest of the mutant as it was then


def mutants(path: Path = DATA) -> list[Mutant]:
    """All of them; ValueError for one that does not fit the code."""
    found = [Mutant(**m) for m in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]
    names = [m.name for m in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two mutants of one name in {path.name}")
    for m in found:
        m.source()
    return found


def breaks(seed: int, world: dict[str, Any]) -> str:
    """What one world breaks, with these options of its own, in short; "" for nothing."""
    from diloco_simulator.worlds.case import Case
    from diloco_simulator.worlds.world import played

    warmed()
    verdict = played(Case.drawn(seed).changed(**world))
    return verdict.violations[0] if verdict.violations else ""


def warmed() -> None:
    """Shared code imported and its kernels at hand: neither is part of a world."""
    from diloco_shared.numerics.merge import warm

    warm()


def seen_by_worlds(seeds: int, world: dict[str, Any]) -> tuple[str, int]:
    """(what broke or "", worlds played)."""
    for seed in range(seeds):
        try:
            broken = breaks(seed, world)
        except Exception as error:  # a checker fell over what the product did
            broken = f"crash: {error!r}"
        if broken:
            return broken, seed + 1
    return "", seeds


def seen_by_test(test: str) -> str:
    """The test, if it fails."""
    import pytest

    return test if pytest.main(["-x", "-q", "-p", "no:cacheprovider", test]) == 1 else ""


def look(mutant: Mutant, seeds: int, answers: Any) -> None:
    """In a process of its own: import the product with the fault, and watch it."""
    began = quietly(ROOT)
    put(mutant)
    what, by, played = seen_by_test(mutant.test) if mutant.test else "", "tests", 0
    if not what:
        what, played = seen_by_worlds(seeds, mutant.world)
        by = "worlds" if what else ""
    seconds = round(time.monotonic() - began, 1)
    answers.send(Outcome(mutant.name, mutant.file, mutant.why, by, what[:200], played, seconds))


def control(seed: int, world: dict[str, Any], answers: Any) -> None:
    """Likewise, without a fault: the same world must be sound."""
    quietly(ROOT)
    answers.send(breaks(seed, world))


def put(mutant: Faulty) -> None:
    """What is imported from now on has the fault, also in processes that a test starts."""
    if mutant.module.startswith(SHARED):
        for name in [n for n in sys.modules if n.startswith(SHARED)]:
            del sys.modules[name]
    sys.meta_path.insert(0, Finder(mutant))
    os.environ[FAULT], os.environ[SOURCE] = mutant.module, mutant.source()
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / "faulty"), before]))


def quietly(root: Path) -> float:
    """Where the tests are, without output; the time now."""
    os.chdir(root)
    sys.path.insert(0, str(root / "tests"))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    return time.monotonic()


def forked(target: Any, *args: Any) -> Any:
    """What `target` sends from a process of its own; None if it dies over it."""
    return watched(None, target, *args)[0]


def watched(idle_s: float | None, target: Any, *args: Any) -> tuple[Any, int]:
    """Likewise, with its exit code; one that computes nothing for `idle_s` is killed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*args, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of forking; it has done nothing yet
        process.start()
    theirs.close()
    answer, computed, since = None, 0.0, time.monotonic()
    try:
        while idle_s is not None and not ours.poll(1.0):
            if (used := _computed(process.pid)) >= computed + IDLE * idle_s:
                computed, since = used, time.monotonic()
            elif time.monotonic() > since + idle_s:
                process.kill()
                break
        answer = ours.recv()
    except EOFError:
        pass  # it died
    process.join()
    assert process.exitcode is not None
    return answer, process.exitcode


def _computed(pid: int | None) -> float:
    """Seconds of processor time that a process has taken; none if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def outcome(mutant: Mutant, seeds: int) -> Outcome:
    """With the fault; and if a world saw it, that world without."""
    found: Outcome | None = forked(look, mutant, seeds)
    if found is None:
        return Outcome(mutant.name, mutant.file, mutant.why, "", "the process died", 0, 0.0)
    if found.by == "worlds" and (sound := forked(control, found.seeds - 1, mutant.world)) != "":
        why = "the process died" if sound is None else sound
        return replace(found, by="", what=f"breaks without the fault too: {why}")
    return found


def outcomes(chosen: Sequence[Mutant], seeds: int, jobs: int) -> Iterator[Outcome]:
    """As they come; a thread waits for each process."""
    for library in LIBRARIES:
        __import__(library)
    warmed()
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda m: outcome(m, seeds), chosen)


@dataclass
class Table:
    """What was found so far, in a file that is written anew with each outcome."""

    path: Path | None
    command: str
    found: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0  # of earlier runs

    def read(self) -> None:
        """What an earlier run has found."""
        if self.path is None or not self.path.is_file():
            return
        result = json.loads(self.path.read_text("utf-8"))
        self.found = {o["name"]: Outcome(**o) for o in result["table"]}
        self.seconds = result["figures"]["seconds"]

    def left(self, chosen: Sequence[Mutant], known: Sequence[Mutant]) -> list[Mutant]:
        """Those that were not tried as they are now; what is not `known` any more is forgotten."""
        now = {m.name: m.digest for m in known}
        self.found = {n: o for n, o in self.found.items() if o.fault == now.get(n)}
        return [m for m in chosen if m.name not in self.found]

    def figures(self, seconds: float) -> dict[str, float]:
        by = [o.by for o in self.found.values()]
        return {
            "mutants": len(by),
            "caught": sum(map(bool, by)),
            "caught_by_worlds": by.count("worlds"),
            "caught_by_tests": by.count("tests"),
            "seconds": round(self.seconds + seconds, 1),
        }

    def write(self, seconds: float) -> None:
        if self.path is None:
            return
        figures = self.figures(seconds)
        result = {
            **figures,
            "figures": figures,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "command": self.command,
            "seed": 0,
            "table": [asdict(o) for o in self.found.values()],
        }
        self.path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table there")
    parser.add_argument("--further", action="store_true", help="go on where that table ends")
    parser.add_argument("--only", nargs="*", help="mutants by name")
    parser.add_argument("--worlds", action="store_true", help="ask worlds alone, and no tests")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="worlds played at most, of each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    try:
        known = mutants()
    except ValueError as error:
        sys.exit(str(error))
    if args.worlds:
        known = [replace(m, test="") for m in known]
    chosen = [m for m in known if not args.only or m.name in args.only]
    table = Table(args.json, f"python bench/mutants.py --seeds {args.seeds}")
    if args.further:
        table.read()
    left, began = table.left(chosen, known), time.monotonic()
    for mutant, o in zip(left, outcomes(left, args.seeds, args.jobs), strict=True):
        table.found[o.name] = replace(o, fault=mutant.digest)
        table.write(time.monotonic() - began)
        print(
            f"{o.name:<44} {o.by or 'NOT SEEN':<9} {o.seeds:>4} worlds  {o.what[:90]}", flush=True
        )
    figures = table.figures(time.monotonic() - began)
    print("  ".join(f"{name} {value}" for name, value in figures.items()))
    table.write(time.monotonic() - began)
    sys.exit(0 if figures["caught"] == figures["mutants"] else 1)


if __name__ == "__main__":
    main()
