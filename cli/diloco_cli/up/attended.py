"""A stack with somebody looking on: messages and the newest run."""

import asyncio
import math
from contextlib import suppress
from functools import partial

from rich.console import Console

from diloco_cli.api import Patience, answers, connect
from diloco_cli.cluster import Where
from diloco_cli.live import SILENT_S, Screen
from diloco_cli.meanwhile import meanwhile
from diloco_cli.seen import ROUNDS_VIEWED, Seen
from diloco_cli.up.folder import is_full
from diloco_cli.up.stack import Stack, started
from diloco_cli.words import CliError
from diloco_client import ApiError, Client

# Between two looks: a view costs the learners some of their processor.
LOOK_S = 1.0
SILENT = "the coordinator does not answer: what is shown is what it said last"


async def attend(stack: Stack, console: Console) -> None:
    """Run the stack and show it, until cancelled or until the stack fails."""
    running = asyncio.create_task(stack.run())
    looking = asyncio.create_task(_look_on(stack, console))
    try:
        await asyncio.wait({running, looking}, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in (looking, running):
            task.cancel()
        await asyncio.wait({looking})  # two screens would write over each other
        with meanwhile(stack.waits_for):
            results = await asyncio.gather(looking, running, return_exceptions=True)
    for result in reversed(results):
        if isinstance(result, Exception):
            raise result


async def _look_on(stack: Stack, console: Console) -> None:
    with meanwhile("starts the message server and the coordinator"):
        await started(stack, lambda: answers(stack.data))
    stack.told(f"API and live page: {stack.url}  (token in {stack.folder.token_file})")
    stack.told("submit a run: diloco submit run.toml; Ctrl-C stops everything")
    with Screen(console) as view:
        while True:
            # The token may have been rotated: its file has the new one.
            with suppress(ApiError, CliError), connect(Where(data=stack.data)) as client:
                await _show(stack, client, view)
            await asyncio.sleep(LOOK_S)


async def _show(stack: Stack, client: Client, view: Screen) -> None:
    """For ever; ApiError where the client's token is none any more."""
    seen: Seen | None = None
    patience, said = Patience(math.inf), set[str]()
    while True:
        # Training goes on without a coordinator; it is being restarted.
        try:
            look = partial(_looked, client, seen)
            if (found := await asyncio.to_thread(patience.ask, look)) is not None:
                (seen,) = found
                said.discard(SILENT)
            elif patience.silent_s > SILENT_S:
                _once(stack, said, SILENT)
            view.show(seen, stack.messages, stack.messages_total)
        except ApiError as error:
            if error.status == 401:
                raise
        except OSError as error:
            # Where it goes to a file: the cluster goes on without what nobody can read.
            if not is_full(error):
                raise
        except Exception as error:  # of what others have told: no reason to stop everything
            _once(stack, said, f"the screen cannot show this: {error!r}")
        await asyncio.sleep(LOOK_S)


def _once(stack: Stack, said: set[str], text: str) -> None:
    if text not in said:
        said.add(text)
        stack.told(text)


def _looked(client: Client, seen: Seen | None) -> tuple[Seen | None]:
    return (newest(client, seen),)


def newest(client: Client, seen: Seen | None) -> Seen | None:
    """The newest run, looked at; None while there is none."""
    runs = sorted(client.runs(), key=lambda run: float(run["created_at"]))
    if not runs:
        return None
    if seen is None or seen.name != runs[-1]["name"]:
        seen = Seen(str(runs[-1]["name"]), rounds_max=ROUNDS_VIEWED)
    seen.look(client)
    return seen
