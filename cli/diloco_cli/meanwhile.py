"""Something to see while a command works or waits: what it does, and for how long already."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(text: str | Callable[[], str], *, quiet: bool = False) -> Iterator[None]:
    """One line in the terminal that is gone afterwards; what is printed meanwhile stands above it.

    `text`: what it says, or what tells what it says now, which is asked several times a second.
    Nothing where standard output is no terminal, or `quiet`: a log and a pipe want results alone.
    """
    if quiet or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    now = (lambda: text) if isinstance(text, str) else text
    said = TextColumn("{task.fields[now]}", markup=False, table_column=Column())
    columns = (SpinnerColumn(), said, TimeElapsedColumn())
    with Progress(*columns, transient=True) as line:
        line.add_task("", total=None, now=_Now(now))
        yield


class _Now:
    """A text that is made when it is shown."""

    def __init__(self, text: Callable[[], str]) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text()
