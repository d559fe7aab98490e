"""What both buses do alike: bounded waiting, answering, knowing a stream that was refilled."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import structlog

from diloco_shared.bus.port import Delivery, Handler, Traffic

# Requests answered at the same time by one `serve`; further ones go unanswered, and are repeated.
SERVE_LIMIT = 64

_log = structlog.get_logger(__name__)


class Deliveries:
    """Messages waiting for one subscriber; past `limit` the oldest is dropped and counted."""

    def __init__(self, subject: str, limit: int, traffic: Traffic) -> None:
        self._subject = subject
        self._waiting: deque[Delivery] = deque(maxlen=limit)
        self._traffic = traffic
        self._ready = asyncio.Event()
        self._ended = False

    def put(self, delivery: Delivery) -> None:
        if len(self._waiting) == self._waiting.maxlen:
            self._traffic.count_dropped(self._subject)
        self._waiting.append(delivery)
        self._ready.set()

    def end(self) -> None:
        """Let the iteration stop once what waits has been taken."""
        self._ended = True
        self._ready.set()

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._waiting.popleft()


class Answers:
    """Runs a handler for every request, at most SERVE_LIMIT at a time; cancels them at the end."""

    def __init__(
        self,
        subject: str,
        handler: Handler,
        publish: Callable[[str, bytes], Awaitable[None]],
        traffic: Traffic,
    ) -> None:
        self._subject = subject
        self._handler = handler
        self._publish = publish
        self._traffic = traffic
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def start(self, request: Delivery) -> None:
        """Have a task of its own answer it; while SERVE_LIMIT of them run, drop and count it."""
        if len(self._running) >= SERVE_LIMIT:
            self._traffic.count_dropped(self._subject)
            return
        task = asyncio.create_task(self._answer(request), name=f"answer {self._subject}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, request: Delivery) -> None:
        try:
            answer = await self._handler(request)
        except Exception:
            # The asker runs into its time limit and repeats; the fault is ours to see.
            _log.exception("handler failed", subject=request.subject)
            return
        if request.reply:
            await self._publish(request.reply, answer)


# --------------------------------------------------------------------------------------------------
# What a reader has yielded last, to recognise a stream that lost its end and was filled again.
#
# A killed server may have lost what it had acknowledged, and one that was put back from a backup
# what came after it. Others may have written since, before this reader is back: sequences that it
# has passed then hold other messages, which it has not seen. All that is after the newest message
# that is as it was may be such, and all that there is where none is left to tell.

M = TypeVar("M")

# Messages that are remembered. The server loses what it took in some milliseconds, or in up to two
# minutes of a stream that is not synced: a hundred contributions of eight learners whose rounds
# take ten seconds.
YIELDED_MAX = 128


class Trail(Generic[M]):
    """Of one reader. By `M` a message is told from another under its sequence."""

    def __init__(self) -> None:
        self._yielded: deque[tuple[int, M]] = deque(maxlen=YIELDED_MAX)
        self._begun = False

    def add(self, seq: int, mark: M) -> None:
        """It was yielded."""
        self._yielded.append((seq, mark))
        self._begun = True

    @property
    def newest_first(self) -> list[int]:
        """Sequences to look at until `same` says that one is as it was."""
        return [seq for seq, _ in reversed(self._yielded)]

    def same(self, seq: int, mark: M) -> bool:
        """Whether this message is the one that was yielded; another takes its place."""
        if (seq, mark) in self._yielded:
            return True
        self._yielded = deque((item for item in self._yielded if item[0] < seq), YIELDED_MAX)
        return False

    def resumes_at(self, next_seq: int, end: int, *, same: int, differs: bool) -> int:
        """Where to read on, of a reader that was about to read `next_seq` of a stream whose next
        message will be `end`.

        `same`: the newest sequence that is as it was yielded, 0 for none; `differs`: some newer one
        is not. One that is not there any more may have been removed, and says nothing.
        """
        if not self._begun:
            return min(next_seq, end)
        if same or differs or end < next_seq:
            return min(next_seq, same + 1)
        return next_seq
