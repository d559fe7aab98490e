"""Each verb brings its own file, and finds it."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

import diloco_cli.commands
from diloco_cli.__main__ import main
from diloco_cli.commands import VERBS, app_for, whole_app
from diloco_cli.words import INTERRUPTED, INVALID


def verbs_of(app: typer.Typer) -> list[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return list(group.commands)


def test_every_file_of_commands_is_asked_for_its_own_verbs() -> None:
    folder = Path(diloco_cli.commands.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "options"}
    assert files == set(VERBS)
    for file, verbs in VERBS.items():
        app = import_module(f"diloco_cli.commands.{file}").app
        outer = typer.Typer()
        outer.callback()(lambda: None)
        outer.add_typer(app)
        assert sorted(verbs_of(outer)) == sorted(verbs), file
        for verb in verbs:
            assert verbs_of(app_for(verb)) == verbs_of(outer)
    assert verbs_of(app_for("sim")) == ["sim"]


@pytest.mark.parametrize("verb", ["", "--help", "nonsense"])
def test_whoever_names_no_verb_hears_of_all(verb: str) -> None:
    assert verbs_of(app_for(verb)) == verbs_of(whole_app())


def leaves(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb that does something."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, each in (inner or {}).items():
        yield from leaves(each, f"{path} {name}".strip())


def test_every_verb_that_asks_a_coordinator_speaks_json() -> None:
    """README says so."""
    found = leaves(typer.main.get_command(whole_app()))
    options = {verb: {o for p in command.params for o in p.opts} for verb, command in found}
    asking = {verb for verb, known in options.items() if "--url" in known}
    assert "page" in asking and "budget" not in asking
    assert {verb for verb in asking if "--json" not in options[verb]} == set()


# Whoever revokes a site is in a hurry, and the machine may be busy: what is imported takes longest.
@pytest.mark.parametrize(
    ("verb", "others"),
    [
        ("status", {"nats", "numpy", "jax"}),
        ("site", {"nats", "numpy", "jax", "httpx", "structlog", "asyncio"}),
    ],
)
def test_a_verb_brings_no_more_than_it_needs(verb: str, others: set[str]) -> None:
    code = f"""
import sys
import time
from diloco_cli.__main__ import main
sys.argv = ["diloco", {verb!r}, "nonsense"]
try:
    main()
except SystemExit:
    print("brought:", *{others!r}.intersection(sys.modules))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["brought:"]


def unread(*words: str) -> subprocess.CompletedProcess[bytes]:
    """A command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "diloco_cli", *words]
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)


# Much, little, at once, and by other hands than print.
@pytest.mark.parametrize("words", ["config --explain", "version", "--version", "--help"])
def test_whoever_has_read_enough_ends_it_without_a_word(words: str) -> None:
    """As `head` does."""
    said = unread(*words.split())
    assert (said.returncode, said.stderr) == (0, b"")


def test_what_fails_has_failed_though_nobody_reads_it() -> None:
    assert unread("config", "/no/such/run.toml").returncode == INVALID


def status_of(raised: BaseException, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a command that raises this."""
    app = typer.Typer()

    @app.command()
    def command() -> None:
        raise raised

    monkeypatch.setattr(diloco_cli.commands, "app_for", lambda _: app)
    monkeypatch.setattr(sys, "argv", ["diloco"])
    for name in ("stdout", "stderr"):  # typer puts others in their place
        monkeypatch.setattr(sys, name, getattr(sys, name))
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_another_connection_that_breaks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of(BrokenPipeError(errno.EPIPE, "Broken pipe"), monkeypatch) == 1


def test_an_interrupt_has_its_status_also_before_a_command_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: str) -> typer.Typer:
        raise KeyboardInterrupt

    assert status_of(KeyboardInterrupt(), monkeypatch) == INTERRUPTED
    monkeypatch.setattr(diloco_cli.commands, "app_for", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INTERRUPTED


def test_nothing_is_imported_where_an_interrupt_would_be_a_traceback() -> None:
    """What the command imports before it can take one is small."""
    code = (
        "import sys, diloco_cli.__main__; print(*{'typer', 'pydantic', 'httpx'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_clears_up(number: signal.Signals, tmp_path: Path) -> None:
    """What it has begun may be a message server over somebody's store."""
    program = f"""
import signal, sys, time
signal.signal({int(number)}, signal.SIG_DFL)  # whoever runs this may ignore it
from pathlib import Path
import diloco_cli.commands as commands
from diloco_cli.__main__ import main
def app():
    try:
        Path({str(tmp_path / "begun")!r}).touch()
        time.sleep(60)
    finally:
        Path({str(tmp_path / "cleared")!r}).touch()
commands.app_for = lambda _: app
main()
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        for _ in range(600):
            if (tmp_path / "begun").exists():
                break
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "cleared").exists()
