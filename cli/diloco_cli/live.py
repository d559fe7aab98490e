"""Looking on: a live screen in a terminal, plain lines elsewhere."""

import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from diloco_cli.api import Patience
from diloco_cli.lines import columns, shaped
from diloco_cli.seen import ROUNDS_VIEWED, Seen
from diloco_cli.view import lines, screen
from diloco_cli.words import UNKNOWN, CliError
from diloco_client import Client

# Between two looks, and between two blocks of lines where there is no terminal, in seconds.
LOOK_S = 0.5
LINES_S = 10.0
# A coordinator that is restarted is back long before; training goes on meanwhile.
PATIENCE_S = 30.0
# What stands above is old after so many seconds without an answer.
SILENT_S = 2.0
SILENT = "the coordinator has not answered for {:.0f} s: this is what it said last"


class Screen:
    """A context; `show` as often as there is something new."""

    def __init__(self, console: Console) -> None:
        self.console = console
        # Colours may be forced upon a file, and a terminal may know no cursor: no screens either.
        has_screen = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._live = Live(console=console, auto_refresh=False) if has_screen else None
        self._told = 0
        self._lines_at = float("-inf")
        self._state = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, seen: Seen | None, messages: Sequence[str] = (), told: int = 0) -> None:
        """The state of things; `told` counts all messages ever, of which these are the newest."""
        if self._live is not None:
            self._live.update(screen(seen, messages), refresh=True)
            return
        new = min(told - self._told, len(messages))
        self._told = told
        for message in list(messages)[len(messages) - new :]:
            self._print(message)
        if seen is None or not seen.run:
            return
        now, state = time.monotonic(), str(seen.run["state"])
        if now - self._lines_at >= LINES_S or state != self._state:
            self._lines_at, self._state = now, state
            for line in lines(seen):
                self._print(line)

    def _print(self, line: str) -> None:
        # Not by the console's own means: it keeps what a full disk does not take, without limit.
        file = self.console.file
        print("\n".join(shaped([line], columns(file))), file=file, flush=True)


def follow(client: Client, name: str, *, as_json: bool) -> None:
    """Until the run is over; Unreachable when nobody answers for too long."""
    seen, patience, said = Seen(name, rounds_max=ROUNDS_VIEWED), Patience(PATIENCE_S), ""
    made_at = None
    with Screen(Console()) as view:
        while not seen.over:
            patience.ask(lambda: seen.look(client))
            made_at = seen.run.get("created_at") if made_at is None else made_at
            if seen.run.get("created_at") != made_at:
                # How that one ends is not what a script waits for.
                text = f"run {name!r}: it was deleted, and another run has its name"
                raise CliError(text, UNKNOWN)
            silent_s = patience.silent_s
            silent = [SILENT.format(silent_s)] if silent_s > SILENT_S else []
            if not as_json:
                view.show(seen, silent, told=len(silent))
            elif (line := json.dumps(seen.run)) != said and seen.run:
                said = line
                print(line, flush=True)
            if not seen.over:
                time.sleep(LOOK_S)
