"""The network of a whole world: links between machines and the hub, each way by itself.

What a process has sent is on its way whatever becomes of the process. What one connection carries
arrives in its order, as over TCP. What meets a cut waits for its end, but not for ever, and what
comes after it on that connection waits behind it. What meets a clog waits until it is released.

Older worlds are not `in_order`: what met a cut tries again by itself there, and may come before
what was sent before it. They stay as they are, since each shows a fault that the product had.
"""

import contextvars
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from diloco_simulator.virtual_loop import VirtualLoop
from diloco_simulator.worlds.options import Options

# What the delays of a slow link are multiplied by.
SLOW = 10.0
# What met a cut tries again this often, and is given up after so long, in virtual seconds.
RETRY_S, GIVEN_UP_S = 0.5, 20.0

Action = Callable[[], object]


@dataclass(slots=True)
class NetLink:
    """Of one machine."""

    out: bool = True
    into: bool = True
    slow: bool = False
    busy_until: float = 0.0  # bytes on their way before


@dataclass(slots=True)
class Way:
    """One direction of one connection: `arrived_at` keeps what it carries in order."""

    link: NetLink
    out: bool
    arrived_at: float = 0.0
    clogged: bool = False
    # Before a cut or a clog, the oldest first: until when, of which life of the hub, and what.
    waiting: deque[tuple[float, int, Action]] = field(default_factory=deque)
    tries: bool = False  # somebody looks again soon whether it is open

    @property
    def open(self) -> bool:
        return not self.clogged and (self.link.out if self.out else self.link.into)


class Net:
    """Virtual delays, drawn from dice of its own."""

    def __init__(
        self, loop: VirtualLoop, rng: Random, options: Options, counts: Counter[str]
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.options = options
        self.counts = counts
        self.links: dict[str, NetLink] = {}
        self.faulty = True
        self.away = False  # the hub, for everybody
        self.gone = False  # it is, until somebody has put it back
        self.lives = 1  # of the hub: what was on its way to the one before never comes
        self.in_order = bool(options.in_order or options.clogs or options.storms)
        self.clogged: list[Way] = []
        self.outside = contextvars.Context()  # of no process

    def link(self, machine: str) -> NetLink:
        return self.links.setdefault(machine, NetLink())

    def heal(self) -> None:
        """From now on nothing is cut, slow or lost."""
        self.faulty = self.away = False
        for link in self.links.values():
            link.out = link.into = True
            link.slow = False
        for way in [*self.clogged]:
            self.release(way)

    def clog(self, way: Way) -> None:
        """Nothing of it arrives until it is released."""
        way.clogged = True
        self.clogged.append(way)

    def release(self, way: Way) -> int:
        """What waited arrives at once, in its order, unless there is a cut as well: how much."""
        if not way.clogged:
            return 0
        way.clogged = False
        self.clogged.remove(way)
        return self._pass(way)

    def chance(self, rate: float, what: str) -> bool:
        """Whether a fault strikes now; counted."""
        if rate <= 0 or not self.faulty or self.rng.random() >= rate:
            return False
        self.counts[what] += 1
        return True

    def send(self, way: Way, size: int, arrive: Action, *, sure: bool = False) -> None:
        """`arrive` at the other end some time later; or never, if it is not `sure`."""
        now = self.loop.now
        at = max(way.arrived_at, now + self._delay_s(way, size, now))
        way.arrived_at = at
        until, life = math.inf if sure else now + GIVEN_UP_S, 0 if sure else self.lives
        self.loop.call_at(at, self._there, way, until, life, arrive, context=self.outside)

    def _delay_s(self, way: Way, size: int, now: float) -> float:
        mean, link = self.options.delay_s, way.link
        if self.faulty:
            mean *= (SLOW if link.slow else 1.0) * (0.5 + self.rng.expovariate(2.0))
        rate = self.options.link_bytes_per_s
        if rate == math.inf:
            return mean
        link.busy_until = max(link.busy_until, now) + size / rate
        return mean + link.busy_until - now

    def _there(self, way: Way, until: float, life: int, arrive: Action) -> None:
        """At the other end, or before a cut, or behind what waits for its end."""
        if life not in (0, self.lives):
            return
        if not way.waiting and self._passes(way):
            arrive()
        elif self.in_order:
            way.waiting.append((until, life, arrive))
            if not way.tries:
                way.tries = True
                self.loop.call_at(self.loop.now + RETRY_S, self._try, way, context=self.outside)
        elif self.loop.now < until:
            at = self.loop.now + RETRY_S
            self.loop.call_at(at, self._there, way, until, life, arrive, context=self.outside)

    def _passes(self, way: Way) -> bool:
        return not self.away and not self.gone and way.open

    def _try(self, way: Way) -> None:
        """Whether the way is open again; as long as anything waits."""
        self._pass(way)
        way.tries = bool(way.waiting)
        if way.tries:
            self.loop.call_at(self.loop.now + RETRY_S, self._try, way, context=self.outside)

    def _pass(self, way: Way) -> int:
        """All that waits arrives, which is so much; or what has waited for too long never does."""
        if not self._passes(way):
            now = self.loop.now
            way.waiting = deque(waiting for waiting in way.waiting if now < waiting[0])
            return 0
        arrived = 0
        while way.waiting:
            _, life, arrive = way.waiting.popleft()
            if life in (0, self.lives):
                arrived += 1
                arrive()
        return arrived
