"""Golden screens: what every command shows of one recorded run, and in terminals of three widths.

The answers are those of a real cluster (record.py). UPDATE_SCREENS=1 writes the screens anew; they
are then to be looked at, one by one, and committed.
"""

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import httpx
import pytest
import typer
from rich.console import Console

import diloco_cli.api
from diloco_cli.__main__ import main
from diloco_cli.commands import whole_app
from diloco_cli.seen import Seen
from diloco_cli.view import screen
from diloco_client import Client

SCREENS = Path(__file__).parent / "screens"
ANSWERS = json.loads((SCREENS / "answers.json").read_text("utf-8"))
RUN = "break"
WIDTHS = (80, 120, 200)
COMMANDS = {
    "runs": ("runs",),
    "status": ("status", RUN),
    "rounds": ("rounds", RUN, "--newest", "5"),
    "members": ("members",),
    "events": ("events", RUN, "--newest", "40"),
    "faults": ("faults",),
    "checkpoints": ("checkpoint", "list", RUN),
    "checkpoint": ("checkpoint", "show", RUN, "1"),
    "tokens": ("token", "list"),
    "plan": ("plan", "--params", "12e9", "--chips", "4096", "--centers", "4"),
    "budget": ("budget", str(Path(__file__).parents[2] / "compose" / "run.toml")),
    "config": ("config", str(Path(__file__).parents[2] / "compose" / "run.toml")),
    "unknown": ("status", "nobody"),
}


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200, text="ready\n")
        body = ANSWERS.get(f"{request.method} {request.url.path}")
        if body is None:
            detail = f"there is no run {request.url.path.split('/')[3]!r}; known: {RUN}"
            return httpx.Response(404, json={"title": "No such run", "detail": detail})
        return httpx.Response(200, json=body)

    def client(url: str, token: str, **_: str) -> Client:
        return Client(url, token, transport=httpx.MockTransport(handle))

    monkeypatch.setattr(diloco_cli.api, "Client", client)
    monkeypatch.setenv("DILOCO_URL", "http://far:1")
    monkeypatch.setenv("DILOCO_TOKEN", "t0ken")


def same(name: str, shown: str) -> None:
    """As it was when somebody looked at it last."""
    path = SCREENS / f"{name}.txt"
    shown = "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"
    for bad in ("Traceback", "{'", "None"):
        assert bad not in shown, f"{name} shows {bad}"
    if os.environ.get("UPDATE_SCREENS"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text("utf-8"), f"UPDATE_SCREENS=1 writes {path} anew: look at it"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_says(
    name: str, cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diloco", *COMMANDS[name]])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        main()
    except SystemExit as exit_:
        assert (exit_.code or 0) == (5 if name == "unknown" else 0)
    same(name, "".join(capsys.readouterr()))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_audit_shows(
    width: int, cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diloco", "audit"])
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert all(len(line) <= width for line in shown.splitlines())
    same(f"audit-{width}", shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_watch_shows(width: int) -> None:
    seen = Seen(RUN)
    seen.run = ANSWERS[f"GET /v1/runs/{RUN}"]
    seen.rounds = ANSWERS[f"GET /v1/runs/{RUN}/rounds"]["rounds"]
    seen.events = ANSWERS["GET /v1/events"]["events"]
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(screen(seen))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown, "a figure is cut"
    same(f"watch-{width}", shown)


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from verbs(inner, (*path, name))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_help_of_every_verb(width: int) -> None:
    shown, command = [], typer.main.get_command(whole_app())
    for path in verbs(command):
        result = click.testing.CliRunner().invoke(
            command, [*path, "--help"], "diloco", env={"COLUMNS": str(width)}
        )
        assert result.exit_code == 0, path
        shown.append(result.output)
    text = "\n".join(shown)
    assert all(len(line) <= width for line in text.splitlines())
    same(f"help-{width}", text)
