"""An event loop whose time is virtual: the product's edges run as they are, only faster.

Nothing waits: when there is nothing to do, the clock goes on to whoever is due next. What a thread
would do is done at once, and is over some virtual time later.

    process = Hosted(loop, "syncer-1")
    process.run(syncer.run())
    process.freeze()                # nothing that it began runs, as after SIGSTOP
    process.thaw()
    process.kill()                  # nor ever again, as after SIGKILL: no `finally` either
"""

import asyncio
import contextvars
import heapq
import itertools
import secrets
import selectors
import time
import uuid
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


class _Selector(selectors.SelectSelector):
    """Asked when nothing is ready: lets the clock go on where others would wait."""

    def __init__(self, next_due: Callable[[], bool]) -> None:
        super().__init__()
        self.next_due = next_due

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None and not self.next_due():
            raise Idle("nobody is due, and nothing can come from outside")
        return []


class Hosted:
    """One process of the product: all that is begun in it belongs to it."""

    def __init__(self, loop: "VirtualLoop", name: str, *, skew_s: float = 0.0) -> None:
        self.loop = loop
        self.name = name
        self.skew_s = skew_s  # its wall clock is off by that much
        self.frozen = self.killed = False
        # Told of everything that it is about to do and that others can see; may kill it.
        self.before: Callable[[str], None] = lambda what: None
        loop.hosted.append(self)
        self._held: list[_Call] = []

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something in it."""
        context = contextvars.copy_context()
        context.run(_HOSTED.set, self)
        return self.loop.create_task(work, context=context)

    def freeze(self) -> None:
        """It stands still; its clocks go on."""
        self.frozen = True

    def thaw(self) -> None:
        """It goes on with what came meanwhile, if it lives."""
        if not self.killed:
            self._go_on()

    def kill(self) -> None:
        """It is gone between two of its steps."""
        self.frozen = self.killed = True

    def end(self) -> None:
        """The world is over: what never goes on cannot be closed."""
        self._go_on()

    def _go_on(self) -> None:
        self.frozen, held, self._held = False, self._held, []
        for call in held:
            self.loop.again(call)

    def passes(self, what: str) -> bool:
        """Whether it lives to do something that others can see."""
        if not self.killed:
            self.before(what)
        return not self.killed

    def step(self, call: "_Call") -> None:
        """The loop has come to something of this process."""
        if self.frozen:
            self._held.append(call)
        elif call.handle is None or not call.handle.cancelled():
            call.callback(*call.args)


_HOSTED: contextvars.ContextVar[Hosted | None] = contextvars.ContextVar("hosted", default=None)


class _Call:
    """What is to be done in a process."""

    __slots__ = ("args", "callback", "context", "handle")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.callback, self.args, self.context = callback, args, context
        self.handle: asyncio.Handle | None = None


class _Task(asyncio.Task[Any]):
    """Sets of tasks have the same order in every process: that of these numbers."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_Task.numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """Of one world; its dice decide how long threads take."""

    def __init__(self, rng: Random) -> None:
        super().__init__(_Selector(self._next_due))
        self.rng = rng
        self.now = 0.0
        self.hosted: list[Hosted] = []
        # What is due when, in its order: tuples, since handles compare slowly.
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        _Task.numbers = itertools.count()
        self.set_task_factory(lambda loop, coro, **kwargs: _Task(coro, loop=loop, **kwargs))

    def _next_due(self) -> bool:
        """Go on to whoever is due next; False if nobody is."""
        due, ready = self._due, self._ready  # type: ignore[attr-defined]
        while due and due[0][2].cancelled():
            heapq.heappop(due)
        if not due:
            return False
        self.now = max(self.now, due[0][0])
        while due and due[0][0] <= self.now:
            ready.append(heapq.heappop(due)[2])
        return True

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        hosted = context.get(_HOSTED)
        if hosted is None:
            return super().call_soon(callback, *args, context=context)
        call = _Call(callback, args, context)
        call.handle = super().call_soon(hosted.step, call, context=context)
        return call.handle

    def again(self, call: _Call) -> None:
        """What was held back in a standstill, unless somebody takes it back meanwhile."""
        hosted = call.context[_HOSTED]
        assert hosted is not None
        super().call_soon(hosted.step, call, context=call.context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        hosted = context.get(_HOSTED)
        if hosted is None:
            handle = asyncio.TimerHandle(when, callback, args, self, context)
        else:
            call = _Call(callback, args, context)
            call.handle = handle = asyncio.TimerHandle(when, hosted.step, (call,), self, context)
        heapq.heappush(self._due, (when, next(self._numbers), handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future, hosted = self.create_future(), _HOSTED.get()

        def over() -> None:
            if future.cancelled() or (hosted is not None and not hosted.passes("a thread's work")):
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self.rng.uniform(0.0, THREAD_S), over)
        return future


@contextmanager
def _virtual(loop: VirtualLoop) -> Iterator[None]:
    """Everybody who asks for the time is told the loop's, and whoever asks for chance, its dice."""
    kept = time.monotonic, time.time, uuid.uuid4, secrets.token_hex
    dice = Random(loop.rng.random())

    def wall() -> float:
        hosted = _HOSTED.get()
        return WALL + loop.now + (hosted.skew_s if hosted is not None else 0.0)

    time.monotonic = lambda: ORIGIN + loop.now
    time.time = wall
    uuid.uuid4 = lambda: uuid.UUID(int=dice.getrandbits(128), version=4)
    secrets.token_hex = lambda nbytes=None: dice.randbytes(nbytes or 32).hex()
    try:
        yield
    finally:
        time.monotonic, time.time, uuid.uuid4, secrets.token_hex = kept


async def _cancelled(loop: VirtualLoop) -> None:
    """Whoever is left ends; told again, should one take it for an answer of somebody else.

    What was killed too: nobody can see any more what it does.
    """
    mine = asyncio.current_task()
    for hosted in loop.hosted:
        hosted.end()
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
        with _virtual(loop):
            task = loop.create_task(main)
            try:
                return loop.run_until_complete(task)
            finally:
                loop.run_until_complete(_cancelled(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
