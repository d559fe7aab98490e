"""`diloco sim …`: experiments on a virtual clock, and models of what was not built."""

import typer

from diloco_simulator.commands import bandwidth, goodput, train
from diloco_simulator.commands.train import spec_of

__all__ = ["app", "spec_of"]

app = typer.Typer(no_args_is_help=True, help="Experiments on a virtual clock, and models.")
for group in (train.app, goodput.app, bandwidth.app):
    app.add_typer(group)
