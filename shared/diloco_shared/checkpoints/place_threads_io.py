"""Asks places of checkpoints on threads of their own: one that hangs holds up nothing else.

A place may be a share or a bucket far away, and a thread that waits for it cannot be ended. On the
threads that everything else uses, a few such calls would hold up every other one, and a process
that is told to stop would wait for them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from dataclasses import dataclass
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from diloco_shared.checkpoints.vault_io import VaultError
from diloco_shared.protocol.pace import ANSWER_S, stored_within_s

T = TypeVar("T")
P = ParamSpec("P")

# Calls to one place at a time: more than any process makes of a place that answers.
CALLS_MAX = 8
# So long one that was left behind is waited for, in seconds.
LEFT_S = 10.0
# What is removed may be a whole model in thousands of objects.
REMOVE_S = 1800.0


class PlaceThreads:
    """Of one process, for an event loop. Each call has a thread, which may be left behind.

    While there is one that was left behind, nothing else is asked of its place: it may still write
    what it was told to, and the next one would hang as well.
    """

    def __init__(self) -> None:
        self._threads = DaemonThreads()
        self._calls: dict[str, list[_Call]] = {}  # by place: those under way

    async def read(
        self,
        place: str,
        size: Callable[[], int],
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """What `work` returns or raises, which reads as many bytes as `size` finds there.

        Raises VaultError like `within`.
        """
        size_bytes = await self.within(ANSWER_S, place, size)
        return await self.within(stored_within_s(size_bytes), place, work, *args, **kwargs)

    async def within(
        self,
        seconds: float,
        place: str,
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """What `work` returns or raises within so many seconds; after that it is left behind.

        Raises VaultError, which is an OSError, then and where an earlier call is not over.
        """
        await self._free(place)
        loop, asking = asyncio.get_running_loop(), copy_context()
        doing = loop.run_in_executor(
            self._threads, lambda: asking.run(lambda: work(*args, **kwargs))
        )
        calls, call = self._calls.setdefault(place, []), _Call(doing)
        calls.append(call)

        def over(done: "asyncio.Future[Any]") -> None:
            calls.remove(call)  # nothing holds what came of it
            done.exception()  # of what was left behind nobody asks

        doing.add_done_callback(over)
        try:
            await asyncio.wait({doing}, timeout=seconds)
        finally:
            call.left = not doing.done()
        if call.left:
            raise VaultError(f"{place} did not answer within {seconds:.0f} s")
        return doing.result()

    async def _free(self, place: str) -> None:
        """Raises VaultError unless something may be asked there."""
        if left := {c.doing for c in self._calls.get(place, ()) if c.left and not c.doing.done()}:
            # Whoever is told to stop leaves calls behind that are over in a moment.
            await asyncio.wait(left, timeout=LEFT_S)
        calls = [c for c in self._calls.get(place, ()) if not c.doing.done()]
        if any(c.left for c in calls) or len(calls) >= CALLS_MAX:
            text = (
                f"an earlier call is not over in {place}: nothing more is asked there until it is"
            )
            raise VaultError(text)


@dataclass(slots=True)
class _Call:
    doing: "asyncio.Future[Any]"
    left: bool = False  # nobody waits for it any more


class DaemonThreads(Executor):
    """A thread for each call, for which a process that ends does not wait."""

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future = Future[T]()
        future.set_running_or_notify_cancel()  # whoever cancels it cannot stop it

        def body() -> None:
            try:
                found = work(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)

        Thread(target=body, name="place of checkpoints", daemon=True).start()
        return future
