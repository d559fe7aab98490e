"""`diloco sim goodput`: how much of a failing fleet's time a method uses."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_simulator.commands.bandwidth import numbers, settings_named, show

if TYPE_CHECKING:  # slow to import
    from diloco_planner.goodput_model import Failures

app = typer.Typer()


@app.command()
def goodput(
    method: Annotated[str, typer.Option(help="dp | elastic | decoupled")] = "decoupled",
    learners: Annotated[int, typer.Option(help="Learners, that share the chips.")] = 8,
    chips: Annotated[int, typer.Option(help="Chips in all.")] = 1_200_000,
    mtbi_years: Annotated[
        float, typer.Option(help="Mean years between interruptions of a chip.")
    ] = 1,
    down_seconds: Annotated[float, typer.Option(help="Seconds to scale down.")] = 11.0,
    up_seconds: Annotated[float, typer.Option(help="Seconds to scale up.")] = 20.0,
    return_seconds: Annotated[
        float, typer.Option(help="Seconds until a chip is back, in the mean.")
    ] = 72.0,
    state_loss: Annotated[
        float, typer.Option(help="Share of the failures that take all of a learner's state.")
    ] = 0.0,
    recovery_seconds: Annotated[
        float, typer.Option(help="Seconds to fetch its state then.")
    ] = 60.0,
    quorum: Annotated[int, typer.Option(help="Learners that a round waits for.")] = 1,
    grace: Annotated[
        float, typer.Option(help="Share of the slack that a round waits for late learners.")
    ] = 0.8,
    overlap_steps: Annotated[
        int, typer.Option(help="Steps that a merge may overlap with training.")
    ] = 2,
    step_seconds: Annotated[float, typer.Option(help="Seconds of an inner step.")] = 1.0,
    sync_seconds: Annotated[
        float, typer.Option(help="Seconds to transfer, merge and publish.")
    ] = 0.0,
    speeds: Annotated[
        str, typer.Option(help="Relative speeds of learners, repeated: 1,0.82.")
    ] = "1",
    jitter: Annotated[float, typer.Option(help="Spread of a step's time, as a share of it")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    seeds: Annotated[
        int, typer.Option(min=2, max=1024, help="How many fleets are simulated.")
    ] = 16,
    table: Annotated[bool, typer.Option("--table", help="The published table's cells.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Goodput and uptime of a fleet whose chips fail, with 95 % confidence intervals."""
    from diloco_planner.goodput_model import YEAR_S, Failures
    from diloco_simulator.fleets.goodput import Cell
    from diloco_simulator.fleets.goodput_rounds import Coupling
    from diloco_simulator.fleets.goodput_table import one

    with settings_named(), meanwhile("simulates fleets", quiet=as_json):
        failures = Failures(
            mtbi_s=mtbi_years * YEAR_S,
            down_s=down_seconds,
            up_s=up_seconds,
            return_mean_s=return_seconds,
            state_loss=state_loss,
            recovery_s=recovery_seconds,
        )
        if table:
            return _table(failures, seed, seeds, as_json=as_json)
        coupling = Coupling(
            quorum=quorum,
            step_s=step_seconds,
            overlap_steps=overlap_steps,
            grace_factor=grace,
            sync_s=sync_seconds,
            speeds=numbers(speeds),
            jitter=jitter,
        )
        cell = Cell(method, chips, learners)  # type: ignore[arg-type]  # checked by Cell
        found = one(cell, failures, coupling, seed=seed, seeds=seeds)
    settings = {"cell": asdict(cell), "failures": asdict(failures), "coupling": asdict(coupling)}
    show(found | {"seed": seed, "settings": settings} if as_json else found, as_json)


def _table(failures: "Failures", seed: int, seeds: int, *, as_json: bool) -> None:
    from diloco_simulator.fleets import goodput_table

    cells = goodput_table.table(failures, seed=seed, seeds=seeds)
    if as_json:
        print(json.dumps({"cells": cells, "failures": asdict(failures), "seed": seed}))
    else:
        say(*goodput_table.lines(cells))
