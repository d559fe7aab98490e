"""An event loop whose time is virtual: the product's edges run as they are, only faster.

Nothing waits: when there is nothing to do, the clock goes on to whoever is due next. What a thread
would do is done at once, and is over some virtual time later.

    process = Hosted(loop, "syncer-1")
    process.run(syncer.run())
    process.freeze()                # nothing that it began runs, as after SIGSTOP
    process.freeze(suspended=True)  # nor does its clock, as of a suspended machine
    process.thaw()
    process.signal(SIGTERM)         # its handler is called, and without one it is killed
    process.kill()                  # nor ever again, as after SIGKILL: no `finally` either
"""

import asyncio
import contextvars
import itertools
import math
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeVar

from anyio import to_thread

from diloco_shared import ambient

T = TypeVar("T")

# Wall time at virtual time 0, in seconds since 1970; and where the monotonic clock begins.
WALL, ORIGIN = 1_800_000_000.0, 1000.0
# What is done in a thread takes up to this long, in virtual seconds.
THREAD_S = 0.05
# How often those that are left at the end of a world are told so.
CANCELLATIONS = 20


class NoEnd(Exception):
    """Tasks that are told to end go on."""


class Idle(RuntimeError):
    """Everybody waits for somebody else, for ever."""


class Died(BaseException):
    """A process dies in the midst of a thread's work: nothing of it is told."""


def _simply(work: Callable[[], T]) -> T:
    return work()


def _at_once(work: Callable[[], Any]) -> tuple[Any, float]:
    return work(), 0.0


class Hosted:
    """One process of the product: all that is begun in it belongs to it."""

    def __init__(
        self, loop: "VirtualLoop", name: str, *, skew_s: float = 0.0, owner: "Hosted | None" = None
    ) -> None:
        """`owner`: whose child it is: it ends with that one, on the same machine."""
        self.loop = loop
        self.owner = owner
        self.children: list[Hosted] = []
        if owner is not None:
            owner.children.append(self)
        self.name = name
        self.skew_s = skew_s  # its wall clock is off by that much
        self.started = ORIGIN + loop.now  # by its clock
        self.frozen = self.killed = False
        self.silent_since = math.inf  # it is gone, or stands still
        self.thawed_at = 0.0  # the last time
        self.suspended_at: float | None = None  # since then its monotonic clock stands still
        self.behind_s = 0.0  # by so much its clock is, of all its suspensions
        self.woke_at = 0.0  # by its clock, from the last of them
        self.app: Any = None  # what runs in it
        self.machine: Any = None  # on which it has a name
        # Does what a thread of it would; what it returns, or something to wait for before it can
        # go on (`islands.waiting.Waiting`).
        self.carry: Callable[[Callable[[], Any]], Any] = _simply
        # Told of everything that it is about to do and that others can see; may kill it.
        self.before: Callable[[str], None] = lambda what: None
        # Of signals: what each calls, in the process.
        self.handlers: dict[int, Callable[[], Any]] = {}
        self.unhandled: Callable[[], None] = self.kill  # what a signal without a handler does
        loop.hosted.append(self)
        self.held: list[_Handle] = []  # what came while it stood still

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something in it."""
        context = contextvars.copy_context()
        context.run(_HOSTED.set, self)
        return self.loop.create_task(work, context=context)

    def freeze(self, *, suspended: bool = False) -> None:
        """It stands still; its clocks go on, unless its whole machine is `suspended`."""
        self.frozen, self.silent_since = True, min(self.silent_since, self.loop.now)
        if suspended and self.suspended_at is None:
            self.suspended_at = self.loop.now
            for child in self.children:
                child.freeze(suspended=True)

    def signal(self, number: int) -> None:
        """Sent to it by whoever may: what stands still gets it when it goes on."""
        context = contextvars.copy_context()
        context.run(_HOSTED.set, self)
        self.loop.call_soon(self._signalled, number, context=context)

    def _signalled(self, number: int) -> None:
        handler = self.handlers.get(number)
        if handler is not None:
            handler()
        else:
            self.unhandled()

    @property
    def monotonic(self) -> float:
        """Its clock, in seconds."""
        until = self.loop.now if self.suspended_at is None else self.suspended_at
        return ORIGIN + until - self.behind_s

    def thaw(self) -> None:
        """It goes on with what came meanwhile, if it lives."""
        if not self.killed:
            if self.frozen:
                self.silent_since, self.thawed_at = math.inf, self.loop.now
            self._go_on()
            for child in self.children:
                child.thaw()

    def kill(self) -> None:
        """It is gone between two of its steps."""
        self.frozen = self.killed = True
        self.silent_since = min(self.silent_since, self.loop.now)
        for child in self.children:
            child.kill()

    def end(self) -> None:
        """The world is over: what never goes on cannot be closed."""
        self._go_on()

    def _go_on(self) -> None:
        if self.suspended_at is not None:
            self.woke_at = self.monotonic
            self.behind_s += self.loop.now - self.suspended_at
            self.suspended_at = None
        self.frozen, held, self.held = False, self.held, []
        for handle in held:
            self.loop.again(handle)

    def passes(self, what: str) -> bool:
        """Whether it lives to do something that others can see."""
        if not self.killed:
            self.before(what)
        return not self.killed


_HOSTED: contextvars.ContextVar[Hosted | None] = contextvars.ContextVar("hosted", default=None)


def _nothing() -> None:
    """What was cancelled does."""


class _Handle(asyncio.TimerHandle):
    """What is to be done, and in which process.

    There are thousands a virtual second, and none is looked at by people: the base class would
    keep more than its own cancelling needs.
    """

    __slots__ = ("behind_s", "hosted")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        if context is None:
            context = contextvars.copy_context()
        self._callback = callback
        self._args = args
        self._loop = loop
        self._when = when
        self._context = context
        self._cancelled = False
        self.hosted = hosted = context.get(_HOSTED)
        self.behind_s = 0.0 if hosted is None else hosted.behind_s

    def cancel(self) -> None:
        """It holds nothing any more, and is not taken out of any order."""
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def failed(self, error: BaseException) -> None:
        """As the base class says it: what people read needs the rest of its fields."""
        self._scheduled, self._source_traceback, self._repr = False, None, None
        self._loop.call_exception_handler(
            {"message": f"Exception in callback {self}", "exception": error, "handle": self}
        )


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

    # Of the base class: what is to be done in this round, and whether it is the last one.
    _ready: deque[_Handle]
    _stopping: bool

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng = rng
        self.now = 0.0
        self.hosted: list[Hosted] = []
        # Does a thread's work, which may raise Died: its result, and how much longer it takes, in
        # virtual seconds.
        self.perform: Callable[[Callable[[], Any]], tuple[Any, float]] = _at_once
        self.thread_s = THREAD_S
        # What is due when, in its order: tuples, since handles compare slowly.
        self._due: list[tuple[float, int, _Handle]] = []
        self._numbers = itertools.count()
        _Task.numbers = itertools.count()
        # Asked for with every future and every task; written in C, they need no frames of Python.
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self.get_debug = bool  # type: ignore[method-assign]  # False
        self.set_task_factory(lambda loop, coro, **kwargs: _Task(coro, loop=loop, **kwargs))

    def _next_due(self) -> bool:
        """Go on to whoever is due next; False if nobody is."""
        due, ready = self._due, self._ready
        while due and due[0][2]._cancelled:
            heappop(due)
        if not due:
            return False
        now, _, handle = heappop(due)
        if now > self.now:
            self.now = now
        else:
            now = self.now
        ready.append(handle)
        while due and due[0][0] <= now:
            ready.append(heappop(due)[2])
        return True

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    # There are no threads.
    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def again(self, handle: _Handle) -> None:
        """What was held back in a standstill, unless somebody takes it back meanwhile."""
        self._ready.append(handle)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = _Handle(callback, args, self, context, when)
        heappush(self._due, (when, next(self._numbers), handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        when = self.now + delay
        handle = _Handle(callback, args, self, context, when)
        heappush(self._due, (when, next(self._numbers), handle))
        return handle

    def _run_once(self) -> None:
        """Rounds of what is ready, until the loop stops; when nothing is, the clock goes on.

        In place of the base class's, which would ask a selector and read the clock each time.
        """
        ready, stops = self._ready, (SystemExit, KeyboardInterrupt)
        take = ready.popleft
        while True:
            if not ready and not self._stopping and not self._next_due():
                raise Idle("nobody is due, and nothing can come from outside")
            for _ in range(len(ready)):
                handle = take()
                if handle._cancelled:
                    continue
                hosted = handle.hosted
                if hosted is not None:
                    if hosted.frozen:
                        hosted.held.append(handle)
                        continue
                    if hosted.behind_s > handle.behind_s and self._early(handle, hosted):
                        continue
                try:
                    handle._context.run(handle._callback, *handle._args)
                except stops:
                    raise
                except BaseException as error:
                    handle.failed(error)
            if self._stopping:
                return

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Of the process that asks for it: signals of the real one are none of theirs."""
        hosted = _HOSTED.get()
        assert hosted is not None, "only processes of a world get its signals"
        hosted.handlers[sig] = partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        # Nobody's: what a process that was killed has left is collected when its world is over.
        hosted = _HOSTED.get()
        return hosted is not None and hosted.handlers.pop(sig, None) is not None

    def _early(self, handle: _Handle, hosted: Hosted) -> bool:
        """Whether a timer is not due yet by a clock that has stood still since it was set."""
        stood_s, handle.behind_s = hosted.behind_s - handle.behind_s, hosted.behind_s
        if not handle._when:
            return False  # it is no timer
        handle._when += stood_s
        if handle._when <= self.now:
            return False
        heappush(self._due, (handle._when, next(self._numbers), handle))
        return True

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Does the work of a thread in one piece, at the virtual time at which it would be done.

        Also where nobody waits for it any more: a thread cannot be told to stop.
        """
        future, hosted = self.create_future(), _HOSTED.get()

        def over() -> None:
            if hosted is not None and not hosted.passes("a thread's work"):
                return
            work = partial(func, *args)
            done(work if hosted is None else partial(hosted.carry, work))

        def done(work: Callable[[], Any]) -> None:
            try:
                result, late_s = self.perform(work)
            except Died:
                return
            except Exception as error:
                if not future.done():  # else nobody waits for it any more
                    future.set_exception(error)
                return
            if hasattr(result, "go_on"):
                result.until.add_done_callback(lambda _: done(result.go_on))
            elif late_s and not future.done():
                self.call_later(late_s, _tell, future, result)
            else:
                _tell(future, result)

        self.call_later(self.rng.uniform(0.0, self.thread_s), over)
        return future


def _tell(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def current() -> Hosted | None:
    """The process that does what is done now; None for the world itself."""
    return _HOSTED.get()


class VirtualAmbient:
    """Everybody who asks for the time is told the loop's, and whoever asks for chance, its dice."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.dice = Random(loop.rng.random())

    def monotonic(self) -> float:
        """Of a process its own: it stands still with it."""
        hosted = _HOSTED.get()
        return ORIGIN + self.loop.now if hosted is None else hosted.monotonic

    def started(self) -> float:
        """Of a process; the world itself was always there."""
        hosted = _HOSTED.get()
        return ORIGIN if hosted is None else hosted.started

    def wall(self) -> float:
        """With the skew of the host's clock."""
        hosted = _HOSTED.get()
        return WALL + self.loop.now + (hosted.skew_s if hosted is not None else 0.0)

    def token(self, size: int) -> str:
        return self.dice.randbytes(size).hex()

    def unique(self) -> str:
        return uuid.UUID(int=self.dice.getrandbits(128), version=4).hex


async def _cancelled(loop: VirtualLoop) -> None:
    """Whoever is left ends; told again, should one take it for an answer of somebody else.

    What was killed too: nobody can see any more what it does. Raises NoEnd where somebody goes on
    all the same: it would be collected in the midst of a later world, and tidy up there.
    """
    mine = asyncio.current_task()
    for _ in range(CANCELLATIONS):
        for hosted in loop.hosted:
            hosted.end()  # again: one that ends may kill its children
        left = {t for t in asyncio.all_tasks(loop) if t is not mine and not t.done()}
        for one in left:
            one.cancel()
        if not left:
            return
        await asyncio.wait(left, timeout=1.0)
    names = sorted({one.get_name().rstrip("-0123456789") for one in left if not one.done()})
    if names:
        raise NoEnd(f"told {CANCELLATIONS} times to end, these go on: {', '.join(names)}")


@contextmanager
def _threads_of_anyio() -> Iterator[None]:
    """What the web framework has done in threads of its own is done as all other threads' work: a
    real thread would be over whenever the machine has time for it, and no world like another."""
    original = to_thread.run_sync

    async def run_sync(func: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, func, *args)

    to_thread.run_sync = run_sync  # type: ignore[assignment]
    try:
        yield
    finally:
        to_thread.run_sync = original


def play(main: Coroutine[Any, Any, T], rng: Random, *, thread_s: float = THREAD_S) -> T:
    """Run `main` to its end in virtual time; whatever else it began is cancelled then.

    `thread_s`: what is done in a thread takes up to this long.
    """
    loop = VirtualLoop(rng)
    loop.thread_s = thread_s
    try:
        asyncio.set_event_loop(loop)
        with ambient.using(VirtualAmbient(loop)), _threads_of_anyio():
            task = loop.create_task(main)
            try:
                return loop.run_until_complete(task)
            finally:
                loop.run_until_complete(_cancelled(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
