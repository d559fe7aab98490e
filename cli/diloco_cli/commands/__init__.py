"""Every verb of the command: thin, each a few calls of the client.

A verb's file is imported when somebody asks for the verb. All files together bring NATS, numpy and
what machines are looked at with, and take twice as long to import as most verbs take to run.
"""

from importlib import import_module
from typing import Annotated

import typer

# By file, in the order of `diloco --help`.
VERBS = {
    "local": ("up", "down", "demo", "config", "version"),
    "runs": (
        *("submit", "runs", "status", "watch", "pause", "resume", "stop", "quorum", "begin-again"),
        *("delete", "rounds", "report"),
    ),
    "data": ("data",),
    "model": ("model",),
    "check": ("check",),
    "checkpoints": ("checkpoint",),
    "export": ("export",),
    "generate": ("generate",),
    "control": ("members", "drain", "forget", "page", "events", "chaos", "faults"),
    "tokens": ("audit", "token"),
    "tape": ("replay", "tape"),
    "plan": ("plan",),
    "budget": ("budget",),
    "hub": ("hub",),
    "site": ("site",),
    "doctor": ("doctor",),
}
SIMULATOR = "sim"


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # takes a tenth of a second, here alone

        typer.echo(f"decoupled-diloco {version('decoupled-diloco')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", callback=_say_version),
    ] = False,
) -> None:
    """What stands before a verb."""


def app_for(verb: str) -> typer.Typer:
    """The command with the file of that verb; with all of them where there is no such verb."""
    if verb == SIMULATOR:
        return _app((), sim=True)
    files = tuple(file for file, verbs in VERBS.items() if verb in verbs)
    return _app(files) if files else whole_app()


def whole_app() -> typer.Typer:
    return _app(tuple(VERBS), sim=True)


def _app(files: tuple[str, ...], *, sim: bool = False) -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Train language models across islands of compute that may fail.",
    )
    # Without one a command of one verb is that verb, and would not be told its name.
    app.callback()(_options)
    for file in files:
        app.add_typer(import_module(f"diloco_cli.commands.{file}").app)
    if sim:
        app.add_typer(import_module("diloco_simulator.commands").app, name=SIMULATOR)
    return app
