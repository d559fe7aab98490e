"""The mutations of `make mutants` fit the code as it is, and are put in place as they say."""

import importlib
import sys

import mutants
import pytest


def test_every_mutation_fits_the_code_and_compiles() -> None:
    found = mutants.mutants()
    assert len(found) >= 30
    for m in found:
        assert m.old != m.new and m.why
        assert not m.file.startswith(("tests/", "simulator/", "bench/")), m.name
        compile(m.source(), m.file, "exec")
        assert not m.test or (mutants.ROOT / m.test).is_file(), f"{m.name}: no {m.test}"


def test_one_that_no_longer_fits_is_named() -> None:
    gone = mutants.Mutant("gone", "shared/diloco_shared/ids.py", "no such text", "", "")
    with pytest.raises(ValueError, match=r"gone: its old text is 0 times in .*ids\.py"):
        gone.source()


def test_the_fault_is_there_when_the_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "diloco_shared.numerics.weights"
    mutant = next(m for m in mutants.mutants() if m.name == "weight-without-quality")
    assert mutant.module == name
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [mutants.Finder(mutant), *sys.meta_path])
    assert importlib.import_module(name).weight(6, 2) == 6.0, "tokens alone, not 6 * 6 / 2"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[1:])
    assert importlib.import_module(name).weight(6, 2) == 18.0
