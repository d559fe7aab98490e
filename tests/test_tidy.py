"""Style that matters enough to test: sizes, names, leftovers, and invariants that are cited."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from names import meant

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
_LOGGER = re.compile(r"(?:\b_?log|\bget_logger\(\))\.\w+$")
NAMES_THAT_SAY_NOTHING = {"utils.py", "helpers.py", "common.py", "misc.py"}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def sources() -> list[Path]:
    return tracked("*.py")


def _writes_a_second_event(call: ast.Call) -> bool:
    """Of a logger under any of its names: `log`, `_log`, `self.log`, or made on the spot."""
    twice = any(keyword.arg == "event" for keyword in call.keywords)
    return twice and _LOGGER.search(ast.unparse(call.func)) is not None


def _lossy_waits(tree: ast.AST) -> list[int]:
    """Lines of them, whichever way they are written."""
    return [n.lineno for n, name in meant(tree) if re.fullmatch(r"asyncio\.(\w+\.)?wait_for", name)]


def _calls(code: str) -> ast.Call:
    (found,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)][:1]
    return found


@cache
def read_once() -> dict[str, list[str]]:
    """What is wrong, by the test that forbids it: to parse all sources takes seconds."""
    too_long, silent, second_events, lossy = [], [], [], []
    for path in sources():
        where, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if (lines := text.count("\n")) > FILE_LINES_MAX:
            too_long.append(f"{where}: {lines} lines")
        if text and not ast.get_docstring(tree):
            silent.append(str(where))
        if "wait_for" in text:
            lossy += [f"{where}:{line}" for line in _lossy_waits(tree)]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (length := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX:
                    too_long.append(f"{where}: {node.name} has {length} lines")
            elif isinstance(node, ast.Call) and _writes_a_second_event(node):
                second_events.append(f"{where}:{node.lineno}")
    lossy = [where for where in lossy if not where.startswith("tests/")]
    wrong = {"too long": too_long, "silent": silent, "second events": second_events}
    return wrong | {"lossy waits": lossy}


def test_files_and_functions_stay_small() -> None:
    assert not read_once()["too long"]


def test_every_module_says_what_it_is_for() -> None:
    assert not read_once()["silent"]


def test_no_log_line_has_a_second_event() -> None:
    """A line's text is its `event`: another one raises TypeError where it is written."""
    assert not read_once()["second events"]


@pytest.mark.parametrize(
    "logger", ["log", "_log", "self.log", "self._log", "structlog.get_logger()"]
)
def test_a_second_event_is_seen_whatever_the_logger_is_called(logger: str) -> None:
    assert _writes_a_second_event(_calls(f"{logger}.info('a', event='b')"))
    assert not _writes_a_second_event(_calls(f"{logger}.info('a', error='b')"))
    assert not _writes_a_second_event(_calls("self.catalog.add(event='b')"))


def test_nothing_waits_so_that_a_cancellation_can_be_lost() -> None:
    """In Python 3.11 `wait_for` swallows one that comes as its awaitable ends: use `timeout`."""
    assert not read_once()["lossy waits"]


@pytest.mark.parametrize(
    "code",
    [
        "import asyncio\nasyncio.wait_for(a, 1)",
        "from asyncio import wait_for as w\nw(a, 1)",
        "import asyncio as aio\naio.wait_for(a, 1)",
        "from asyncio import tasks\ntasks.wait_for(a, 1)",
    ],
)
def test_a_wait_that_loses_cancellations_is_seen_however_it_is_written(code: str) -> None:
    assert _lossy_waits(ast.parse(code)) == [2]
    assert not _lossy_waits(ast.parse("import asyncio\nself.wait_for(asyncio.wait(a))"))


def test_no_names_that_say_nothing_and_no_leftovers() -> None:
    leftover = re.compile(r"\b(TODO|FIXME|XXX)\b|\bNotImplementedError\b")
    faults = []
    for path in sources():
        if path.name in NAMES_THAT_SAY_NOTHING:
            faults.append(f"{path.relative_to(ROOT)}: name by concept")
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if leftover.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not faults, "\n".join(faults)


def test_properties_have_no_profile_of_their_own() -> None:
    """Else exploring would try what the tests of every day try (examples.py)."""
    own = re.compile(r"\b(derandomize|max_examples)=")
    faults = [
        str(path.relative_to(ROOT))
        for path in tracked("tests/*.py")
        if path.name not in ("conftest.py", "examples.py") and own.search(path.read_text("utf-8"))
    ]
    assert not faults, "\n".join(faults)


def test_whoever_runs_tests_is_told_which_were_skipped_and_why() -> None:
    """Some want tools that installing does not bring. What is not told is taken for played."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^TOLD = .*-rfEs\b", makefile, re.MULTILINE)
    starts = re.findall(r"\$\(BIN\)/pytest .*", makefile)
    assert starts and all(line.startswith("$(BIN)/pytest $(TOLD) ") for line in starts)


def test_every_invariant_built_so_far_is_cited_by_a_test() -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    listed = set(re.findall(r"^\| (I\d+) \|", architecture, flags=re.MULTILINE))
    assert listed == {f"I{n}" for n in range(1, 14)}
    tests = "\n".join(p.read_text("utf-8") for p in tracked("tests/*.py") if p != Path(__file__))
    uncited = sorted(i for i in listed if not re.search(rf"\b{i}\b", tests))
    assert not uncited, f"no test cites {', '.join(uncited)}"
