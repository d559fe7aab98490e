"""I13: the hosts of an island are one learner.

All take up the same orders in the same order, and hold alike what they share. Each takes its part
of the anchor that process 0 names. What the island contributes is what one host would. Half an
island does not act, and does not live on.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco_learner.hosts import whole
from diloco_learner.hosts.shares import KEPT_MAX
from diloco_shared.bus.port import Stored
from diloco_shared.protocol.chunks import HEADER_DIGEST, HEADER_INDEX
from diloco_shared.protocol.messages import Blob
from diloco_simulator.checkers.promises import Report

# Beyond the limit of silence: two looks, what is on its way, and the standstill of a thread.
SLACK_S = 4 * whole.BEAT_S
# Numbers of orders of which all hosts were heard that are kept: one host is ahead by few.
KEPT = 64


class Process(Protocol):
    """Process 0 of an island."""

    killed: bool
    frozen: bool
    thawed_at: float


class Hosts(Protocol):
    """An island: what is asked of it."""

    hosts: int
    silence_s: float
    followers: dict[int, Any]


@dataclass(slots=True)
class IslandLife:
    """From the start of process 0 to its end."""

    watch: "IslandWatch"
    name: str  # of the learner
    host: str
    island: Hosts
    process: Process
    whole_at: float = math.inf
    ended_at: float = math.inf
    dead_at: float = math.inf  # the first of its hosts that died
    heads: dict[int, bytes] = field(default_factory=dict)  # of orders, as process 0 told them
    last: dict[int, int] = field(default_factory=dict)  # order that each host took up last
    states: dict[int, tuple[int, str]] = field(default_factory=dict)  # first host, what it held
    # By order that names an anchor: what each host has of that one.
    parts: dict[int, Mapping[int, str]] = field(default_factory=dict)
    # What was put together, by fragment and round; and of that, what is not on the hub yet.
    made: set[tuple[int, int, bytes]] = field(default_factory=set)
    putting: set[tuple[int, int, bytes]] = field(default_factory=set)
    # By host that could not carry its share: until when, by process 0's clock, it is not asked.
    resting: dict[int, float] = field(default_factory=dict)

    # --- the plan ------------------------------------------------------------------------------

    def told(self, number: int, head: bytes) -> None:
        """Process 0 tells an order."""
        self.heads[number] = head
        self.heads.pop(number - KEPT, None)

    def taken(self, index: int, number: int, head: bytes) -> None:
        """A host takes one up."""
        self.watch.report.looked("I13")
        before = self.last.get(index, 0)
        if number != before + 1:
            self._broken(f"host {index} takes up order {number} after {before}")
        self.last[index] = number
        if self.heads.get(number, head) != head:
            self._broken(f"host {index} takes up another order {number} than was told")

    def carried(self, index: int, number: int, state: str) -> None:
        """A host has carried out an order that changes what all hold alike."""
        first, known = self.states.setdefault(number, (index, state))
        if known != state:
            self._broken(f"after order {number}, host {index} holds {state}, host {first} {known}")
        self.states.pop(number - KEPT, None)

    def named(self, number: int, parts: Mapping[int, str]) -> None:
        """Process 0 names an anchor in that order; by host, a digest of what it has of it."""
        self.parts[number] = parts
        while len(self.parts) > KEPT:
            del self.parts[next(iter(self.parts))]

    def took(self, index: int, number: int, digest: str) -> None:
        """A host takes its part of an anchor that an order names."""
        self.watch.report.looked("I13")
        if self.parts.get(number, {}).get(index, digest) != digest:
            self._broken(f"host {index} takes another anchor than order {number} names")

    # --- what it contributes -------------------------------------------------------------------

    def gathered(self, payload: bytes, expected: bytes, fragment: int, round_: int) -> None:
        """All parts of a contribution are there."""
        self.watch.report.looked("I13")
        self.acts()
        if payload != expected:
            self._broken(f"parts of fragment {fragment} for round {round_} make another whole")
        self.made.add((fragment, round_, payload))
        self.putting.add((fragment, round_, payload))

    # --- what its hosts carry ------------------------------------------------------------------

    def rests(self, index: int, until: float) -> None:
        """A host has not stored its share, or not fetched its run."""
        self.resting[index] = until

    def asks(self, carriers: Iterable[int], now: float) -> None:
        """An order is told by which these hosts are to keep their shares."""
        for index in carriers:
            self.watch.report.looked("I13")
            if now < self.resting.get(index, -math.inf):
                self._broken(f"host {index} is to carry again, which has just failed")

    def shared(self, payload: bytes, expected: bytes, of: str) -> None:
        """All parts of what the island gives away are there."""
        self.watch.report.looked("I13")
        if payload != expected:
            self._broken(f"parts of what it gives away make another whole: {of}")

    def keeps(self, of: str, many: int) -> None:
        """A host keeps so many shares of that kind."""
        self.watch.report.looked("I13")
        if many > KEPT_MAX[of]:
            self._broken(f"a host keeps {many} shares of what it carries: {of}")

    # --- who lives -----------------------------------------------------------------------------

    def died(self, now: float) -> None:
        """One of its hosts has: the island ends in time."""
        if self.dead_at < math.inf or self.ended_at < math.inf:
            return
        self.dead_at = now
        limit_s = self.island.silence_s + whole.LAST_WORDS_S + SLACK_S
        self.watch.later(limit_s, self._ends_by, limit_s)

    def acts(self) -> None:
        """It steps or contributes: not long after one of its hosts died."""
        self.watch.report.looked("I13")
        now = self.watch.now()
        since = max(self.dead_at, self.process.thawed_at)
        if self.dead_at < math.inf and now > since + self.island.silence_s + SLACK_S:
            self._broken(f"acts, and one of its hosts has died at {self.dead_at:.2f} s")

    def _ends_by(self, limit_s: float) -> None:
        self.watch.report.looked("I13")
        if self.process.killed:
            return
        if self.process.frozen:
            self.watch.later(limit_s, self._ends_by, limit_s)
            return
        if self.process.thawed_at > self.dead_at:
            left_s = self.process.thawed_at + limit_s - self.watch.now()
            if left_s > 0:
                self.watch.later(left_s, self._ends_by, limit_s)
                return
        self._broken(f"lives on {limit_s:.1f} s after one of its hosts died")

    def _broken(self, text: str) -> None:
        self.watch.broken(f"{self.host}: {text}")


class IslandWatch:
    """Of one world."""

    def __init__(
        self,
        report: Report,
        counts: Counter[str],
        now: Callable[[], float],
        later: Callable[..., object],
    ) -> None:
        """`later(seconds, do, *args)`: does it then."""
        self.report, self.counts, self.now, self.later = report, counts, now, later
        self.lives: list[IslandLife] = []
        # By payload, its subject and digest: chunks that the hub has ever taken.
        self.chunks: defaultdict[tuple[str, str], set[int]] = defaultdict(set)

    def begins(self, name: str, host: str, island: Hosts, process: Process) -> IslandLife:
        """Process 0 is started."""
        life = IslandLife(self, name, host, island, process)
        self.lives.append(life)
        return life

    def stored(
        self, learner: str, fragment: int, round_: int, payload: bytes, *, lies: bool
    ) -> None:
        """A contribution lies on the hub: if an island's, it was put together of all parts.

        `lies`: in this world it may be another one's, or not what the island made of it.
        """
        mine = [life for life in self.lives if life.name == learner]
        put = fragment, round_, payload
        for life in mine:
            life.putting.discard(put)
        if mine and not lies:
            self.report.looked("I13")
            if not any(put in life.made for life in mine):
                self.broken(f"{learner} has put for round {round_} what was never put together")

    def chunk(self, message: Stored) -> None:
        """The hub has taken a message that is no manifest."""
        headers = message.headers
        if HEADER_DIGEST in headers and HEADER_INDEX in headers:
            key = message.subject, headers[HEADER_DIGEST]
            self.chunks[key].add(int(headers[HEADER_INDEX]))

    def named(self, learner: str, blob: Blob) -> None:
        """A manifest of what several hosts may have carried: all chunks were stored before."""
        if any(life.name == learner for life in self.lives):
            self.report.looked("I13")
            known = self.chunks[blob.subject, blob.digest]
            if absent := set(range(blob.chunks)).difference(known):
                self.broken(f"{learner} names {blob.subject}, and stored no chunk {min(absent)}")

    def broken(self, text: str) -> None:
        self.report("I13", text)

    def numbers(self, invariant: str, text: str) -> None:
        """What a host finds wrong with its own numbers."""
        self.report(invariant, text)
