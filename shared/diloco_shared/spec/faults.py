"""A fault of a run's specification, under the path of the value at fault."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecFault:
    """What is wrong with the value at `path` (dotted; "(whole)" for the document itself)."""

    path: str
    message: str


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
