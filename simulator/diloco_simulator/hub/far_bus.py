"""A bus in memory whose hub is far away, and not always there.

A request that is not answered in time may still be carried out, later: nobody knows.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from diloco_shared.bus.port import Delivery, Stored, Unavailable
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_simulator.hub.net import Net, Way
from diloco_simulator.virtual_loop import VirtualLoop

T = TypeVar("T")

# What a message without a payload of its own weighs, in bytes.
SMALL = 64


class FarBus(MemoryBus):
    """One connection of one machine. `passing` is asked before everything that goes out: whether
    the process lives to send it."""

    def __init__(
        self,
        broker: MemoryBroker,
        name: str,
        machine: str,
        net: Net,
        passing: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(broker, name)
        self.net = net
        self.passing = passing
        link = net.link(machine)
        self.out, self.into = Way(link, out=True), Way(link, out=False)
        self.patience = Patience(net.loop)
        self.broken = False  # the connection is lost, and will be there again
        # For answers, in the same order in each play.
        self.waiting: dict[asyncio.Future[Any], None] = {}

    @property
    def ways(self) -> list[Way]:
        """Both directions of each of its connections."""
        return [self.out, self.into]

    def breaks(self) -> None:
        """The connection is lost: what is on its way here is lost with it, and who asks waits."""
        self.broken = True
        self.disconnect()
        for answer in self.waiting:
            if not answer.done():
                answer.set_exception(Unavailable(f"the connection {self.name} was lost"))

    def mended(self) -> None:
        """It is there again."""
        self.broken = False
        self.reconnect()

    async def _call(
        self, operation: str, subject: str, timeout_s: float, work: Callable[[], T], size: int = 0
    ) -> T:
        if self.passing is not None and not self.passing(operation):
            await asyncio.Event().wait()
        if self.broken:
            await self._again(timeout_s, subject)
        if not self.connected:
            raise Unavailable(f"the connection {self.name} is closed")
        answer: asyncio.Future[T] = self.net.loop.create_future()
        self.net.send(self.out, SMALL + size, partial(self._carried_out, work, answer))
        self.patience.wait(answer, timeout_s, subject)
        self.waiting[answer] = None
        try:
            return await answer
        finally:
            self.waiting.pop(answer, None)

    async def _again(self, timeout_s: float, subject: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise Unavailable(f"no answer on {subject} within {timeout_s:g} s") from None

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
        if self.passing is not None and not self.passing("publish"):
            await asyncio.Event().wait()
        if self.broken:
            return
        self._count_out(subject, payload)
        if self.net.chance(self.net.options.loss, "lost"):
            return
        copies = 2 if self.net.chance(self.net.options.duplicate, "duplicated") else 1
        for _ in range(copies):
            delivery = Delivery(subject, payload)
            self.net.send(self.out, len(payload), partial(self.broker.publish, delivery))

    def _receiver(self, put: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        receive = super()._receiver(put)
        return lambda d: self.net.send(self.into, len(d.payload), partial(receive, d))

    async def _brought(self, message: Stored) -> None:
        """Until it is there, however long that takes."""
        arrival: asyncio.Future[None] = self.net.loop.create_future()

        def arrived() -> None:
            if not arrival.done():
                arrival.set_result(None)

        self.net.send(self.into, len(message.payload), arrived, sure=True)
        await arrival


class Patience:
    """Of one connection: gives up on answers in time. One timer looks after all of a length."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.waiting: dict[float, deque[tuple[float, asyncio.Future[Any], str]]] = {}

    def wait(self, answer: "asyncio.Future[Any]", timeout_s: float, subject: str) -> None:
        """Unavailable for `answer` unless it is there within `timeout_s`."""
        queue = self.waiting.get(timeout_s)
        if queue is None:
            queue = self.waiting[timeout_s] = deque()
        if not queue:
            self.loop.call_later(timeout_s, self._look, timeout_s)
        queue.append((self.loop.now + timeout_s, answer, subject))

    def _look(self, timeout_s: float) -> None:
        queue, now = self.waiting[timeout_s], self.loop.now
        while queue and (queue[0][1].done() or queue[0][0] <= now):
            _, answer, subject = queue.popleft()
            if not answer.done():
                text = f"no answer on {subject} within {timeout_s:g} s"
                answer.set_exception(Unavailable(text))
        if queue:
            self.loop.call_at(queue[0][0], self._look, timeout_s)
