"""Lines for people: in a terminal none is wider than it, and each is cut between words.

A line that goes on begins below its last column, where it has columns: two spaces or more end one.
Elsewhere than in a terminal (a pipe, a file) each line stays whole, for `grep` and its like.
"""

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import IO

from diloco_cli.words import plain

# So many columns are left at least for what goes on below a column.
ROOM = 24
# How much further in a line goes on that has no columns.
STEP = 2
_COLUMN = re.compile(r"\S {2,}(?=\S)")


def columns(stream: IO[str]) -> int | None:
    """How wide the terminal is that a stream writes to; None where it is none."""
    if not stream.isatty():
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def fitted(line: str, width: int) -> list[str]:
    """The line in as many as it takes in `width` columns.

    A word that is longer than that (a path, an address, a token) stays whole: people copy it.
    """
    line = line.expandtabs()
    if len(line) <= width:
        return [line]
    further = _further_in(line, width)
    cut = textwrap.TextWrapper(
        width,
        subsequent_indent=" " * further,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return cut.wrap(line) or [line]


def _further_in(line: str, width: int) -> int:
    """Where it goes on."""
    begins = len(line) - len(line.lstrip())
    ends = [found.end() for found in _COLUMN.finditer(line)]
    longest = max(map(len, line.split()), default=0)
    room = max(longest, ROOM)
    fits = [end for end in ends if end <= width - room]
    return fits[-1] if fits else begins + STEP


def shaped(lines: Iterable[str], width: int | None) -> Iterator[str]:
    """Texts of one line or several, as they are shown; `width`: of a terminal, if it is one."""
    for line in "\n".join(map(plain, lines)).split("\n"):
        if width is None:
            yield line
        else:
            yield from fitted(line, width)


def say(*lines: str) -> None:
    """Show lines on standard output, at once."""
    print("\n".join(shaped(lines, columns(sys.stdout))), flush=True)
