"""An event loop whose time is virtual: the product's edges run as they are, only faster.

Nothing waits: when there is nothing to do, the clock goes on to whoever is due next. What a thread
would do is done at once, and is over some virtual time later.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

# Wall time at virtual time 0, in seconds since 1970; and where the monotonic clock begins.
WALL, ORIGIN = 1_700_000_000.0, 1000.0
# What is done in a thread takes up to this long, in virtual seconds.
THREAD_S = 0.05
# How often those that are left at the end of a world are told so.
CANCELLATIONS = 20


class Idle(RuntimeError):
    """Everybody waits for somebody else, for ever."""


class _Selector(selectors.DefaultSelector):
    """Looks at what is ready, and lets the loop's clock go on where others would wait."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self.advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Idle("nobody is due, and nothing can come from outside")
        if not ready and timeout:
            self.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Of one world; its dice decide how long threads take."""

    def __init__(self, rng: Random) -> None:
        super().__init__(_Selector(self._advance))
        self.rng = rng
        self.now = 0.0

    def _advance(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()

        def over() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self.rng.uniform(0.0, THREAD_S), over)
        return future


@contextmanager
def _clocks(loop: VirtualLoop) -> Iterator[None]:
    """Everybody who asks for the time is told the loop's."""
    kept = time.monotonic, time.time
    time.monotonic = lambda: ORIGIN + loop.now
    time.time = lambda: WALL + loop.now
    try:
        yield
    finally:
        time.monotonic, time.time = kept


async def _cancelled(loop: VirtualLoop) -> None:
    """Whoever is left ends; told again, should one take it for an answer of somebody else."""
    mine = asyncio.current_task()
    for _ in range(CANCELLATIONS):
        left = {t for t in asyncio.all_tasks(loop) if t is not mine and not t.done()}
        for one in left:
            one.cancel()
        if not left:
            return
        await asyncio.wait(left, timeout=1.0)


def play(main: Coroutine[Any, Any, T], rng: Random) -> T:
    """Run `main` to its end in virtual time; whatever else it began is cancelled then."""
    loop = VirtualLoop(rng)
    try:
        asyncio.set_event_loop(loop)
        with _clocks(loop):
            task = loop.create_task(main)
            try:
                return loop.run_until_complete(task)
            finally:
                loop.run_until_complete(_cancelled(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
