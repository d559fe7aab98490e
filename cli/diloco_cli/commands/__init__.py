"""Every verb of the command: thin, each a few calls of the client."""

import typer

from diloco_cli.commands import (
    budget,
    check,
    checkpoints,
    control,
    data,
    doctor,
    export,
    generate,
    hub,
    local,
    model,
    plan,
    runs,
    tape,
    tokens,
)
from diloco_simulator.commands import app as sim

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train language models across islands of compute that may fail.",
)
for group in (
    local.app,
    runs.app,
    data.app,
    model.app,
    check.app,
    checkpoints.app,
    export.app,
    generate.app,
    control.app,
    tokens.app,
    tape.app,
    plan.app,
    budget.app,
    hub.app,
    doctor.app,
):
    app.add_typer(group)
app.add_typer(sim, name="sim")
