"""What joins the hosts of an island: connections to process 0, and programs that all compute.

As over TCP, what was sent arrives in its order, and a process that dies closes its connections. A
machine that is gone closes nothing: it is only silent.
"""

import asyncio
import contextvars
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from diloco_learner.hosts.whole import HostLost
from diloco_simulator.virtual_loop import VirtualLoop

# One way between two hosts, in virtual seconds; and where the link is slow.
WAY_S, SLOW_S = (0.001, 0.01), (0.2, 1.2)


@dataclass(slots=True)
class Cable:
    """Of one host to process 0."""

    loop: VirtualLoop
    rng: Random
    slow: bool = False

    def way_s(self) -> float:
        return self.rng.uniform(*(SLOW_S if self.slow else WAY_S))

    def later(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        """Whatever becomes of who began it."""
        self.loop.call_later(seconds, do, *args, context=contextvars.Context())


@dataclass(slots=True)
class Wire:
    """One direction of a connection."""

    cable: Cable
    came: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)
    there_at: float = 0.0  # when the newest of what was sent arrives
    closed: bool = False
    gone_at: float = math.inf  # since then no machine acknowledges what is sent
    given_up_s: float = math.inf  # and for so long the sender's machine tries

    def send(self, item: Any) -> None:
        """Raises HostLost once it is known that nobody is there."""
        if self.closed:
            raise HostLost("its connection is closed")
        if self.cable.loop.now > self.gone_at + self.given_up_s:
            raise HostLost("nothing acknowledges what is sent to it")
        self.there_at = max(self.there_at, self.cable.loop.now + self.cable.way_s())
        self.cable.later(self.there_at - self.cable.loop.now, self.came.put_nowait, item)

    async def receive(self) -> Any:
        """What comes next. Raises HostLost where the other side has closed."""
        if (item := await self.came.get()) is None:
            raise HostLost("its connection is closed")
        return item

    def close(self) -> None:
        """Both ends hear of it, after all that was sent."""
        if not self.closed:
            with suppress(HostLost):  # the other end's machine is gone
                self.send(None)
            self.closed = True


@dataclass(slots=True)
class Connection:
    """Of one host: both of the product's connections, by their directions."""

    orders: Wire
    said: Wire  # signs of life, and what was taken up
    answers: Wire

    @classmethod
    def over(cls, cable: Cable) -> "Connection":
        return cls(Wire(cable), Wire(cable), Wire(cable))

    def close(self) -> None:
        for wire in (self.orders, self.said, self.answers):
            wire.close()


class Programs:
    """Programs that all hosts of an island compute together: each waits there for all others.

    One that is dead is waited for without end, as by the product's.
    """

    def __init__(self, cable: Cable, hosts: int) -> None:
        self.cable = cable
        self.hosts = hosts
        # By the order that they carry out: what each host brought, and who waits.
        self.brought: dict[int, dict[int, Any]] = {}
        self.waiting: dict[int, list[asyncio.Future[list[Any]]]] = {}

    def meet(self, number: int, index: int, value: Any) -> "asyncio.Future[list[Any]]":
        """What every host has brought to it, in their order."""
        there = self.brought.setdefault(number, {})
        there[index] = value
        met: asyncio.Future[list[Any]] = self.cable.loop.create_future()
        waiting = self.waiting.setdefault(number, [])
        waiting.append(met)
        if len(there) == self.hosts:
            del self.brought[number], self.waiting[number]
            values = [there[n] for n in range(self.hosts)]
            for one in waiting:
                self.cable.later(self.cable.way_s(), _settle, one, values)
        return met


def _settle(future: "asyncio.Future[Any]", values: Any) -> None:
    if not future.done():
        future.set_result(values)
