"""What the bus does not do at once is tried again: until it is done, for ever, or by somebody else.

What is waited for is said once, and once more when the trouble is of another kind: a server that is
away for a night fills no log. Only trouble with the bus is waited out (or what the caller names);
anything else, a cancellation above all, passes through.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import BusError, Conflict

log = structlog.get_logger()

T = TypeVar("T")
Trouble = type[Exception] | tuple[type[Exception], ...]

# First and longest pause between two attempts, in seconds. Ever longer, so that those who wait do
# not hold up a server that comes back; and short enough that nobody sees the last one.
PATIENT = (0.2, 3.0)
# For what a step, a round or the beginning of a process waits for: few and small requests.
PROMPT = (0.3, 0.3)

# Losing a compare-and-set that often means that somebody writes without end.
CONFLICTS_MAX = 5

# Requests of one kind that are under way together. A run has one or two keys for each data shard,
# perhaps thousands, and a hub far away answers each request after a third of a second.
AT_ONCE = 16


async def some_at_once(work: Iterable[Awaitable[Any]]) -> None:
    """All of it, AT_ONCE at a time; no more is begun once one has failed.

    Whatever was begun has ended when it returns or raises: a late request could meet what follows.
    """
    left = iter(work)
    while begun := list(islice(left, AT_ONCE)):
        for outcome in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def pause_after(failures: int, pauses: tuple[float, float]) -> float:
    """Seconds before the next attempt, after so many in a row failed (1 or more): each pause is
    twice the one before, from the first to the longest of `pauses`."""
    first_s, longest_s = pauses
    # No more doublings than a float of seconds takes: a server may be away for weeks.
    return min(first_s * 2.0 ** min(failures - 1, 64), longest_s)


async def against_others(what: Callable[[], Awaitable[T]], conflicts_max: int = CONFLICTS_MAX) -> T:
    """Try again at once where another writer came first; `what` reads anew what it writes upon.

    Raises the last Conflict after `conflicts_max` of them.
    """
    for _ in range(conflicts_max - 1):
        with suppress(Conflict):
            return await what()
    return await what()


async def until_done(
    what: Callable[[], Awaitable[T]],
    doing: str,
    *,
    pauses: tuple[float, float] = PATIENT,
    trouble: Trouble = BusError,
    fatal: Trouble = (),
    until: float = math.inf,
) -> T:
    """Try until it is done; the last trouble is raised at `until` (by the monotonic clock).

    `doing` says, in the log, what is waited for; of `trouble`, what is `fatal` is not waited out.
    """
    failures, said = 0, set[type[Exception]]()
    while True:
        try:
            return await what()
        except fatal:
            raise
        except trouble as error:
            failures += 1
            pause_s = pause_after(failures, pauses)
            if ambient.monotonic() + pause_s >= until:
                raise
            _say(doing, error, said)
        await asyncio.sleep(pause_s)


async def again_and_again(
    look: Callable[[], Awaitable[bool | None]],
    doing: str,
    every_s: float,
    *,
    trouble: Trouble = BusError,
) -> None:
    """Every so often until `look` returns True: for ever, if it never does.

    What one look cannot do is the next one's to do.
    """
    said: set[type[Exception]] = set()
    while True:
        try:
            if await look():
                return
            said.clear()
        except trouble as error:
            _say(doing, error, said)
        await asyncio.sleep(every_s)


@contextmanager
def left_undone(doing: str) -> Iterator[None]:
    """What the bus does not do stays undone: it is repeated anyway, or nothing depends on it."""
    try:
        yield
    except BusError as error:
        log.debug("left undone", doing=doing, error=str(error))


def _say(doing: str, error: Exception, said: set[type[Exception]]) -> None:
    if type(error) not in said:
        said.add(type(error))
        log.warning("tried again later", doing=doing, error=str(error))
