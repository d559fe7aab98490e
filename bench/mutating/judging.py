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
WORLDS_S = 1.0
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


def judged(fault: Fault, tests: Sequence[Test], worlds: int) -> Found:
    """In a process of its own, which imports everything anew. Who fails anyway has no say."""
    limit, ids = int(limit_s(tests, worlds)), [t.id for t in tests]
    while True:
        answer, code = mutants.watched(IDLE_S, look, fault.root, fault, ids, worlds, limit)
        by, what, _ = found = answer or ended(code)
        if by != "tests" or what not in ids:
            return found
        anyway, _ = mutants.watched(IDLE_S, look, fault.root, None, [what], 0, limit)
        if anyway == ("", "", 0):
            return found
        ids.remove(what)


def sound(found: Found) -> Found:
    """What a world saw, unless it sees it without the fault too."""
    by, _, played = found
    if by == "worlds" and (broken := mutants.forked(mutants.control, played - 1, {})) != "":
        return "", f"breaks without the fault too: {broken}", played
    return found


def look(
    root: Path, fault: Fault | None, ids: Sequence[str], worlds: int, limit: int, answers: Any
) -> None:
    """Import the product with the fault, or without, run the tests, play the worlds."""
    mutants.quietly(root)
    restrict(limit)
    if fault is not None:
        mutants.put(fault)
    if ids and (failed := failing(ids)):
        answers.send(("tests", failed, 0))
    else:
        answers.send(worlds_or_nobody(worlds))
    # Threads that a fault has left waiting would hold the process up.
    os._exit(0)


def restrict(limit: int) -> None:
    """No more processor time than this, and no core file for who takes more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def worlds_or_nobody(worlds: int) -> Found:
    """What tests have not seen: what worlds see of it."""
    if not worlds:
        return "", "", 0
    broken, played = mutants.seen_by_worlds(worlds, {})
    return ("worlds" if broken else ""), broken[:200], played


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
