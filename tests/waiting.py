"""Waiting for what happens by itself: until it holds or patience ends, which is told."""

import asyncio
import inspect
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

# A step of a test takes several times as long while others use the same two cores.
PATIENCE_S = 120.0


class NotYet(Exception):
    """What a condition raises that can say what is missing."""


def wait_until(
    condition: Callable[[], Any],
    what: str = "",
    *,
    patience_s: float = PATIENCE_S,
    every_s: float = 0.05,
    tolerated: tuple[type[Exception], ...] = (),
) -> Any:
    """The first true value of `condition`; before, it may raise `NotYet` or one of `tolerated`."""
    deadline, trouble = monotonic() + patience_s, ""
    expected: tuple[type[Exception], ...] = (NotYet, *tolerated)
    while True:
        try:
            if value := condition():
                return value
        except expected as error:
            trouble = _told(error)
        if monotonic() >= deadline:
            raise AssertionError(_never(condition, what, patience_s, trouble))
        sleep(every_s)


async def until(
    condition: Callable[[], Any],
    what: str = "",
    *,
    patience_s: float = PATIENCE_S,
    every_s: float = 0.005,
    tolerated: tuple[type[Exception], ...] = (),
) -> Any:
    """Likewise in a coroutine, where the condition may be one itself."""
    deadline, trouble = monotonic() + patience_s, ""
    expected: tuple[type[Exception], ...] = (NotYet, *tolerated)
    while True:
        try:
            value = condition()
            if value := (await value if inspect.isawaitable(value) else value):
                return value
        except expected as error:
            trouble = _told(error)
        if monotonic() >= deadline:
            raise AssertionError(_never(condition, what, patience_s, trouble))
        await asyncio.sleep(every_s)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, NotYet) else f"{type(error).__name__}: {error}"


def _never(condition: Any, what: str, patience_s: float, trouble: str) -> str:
    """What never came, or else the source of the condition; and the last trouble."""
    try:
        what = what or " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        what = repr(condition)
    return f"never came in {patience_s:g} s: {what}" + (f" ({trouble})" if trouble else "")
