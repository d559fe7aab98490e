"""Data lanes: connections of their own for chunks, each served by a thread.

nats-py copies a payload four or five times; here it goes from and to the caller's buffer. One
payload at a time uses a connection, so several payloads under way are several connections, and
`connections` of them may carry one payload together: over a long link one TCP connection is
bounded by its buffers and by loss. A connection that fails is replaced, and what it left unanswered
is repeated. Small messages stay on the bus's nats-py connection.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.api import PATIENCE_S
from diloco_shared.bus.nats.lane_get import Receiving
from diloco_shared.bus.nats.lane_put import FirstPace, Sending
from diloco_shared.bus.nats.lane_socket import LaneBroken, LaneSocket
from diloco_shared.bus.nats.link import NatsLink
from diloco_shared.bus.nats.pulls import forget_consumer, heartbeat_s, open_consumer
from diloco_shared.bus.port import NoStream, TransferProgress, Unavailable
from diloco_shared.protocol.chunks import Incoming, Outgoing
from diloco_shared.protocol.pace import TokenBucket

# Payloads under way at once over one bus, each way; more wait their turn. Each way has its own
# turns: what is fetched must not hold up what is sent over a link that carries both. What a syncer
# fetches at most; to send, a learner's rounds in flight beside the states that it gives. Bounds
# threads and sockets: 16 with one connection each, of the 2048 that a site may have.
FETCHES_MAX, SENDS_MAX = 8, 8
# How often connections that lie idle are looked after, in seconds: the embedded server drops one
# that leaves two pings, 10 s apart, unanswered.
TEND_S = 3.0
# One unused for this long is closed: rounds follow each other within minutes, and over a long link
# a new one costs several round trips; those beyond what rounds use were opened in a rush.
IDLE_S = 600.0
# What a thread takes to notice that it is stopped; one that is making a connection is not awaited.
_STOP_S = 0.3


class RateLimit:
    """A token bucket that several threads share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bucket = TokenBucket(bytes_per_s)
        self._lock = threading.Lock()

    def take(self, size: int) -> float:
        """Seconds to wait before asking again; 0.0: `size` bytes may go."""
        with self._lock:
            return self._bucket.take(size, time.monotonic())


class NatsLanes:
    """The lanes beside one `NatsLink`; `bus.Lanes`."""

    def __init__(
        self,
        link: NatsLink,
        address: Address,
        *,
        connections: int = 1,
        uplink_bytes_per_s: float = 0.0,
        downlink_bytes_per_s: float = 0.0,
    ) -> None:
        self._link = link
        self._address = address
        self._connections = connections
        self._up = RateLimit(uplink_bytes_per_s)
        self._down = RateLimit(downlink_bytes_per_s)
        self._fetches, self._sends = asyncio.Semaphore(FETCHES_MAX), asyncio.Semaphore(SENDS_MAX)
        threads = (FETCHES_MAX + SENDS_MAX) * connections
        self._threads = ThreadPoolExecutor(threads, f"lane {link.name}")
        self._lock = threading.Lock()
        # Newest last, with the time each was put back.
        self._idle: deque[tuple[float, LaneSocket]] = deque()
        self._jobs: set[Sending | Receiving] = set()
        self._tending: asyncio.Task[None] | None = None
        self._closed = False
        self._server = 0  # of the hub's: the one that took the newest connection

    async def send(
        self,
        outgoing: Outgoing,
        chunks: Sequence[int],
        progress: TransferProgress,
        *,
        window: int,
        chunk_timeout_s: float,
    ) -> None:
        """As `bus.Lanes.send`, over some connections, each with its share of `window`."""
        connections = max(1, min(self._connections, len(chunks), window))
        several = self._link.several_nodes
        timeout_s_min = min(chunk_timeout_s, PATIENCE_S) if several else chunk_timeout_s
        sending = Sending(
            outgoing,
            chunks,
            progress,
            self._up,
            self._link.traffic,
            self.socket,
            message_id=self._link.message_id,
            first_pace=FirstPace(-(-window // connections), timeout_s_min),
        )
        await self._run(sending, connections, progress, self._sends)

    async def receive(self, stream: str, incoming: Incoming, progress: TransferProgress) -> None:
        """As `bus.Lanes.receive`: by a consumer of its own, from which several connections ask."""
        if not incoming.awaited:
            return
        name, there = await self._consumer(stream, incoming.blob.subject, progress.next_seq)
        try:
            if there:
                receiving = Receiving(
                    incoming,
                    progress,
                    f"{stream}.{name}",
                    self._down,
                    self._link.traffic,
                    self.socket,
                    api=self._link.api,
                    beat_s=heartbeat_s(self._link),
                )
                connections = min(self._connections, there)
                await self._run(receiving, connections, progress, self._fetches)
        finally:
            await forget_consumer(self._link, stream, name)

    async def _consumer(self, stream: str, subject: str, start_seq: int) -> tuple[str, int]:
        """A pull consumer in the server's memory: its name, and how many messages it will give.

        Several connections may pull on it: each message goes to one of them.
        """
        name = "b" + secrets.token_hex(8)
        try:
            there = await open_consumer(self._link, stream, subject, name=name, start_seq=start_seq)
        except NoStream as error:
            raise Unavailable(str(error)) from None
        return name, there

    async def _run(
        self,
        job: Sending | Receiving,
        connections: int,
        progress: TransferProgress,
        turns: asyncio.Semaphore,
    ) -> None:
        """Work on `job` with that many threads; when cancelled they end by themselves."""
        progress.queued = turns.locked()
        try:
            await turns.acquire()
        finally:
            progress.queued = False
        if self._closed:
            turns.release()
            raise Unavailable(f"the connection {self._link.name} is closed")
        self._jobs.add(job)
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())
        loop = asyncio.get_running_loop()
        works = [loop.run_in_executor(self._threads, job.work) for _ in range(connections)]
        ended = asyncio.gather(*works, return_exceptions=True)
        ended.add_done_callback(lambda _: self._ended(job, turns))
        try:
            await asyncio.shield(ended)
        finally:
            # The threads look at it several times a second. What they have claimed of a payload
            # they give back: whoever goes on with it should find it there.
            job.stopped = True
            if not ended.done():
                await asyncio.wait({ended}, timeout=_STOP_S)
        if self._closed:
            raise Unavailable(f"the connection {self._link.name} is closed")
        if job.failure is not None:
            raise job.failure
        for outcome in ended.result():
            if isinstance(outcome, BaseException):
                raise outcome

    def _ended(self, job: Sending | Receiving, turns: asyncio.Semaphore) -> None:
        self._jobs.discard(job)
        turns.release()

    # --- connections --------------------------------------------------------------------------

    @contextmanager
    def socket(self) -> Iterator[LaneSocket]:
        """A connection for one thread; kept for the next one unless the use of it failed."""
        lane = self._take() or self._open()
        try:
            yield lane
        except BaseException:
            lane.abort()
            raise
        self._give_back(lane)

    def _open(self) -> LaneSocket:
        """At the server that took the last one, else at the next that does. Raises LaneBroken."""
        servers, first = len(self._address.endpoints()), self._server
        name, trouble = f"{self._link.name}-lane", LaneBroken("no server is named")
        for turn in range(servers):
            server = (first + turn) % servers
            try:
                lane = LaneSocket.open(self._address, name, self._link.traffic, server=server)
            except LaneBroken as error:
                trouble = error
                continue
            self._server = server
            return lane
        raise trouble

    def _take(self) -> LaneSocket | None:
        with self._lock:
            while self._idle:
                lane = self._idle.pop()[1]
                if lane.alive():
                    return lane
                lane.abort()
        return None

    def _give_back(self, lane: LaneSocket) -> None:
        with self._lock:
            if not (self._closed or lane.broken or lane.backlog):
                self._idle.append((time.monotonic(), lane))
                return
        lane.abort()

    async def _tend(self) -> None:
        """Keep idle connections open, so that the next payload begins at once; until cancelled."""
        while True:
            await asyncio.sleep(TEND_S)
            with self._lock:  # for moments: nothing waits for the network under it
                kept: deque[tuple[float, LaneSocket]] = deque()
                for since, lane in self._idle:
                    if time.monotonic() - since < IDLE_S and lane.tend():
                        kept.append((since, lane))
                    else:
                        lane.abort()
                self._idle = kept

    def close(self) -> None:
        """End what is under way, with Unavailable, and close every connection."""
        self._closed = True
        if self._tending is not None:
            self._tending.cancel()
        for job in self._jobs:
            job.stopped = True
        # Threads end within moments, or when the connection they are making is made or not.
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while self._idle:
                self._idle.pop()[1].abort()
