"""Puts a fault into one module while it is imported, never on disk."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence
from typing import Protocol

# What tells a process that a test starts of the fault: the module, and all of its source.
FAULT, SOURCE = "DILOCO_FAULT", "DILOCO_FAULT_SOURCE"


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with a fault in it."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self.source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self.source, self.path, "exec")


class Faulty(Protocol):
    """A module with a fault in it, however it was made."""

    @property
    def module(self) -> str: ...

    def source(self) -> str: ...


class Finder(importlib.abc.MetaPathFinder):
    """Puts the fault in place when its module is imported."""

    def __init__(self, mutant: Faulty) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None, f"{fullname} is not installed"
        spec.loader = Loader(fullname, spec.origin, self.mutant.source())
        return spec
