"""The bus in memory: several clients on one `MemoryBroker`, with faults on demand.

    broker = MemoryBroker()
    syncer, learner = MemoryBus(broker, "syncer"), MemoryBus(broker, "learner")

Answers exactly like `bus.nats.bus.NatsBus`: one suite of tests holds for both. Faults: `disconnect`
and `reconnect` cut one client off; `broker.fault` loses single messages or answers;
`broker.lose_leader` makes a hub whose nodes elect another leader, or are too few to.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any, TypeVar

from diloco_shared.bus.deliveries import Answers, Deliveries, Trail
from diloco_shared.bus.nats.api import (
    API_TIMEOUT_S,
    NS_PER_S,
    PATIENCE_S,
    without_server_headers,
)
from diloco_shared.bus.nats.link import MAJORITY_LOST
from diloco_shared.bus.port import (
    Delivery,
    Handler,
    Held,
    Lanes,
    Refused,
    StorageInfo,
    Stored,
    Stray,
    StreamInfo,
    StreamSpec,
    Sweep,
    Traffic,
    Unavailable,
)
from diloco_shared.bus.stream_kv import StreamKv
from diloco_simulator.hub.broker import PAYLOAD_BYTES_MAX, MemoryBroker, Unacknowledged

_T = TypeVar("_T")


class MemoryBus(StreamKv):
    """One client. See `bus.Bus`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.number = broker.next_id()  # among the clients
        self.traffic = Traffic()
        self.lanes: Lanes | None = None
        self.reconnects = 0
        self.errors = 0
        self._up = asyncio.Event()
        self._up.set()
        self._closed = False
        self.vanished = False  # its process is gone
        self._deliveries: dict[Deliveries, None] = {}  # in the same order in each play
        self._subscribed: set[int] = set()  # at the broker

    # --- connection ---------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    @property
    def named(self) -> bool:
        return self.broker.named

    @property
    def life(self) -> str:
        return str(self.broker.life)

    @property
    def several_nodes(self) -> bool:
        return self.broker.nodes > 1

    @property
    def ails(self) -> str:
        return MAJORITY_LOST if self.broker.leaderless and self.connected else ""

    @property
    def closed(self) -> bool:
        return self._closed

    def disconnect(self) -> None:
        """Cut this client off: nothing comes or goes until `reconnect`."""
        self._up.clear()

    def vanish(self) -> None:
        """Its process is gone, and the connection with it: nothing is sent to it any more."""
        self.vanished = True
        self.disconnect()
        for number in self._subscribed:
            self.broker.unsubscribe(number)
        self._subscribed.clear()

    def reconnect(self) -> None:
        self.reconnects += 1
        self._up.set()

    async def close(self) -> None:
        self._closed = True
        self._up.set()
        for waiting in self._deliveries:
            waiting.end()
        self.broker.wake()

    async def wait_connected(self) -> None:
        await self._up.wait()

    async def _call(
        self, operation: str, subject: str, timeout_s: float, work: Callable[[], _T], size: int = 0
    ) -> _T:
        """Carry out `work` at the broker, under the faults of the day. `size`: bytes to carry."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
                # A round trip lets others run, as on a network.
                await asyncio.sleep(0)
        except TimeoutError:
            raise Unavailable(f"no answer on {subject} within {timeout_s:g} s") from None
        if self._closed:
            raise Unavailable(f"the connection {self.name} is closed")
        fate = self.broker.fate(self.name, operation, subject)
        if fate == "lose_request":
            raise Unavailable(f"no answer on {subject} within {timeout_s:g} s")
        done = work()
        if fate == "lose_answer":
            raise Unavailable(f"no answer on {subject} within {timeout_s:g} s")
        return done

    def _count_out(self, subject: str, payload: bytes) -> None:
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise Refused(
                f"{len(payload)} bytes on {subject} exceed the server's limit {PAYLOAD_BYTES_MAX}"
            )
        self.traffic.sent(len(payload))

    # --- core ---------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes) -> None:
        if not self.connected:
            return
        self._count_out(subject, payload)
        if self.broker.fate(self.name, "publish", subject) != "lose_request":
            self.broker.publish(Delivery(subject, payload))

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, limit: int = 1024
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        waiting = Deliveries(subject, limit, self.traffic)
        self._deliveries[waiting] = None
        try:
            with self._receives(subject, waiting.put):
                yield waiting
        finally:
            self._deliveries.pop(waiting, None)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float = 2.0) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def arrived(delivery: Delivery) -> None:
            if not answer.done():
                answer.set_result(delivery.payload)

        self._count_out(subject, payload)
        inbox = f"_INBOX.{self.name}.{self.broker.next_id()}"
        delivery = Delivery(subject, payload, inbox)
        try:
            with self._receives(inbox, arrived):
                async with asyncio.timeout(timeout_s):
                    listeners = await self._call(
                        "request", subject, timeout_s, lambda: self.broker.publish(delivery)
                    )
                    if not listeners:
                        raise Unavailable(f"nobody listens on {subject}")
                    return await answer
        except TimeoutError:
            raise Unavailable(f"no answer on {subject} within {timeout_s:g} s") from None

    @asynccontextmanager
    async def serve(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        async with Answers(subject, handler, self.publish, self.traffic) as answers:
            # Who answers goes by its own clock, and not by that of who asks.
            own = copy_context()

            def start(delivery: Delivery) -> None:
                own.copy().run(answers.start, delivery)

            with self._receives(subject, start):
                yield

    @contextmanager
    def _receives(self, subject: str, put: Callable[[Delivery], None]) -> Iterator[None]:
        """What is published on a subject meanwhile, as long as the connection lasts."""
        number = self.broker.subscribe(subject, self._receiver(put))
        self._subscribed.add(number)
        try:
            yield
        finally:
            self._subscribed.discard(number)
            self.broker.unsubscribe(number)

    def _receiver(self, put: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        def receive(delivery: Delivery) -> None:
            if self.connected:
                self.traffic.received(len(delivery.payload))
                put(delivery)

        return receive

    # --- streams ------------------------------------------------------------------------------

    async def ensure(self, config: dict[str, Any]) -> None:
        await self._api(config["name"], lambda: self.broker.ensure(config))

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await self.ensure(
            {
                "name": spec.name,
                "subjects": list(spec.subjects),
                "max_bytes": spec.bytes_max,
                "discard": "old" if spec.drop_oldest else "new",
                "max_msgs_per_subject": spec.subject_messages_max or -1,
                "max_msg_size": spec.message_bytes_max or -1,
                "max_age": int(spec.age_s_max * NS_PER_S),
                "num_replicas": spec.replicas,
                "persist_mode": "async" if self._may_lose(spec) else "default",
            }
        )

    def _may_lose(self, spec: StreamSpec) -> bool:
        return not spec.synced and spec.replicas == 1 and not self.several_nodes

    async def delete_stream(self, name: str) -> None:
        await self._api(name, lambda: self.broker.delete_stream(name))

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: dict[str, str] | None = None,
        msg_id: str | None = None,
        expect_last: int | None = None,
        timeout_s: float = 5.0,
    ) -> int:
        self._count_out(subject, payload)
        head = dict(headers or {})
        if msg_id is not None:
            head["Nats-Msg-Id"] = self._message_id(msg_id)
        if expect_last is not None:
            head["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)

        def store() -> int:
            self.broker.check_leader(subject, alone=True)
            named = head.get("Nats-Msg-Id")
            return self.broker.append(subject, bytes(payload), head, named, expect_last)

        try:
            return await self._call("append", subject, timeout_s, store, len(payload))
        except Unacknowledged:
            await asyncio.sleep(min(timeout_s, PATIENCE_S))
            raise

    def _message_id(self, name: str) -> str:
        """This client's own, as long as a connection to a server makes them."""
        return hashlib.blake2b(f"{self.number}/{name}".encode(), digest_size=16).hexdigest()

    def read(
        self, stream: str, subject: str, *, start_seq: int = 1, batch: int = 64
    ) -> AbstractAsyncContextManager[AsyncIterator[Stored]]:
        return self._reading(stream, subject, start_seq, plain=True)

    def read_raw(
        self, stream: str, subject: str, *, start_seq: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Stored]]:
        return self._reading(stream, subject, start_seq, plain=False)

    @asynccontextmanager
    async def _reading(
        self, stream: str, subject: str, start_seq: int, *, plain: bool
    ) -> AsyncIterator[AsyncIterator[Stored]]:
        yield _Reader(self, stream, subject, start_seq, plain)

    async def _brought(self, message: Stored) -> None:
        """From the broker to a reader: others get their turn even when much is waiting."""
        await asyncio.sleep(0)

    async def fetch(
        self, stream: str, subject: str, *, start_seq: int = 1, limit: int | None = None
    ) -> list[Stored]:
        found = await self.fetch_raw(stream, subject, start_seq=start_seq, limit=limit)
        return [without_server_headers(message) for message in found]

    async def fetch_raw(
        self, stream: str, subject: str, *, start_seq: int = 1, limit: int | None = None
    ) -> list[Stored]:
        def select() -> list[Stored]:
            if not self.broker.exists(stream):
                raise Unavailable(f"reading {subject}: there is no stream {stream}")
            found = self.broker.select(stream, subject, start_seq)
            return [m for m, _ in zip(found, range(limit), strict=False)] if limit else [*found]

        found = await self._told(stream, select)
        for message in found:
            self.traffic.received(len(message.payload))
        return found

    async def last(self, stream: str, subject: str) -> Stored | None:
        found = await self.last_raw(stream, subject)
        return None if found is None else without_server_headers(found)

    async def last_raw(self, stream: str, subject: str) -> Stored | None:
        return await self._told(stream, lambda: self.broker.last(stream, subject))

    async def purge(self, stream: str, subject: str, *, below_seq: int | None = None) -> int:
        if below_seq is not None and below_seq <= 1:
            return 0
        return await self._api(stream, lambda: self.broker.purge(stream, subject, below_seq))

    async def stream_info(self, stream: str) -> StreamInfo:
        return await self._told(stream, lambda: self.broker.info(stream))

    async def held(
        self,
        stream: str,
        subject: str,
        *,
        messages_max: int,
        start_seq: int = 1,
        below_seq: int | None = None,
    ) -> dict[str, Held]:
        def held() -> dict[str, Held]:
            return self.broker.held(stream, subject, messages_max, start_seq, below_seq)

        return await self._told(stream, held)

    async def heads(
        self, stream: str, subject: str, *, messages_max: int, messages_min: int = 1
    ) -> list[Stored]:
        found = await self._told(stream, lambda: [*self.broker.select(stream, subject, 1)])
        if len(found) < messages_min:
            return []
        heads = [replace(m, payload=b"") for m in found[:messages_max]]
        return [without_server_headers(m) for m in heads]

    async def storage(self) -> StorageInfo:
        return await self._api("storage", self.broker.storage)

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[Sweep]:
        async def sweep(streams: Collection[str]) -> list[Stray]:
            return []  # nobody can make any

        yield sweep

    async def _api(self, subject: str, work: Callable[[], _T]) -> _T:
        return await self._asked(subject, work, alone=False)

    async def _told(self, subject: str, work: Callable[[], _T]) -> _T:
        """What one node tells by itself."""
        return await self._asked(subject, work, alone=True)

    async def _asked(self, subject: str, work: Callable[[], _T], *, alone: bool) -> _T:
        def answer() -> _T:
            self.broker.check_leader(subject, alone=alone)
            return work()

        return await self._call("api", subject, API_TIMEOUT_S, answer)


class _Reader:
    """Endless reading; a client that is cut off waits, and then goes on where it was."""

    def __init__(
        self, bus: MemoryBus, stream: str, subject: str, start_seq: int, plain: bool
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self._next_seq = start_seq
        self._plain = plain
        self._trail: Trail[Stored] = Trail()
        self._last: Stored | None = None  # the newest on it

    def __aiter__(self) -> AsyncIterator[Stored]:
        return self

    async def __anext__(self) -> Stored:
        while True:
            if not self._bus.connected:
                await self._bus.wait_connected()
            if self._bus.closed:
                raise StopAsyncIteration
            message = None if self._bus.broker.leaderless else self._next()
            if message is not None:
                await self._bus._brought(message)
                self._next_seq = message.seq + 1
                self._trail.add(message.seq, message)
                self._last = message
                self._bus.traffic.received(len(message.payload))
                return without_server_headers(message) if self._plain else message
            await self._bus.broker.changed(self._stream)

    def _next(self) -> Stored | None:
        broker = self._bus.broker
        if not broker.exists(self._stream):
            return None
        # What came after the end of a stream that lost its last messages comes again.
        messages, end = broker.messages(self._stream)
        last = self._last
        if last is None or messages.get(last.seq) is not last:
            self._look_back(messages, end)
        message = None
        if self._next_seq < end:
            message = next(broker.select(self._stream, self._subject, self._next_seq), None)
        if message is None:
            # Not to look through the same other subjects' messages again.
            self._next_seq = end
        return message

    def _look_back(self, messages: Mapping[int, Stored], end: int) -> None:
        same, differs = 0, False
        for seq in self._trail.newest_first:
            there = messages.get(seq)
            if there is not None and self._trail.same(seq, there):
                same = seq
                break
            differs |= there is not None
        self._next_seq = self._trail.resumes_at(self._next_seq, end, same=same, differs=differs)
