"""`diloco sim bandwidth`: what a method needs between data centers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from diloco_cli.lines import say
from diloco_planner import bandwidth as model
from diloco_planner.bandwidth import BadSetting
from diloco_shared.spec.algorithm import Algorithm

# What a run has that says nothing of it: whoever asks without a setting asks for such a run. A
# figure for more fragments than it has would be too small (published figures are for 24).
OF_A_RUN = Algorithm.model_validate({})

# --------------------------------------------------------------------------------------------------
# How models take lists, show a result, and tell what is wrong with a setting.


@contextmanager
def settings_named() -> Iterator[None]:
    """A setting out of range is wrong usage: one sentence, status 2."""
    try:
        yield
    except BadSetting as error:
        raise typer.BadParameter(str(error)) from None


def show(result: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or a line of words per key."""
    if as_json:
        print(json.dumps(result))
        return
    width = max(len(_words(key)) for key in result)
    say(*(f"{_words(key):<{width}}  {_written(value)}" for key, value in result.items()))


def _words(text: str) -> str:
    """Of a key, or of a text that names keys."""
    text = text.replace("gbit_per_s", "Gbit/s").replace("_ci", ", 95 % interval")
    return text.replace("_", " ")


def _written(value: Any) -> str:
    """A figure, an interval or an answer, as people write it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case [*several]:
            return " to ".join(map(_written, several))
        case _:
            return _words(str(value))


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them; wrong usage if they are not."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers: 1,0.82") from None


app = typer.Typer()


@app.command()
def bandwidth(
    method: Annotated[str, typer.Option(help=" | ".join(model.METHODS))] = "decoupled",
    params: Annotated[float, typer.Option(help="Parameters of the model, for example 5e9.")] = 5e9,
    learners: Annotated[int, typer.Option(help="Learners, one per data center.")] = 2,
    step_seconds: Annotated[float, typer.Option(help="Seconds of an inner step.")] = 1.0,
    sync_every: Annotated[
        int, typer.Option(help="Inner steps between two merges of a fragment.")
    ] = OF_A_RUN.sync_every_steps,
    fragments: Annotated[
        int, typer.Option(help="Parts that the parameters are cut into; published figures have 24.")
    ] = OF_A_RUN.fragments,
    overlap_steps: Annotated[
        int, typer.Option(help="Steps that a merge may overlap with training.")
    ] = OF_A_RUN.overlap_steps,
    utilisation: Annotated[
        float, typer.Option(help="Compute utilisation to reach; Decoupled never stalls.")
    ] = 0.95,
    up_bits: Annotated[
        float, typer.Option(help="Bits per value of a contribution: 16 of bf16, 4.0625 of int4.")
    ] = 16.0,
    down_bits: Annotated[
        float, typer.Option(help="Bits per value of a publication, of Decoupled only.")
    ] = 16.0,
    keyframe_every: Annotated[
        int,
        typer.Option(
            help="Versions of a fragment from one keyframe (a whole fragment) to the next, of "
            "Decoupled only; 0: none, as published figures have it."
        ),
    ] = model.KEYFRAME_EVERY,
    keyframe_bits: Annotated[
        float, typer.Option(help="Bits per value of a keyframe: 32 of fp32, 16 of bf16.")
    ] = model.CODEC_BITS[model.KEYFRAME_CODEC],
    link_gbit_per_s: Annotated[
        float | None, typer.Option(help="Say also what a link of this rate makes of it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Gbit/s that a method needs per data center, by the author's link model."""
    with settings_named():
        link = model.Link(
            method,  # type: ignore[arg-type]  # checked by Link
            params,
            learners,
            step_seconds,
            sync_every,
            fragments,
            overlap_steps,
            utilisation,
            up_bits,
            down_bits,
            keyframe_every,
            keyframe_bits,
        )
        result = model.required(link)
        if link_gbit_per_s is not None:
            result |= model.on_link(link, link_gbit_per_s)
    if not as_json:
        result["symbols"] = "tau is --overlap-steps, and M is --learners"
    show(result | {"settings": asdict(link)} if as_json else result, as_json)
