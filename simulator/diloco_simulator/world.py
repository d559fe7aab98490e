"""Virtual time and everything between processes: links, core messages, durable logs.

One heap of (time, sequence, action) and one seeded generator: a seed is a run.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diloco_simulator.options import Options

Action = Callable[[], None]

# A link that is cut is tried again this often, in virtual seconds.
RETRY_S = 0.5
# Before what a full stream refused is put again, in virtual seconds: the product's longest pause.
FULL_S = 2.0
# What a slow link's delays are multiplied by.
SLOW = 10.0
# A transfer that is overtaken takes up to this many mean delays more.
OVERTAKEN_DELAYS = 10.0
# What a stream keeps of a message beside its payload: headers, manifest, the file's own.
MESSAGE_BYTES = 64


@dataclass(slots=True)
class Link:
    """Between one process and the hub; each way may be cut by itself."""

    out: bool = True
    into: bool = True
    slow: bool = False
    busy_until: float = 0.0  # bytes on their way before: several transfers share the link


@dataclass(frozen=True, slots=True)
class Item:
    """One stored message."""

    seq: int
    subject: str
    message: Any
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes, as the stream's limit counts it."""
        return len(self.payload) + MESSAGE_BYTES


class World:
    """The clock, the dice and the links."""

    def __init__(self, seed: int, options: Options) -> None:
        self.seed = seed
        self.options = options
        self.rng = random.Random(seed)
        self.now = 0.0
        self.heap: list[tuple[float, int, Action]] = []
        self.counter = 0
        self.links: dict[str, Link] = {}
        self.faulty = True  # until healed
        self.away = False  # the hub, for everybody
        self.squeezed = False  # the hub's disk is full: no stream takes anything
        self.counts: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()  # performed so far, by role

    # --- time ----------------------------------------------------------------------------------

    def at(self, when: float, action: Action) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (max(when, self.now), self.counter, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Advance to `until`, or to when `done` says so."""
        while self.heap and self.heap[0][0] <= until and not done():
            self.now, _, action = heapq.heappop(self.heap)
            action()
        if not done():
            self.now = max(self.now, until)

    # --- chance --------------------------------------------------------------------------------

    def chance(self, rate: float, what: str) -> bool:
        """Whether a fault strikes now; counted. Never after the world is healed."""
        if rate <= 0 or not self.faulty or self.rng.random() >= rate:
            return False
        self.counts[what] += 1
        return True

    def dies(self, role: str, rate: float, before: str) -> bool:
        """Whether a process dies before its next effect; counted by role and effect."""
        self.effects[role] += 1
        if (role, self.effects[role]) == self.options.dies_at or (
            rate > 0 and self.faulty and self.rng.random() < rate
        ):
            self.counts["learner crashes" if role == "learner" else "syncer crashes"] += 1
            self.counts[f"{role} dies before {before}"] += 1
            return True
        return False

    def delay(self, *processes: str) -> float:
        """One way, in virtual seconds: exponential, so that messages overtake each other."""
        mean = self.options.delay_s
        if not self.faulty:
            return mean
        if any((link := self.links.get(p)) is not None and link.slow for p in processes):
            mean *= SLOW
        return mean * (0.5 + self.rng.expovariate(2.0))

    def transfer(self, process: str, size: int) -> float:
        """Seconds until `size` bytes more have gone over a process's link, after those before."""
        rate = self.options.link_bytes_per_s
        if rate == math.inf:
            return 0.0
        link = self.link(process)
        link.busy_until = max(link.busy_until, self.now) + size / rate
        return link.busy_until - self.now

    def heal(self) -> None:
        """From now on nothing goes wrong."""
        self.faulty = self.away = self.squeezed = False
        for link in self.links.values():
            link.out, link.into, link.slow = True, True, False

    def link(self, process: str) -> Link:
        return self.links.setdefault(process, Link())

    def reaches(self, process: str) -> bool:
        """Whether what a process sends gets to the hub."""
        return self.link(process).out and not self.away

    def hears(self, process: str) -> bool:
        """Whether what the hub sends gets to a process."""
        return self.link(process).into and not self.away

    # --- core messages -------------------------------------------------------------------------

    def core(self, source: str, target: str, deliver: Action) -> None:
        """At most once, in any order, perhaps twice, perhaps never."""
        if not self.reaches(source) or self.chance(self.options.loss, "lost"):
            return
        copies = 2 if self.chance(self.options.duplicate, "duplicated") else 1
        for _ in range(copies):

            def arrive() -> None:
                if self.hears(target):
                    deliver()

            self.after(self.delay(source, target), arrive)

    # --- requests with an answer ---------------------------------------------------------------

    def request(self, process: str, act: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """`act` at the hub, then `answer` with its result; `answer(None)` when unknown."""
        if not self.reaches(process):
            self.after(RETRY_S, lambda: answer(None))
            return

        def there() -> None:
            if self.away:
                self.after(RETRY_S, lambda: answer(None))
                return
            result = act()
            if not self.hears(process) or self.chance(self.options.unknown, "unknown"):
                self.after(RETRY_S, lambda: answer(None))
            else:
                self.after(self.delay(process), lambda: answer(result))

        self.after(self.delay(process), there)


@dataclass(slots=True)
class Log:
    """A durable stream at the hub: ordered, deduplicated by subject, read at least once."""

    world: World
    name: str
    items: list[Item] = field(default_factory=list)
    by_subject: dict[str, Item] = field(default_factory=dict)
    readers: list["Reader"] = field(default_factory=list)
    seq: int = 0
    on_store: Callable[[Item], None] = lambda item: None
    limit: float = math.inf  # in bytes
    held: int = 0  # bytes

    def store(self, subject: str, message: Any, payload: bytes = b"") -> Item | None:
        """Idempotent per subject; None: it is full."""
        known = self.by_subject.get(subject)
        if known is not None:
            return known
        item = Item(self.seq + 1, subject, message, payload)
        if self.held + item.size > self.limit or self.world.squeezed:
            self.world.counts[f"{self.name} full"] += 1
            return None
        self.seq, self.held = item.seq, self.held + item.size
        self.items.append(item)
        self.by_subject[subject] = item
        self.on_store(item)
        for reader in self.readers:
            reader.wake()
        return item

    def after(self, seq: int) -> list[Item]:
        """What was stored after `seq`, in order."""
        first = len(self.items)
        while first and self.items[first - 1].seq > seq:
            first -= 1
        return self.items[first:]

    def purge(self, gone: Callable[[Item], bool]) -> None:
        for item in self.items:
            if gone(item):
                del self.by_subject[item.subject]
                self.held -= item.size
        self.items = [i for i in self.items if i.subject in self.by_subject]

    def lose(self, count: int) -> int:
        """The newest were not on disk yet: how many of `count` there were to lose.

        Their sequences come again; readers, which all lose their connections, look where it ends.
        """
        lost = {item.seq for item in self.items[-count:]} if count else set[int]()
        self.purge(lambda item: item.seq in lost)
        if lost:
            self.seq = min(lost) - 1
            for reader in self.readers:
                reader.seen = min(reader.seen, self.seq)
        return len(lost)

    def put(
        self, process: str, subject: str, message: Any, payload: bytes, *, until: float
    ) -> None:
        """Repeat until stored, or until the deadline."""
        world = self.world

        def attempt() -> None:
            if world.now > until:
                return
            if not world.reaches(process) or world.chance(world.options.loss, "put again"):
                world.after(RETRY_S, attempt)
                return
            if self.store(subject, message, payload) is None:
                world.after(FULL_S, attempt)
                return
            if world.chance(world.options.duplicate, "put twice"):
                world.after(world.delay(), lambda: self.again(subject))

        moved_s = world.transfer(process, len(payload))
        world.after(world.delay(process) + moved_s, attempt)

    def again(self, subject: str) -> None:
        """Deliver a stored item a second time."""
        item = self.by_subject.get(subject)
        if item is not None:
            for reader in self.readers:
                reader.repeat(item)


class Reader:
    """One process's place in a log, while that process lives.

    `found` is told of items in order, as manifests are read; `deliver` gets what they name, and
    transfers may overtake each other.
    """

    def __init__(
        self,
        log: Log,
        process: str,
        alive: Callable[[], bool],
        deliver: Callable[[Item], None],
        after_seq: int = 0,
        found: Callable[[Item], None] = lambda item: None,
    ) -> None:
        self.found = found
        self.log = log
        self.process = process
        self.alive = alive
        self.deliver = deliver
        self.seen = after_seq
        self.pumping = False
        log.readers.append(self)
        self.wake()

    def wake(self) -> None:
        if not self.pumping:
            self.pumping = True
            self.log.world.after(self.log.world.delay(self.process), self._pump)

    def repeat(self, item: Item) -> None:
        if self.alive():
            self.deliver(item)

    def _pump(self) -> None:
        world = self.log.world
        self.pumping = False
        if not self.alive():
            self.log.readers.remove(self)
            return
        if not world.hears(self.process):
            self.pumping = True
            world.after(RETRY_S, self._pump)
            return
        for item in self.log.after(self.seen):
            if not self.alive():
                return
            self.seen = item.seq
            self.found(item)
            if world.chance(world.options.overtaken, "overtaken"):
                more_s = world.options.delay_s * OVERTAKEN_DELAYS * world.rng.random()
                world.after(more_s, partial(self._late, item))
            elif moved_s := world.transfer(self.process, len(item.payload)):
                world.after(moved_s, partial(self._late, item))
            else:
                self.deliver(item)

    def _late(self, item: Item) -> None:
        if self.log.world.hears(self.process):
            self.repeat(item)
        else:
            self.log.world.after(RETRY_S, partial(self._late, item))
