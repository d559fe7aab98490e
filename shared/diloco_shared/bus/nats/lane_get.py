"""Receiving one payload over data lanes: what a thread does with its connection."""

import time
from collections import deque

from diloco_shared.bus.nats.lane_put import LOOK_S, ByteBudget, Connect
from diloco_shared.bus.nats.lane_socket import LaneBroken, LaneSocket
from diloco_shared.bus.nats.pulls import IDLE, MISSED_MAX, Delivered, delivered, pull, unserved
from diloco_shared.bus.nats.wire import Arrived, WireMessage, publish_line
from diloco_shared.bus.port import BusError, Traffic, TransferProgress, Unavailable
from diloco_shared.protocol.chunks import Incoming
from diloco_shared.protocol.pace import Pace

# Chunks asked for and not here yet, per connection: 16 MiB, one second of 128 Mbit/s.
WINDOW = 32


class Receiving:
    """One pass over a payload's messages; as many threads as there are connections call `work`.

    The messages of the consumer are numbered without gaps; `_seen` knows which came, and so what
    the next pass may skip, and when this one has seen all there are.
    """

    def __init__(
        self,
        incoming: Incoming,
        progress: TransferProgress,
        consumer: str,
        budget: ByteBudget,
        traffic: Traffic,
        connect: Connect,
        *,
        api: str,
        beat_s: int,
    ) -> None:
        self.stopped = False
        self.failure: BusError | None = None
        self.api = api  # JetStream is asked below this subject
        self.beat_s = beat_s  # of the server, while it has nothing for us
        self.consumer = consumer
        self.traffic = traffic
        self._incoming = incoming
        self._progress = progress
        self._budget = budget
        self._connect = connect
        self._lock = incoming.lock
        self._asked = 0
        # Delivery number -> stream sequence, for those above the first one not seen yet.
        self._seen: dict[int, int] = {}
        self._seen_below = 1
        self._total: int | None = None
        # Something was damaged: the next pass must not skip it.
        self._pinned = False

    @property
    def over(self) -> bool:
        """Whether a thread has nothing to do any more."""
        return (
            self.stopped
            or self.failure is not None
            or not self._incoming.awaited
            or (self._total is not None and self._seen_below > self._total)
        )

    def work(self) -> None:
        """Pull until this pass is over; a broken connection ends the pass."""
        try:
            with self._connect() as lane:
                _Receiver(self, lane).run()
        except Unavailable as error:
            self._progress.trouble = str(error)
            self.failure = error

    # --- what receivers share -----------------------------------------------------------------

    def ask(self, most: int) -> tuple[int, float]:
        """How many messages to ask for, at most `most`; if none, seconds until asking again."""
        with self._lock:
            blob = self._incoming.blob
            wanted = min(most, self._incoming.awaited - self._asked)
            granted, wait_s = 0, LOOK_S
            # Repeats and other attempts' chunks use up what was asked for: then one more at a time.
            for _ in range(max(wanted, 0 if self._asked else 1)):
                wait_s = self._budget.take(min(blob.chunk_bytes, blob.bytes))
                if wait_s:
                    break
                granted += 1
            self._asked += granted
            return granted, wait_s

    def unasked(self, count: int) -> None:
        """That many of the messages asked for came, or will not."""
        with self._lock:
            self._asked -= count

    def claim(self, message: WireMessage) -> int | None:
        with self._lock:
            return self._incoming.claim(message.headers, message.size)

    def place(self, index: int) -> memoryview:
        return self._incoming.place(index)

    def settle(self, index: int) -> bool:
        """A claimed chunk is in place; whether it is good."""
        good = self._incoming.check(index)
        with self._lock:
            self._incoming.settle(index, good)
        return good

    def release(self, index: int) -> None:
        with self._lock:
            self._incoming.release(index)

    def saw(self, message: Delivered, good: bool) -> None:
        """A message is dealt with. Not `good`: it was damaged."""
        with self._lock:
            self._seen[message.number] = message.seq if good else 0
            while self._seen_below in self._seen:
                seen_seq = self._seen.pop(self._seen_below)
                self._seen_below += 1
                self._pinned = self._pinned or not seen_seq
                if not self._pinned:
                    self._progress.next_seq = seen_seq + 1
            if message.pending == 0:
                self._total = message.number


class _Receiver:
    """One connection's part."""

    def __init__(self, receiving: Receiving, lane: LaneSocket) -> None:
        self._receiving = receiving
        self._lane = lane
        self._silent_s = float(MISSED_MAX * receiving.beat_s)
        self._pace = Pace(WINDOW, self._silent_s)
        self._reply = f"{lane.inbox}.{time.monotonic_ns():x}"
        self._asked_at: deque[float] = deque()
        self._heard_at = time.monotonic()
        # What `_place` claimed for the messages that are not dealt with yet, in their order.
        self._claimed: deque[int | None] = deque()
        self._nothing_more = False

    def run(self) -> None:
        """Until the pass is over, or this connection is no good (Unavailable)."""
        self._lane.place_with(self._place)
        try:
            while not (self._receiving.over or self._nothing_more):
                wait_s = self._pull()
                if self._lane.wait(wait_s):
                    self._heard_at = time.monotonic()
                    for event in self._lane.receive():
                        if isinstance(event, Arrived):
                            self._arrived(event)
                elif self._asked_at:
                    self._check_patience()
        finally:
            self._lane.place_with(None)
            self._receiving.unasked(len(self._asked_at))
            for index in self._claimed:
                if index is not None:
                    self._receiving.release(index)
        if self._asked_at:
            # Chunks may be on their way; nobody should have to receive them.
            self._lane.abort()

    def _pull(self) -> float:
        """Ask for more when half of the window is used up; the seconds to wait at most."""
        room = self._pace.window - len(self._asked_at)
        if room < max(1, self._pace.window // 2):
            return LOOK_S
        count, wait_s = self._receiving.ask(room)
        if count:
            if not self._asked_at:  # until now nobody owed us anything
                self._heard_at = time.monotonic()
            subject, body = pull(
                self._receiving.api, self._receiving.consumer, count, self._receiving.beat_s
            )
            self._lane.send(publish_line(subject, self._reply, body))
            self._asked_at.extend([time.monotonic()] * count)
        return min(wait_s or LOOK_S, LOOK_S)

    def _ours(self, message: WireMessage) -> bool:
        return f".{self._receiving.consumer}." in message.reply

    def _is_status(self, message: WireMessage) -> bool:
        """Of the server: what is stored comes on its own subject, whatever its headers say."""
        return message.subject == self._reply and message.status != 0

    def _place(self, message: WireMessage) -> memoryview | None:
        if self._is_status(message) or not self._ours(message):
            return None
        index = self._receiving.claim(message)
        self._claimed.append(index)
        return None if index is None else self._receiving.place(index)

    def _arrived(self, event: Arrived) -> None:
        message = event.message
        if self._is_status(message):
            self._status(message)
        elif self._ours(message):
            self._chunk(message)

    def _chunk(self, message: WireMessage) -> None:
        self._receiving.traffic.received(message.size)
        index = self._claimed.popleft()
        good = index is None or self._receiving.settle(index)
        if self._asked_at:
            self._pace.answered(time.monotonic() - self._asked_at.popleft())
            self._receiving.unasked(1)
        self._receiving.saw(delivered(message.reply), good)

    def _status(self, message: WireMessage) -> None:
        if message.status == IDLE:
            # The server has been idle: what was still to come has been purged.
            self._nothing_more = True
            return
        count = min(unserved(message.status, message.headers), len(self._asked_at))
        for _ in range(count):
            self._asked_at.pop()
        self._receiving.unasked(count)

    def _check_patience(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._silent_s:
            raise LaneBroken(f"nothing heard for {silent_s:.1f} s")
