"""Work that waits as a thread may, in a loop that has no threads.

The product waits for other hosts in the middle of plain functions. Such work is carried in a
greenlet of its own: where it must wait, it gives up control, and goes on there later.

    result = carry(work)               # what it returned, or Waiting
    result = await carried(work)       # its result, however often it waits
    waited(future)                     # in such work: the future's result
"""

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting:
    """Work that goes on once something is there."""

    until: asyncio.Future[Any]
    go_on: Callable[[], Any]  # its result, or Waiting again; raises what the work raises


def carry(work: Callable[[], T]) -> T | Waiting:
    """Do it until it is done or must wait."""
    body = greenlet(work)
    # It is of the process that begins it, and asks that process's clock.
    body.gr_context = contextvars.copy_context()
    result: T | Waiting = body.switch()
    return result


async def carried(work: Callable[[], T]) -> T:
    """Its result, in the end."""
    result = carry(work)
    while isinstance(result, Waiting):
        await asyncio.wait({result.until})
        result = result.go_on()
    return result


def waited(until: asyncio.Future[T]) -> T:
    """Within work that is carried: what the future comes to. Raises what it raises."""
    if not until.done():
        body = getcurrent()
        assert body.parent is not None, "only work that is carried may wait"
        body.parent.switch(Waiting(until, body.switch))
    return until.result()
