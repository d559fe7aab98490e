"""Who notices a fault: the tests that run its line, fastest first; then seeded worlds.

Each is judged in a process of its own, which ends it may not survive: what takes more processor
time, or waits longer, than everything together takes without the fault goes round in circles.
"""

import os
import resource
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mutants

from mutating.faults import Fault
from mutating.touching import Test, quiet_arguments

# Processor time besides that of the tests themselves: imports, collecting, what is compiled.
BASE_S = 30.0
# How much longer than without the fault.
TIMES = 4.0
# Who waits for what never comes takes no processor time; no test waits for so long.
IDLE_S = 20.0
# Of one world on average; the slowest take twenty, and one that circles ends by itself.
WORLDS_S = 3.0
# (by, what, worlds played): as in Verdict.
Found = tuple[str, str, int]
# Tests cannot notice these: pytest's words for all passed, and for none there.
UNSEEN = {0, 5}


@dataclass(frozen=True)
class Verdict:
    """`by`: tests, worlds, limit, or "" for nobody; `what`: the test, the promise, the signal."""

    fault: Fault
    by: str
    what: str
    tests: int  # that run its line
    worlds: int  # played

    def told(self) -> dict[str, Any]:
        return {**self.fault.told(), **{k: v for k, v in asdict(self).items() if k != "fault"}}


class Chosen:
    """A plugin of pytest: these tests and no others, in this order, and the one that fails."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.order = {name: n for n, name in enumerate(ids)}
        self.failed = ""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        quick = settings(derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
        settings.register_profile("judging", quick)
        settings.load_profile("judging")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order),
            key=lambda item: self.order[item.nodeid],
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} cannot be imported"


def limit_s(tests: Sequence[Test], worlds: int) -> float:
    """Of processor time."""
    return BASE_S + TIMES * (sum(t.seconds for t in tests) + WORLDS_S * worlds)


def ended(code: int) -> Found:
    """One whose process said nothing: by its limit, by us, or by what the fault did to it."""
    return "limit", f"exit code {code}", 0


def judged(fault: Fault, tests: Sequence[Test]) -> Found:
    """In a process of its own, which imports everything anew. Who fails anyway has no say."""
    limit, ids = int(limit_s(tests, 0)), [t.id for t in tests]
    while True:
        answer, code = mutants.watched(IDLE_S, look, fault.root, fault, ids, limit)
        by, what, _ = found = answer or ended(code)
        if by != "tests" or what not in ids:
            return found
        anyway, _ = mutants.watched(IDLE_S, look, fault.root, None, [what], limit)
        if anyway == ("", "", 0):
            return found
        ids.remove(what)


def by_worlds(fault: Fault, worlds: int) -> Found:
    """What worlds see, unless they see it without the fault too.

    In a process of its own: what libraries began for the tests does not live on in a fork.
    """
    limit = int(limit_s([], worlds))
    answer, code = mutants.watched(IDLE_S, play, fault.root, fault, worlds, limit)
    by, _, played = found = answer or ended(code)
    if by == "worlds" and (broken := mutants.forked(mutants.control, played - 1, {})) != "":
        return "", f"breaks without the fault too: {broken}", played
    return found


def look(root: Path, fault: Fault | None, ids: Sequence[str], limit: int, answers: Any) -> None:
    """Import the product with the fault, or without, and run the tests."""
    mutants.quietly(root)
    restrict(limit)
    if fault is not None:
        mutants.put(fault)
    failed = failing(ids) if ids else ""
    answers.send(("tests" if failed else "", failed, 0))
    # Threads that a fault has left waiting would hold the process up.
    os._exit(0)


def play(root: Path, fault: Fault, worlds: int, limit: int, answers: Any) -> None:
    """Import the product with the fault, and play worlds."""
    mutants.quietly(root)
    restrict(limit)
    mutants.put(fault)
    broken, played = mutants.seen_by_worlds(worlds, {})
    answers.send(("worlds" if broken else "", broken[:200], played))
    os._exit(0)


def restrict(limit: int) -> None:
    """No more processor time than this, and no core file for who takes more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def failing(ids: Sequence[str]) -> str:
    """The first of these tests to fail, "" if none does."""
    import pytest

    files = list(dict.fromkeys(name.partition("::")[0] for name in ids))
    chosen = Chosen(ids)
    with tempfile.TemporaryDirectory() as folder:
        # Files of tests come in any order and many do not matter: only their own fixtures do.
        code = pytest.main(
            ["-x", "-q", f"--basetemp={folder}/t", *quiet_arguments(), *sorted(files)],
            plugins=[chosen],
        )
    return "" if code in UNSEEN else chosen.failed or f"pytest's exit code {int(code)}"
