"""Golden screens: what every command shows, and its help, in terminals of three widths.

The answers are those of a real cluster (record.py); staged.py has what is needed besides.
UPDATE_SCREENS=1 writes the screens anew; they are then to be looked at, one by one, and committed.
"""

import io
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click.testing
import pytest
import typer
from cli.staged import (
    ANSWERS,
    KILLED,
    RUN,
    STAGES,
    cluster,
    demo_told,
    place,
    shown,
    typed,
)
from rich.console import Console

from diloco_cli.commands import whole_app
from diloco_cli.seen import Seen
from diloco_cli.view import screen
from diloco_cli.words import CONFLICT, FAILED, INVALID, NO_CLUSTER, UNKNOWN

SCREENS = Path(__file__).parent / "screens"
COMPOSED = str(Path(__file__).parents[2] / "compose" / "run.toml")
WIDTHS = (80, 120, 200)
# What is typed after each verb.
WORDS = {
    "up": "--detach",
    "down": "",
    "demo": "",
    "config": COMPOSED,
    "version": "",
    "submit": "run.toml",
    "runs": "",
    "status": RUN,
    "watch": RUN,
    "pause": RUN,
    "resume": RUN,
    "stop": RUN,
    "quorum": f"{RUN} 4",
    "begin-again": RUN,
    "delete": RUN,
    "rounds": f"{RUN} --newest 3",
    "report": RUN,
    "data train-tokenizer": "text --to tokenizer --vocabulary 300",
    "data prepare": "text --to corpus",
    "data show": "corpus --verify",
    "model describe": "nano",
    "check": "run.toml",
    "checkpoint create": RUN,
    "checkpoint list": RUN,
    "checkpoint show": f"{RUN} 1",
    "checkpoint restore": f"{RUN} 1 --as again",
    "checkpoint delete": f"{RUN} 1",
    "export": f"{RUN} --to weights --dtype bf16",
    "generate": "./text --prompt Sentence",
    "members": "",
    "drain": "learner-1",
    "forget": "learner-1",
    "page": "",
    "events": f"{RUN} --newest 40",
    "chaos": f"kill {KILLED['target']} --at-step {KILLED['at_step']}",
    "faults": "",
    "audit": "",
    "token make": "ben read operate",
    "token rotate": "anna",
    "token list": "",
    "token revoke": "anna",
    "replay": RUN,
    "tape show": RUN,
    "tape export": f"{RUN} tape.jsonl",
    "tape check": "tape.jsonl",
    "tape verify": RUN,
    "plan": "--params 12e9 --chips 4096 --centers 4",
    "budget": COMPOSED,
    "hub init": "hub --host hub.example.org",
    "hub renew": "hub",
    "hub backup": "backup",
    "hub restore": "backup --store store",
    "site add": "oslo --hub hub --learner oslo-1 --learner oslo-2",
    "site revoke": "oslo --hub hub",
    "site rotate": "oslo --hub hub",
    "site learners": "oslo --hub hub --add oslo-3",
    "site list": "--hub hub",
    "site key": "bergen --to bergen.key",
    "site leaf": "--credentials hub/credentials/oslo --hub-url tls://hub.example.org:7422 "
    "--to leaf",
    "doctor": "",
    "sim train": "--learners 2 --steps 481",
    "sim goodput": "--chips 1000 --learners 2 --seeds 2",
    "sim bandwidth": "--link-gbit-per-s 11",
}
# What one may type besides, by the name of the screen.
BESIDES = {
    "up in use": ("up",),
    "down of nothing": ("down",),
    "unknown run": ("status", "nobody"),
    "config explained": ("config", "--explain"),
    "config with faults": ("config", "faulty.toml"),
    "sim goodput table": ("sim", "goodput", "--table", "--seeds", "2"),
}
STATUSES = {"up in use": CONFLICT, "down of nothing": NO_CLUSTER, "check": FAILED}
STATUSES |= {"unknown run": UNKNOWN, "config with faults": INVALID}
# What no screen may show: an object as Python writes it, a part of an error, half a word.
BAD = re.compile(r"Traceback|\{'|\['|\[\d+(\.\d+)?, |\('[^']*', ?['\)]|\b(None|True|False)\b|…")


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("TERM", "dumb")  # so that nothing moves
    for name in ("DILOCO_NATS_URL", "DILOCO_CA", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def same(name: str, found: str) -> None:
    """As it was when somebody looked at it last."""
    path = SCREENS / f"{name.replace(' ', '-')}.txt"
    found = "\n".join(line.rstrip() for line in found.splitlines()) + "\n"
    bad = BAD.search(found)
    assert bad is None, f"{name} shows {bad}"
    if os.environ.get("UPDATE_SCREENS"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text("utf-8"), f"UPDATE_SCREENS=1 writes {path} anew: look at it"


def too_wide(text: str, width: int) -> list[str]:
    """Lines that a terminal would break; a word that is longer (a path, a token) stays whole."""
    lines = (line for line in text.splitlines() if len(line) > width)
    return [line for line in lines if len(line.split()) > 1]


def merged(screens: dict[int, str], typed: str) -> str:
    """One after the other; the same one once."""
    parts = []
    for text, widths in itertools.groupby(screens, screens.__getitem__):
        parts.append(f"$ {typed}  ({', '.join(map(str, widths))} columns)\n{text}")
    return "\n".join(parts)


def screens_of(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> dict[int, str]:
    found = {}
    for width in WIDTHS:
        with monkeypatch.context() as patched, place(patched) as where:
            cluster(patched)
            for stage in STAGES.get(name, ()):
                stage(patched)
            (where / "faulty.toml").write_text('name = "A B"\n[algorithm]\nspeed = 9\n', "utf-8")
            capsys.readouterr()
            patched.setenv("COLUMNS", str(width))
            for stream in (sys.stdout, sys.stderr):
                patched.setattr(stream, "isatty", lambda: True)
            ended = typed(patched, *words)
            out, err = capsys.readouterr()
            found[width] = shown(out + (err if ended else ""), where)  # else of how fast it is
        assert ended == STATUSES.get(name, 0), found[width]
        assert not too_wide(found[width], width)
    return found


def leaves(command: Any, path: str = "") -> Iterator[str]:
    """Every verb that does something."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path
    for name, each in (inner or {}).items():
        yield from leaves(each, f"{path} {name}".strip())


def test_every_verb_has_a_screen() -> None:
    assert set(leaves(typer.main.get_command(whole_app()))) == set(WORDS)


@pytest.mark.parametrize("name", [*WORDS, *BESIDES])
def test_what_a_command_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*BESIDES.get(name, ()), *(f"{name} {WORDS[name]}".split() if name in WORDS else ())]
    found = screens_of(name, words, monkeypatch, capsys)
    as_typed = " ".join(["diloco", *words]).replace(COMPOSED, "compose/run.toml")
    same(name, merged(found, as_typed))


def drawn(name: str, width: int, seen: Seen, messages: Sequence[str] = ()) -> None:
    """A screen that moves, as it stands at one moment."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(screen(seen, messages))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    same(f"{name}-{width}", text)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_watch_shows(width: int) -> None:
    rounds = ANSWERS[f"GET /v1/runs/{RUN}/rounds"]["rounds"]
    events = ANSWERS["GET /v1/events"]["events"]
    drawn("watch", width, Seen(RUN, ANSWERS[f"GET /v1/runs/{RUN}"], rounds, events))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_demo_shows_while_it_runs(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn("demo", width, *demo_told(monkeypatch))


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from verbs(inner, (*path, name))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_help_of_every_verb(width: int) -> None:
    found, command = [], typer.main.get_command(whole_app())
    for path in verbs(command):
        result = click.testing.CliRunner().invoke(
            command, [*path, "--help"], prog_name="diloco", env={"COLUMNS": str(width)}
        )
        assert result.exit_code == 0, path
        found.append(result.output)
    text = "\n".join(found)
    assert all(len(line) <= width for line in text.splitlines())
    same(f"help-{width}", text)
