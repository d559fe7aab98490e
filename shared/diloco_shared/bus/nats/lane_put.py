"""Storing one payload over data lanes: what a thread does with its connection."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from diloco_shared.bus.nats.api import stored_at
from diloco_shared.bus.nats.lane_socket import LaneBroken, LaneSocket
from diloco_shared.bus.nats.wire import Arrived, publish_head
from diloco_shared.bus.port import (
    BusError,
    Refused,
    StreamFull,
    Traffic,
    TransferProgress,
    Unavailable,
)
from diloco_shared.bus.repeating import pause_after
from diloco_shared.protocol.chunks import Outgoing
from diloco_shared.protocol.pace import Pace

# How often a thread that waits looks whether it is told to stop, in seconds.
LOOK_S = 0.1
# First and longest pause after a failure, in seconds: a server that restarts is back within one.
PAUSES_S = (0.1, 2.0)

Connect = Callable[[], AbstractContextManager[LaneSocket]]


class ByteBudget(Protocol):
    """A byte budget. See `lanes.RateLimit`."""

    def take(self, size: int) -> float: ...


@dataclass(frozen=True, slots=True)
class FirstPace:
    """What every connection of a payload begins with: see `Pace`."""

    window: int
    timeout_s_min: float


class Sending:
    """Chunks of one payload on their way; as many threads as there are connections call `work`.

    Every index is in exactly one place: `_todo`, a thread's `flying`, or stored. A thread that
    loses its connection puts what was flying back, to be sent again under the same message ids.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        chunks: Sequence[int],
        progress: TransferProgress,
        budget: ByteBudget,
        traffic: Traffic,
        connect: Connect,
        *,
        message_id: Callable[[str], str],
        first_pace: FirstPace,
    ) -> None:
        """`message_id`: see `NatsLink`."""
        self.stopped = False
        self.failure: BusError | None = None
        self._outgoing = outgoing
        self._progress = progress
        self._budget = budget
        self._traffic = traffic
        self._connect = connect
        self._message_id = message_id
        self._first_pace = first_pace
        self._todo = deque(chunks)
        self._lock = threading.Lock()
        # Nothing is sent before this time: the stream was full.
        self._pause_until = 0.0
        self._refusals = 0

    @property
    def over(self) -> bool:
        """Whether a thread has nothing to do any more."""
        return (
            self.stopped
            or self.failure is not None
            or self._progress.stored == self._outgoing.blob.chunks
        )

    def work(self) -> None:
        """Send until the payload is stored, over one connection after the other."""
        pace = Pace(self._first_pace.window, self._first_pace.timeout_s_min)
        failures = 0
        while not self.over:
            stored = self._progress.stored
            try:
                with self._connect() as lane:
                    _Sender(self, lane, pace).run()
            except Unavailable as error:
                self._progress.trouble = str(error)
                failures = 1 if self._progress.stored > stored else failures + 1
                self._sleep(pause_after(failures, PAUSES_S))

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.over and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))

    # --- what senders share -------------------------------------------------------------------

    def next(self) -> tuple[int | None, float]:
        """An index to send, or None and the seconds until it is worth asking again."""
        with self._lock:
            wait_s = self._pause_until - time.monotonic()
            if wait_s > 0 or not self._todo:
                return None, max(wait_s, 0.0) if self._todo else LOOK_S
            wait_s = self._budget.take(len(self._outgoing.data(self._todo[0])))
            return (None, wait_s) if wait_s else (self._todo.popleft(), 0.0)

    def stored(self, index: int, life: str) -> None:
        with self._lock:
            self._progress.chunk(index, life)
            self._refusals = 0

    def again(self, indices: list[int]) -> None:
        with self._lock:
            self._todo.extendleft(reversed(indices))

    def refused(self, index: int, error: BusError) -> None:
        """The server said no: for good, or until there is room."""
        with self._lock:
            self._todo.appendleft(index)
            self._progress.trouble = str(error)
            if isinstance(error, StreamFull):
                self._progress.no_room(str(error))
            elif not isinstance(error, Unavailable):
                self.failure = error
            now = time.monotonic()
            if now >= self._pause_until:
                self._refusals += 1
                self._pause_until = now + pause_after(self._refusals, PAUSES_S)

    def head(self, index: int, reply: str) -> tuple[bytes, memoryview]:
        """What goes before chunk `index`, and the chunk."""
        data = self._outgoing.data(index)
        headers = self._outgoing.headers(index)
        headers["Nats-Msg-Id"] = self._message_id(self._progress.message_id(self._outgoing, index))
        self._traffic.sent(len(data))
        return publish_head(self._outgoing.blob.subject, reply, headers, len(data)), data

    @property
    def chunk_bytes(self) -> int:
        return min(self._outgoing.blob.chunk_bytes, self._outgoing.blob.bytes)


class _Sender:
    """One connection's part."""

    def __init__(self, sending: Sending, lane: LaneSocket, pace: Pace) -> None:
        self._sending = sending
        self._lane = lane
        self._pace = pace
        self._reply = f"{lane.inbox}.{time.monotonic_ns():x}"
        # index -> when it was handed over, oldest first.
        self._flying: dict[int, float] = {}

    def run(self) -> None:
        """Until the payload is stored, or this connection is no good (LaneBroken)."""
        limit = self._lane.payload_bytes_max
        if self._sending.chunk_bytes > limit - 2048:  # less its headers
            self._sending.failure = Refused(
                f"chunks of {self._sending.chunk_bytes} bytes exceed the server's limit {limit}"
            )
            return
        try:
            while not self._sending.over:
                wait_s = self._fill()
                if self._lane.wait(wait_s):
                    for event in self._lane.receive():
                        if isinstance(event, Arrived):
                            self._answered(event)
                self._check_patience()
        finally:
            self._sending.again([*self._flying])
        if self._flying:
            # Ended early: answers would come to whoever has this connection next.
            self._lane.abort()

    def _fill(self) -> float:
        """Send while the window and the kernel have room; the seconds to wait at most."""
        wait_s = LOOK_S
        while not self._lane.backlog and len(self._flying) < self._pace.window:
            index, wait_s = self._sending.next()
            if index is None:
                break
            self._flying[index] = time.monotonic()
            head, data = self._sending.head(index, f"{self._reply}.{index}")
            self._lane.send(head, data, b"\r\n")
        return min(wait_s, LOOK_S)

    def _answered(self, event: Arrived) -> None:
        reply, _, name = event.message.subject.rpartition(".")
        if reply != self._reply or not name.isdigit() or int(name) not in self._flying:
            return
        index = int(name)
        latency_s = time.monotonic() - self._flying.pop(index)
        error = _error(event, index)
        if error is None:
            self._pace.answered(latency_s)
            self._sending.stored(index, self._lane.life)
        else:
            self._pace.refused()
            self._sending.refused(index, error)

    def _check_patience(self) -> None:
        """On a connection on which nothing is answered, nothing more will be."""
        if not self._flying:
            return
        sent_at, now = next(iter(self._flying.values())), time.monotonic()
        if now - sent_at > self._pace.timeout_s:
            self._pace.timed_out(sent_at, now)
            raise LaneBroken(f"no answer within {now - sent_at:.1f} s")


def _error(event: Arrived, index: int) -> BusError | None:
    """What a stream's answer says, None for stored."""
    if event.message.status == 503:
        return Unavailable("no stream takes the chunk, or there is no leader")
    try:
        stored_at(event.payload, f"chunk {index}")
    except BusError as error:
        return error
    return None
