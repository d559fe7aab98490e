"""The mutations of `make mutants` fit the code as it is, and are put in place as they say."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mutants
import pytest
from faulty.faults import FAULT, SOURCE

from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.world import WorldResult

# Left to worlds on purpose. Each takes seconds where a test takes a fraction of one.
OF_WORLDS_MAX = 15


def test_every_mutation_fits_the_code_and_compiles() -> None:
    found = mutants.mutants()
    assert len(found) >= 30
    for m in found:
        assert m.old != m.new and m.why
        assert not m.file.startswith(("tests/", "simulator/", "bench/", "site/")), m.name
        compile(m.source(), m.file, "exec")
        assert not m.test or (mutants.ROOT / m.test).is_file(), f"{m.name}: no {m.test}"
        Case.drawn(0).changed(**m.world)
    assert 0 < sum(not m.test for m in found) <= OF_WORLDS_MAX


def test_one_that_no_longer_fits_is_named() -> None:
    gone = mutants.Mutant(
        "gone", "shared/diloco_shared/protocol/subjects.py", "no such text", "", ""
    )
    with pytest.raises(ValueError, match=r"gone: its old text is 0 times in .*subjects\.py"):
        gone.source()


def test_the_fault_is_there_when_the_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "diloco_shared.numerics.merge"
    mutant = next(m for m in mutants.mutants() if m.name == "weight-without-quality")
    assert mutant.module == name
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [mutants.Finder(mutant), *sys.meta_path])
    assert importlib.import_module(name).weight(6, 2) == 6.0, "tokens alone, not 6 * 6 / 2"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[1:])
    assert importlib.import_module(name).weight(6, 2) == 18.0


def test_a_world_is_as_its_seed_has_it_but_for_the_mutants_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = []

    def played(case: Case) -> WorldResult:
        cases.append(case)
        broken = ["I9 at 1.00 s: first", "I4 at 2.00 s: later"] if case.seed == 2 else []
        return WorldResult(case.seed, broken)

    monkeypatch.setattr("diloco_simulator.worlds.world.played", played)
    assert mutants.seen_by_worlds(9, {"garbage": 0.2}) == ("I9 at 1.00 s: first", 3)
    assert cases == [Case.drawn(seed).changed(garbage=0.2) for seed in range(3)]
    assert mutants.seen_by_worlds(2, {}) == ("", 2)


def test_a_world_that_falls_over_a_fault_has_seen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(case: Case) -> WorldResult:
        raise ValueError(f"of seed {case.seed}")

    monkeypatch.setattr("diloco_simulator.worlds.world.played", played)
    assert mutants.seen_by_worlds(2, {}) == ("crash: ValueError('of seed 0')", 1)


def test_a_process_that_a_test_starts_has_the_fault_too() -> None:
    """Islands of several devices and hosts are tested in processes of their own."""
    found = os.pathsep.join([str(mutants.HERE / "faulty"), os.environ.get("PYTHONPATH", "")])
    given = {FAULT: "diloco_shared.durable", SOURCE: "faulty = 'yes'", "PYTHONPATH": found}
    asks = "import diloco_shared.durable as d; print(getattr(d, 'faulty', 'no'))"
    for more, what in ((given, "yes"), ({"PYTHONPATH": found}, "no")):
        process = [sys.executable, "-c", asks]
        told = subprocess.run(process, env=os.environ | more, capture_output=True, text=True)
        assert told.stdout.strip() == what, told.stderr


def test_a_run_goes_on_where_it_ended_with_what_was_not_tried_as_it_is(tmp_path: Path) -> None:
    one, two, three = (
        mutants.Mutant(name, f"diloco_{name}.py", "old", "new", "why") for name in ("a", "b", "c")
    )
    table = mutants.Table(tmp_path / "table.json", "again")
    for m, by in ((one, "tests"), (two, "")):
        found = mutants.Outcome(m.name, m.file, m.why, by, "", 0, 1.0, m.digest)
        table.found[m.name] = found
    table.write(10.0)
    later = mutants.Table(tmp_path / "table.json", "again")
    later.read()
    changed = replace(two, new="newer")
    known = [one, changed, three]
    assert later.left([three], known) == [three] and later.found.keys() == {"a"}
    assert later.left(known, known) == [changed, three]
    assert later.figures(5.0) == {
        "mutants": 1,
        "caught": 1,
        "caught_by_worlds": 0,
        "caught_by_tests": 1,
        "seconds": 15.0,
    }
    nothing = mutants.Table(tmp_path / "none.json", "")
    nothing.read()
    assert nothing.left([one], [one]) == [one]
