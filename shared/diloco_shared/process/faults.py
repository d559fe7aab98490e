"""Faults of tasks that run together: the first cause, and a cancellation that none of them hides.

What ended a process is said in its log, each fault once, without the groups around it.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.port import BusError

log = structlog.get_logger()

T = TypeVar("T")


async def in_a_task(work: Coroutine[Any, Any, T]) -> T:
    """`work`, awaited so that a cancellation of the caller is never lost.

    A TaskGroup of Python 3.11 that ends because of a fault raises that fault alone, also when its
    task was cancelled while it waited for the others of the group. Whoever catches the fault and
    goes on would never end. Here the group has a task of its own, and the caller's stays clean.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return task.result()


def leaves(fault: BaseException) -> list[BaseException]:
    """The faults themselves, out of the groups that nested task groups wrap around them."""
    if not isinstance(fault, BaseExceptionGroup):
        return [fault]
    return [leaf for each in fault.exceptions for leaf in leaves(each)]


def tell(fault: BaseException, server: str) -> None:
    """`server`: the address of the message server, as the settings say it."""
    for each in leaves(fault):
        if isinstance(each, BusError):
            log.error("no bus", url=Address(server).shown, error=str(each))
        else:
            # A system's fault tells its path in its text alone.
            said = f"{type(each).__name__}: {each}" if isinstance(each, OSError) else repr(each)
            log.error("failed, to be started again", error=said, exc_info=each)
