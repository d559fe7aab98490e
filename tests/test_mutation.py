"""Faults made by machine: which there are, which are drawn, and who notices them."""

import subprocess
import sys
from pathlib import Path

import pytest
from mutating.faults import Fault, faults, sampled

ROOT = Path(__file__).parent.parent

FILE = "src/diloco_tiny/clamp.py"
CODE = '''\
"""Keep a value within bounds, and count those that were not."""

from dataclasses import dataclass

import structlog

log = structlog.get_logger()


@dataclass
class Clamp:
    """ä: columns are counted in bytes."""

    bound: int
    beyond: int = 0

    def clamp(self, value: int) -> int:
        assert value > -9
        log.info("clamp", value=value + 1)
        if value > self.bound:
            self.beyond += 1
            return self.bound
        return min(value, self.bound)

    def __repr__(self) -> str:
        return "one" if self.bound == 1 else "many"


def spin(steps: int, done: int = 0) -> int:
    while done < steps:
        done += 1
    return done


def never(given: bool) -> None:
    if not given:
        raise ValueError(f"{1 + 1}")
'''
TESTS = """\
from pathlib import Path

import pytest

from diloco_tiny.clamp import Clamp, spin


def test_bounds():
    it = Clamp(3)
    assert [it.clamp(n) for n in (1, 3, 4)] == [1, 3, 3]


def test_counts():
    it = Clamp(3)
    it.clamp(9)
    assert it.beyond == 1


def test_spins():
    assert spin(2) == 2


def test_that_passes_once_only():
    # Whatever the fault: it must not count.
    first = not Path("ran").exists()
    Path("ran").touch()
    assert spin(1) == 1 and first


@pytest.mark.skipif(True, reason="never")
def test_skipped():
    spin(3)
"""
# In a process of its own, since it forks and runs tests.
SCRIPT = """\
import sys
from pathlib import Path

import coverage, hypothesis, pytest, structlog
from mutating import judging
from mutating.faults import faults
from mutating.nursery import verdicts
from mutating.touching import Touching

root = Path(sys.argv[1])
judging.BASE_S = 2.0
touching = Touching(root, ["src/diloco_tiny"], root / "kept")
both = ["tests/test_dies.py", "tests/test_other.py"]
assert touching.measure(["tests/test_clamp.py"]) == []
assert touching.measure(both) == both[:1], "who dies takes nobody along"
assert [t.id.partition("::")[2] for t in touching.tests if "skipped" in t.id] == []
tasks = [(f, touching.of(f)) for f in faults(root, "src/diloco_tiny/clamp.py")]
for seen in verdicts(tasks, 0):
    print(seen.tests, seen.by or "nobody", "|", seen.fault.old, "->", seen.fault.new)
again = Touching(root, ["src/diloco_tiny"], root / "kept")
assert again.measure(["tests/test_clamp.py", *both]) == [], "nobody is measured a second time"
assert again.tests == touching.tests
(root / "src/diloco_tiny/clamp.py").write_text("")
assert Touching(root, ["src/diloco_tiny"], root / "kept")._kept("tests/test_clamp.py") is None
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    for name, text in (
        (FILE, CODE),
        ("src/diloco_tiny/__init__.py", ""),
        ("tests/test_clamp.py", TESTS),
        ("tests/test_dies.py", "import os\n\n\ndef test_dies():\n    os._exit(1)\n"),
        ("tests/test_other.py", "def test_other():\n    pass\n"),
        ("pytest.ini", "[pytest]\naddopts = --import-mode=importlib\nmarkers = live\n  whole\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def told(found: list[Fault]) -> list[tuple[str, str, str]]:
    return [(f.kind, f.old, f.new) for f in found]


def test_faults_of_each_kind_are_made_and_what_nobody_reads_is_left_alone(tiny: Path) -> None:
    assert told(faults(tiny, FILE)) == [
        ("branch", "value > self.bound", "not (value > self.bound)"),
        ("compare", "value > self.bound", "value >= self.bound"),
        ("removed", "self.beyond += 1", "pass"),
        ("sign", "self.beyond += 1", "self.beyond -= 1"),
        ("constant", "1", "2"),
        ("removed", "return self.bound", "pass"),
        ("return", "self.bound", "0"),
        ("min-max", "min", "max"),
        ("return", "min(value, self.bound)", "0"),
        ("constant", "0", "1"),
        ("compare", "done < steps", "done <= steps"),
        ("removed", "done += 1", "pass"),
        ("sign", "done += 1", "done -= 1"),
        ("constant", "1", "2"),
        ("return", "done", "0"),
        ("not", "not given", "(given)"),
        ("removed", "raise ValueError(f'{1 + 1}')", "pass"),
    ]


@pytest.mark.parametrize(
    ("statement", "changed"),
    [
        ("return a and b or c", ["return ((a and b) and c)", "return (a or b) or c"]),
        ("return a is None", ["return a is not None"]),
        ("return 1 < a < 3", ["return 1 <= a < 3", "return 1 < a <= 3"]),
        ("return a not in b", ["return a in b"]),
        ("return f(a, strict=True, deep=True)", ["return f(a, strict=True, deep=False)"]),
        ("return a - b", ["return a + b"]),
        ("return a + 'text'", []),
        ("return {k: v for k, v in a if v > b}", ["if not (v > b)}", "if v >= b}"]),
        ("return b if a else c", ["return b if not (a) else c"]),
        ("f(a)", ["pass"]),
        ("self.tell(Tell('kind', a[:5]))", ["pass"]),
        ("await f(a)", ["pass"]),
        ("a.b: int = c", []),
        ("a.b = c", ["pass"]),
        ("a = c", []),
        ("assert_never(a)", []),
        ("self.log.info('text', n=1)", []),
        ("if a: continue", ["if not (a): continue"]),
        ("if a: break", ["if not (a): break", "if a: pass"]),
    ],
)
def test_what_is_made_of_a_statement(tmp_path: Path, statement: str, changed: list[str]) -> None:
    head = "async def f(self, a, b, c):\n    for n in a:\n        "
    (tmp_path / "diloco_one.py").write_text(f"{head}{statement}\n", encoding="utf-8")
    lines = {f.source().removeprefix(head).strip() for f in faults(tmp_path, "diloco_one.py")}
    # A return within a loop may be left out, too; an integer is told apart elsewhere.
    lines = {one for one in lines if one != "pass" or not statement.startswith("return")}
    lines = {one for one in lines if "2 <" not in one and "< 4" not in one}
    assert len(lines) == len(changed)
    for wanted in changed:
        assert any(one.endswith(wanted) for one in lines), (wanted, lines)


@pytest.mark.parametrize(
    ("annotation", "value", "instead"),
    [
        ("list[int]", "a", "[]"),
        ("list[int]", "[]", None),
        ("bool", "f(a)", "not (f(a))"),
        ("str", "a", "''"),
        ("A | None", "a", "None"),
        ("A", "a", None),
        ("tuple[int, ...]", "a", "()"),
        ("tuple[int, int]", "a", None),
        ("dict[str, int]", "a", "{}"),
    ],
)
def test_an_answer_is_replaced_by_one_of_its_type(
    tmp_path: Path, annotation: str, value: str, instead: str | None
) -> None:
    code = f"def f(a) -> {annotation}:\n    return {value}\n"
    (tmp_path / "diloco_one.py").write_text(code, encoding="utf-8")
    found = faults(tmp_path, "diloco_one.py")
    assert [f.new for f in found] == ([] if instead is None else [instead])


def test_names_and_samples_outlive_what_changes_elsewhere_in_the_file(tiny: Path) -> None:
    before = faults(tiny, FILE)
    assert sampled(before, 5, 1) == sampled(before, 5, 1)
    assert [f.id for f in sampled(before, 5, 1)] != [f.id for f in sampled(before, 5, 2)]
    assert sampled(before, 0, 1) == before
    (tiny / FILE).write_text(CODE.replace("@dataclass\n", "LIMIT = 3\n\n\n@dataclass\n"), "utf-8")
    after = faults(tiny, FILE)
    assert [f.id for f in after] == [f.id for f in before]
    assert after[0].line == before[0].line + 3
    assert [f.id for f in sampled(after, 5, 1)] == [f.id for f in sampled(before, 5, 1)]


def test_every_fault_of_the_product_compiles_and_has_a_name_of_its_own() -> None:
    for file in (
        "services/syncer/diloco_syncer/rounds/rounds.py",
        "shared/diloco_shared/bus/blobs.py",
    ):
        found = faults(ROOT, file)
        assert len({f.id for f in found}) == len(found) > 30
        for fault in found:
            compile(fault.source(), file, "exec")


@pytest.mark.whole
def test_a_fault_is_noticed_by_the_tests_that_run_its_line_or_by_nobody(tiny: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny)],
        env={"PYTHONPATH": f"{ROOT / 'bench'}:{tiny / 'src'}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2 tests | value > self.bound -> not (value > self.bound)",
        "2 nobody | value > self.bound -> value >= self.bound",
        "2 tests | self.beyond += 1 -> pass",
        "2 tests | self.beyond += 1 -> self.beyond -= 1",
        "2 tests | 1 -> 2",
        "2 nobody | return self.bound -> pass",
        "2 tests | self.bound -> 0",
        "1 tests | min -> max",
        "1 tests | min(value, self.bound) -> 0",
        # One that starts higher ends alike: nobody can tell.
        "2 nobody | 0 -> 1",
        "2 tests | done < steps -> done <= steps",
        "2 limit | done += 1 -> pass",
        "2 limit | done += 1 -> done -= 1",
        "2 nobody | 1 -> 2",
        "2 tests | done -> 0",
        # No test comes here at all.
        "0 nobody | not given -> (given)",
        "0 nobody | raise ValueError(f'{1 + 1}') -> pass",
    ]
