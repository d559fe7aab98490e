"""A bus in memory whose hub is far away, and not always there.

A request that is not answered in time may still be carried out, later: nobody knows.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from diloco_shared.edges.bus import Delivery, Stored, Unavailable
from diloco_shared.edges.memory_broker import MemoryBroker
from diloco_shared.edges.memory_bus import MemoryBus
from diloco_simulator.whole.net import Net, Way

T = TypeVar("T")

# What a message without a payload of its own weighs, in bytes.
SMALL = 64


class FarBus(MemoryBus):
    """One connection of one machine. `passing` is awaited before everything that goes out."""

    def __init__(
        self,
        broker: MemoryBroker,
        name: str,
        machine: str,
        net: Net,
        passing: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(broker, name)
        self.net = net
        self.passing = passing
        link = net.link(machine)
        self.out, self.into = Way(link, out=True), Way(link, out=False)
        self.patience = Patience()

    async def _call(
        self, operation: str, subject: str, timeout_s: float, work: Callable[[], T], size: int = 0
    ) -> T:
        if self.passing is not None:
            await self.passing(operation)
        if not self.connected:
            raise Unavailable(f"the connection {self.name} is closed")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.net.send(self.out, SMALL + size, lambda: self._carried_out(work, answer))
        self.patience.wait(answer, timeout_s, subject)
        return await answer

    def _carried_out(self, work: Callable[[], T], answer: "asyncio.Future[T]") -> None:
        """At the hub."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        if self.net.chance(self.net.options.unknown, "unknown"):
            return

        def arrived() -> None:
            if answer.done() or not self.connected:
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self.net.send(self.into, SMALL, arrived)

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.passing is not None:
            await self.passing("publish")
        self._count_out(subject, payload)
        if self.net.chance(self.net.options.loss, "lost"):
            return
        copies = 2 if self.net.chance(self.net.options.duplicate, "duplicated") else 1
        for _ in range(copies):
            delivery = Delivery(subject, payload)
            self.net.send(self.out, len(payload), lambda d=delivery: self._published(d))  # type: ignore[misc]

    def _published(self, delivery: Delivery) -> None:
        self.broker.publish(delivery)

    def _receiver(self, put: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        receive = super()._receiver(put)
        return lambda d: self.net.send(self.into, len(d.payload), lambda: receive(d))

    @asynccontextmanager
    async def _reading(
        self, stream: str, subject: str, start_seq: int, *, plain: bool
    ) -> AsyncIterator[AsyncIterator[Stored]]:
        async with super()._reading(stream, subject, start_seq, plain=plain) as messages:
            yield self._late(messages)

    async def _late(self, messages: AsyncIterator[Stored]) -> AsyncIterator[Stored]:
        async for stored in messages:
            await self._crosses(self.into, len(stored.payload))
            yield stored

    async def _crosses(self, way: Way, size: int) -> None:
        """Until it is there, however long that takes."""
        arrived = asyncio.Event()
        self.net.send(way, size, arrived.set, sure=True)
        await arrived.wait()


class Patience:
    """Of one connection: gives up on answers in time. One timer looks after all of a length."""

    def __init__(self) -> None:
        self.waiting: dict[float, deque[tuple[float, asyncio.Future[Any], str]]] = {}

    def wait(self, answer: "asyncio.Future[Any]", timeout_s: float, subject: str) -> None:
        """Unavailable for `answer` unless it is there within `timeout_s`."""
        loop = asyncio.get_running_loop()
        queue = self.waiting.setdefault(timeout_s, deque())
        if not queue:
            loop.call_later(timeout_s, self._look, timeout_s)
        queue.append((loop.time() + timeout_s, answer, subject))

    def _look(self, timeout_s: float) -> None:
        loop, queue = asyncio.get_running_loop(), self.waiting[timeout_s]
        while queue and (queue[0][1].done() or queue[0][0] <= loop.time()):
            _, answer, subject = queue.popleft()
            if not answer.done():
                text = f"no answer on {subject} within {timeout_s:g} s"
                answer.set_exception(Unavailable(text))
        if queue:
            loop.call_at(queue[0][0], self._look, timeout_s)
