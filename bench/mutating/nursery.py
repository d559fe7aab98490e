"""Many faults of one module without importing anything twice: the tests are collected once.

A process collects the tests of a module and forks for each fault. The fork gives the function with
the fault its new code, in place, so that whoever has imported it has the fault too. A fault that is
in no function's code (a default, what a module sets) is imported with its module instead, slowly.
"""

import functools
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import mutants

from mutating.faults import Fault
from mutating.judging import (
    IDLE_S,
    Chosen,
    Found,
    Verdict,
    by_worlds,
    ended,
    judged,
    limit_s,
    restrict,
)
from mutating.touching import Test, quiet_arguments

# One fault and the tests that run its line.
Task = tuple[Fault, Sequence[Test]]


class Nursery(Chosen):
    """A plugin of pytest: in place of the run of tests, one run for each fault, forked."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__(list(dict.fromkeys(t.id for _, tests in tasks for t in tests)))
        self.tasks = tasks
        self.items: dict[str, Any] = {}
        self.sound: dict[str, bool] = {}
        self.found: dict[str, Found] = {}

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for fault, tests in self.tasks:
            if (found := self._judged(fault, tests)) is not None:
                self.found[fault.id] = found
        return True

    def _judged(self, fault: Fault, tests: Sequence[Test]) -> Found | None:
        """None: it must be imported with its module. Who fails without the fault has no say."""
        while True:
            items = [self.items[t.id] for t in tests if t.id in self.items]
            limit = int(limit_s(tests, 0))
            answer, code = mutants.watched(IDLE_S, _look, fault, items, limit, self)
            if answer == "elsewhere":
                return None
            by, what, _ = found = answer or ended(code)
            if by != "tests" or what not in self.items or self._sound(what):
                return found
            del self.items[what]

    def _sound(self, name: str) -> bool:
        """Whether this test passes as it is, in a fork like those of the faults."""
        if name not in self.sound:
            items = [self.items[name]]
            answer, _ = mutants.watched(IDLE_S, _look, None, items, int(limit_s([], 0)), self)
            self.sound[name] = answer == ("", "", 0)
        return self.sound[name]


def raised(tasks: Sequence[Task], answers: Any) -> None:
    """In a process of its own: what tests see of each of these faults, by name."""
    import pytest

    mutants.quietly(tasks[0][0].root)
    nursery = Nursery(tasks)
    files = sorted({name.partition("::")[0] for name in nursery.order})
    with tempfile.TemporaryDirectory() as folder:
        pytest.main(["-q", f"--basetemp={folder}/t", *quiet_arguments(), *files], plugins=[nursery])
    answers.send(nursery.found)


def verdicts(tasks: Sequence[Task], worlds: int) -> list[Verdict]:
    """Of faults of one module."""
    found: dict[str, Found] = mutants.forked(raised, tasks) or {}
    made = []
    for fault, tests in tasks:
        by, what, played = found.get(fault.id) or judged(fault, tests)
        if worlds and not by:
            by, what, played = by_worlds(fault, worlds)
        made.append(Verdict(fault, by, what, len(tests), played))
    return made


def _look(
    fault: Fault | None, items: Sequence[Any], limit: int, chosen: Chosen, answers: Any
) -> None:
    restrict(limit)
    there = fault is None or patched(fault)
    answers.send(_found(items, chosen) if there else "elsewhere")
    # Fixtures need not be torn down, nor threads waited for that a fault has left waiting.
    os._exit(0)


def _found(items: Sequence[Any], chosen: Chosen) -> Found:
    for n, item in enumerate(items):
        following = items[n + 1] if n + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if chosen.failed:
            return "tests", chosen.failed, 0
    return "", "", 0


def patched(fault: Fault) -> bool:
    """Give the function its new code; False if that does not put the fault in place."""
    if not fault.called:
        return False
    module = sys.modules.get(fault.module)
    if module is None:
        try:
            module = import_module(fault.module)
        except ImportError:
            return False
    path = module.__file__
    assert path is not None
    codes = {_known(code): code for code in _codes(compile(fault.source(), path, "exec"))}
    for function in _functions(module, fault.scope.split(".")):
        new = codes.get(_known(function.__code__))
        if new is not None and new != function.__code__:
            if len(new.co_freevars) != len(function.__code__.co_freevars):
                return False
            function.__code__ = new
            return True
    return False


def _known(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _functions(module: types.ModuleType, names: Sequence[str]) -> Iterator[types.FunctionType]:
    """What is found under this name, however it is wrapped; the outermost of nested ones."""
    found: object = module
    for name in names:
        found = inspect.getattr_static(found, name, None)
        if not isinstance(found, type):
            yield from _unwrapped(found)
            return


def _unwrapped(found: object) -> Iterator[types.FunctionType]:
    match found:
        case types.FunctionType():
            yield found
            yield from _unwrapped(getattr(found, "__wrapped__", None))
        case staticmethod() | classmethod():
            yield from _unwrapped(found.__func__)
        case property():
            for part in (found.fget, found.fset, found.fdel):
                yield from _unwrapped(part)
        case functools.cached_property():
            yield from _unwrapped(found.func)
        case _ if hasattr(found, "__wrapped__"):
            yield from _unwrapped(found.__wrapped__)
