"""Something to see while a command works or waits: what it does, and for how long already."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(text: str, *, quiet: bool = False) -> Iterator[None]:
    """One line in the terminal that is gone afterwards; what is printed meanwhile stands above it.

    Nothing where standard output is no terminal, or `quiet`: a log and a pipe want results alone.
    """
    if quiet or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as line:
        line.add_task(text, total=None)
        yield
