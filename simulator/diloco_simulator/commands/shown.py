"""How models take lists, show a result, and tell what is wrong with a setting."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from diloco_simulator.bandwidth import BadSetting


@contextmanager
def settings_named() -> Iterator[None]:
    """A setting out of range is wrong usage: one sentence, status 2."""
    try:
        yield
    except BadSetting as error:
        raise typer.BadParameter(str(error)) from None


def show(result: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or one line per key."""
    if as_json:
        print(json.dumps(result))
        return
    width = max(map(len, result))
    for key, value in result.items():
        print(f"{key:<{width}}  {f'{value:.4g}' if isinstance(value, float) else value}")


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them; wrong usage if they are not."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers: 1,0.82") from None
