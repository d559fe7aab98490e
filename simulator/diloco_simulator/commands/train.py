"""`diloco sim train`: train on a virtual clock."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_simulator.commands.bandwidth import numbers, settings_named, show

app = typer.Typer()


def spec_of(
    preset: str, steps: int, seed: int, inner_rate: float | None, sequences: int = 1024
) -> Any:
    """The nano run on the standard library's source; `inner_rate` is the learners' peak rate."""
    from diloco_shared.spec.algorithm import PRESETS
    from diloco_shared.spec.run import RunSpec

    inner: dict[str, Any] = {}
    if inner_rate is not None:
        inner["learning_rate"] = inner_rate / PRESETS[preset]["inner_rate_factor"]
    return RunSpec.model_validate(
        {
            "name": "sim",
            "seed": seed,
            "algorithm": {"preset": preset},
            "inner": inner,
            "evaluation": {"sequences": sequences, "every_steps": 480},
            "budget": {"steps": steps},
        }
    )


def _read(file: Path) -> Any:
    """The run of a file; wrong usage if it is none."""
    from diloco_shared.checking import load

    try:
        return load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="--spec") from None


@app.command()
def train(
    learners: Annotated[int, typer.Option(min=1, max=512, help="How many learners.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps per learner.")] = 3000,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of parameters, data order and held-out text.")
    ] = 0,
    preset: Annotated[str, typer.Option(help="long or short")] = "long",
    inner_rate: Annotated[
        float | None, typer.Option(help="Peak inner rate; by preset if left out.")
    ] = None,
    data_parallel: Annotated[
        bool,
        typer.Option(
            "--data-parallel", help="One optimizer step for the batches of all learners together."
        ),
    ] = False,
    speeds: Annotated[str, typer.Option(help="Relative speeds, repeated: 1,1,0.5")] = "1",
    mtbi_seconds: Annotated[
        float | None,
        typer.Option(help="Mean seconds between a learner's deaths; none dies if left out."),
    ] = None,
    away_seconds: Annotated[
        float, typer.Option(help="Mean seconds until a dead one starts again.")
    ] = 11.0,
    file: Annotated[Path | None, typer.Option("--spec", help="A run.toml instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Train with the real machines and real numerics, deterministically."""
    from diloco_shared.spec.algorithm import PRESETS

    if preset not in PRESETS:
        raise typer.BadParameter(f"choose one of {', '.join(PRESETS)}", param_hint="--preset")
    began = time.perf_counter()

    def told(step: int, loss: float) -> None:
        if not as_json:
            say(f"step {step:>6}  loss {loss:.4f}")

    spec = spec_of(preset, steps, seed, inner_rate) if file is None else _read(file)
    if data_parallel:
        from diloco_learner.training.data_parallel import train_data_parallel

        with meanwhile("trains", quiet=as_json):
            result = train_data_parallel(spec, learners, rate=inner_rate, progress=told)
        result |= {"method": "data-parallel"}
    else:
        from diloco_simulator.experiments.setting import Interruptions, Setting
        from diloco_simulator.experiments.train import Fleet

        with settings_named():
            dying = None if mtbi_seconds is None else Interruptions(mtbi_seconds, away_seconds)
        if not as_json:
            say("trains on a virtual clock; a line follows whenever the loss is measured")
        setting = Setting(learners, speeds=numbers(speeds), interruptions=dying)
        with meanwhile("trains", quiet=as_json):
            result = Fleet(spec, setting, told=None if as_json else told).run()
        result |= {"method": "decoupled", "preset": spec.algorithm.preset}
    result |= {
        "learners": learners,
        "seed": spec.seed,
        "steps": spec.budget.steps,
        "seconds": round(time.perf_counter() - began, 1),
    }
    show(result, as_json)
