"""Endless reading of a JetStream stream that resumes by itself."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import structlog

from diloco_shared.bus.deliveries import Trail
from diloco_shared.bus.nats.api import (
    NO_MESSAGE,
    READ_BYTES_MAX,
    ApiRefused,
    api_call,
    nanoseconds,
    without_server_headers,
)
from diloco_shared.bus.nats.link import NatsLink, Raw
from diloco_shared.bus.nats.pulls import (
    IDLE,
    MISSED_MAX,
    delivered,
    forget_consumer,
    heartbeat_s,
    open_consumer,
    pull,
    unserved,
)
from diloco_shared.bus.nats.wire import stored_of_head
from diloco_shared.bus.port import BusError, Stored, Unavailable
from diloco_shared.bus.repeating import pause_after

_log = structlog.get_logger(__name__)


class ReplyInbox:
    """Messages of one reply subject. Bounded by what was asked for."""

    def __init__(self) -> None:
        self._waiting: deque[Raw | None] = deque()
        self._ready = asyncio.Event()

    def put(self, message: Raw) -> None:
        self._waiting.append(message)
        self._ready.set()

    def wake(self) -> None:
        """Make `get` return None once: the connection was lost."""
        self._waiting.append(None)
        self._ready.set()

    async def get(self, timeout_s: float) -> Raw | None:
        """The next message; None on a lost connection or when none comes in time."""
        if not self._waiting:
            self._ready.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
        return self._waiting.popleft() if self._waiting else None


class Reader:
    """Endless, ordered reading of a filtered stream; survives disconnects and restarts.

    A pull consumer in the server's memory, without acknowledgements: the place is kept here as the
    last sequence yielded, and whenever anything is doubtful (connection lost, a heartbeat missed,
    a gap in the delivery count) a new consumer starts one after it. Credit bounds what is on its
    way to `batch` messages and READ_BYTES_MAX.
    """

    PAUSES_S = (0.1, 1.0)  # first and longest before it reads again
    PATIENCE_MAX = 4  # times the usual one

    def __init__(
        self,
        link: NatsLink,
        stream: str,
        subject: str,
        start_seq: int,
        batch: int,
        *,
        plain: bool = False,
        headers_only: bool = False,
    ) -> None:
        self._link = link
        self._stream = stream
        self._subject = subject
        self._next_seq = max(1, start_seq)
        self._batch = batch
        self._plain = plain
        self._headers_only = headers_only
        self.pending = 0  # messages after the newest that came
        self._there = 0  # messages when it was opened
        self.stored = 0  # bytes that one takes in the stream, where headers alone come
        self._stack: AsyncExitStack | None = None
        self._inbox = ReplyInbox()
        self._reply = ""
        self._consumer = ""
        self._asked = 0
        self._delivered = 0
        self._failures = 0
        self._trail: Trail[int] = Trail()  # by when each was stored

    def __aiter__(self) -> AsyncIterator[Stored]:
        return self

    async def __anext__(self) -> Stored:
        while not self._link.closed:
            try:
                if self._stack is None:
                    await self._open()
                message = await self._receive()
            except BusError as error:
                await self._retry(error)
                continue
            if message is not None:
                return without_server_headers(message) if self._plain else message
        raise StopAsyncIteration

    async def begin(self) -> int:
        """How many messages there are for it, as it begins. Raises BusError."""
        await self._open()
        return self._there

    async def _open(self) -> None:
        stack = AsyncExitStack()
        self._stack = stack
        self._inbox = ReplyInbox()
        self._asked = self._delivered = 0
        await stack.enter_async_context(self._link.on_reconnect(self._inbox.wake))
        self._reply = await stack.enter_async_context(
            self._link.subscribed(self._link.new_inbox(), self._inbox.put)
        )
        await self._look_back()
        self._consumer = "r" + self._reply.rsplit(".", 1)[-1]
        self._there = await open_consumer(
            self._link,
            self._stream,
            self._subject,
            name=self._consumer,
            start_seq=self._next_seq,
            headers_only=self._headers_only,
        )

    async def _look_back(self) -> None:
        """A killed server may have lost what it had acknowledged: its sequences come again."""
        if self._next_seq == 1:
            return
        what = f"stream {self._stream}"
        answer = await api_call(self._link, f"STREAM.INFO.{self._stream}", {}, what=what)
        state = answer["state"]
        await self._look_at_trail(int(state["first_seq"]), int(state["last_seq"]) + 1)

    async def _look_at_trail(self, first: int, end: int) -> None:
        """And the lost end may have been filled again before this reader was back."""
        same, differs = 0, False
        for seq in self._trail.newest_first:
            stored_at = await self._stored_at(seq) if first <= seq < end else 0
            if stored_at and self._trail.same(seq, stored_at):
                same = seq
                break
            differs |= bool(stored_at)
        if end < self._next_seq or differs:
            _log.warning("the stream lost its end", stream=self._stream, end=end, as_it_was=same)
        self._next_seq = self._trail.resumes_at(self._next_seq, end, same=same, differs=differs)

    async def _stored_at(self, seq: int) -> int:
        """Nanoseconds since 1970; 0 where no message lies."""
        subject, what = f"STREAM.MSG.GET.{self._stream}", f"message {seq} of {self._stream}"
        try:
            answer = await api_call(self._link, subject, {"seq": seq}, what=what)
        except ApiRefused as error:
            if error.code == NO_MESSAGE:
                return 0
            raise
        return nanoseconds(answer["message"]["time"])

    async def _receive(self) -> Stored | None:
        """The next message, or None for a status that needs no more than another turn."""
        if self._asked <= self._batch // 2:
            await self._pull(self._batch - self._asked)
        # Ever longer, so that a link that is slower than this is waited for in the end.
        longer = min(1 + self._failures, self.PATIENCE_MAX)
        patience_s = MISSED_MAX * heartbeat_s(self._link) * longer
        raw = await self._inbox.get(patience_s)
        if raw is None:
            raise Unavailable("connection or heartbeat lost")
        self._failures = 0
        # What is stored comes on its own subject, and may have a header of that name, too.
        if raw.subject != self._reply or not raw.status:
            return self._accept(raw)
        if raw.status != IDLE:
            self._asked -= unserved(raw.status, raw.headers)
        return None

    async def _pull(self, count: int) -> None:
        consumer = f"{self._stream}.{self._consumer}"
        subject, body = pull(
            self._link.api, consumer, count, heartbeat_s(self._link), max_bytes=READ_BYTES_MAX
        )
        await self._link.publish(subject, body, reply=self._reply)
        self._asked += count

    def _accept(self, raw: Raw) -> Stored:
        seq, number, self.pending, stored_at = delivered(raw.reply)
        self._asked -= 1
        if number != self._delivered + 1 or seq < self._next_seq:
            raise Unavailable(f"delivery {number} came after {self._delivered}")
        self._delivered = number
        self._next_seq = seq + 1
        self._trail.add(seq, stored_at)
        if self._headers_only:
            self.stored = stored_of_head(raw.subject, raw.head)
        return Stored(raw.subject, raw.payload, raw.headers, seq)

    async def _retry(self, error: BusError) -> None:
        await self.close()
        if self._failures in (0, 30):
            _log.info(
                "reading again", stream=self._stream, subject=self._subject, reason=str(error)
            )
        self._failures += 1
        await asyncio.sleep(pause_after(self._failures, self.PAUSES_S))

    async def close(self) -> None:
        """Forget the consumer; the server is told if it listens."""
        stack, self._stack = self._stack, None
        if stack is None:
            return
        await stack.aclose()
        await forget_consumer(self._link, self._stream, self._consumer)
