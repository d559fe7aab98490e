"""Each verb brings its own file, and finds it."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

import diloco_cli.commands
from diloco_cli.commands import VERBS, app_for, whole_app


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
from diloco_cli.__main__ import main
sys.argv = ["diloco", {verb!r}, "nonsense"]
try:
    main()
except SystemExit:
    print("brought:", *{others!r}.intersection(sys.modules))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["brought:"]
