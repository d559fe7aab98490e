"""Events waiting for a leader's machine: in order, bounded, and what must not be lost is not.

Answers to the machine's own effects are never dropped: there are at most a few per round in flight,
publication, snapshot and checkpoint, and a lost one would be waited for without end. What learners
repeat by themselves is: reports give way to newer ones of the same life once many wait, and beyond
the limit whatever comes from outside is counted and dropped.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

from diloco_syncer.events import (
    BusBack,
    ContributionSeen,
    Event,
    InitMoved,
    JoinSeen,
    Malformed,
    ProgressSeen,
)

# Beyond this many, a report or a join replaces the one of the same life that waits: the machine is
# seconds behind, and only the newest matters.
LONG = 1024
# Beyond this many, what comes from outside is dropped: reports of MEMBERS_MAX learners, and as much
# again of everything else. Some tens of MB.
MAX = 16_384


class Arrivals:
    """A queue for one reader. `holds` tells whether a contribution's payload is in memory."""

    def __init__(self, holds: Callable[[str], bool] = lambda _: True) -> None:
        self._holds = holds
        self._waiting: OrderedDict[int, Event] = OrderedDict()
        self._place: dict[Hashable, int] = {}  # of the newest of its kind, while it waits
        self._next = 0
        self._there = asyncio.Event()
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: Event) -> bool:
        """Leave an event; False if it is dropped."""
        key, place = self._key(event), None
        if key is not None:
            place = self._place.get(key)
        if place is not None and (len(self) >= LONG or isinstance(event, BusBack | InitMoved)):
            self._waiting[place] = event
            return True
        if len(self) >= MAX and self._repeated(event):
            self.dropped[type(event).__name__] += 1
            return False
        self._waiting[self._next] = event
        if key is not None:
            self._place[key] = self._next
        self._next += 1
        self._there.set()
        return True

    async def get(self) -> Event:
        """The oldest, once there is one."""
        while not self._waiting:
            self._there.clear()
            await self._there.wait()
        place, event = self._waiting.popitem(last=False)
        key = self._key(event)
        if key is not None and self._place.get(key) == place:
            del self._place[key]
        return event

    @staticmethod
    def _key(event: Event) -> Hashable | None:
        """What only the newest is worth of; None: every one counts."""
        match event:
            case ProgressSeen():
                return ("progress", event.progress.learner, event.progress.incarnation)
            case JoinSeen():
                return ("join", event.join.learner, event.join.nonce)
            case BusBack() | InitMoved():
                return type(event).__name__
        return None

    def _repeated(self, event: Event) -> bool:
        """Whether it comes from outside, and comes again or is not needed."""
        if isinstance(event, ContributionSeen):
            return not self._holds(event.manifest.blob.subject)
        return isinstance(event, ProgressSeen | JoinSeen | Malformed)
