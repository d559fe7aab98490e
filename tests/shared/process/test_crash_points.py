"""A process dies where it is told to, once, and says what it does not know."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_learner.settings import Settings
from diloco_shared.process.crash_points import POINTS, CrashPoint, arm, done_in, parse, passing

PASS = """
import sys
from pathlib import Path
from diloco_shared.process.crash_points import arm, passing
arm(sys.argv[1], "l-1", Path(sys.argv[2]))
for n in range(3):
    passing("before-append")
    passing("after-append")
    print(n, flush=True)
"""


def life(setting: str, folder: Path) -> tuple[int, list[str]]:
    """(exit status, passages survived) of a process that passes two points three times."""
    done = subprocess.run(
        [sys.executable, "-c", PASS, setting, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [line for line in done.stdout.split() if line.isdecimal()]


def test_it_dies_at_the_passage_named_and_only_in_one_life(tmp_path: Path) -> None:
    setting = "l-1/after-append:2, l-2/before-append,l-1/before-append"
    assert life(setting, tmp_path) == (-signal.SIGKILL, [])
    assert done_in(tmp_path) == ["l-1/before-append"]
    assert life(setting, tmp_path) == (-signal.SIGKILL, ["0"])
    assert life(setting, tmp_path) == (0, ["0", "1", "2"])
    assert done_in(tmp_path) == ["l-1/before-append", "l-1/after-append:2"]


def test_without_a_member_everybody_is_meant(tmp_path: Path) -> None:
    assert life("before-append:3", tmp_path) == (-signal.SIGKILL, ["0", "1"])


def test_unset_it_does_nothing(tmp_path: Path) -> None:
    arm("", "l-1", tmp_path)
    for point in POINTS:
        passing(point)
    assert done_in(tmp_path) == []


def test_each_place_in_the_sources_is_a_known_one() -> None:
    """A process that is armed for any other place would end with an AssertionError there."""
    root = Path(__file__).parents[3]
    sources = [p for part in ("services", "shared") for p in (root / part).rglob("*.py")]
    calls = [re.findall(r"\bpassing\((.*)\)", p.read_text("utf-8")) for p in sources]
    named = {name for call in calls for text in call for name in re.findall(r'"([a-z-]+)"', text)}
    assert named == {*POINTS}


def test_entries_are_parsed() -> None:
    assert parse("") == []
    assert parse(" snapshot , s-1/replay:7") == [
        CrashPoint("snapshot", "", "snapshot", 1),
        CrashPoint("s-1/replay:7", "s-1", "replay", 7),
    ]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("l-1/nowhere", "crash point 'l-1/nowhere': there is no 'nowhere'; known: before-append"),
        ("replay:0", "crash point 'replay:0': the passage is a number from 1 on"),
        ("replay:x", "the passage is a number from 1 on"),
        ("L 1/replay", "the member 'L 1' is not a valid id"),
    ],
)
def test_what_is_not_known_is_refused_at_the_start(setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(setting)
    with pytest.raises(ValueError, match=said):
        Settings(crash_at=setting)


def test_passages_are_counted_from_when_it_was_armed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: died.append(number))
    for _ in range(2):
        arm("before-append:2", "l-1", tmp_path)
        passing("before-append")
        assert died == []
    passing("before-append")
    assert died == [signal.SIGKILL]
    arm("", "l-1", tmp_path)
