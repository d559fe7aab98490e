"""Which test runs which lines of the product: measured once, and kept while no file of it changes.

What is kept of a file of tests names the digest of every file that its tests ran: it is measured
again when one of them is another, and only then.
"""

import ast
import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mutants

from mutating.faults import Fault

# Slow, or processes of their own: what they run is not seen here.
MARKS = "not live and not whole"
# One process measures them together, which spares it the imports.
TOGETHER = 12
# Files of tests that wait for longer are left out, with a word.
IDLE_S = 120.0


@dataclass(frozen=True)
class Test:
    """One that passes without a fault; lines by file."""

    id: str
    seconds: float  # of processor time, while it is watched
    lines: dict[str, frozenset[int]] = field(repr=False)


class Touching:
    """The tests of a project, by the lines they run."""

    def __init__(self, root: Path, sources: Sequence[str], kept: Path) -> None:
        self.root = root
        self.sources = sources
        self.kept = kept
        self.tests: list[Test] = []
        self.digests: dict[str, str] = {}

    def measure(self, files: Sequence[str]) -> list[str]:
        """Have these files of tests measured if they are not yet; those that cannot be."""
        stale = []
        for file in files:
            if (tests := self._kept(file)) is None:
                stale.append(file)
            else:
                self.tests += tests
        alone = []
        for n in range(0, len(stale), TOGETHER):
            alone += self._measure(stale[n : n + TOGETHER])
        # One that hangs takes those beside it along. By itself it is left out until it is changed.
        failed = [file for one in alone for file in self._measure([one])]
        for file in failed:
            self._keep(file, {"tests": []})
        self.tests.sort(key=lambda test: (test.seconds, test.id))
        return failed

    def _measure(self, files: Sequence[str]) -> list[str]:
        """In one process; those of which it said nothing."""
        print(f"measuring {len(files)} files of tests, {files[0]} first", file=sys.stderr)
        answer, _ = mutants.watched(IDLE_S, measured, self.root, files, self.sources)
        found = answer or {}
        for file in files:
            if file in found:
                self._keep(file, found[file])
                self.tests += list(self._read(found[file]))
        return [file for file in files if file not in found]

    def of(self, fault: Fault, budget_s: float = math.inf) -> list[Test]:
        """Those that can notice it: the fastest ones that take no longer together."""
        if fault.scope:
            span = range(fault.first, fault.last + 1)
            found = [t for t in self.tests if not t.lines.get(fault.file, _NONE).isdisjoint(span)]
        else:
            # What a module sets when it is imported is seen by who imports it, too.
            files = {fault.file, *importers(self.root, self.sources, fault.module)}
            found = [t for t in self.tests if not files.isdisjoint(t.lines)]
        sums = itertools.accumulate(t.seconds for t in found)
        return [t for t, until in zip(found, sums, strict=True) if until <= budget_s]

    def _place(self, file: str) -> Path:
        return self.kept / (file.replace("/", "-") + ".json")

    def _kept(self, file: str) -> list[Test] | None:
        try:
            found = json.loads(self._place(file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if any(self.digest(name) != digest for name, digest in found["digests"].items()):
            return None
        return list(self._read(found))

    def _keep(self, file: str, found: dict[str, Any]) -> None:
        touched = {file, *(name for test in found["tests"] for name in test["lines"])}
        folders = [self.root / parent for parent in Path(file).parents]
        shared = [p for folder in folders for p in folder.glob("*.py") if p.stem[:5] != "test_"]
        touched |= {str(p.relative_to(self.root)) for p in shared if "tests" in p.parts}
        found = {"digests": {name: self.digest(name) for name in sorted(touched)}, **found}
        self.kept.mkdir(parents=True, exist_ok=True)
        self._place(file).write_text(json.dumps(found), encoding="utf-8")

    def _read(self, found: dict[str, Any]) -> Iterator[Test]:
        for test in found["tests"]:
            lines = {name: frozenset(numbers) for name, numbers in test["lines"].items()}
            yield Test(test["id"], test["seconds"], lines)

    def digest(self, name: str) -> str:
        if name not in self.digests:
            path = self.root / name
            raw = path.read_bytes() if path.is_file() else b""
            self.digests[name] = hashlib.sha256(raw).hexdigest()
        return self.digests[name]


_NONE: frozenset[int] = frozenset()


class Contexts:
    """A plugin of pytest: tells the coverage whose lines come now, and notes times and failures."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.began = 0.0
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.began = time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = time.process_time() - self.began
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)


def measured(root: Path, files: Sequence[str], sources: Sequence[str], answers: Any) -> None:
    """In a process of its own: what each test of these files runs."""
    import coverage
    import pytest

    mutants.quietly(root)
    began = time.monotonic()
    watch = coverage.Coverage(
        data_file=None, config_file=False, source=[str(root / s) for s in sources]
    )
    contexts = Contexts(watch)
    watch.start()
    pytest.main(["-q", "-m", MARKS, *quiet_arguments(), *files], plugins=[contexts])
    watch.stop()
    found: dict[str, dict[str, Any]] = {file: {"tests": []} for file in files}
    lines: dict[str, dict[str, list[int]]] = {}
    data = watch.get_data()
    for path in sorted(data.measured_files()):
        name = os.path.relpath(path, root)
        for number, tests in data.contexts_by_lineno(path).items():
            for test in tests:
                lines.setdefault(test, {}).setdefault(name, []).append(number)
    for test, seconds in contexts.seconds.items():
        if test not in contexts.failed:
            entry = {"id": test, "seconds": round(seconds, 4), "lines": lines.get(test, {})}
            found[test.partition("::")[0]]["tests"].append(entry)
    found[files[0]]["seconds"] = round(time.monotonic() - began, 1)
    answers.send(found)


def quiet_arguments() -> list[str]:
    """What every run of tests is told: it leaves nothing behind, and draws the same each time."""
    plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
    # Plugins are imported before the fork.
    return [*plain, "-W", "ignore::pytest.PytestAssertRewriteWarning"]


def importers(root: Path, sources: Sequence[str], module: str) -> Iterator[str]:
    """The files of the product that import a module by its name."""
    parent, _, leaf = module.rpartition(".")
    for source in sources:
        for path in sorted((root / source).rglob("*.py")):
            if any(
                name == module or (name == parent and leaf in aliases)
                for name, aliases in imported(ast.parse(path.read_bytes()))
            ):
                yield str(path.relative_to(root))


def imported(tree: ast.Module) -> Iterable[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            yield from ((alias.name, set()) for alias in node.names)
