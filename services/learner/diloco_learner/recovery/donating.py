"""What goes out of this learner's inner state, one copy at a time.

A copy is as large as moments and counts, on the host. So an own checkpoint waits for what is on its
way: it is made at the first boundary at which nothing is. The part of a run-wide checkpoint cannot
wait, since nothing of after the mark may be in it: while a copy is on its way, which was made
before the mark, that one is the part too. Nor does a newcomer wait, since a checkpoint may take a
quarter of an hour to be written: moments may be old, so it is given the copy that is on its way.
"""

from collections import deque
from dataclasses import dataclass, field

from diloco_learner.events import Checkpoint, GiveState, KeepPart
from diloco_learner.exchange.counters import Counters, Marks
from diloco_shared.protocol.messages import Donate

# --------------------------------------------------------------------------------------------------
# Requests for this learner's inner state: each nonce is served once, when it can be.

# Newcomers waiting for their turn: more than restart within one lease.
REQUESTS_MAX = 8
# The syncer repeats a request every second: after this long without one it is settled elsewhere.
SILENCE_S = 10.0
# Nonces remembered as served: a repeat comes within seconds.
SERVED_MAX = 64
# Newcomers that one copy is given to. Whoever comes after them waits until it is gone: else, where
# newcomers never cease, it would never go, and ever older moments would be given and kept.
GIVEN_MAX = 8


@dataclass(slots=True)
class StateRequest:
    """A request and when it was last repeated."""

    donate: Donate
    seen_at: float


@dataclass(slots=True)
class DonationRequests:
    """Those that wait to be served; at most one per newcomer."""

    learner: str
    incarnation: int
    requests: dict[str, StateRequest] = field(default_factory=dict)  # by newcomer
    served: deque[str] = field(default_factory=lambda: deque(maxlen=SERVED_MAX))

    def ask(self, donate: Donate, now: float) -> str:
        """Note a request; why not, or ""."""
        if (donate.donor, donate.donor_incarnation) != (self.learner, self.incarnation):
            return "request to another donor"
        if donate.newcomer == self.learner:
            return "request by this learner itself"
        if donate.nonce in self.served:
            return "request served before"
        self.requests[donate.newcomer] = StateRequest(donate, now)
        if len(self.requests) > REQUESTS_MAX:
            del self.requests[min(self.requests, key=lambda n: self.requests[n].seen_at)]
        return ""

    def due(self, epoch: int, counters: Counters, now: float) -> Donate | None:
        """The oldest request that can be served from the state as it is now; it counts as served.

        A learner that has not itself trained since it began gives nothing: its moments may be
        fresh, and a fresh initialisation must never become the source of a running run.
        """
        if not self.requests or counters.step < 1:
            return None
        for newcomer, request in list(self.requests.items()):
            if now - request.seen_at > SILENCE_S:
                del self.requests[newcomer]
            elif request.donate.epoch == epoch and counters.covers(request.donate.versions):
                del self.requests[newcomer]
                self.served.append(request.donate.nonce)
                return request.donate
        return None


@dataclass(frozen=True, slots=True)
class CopyMoment:
    """When the copy that is on its way was made."""

    epoch: int
    step: int
    versions: tuple[int, ...]


@dataclass(slots=True)
class Handing:
    """`every`: steps between own checkpoints. Mutated only through the exchange."""

    donations: DonationRequests
    every: int
    marks: Marks = field(default_factory=Marks)
    copy: CopyMoment | None = None  # on its way
    given: int = 0  # newcomers that it goes to
    due: bool = False  # an own checkpoint

    def part(self, epoch: int, c: Counters) -> list[KeepPart]:
        """A checkpoint was begun: this is where the cut goes through this learner.

        Called before anything of later is adopted.
        """
        if not (number := self.marks.take()):
            return []
        made = self.copy or self._made(epoch, c)
        return [KeepPart(number, made.epoch, made.step, made.versions)]

    def give(self, epoch: int, c: Counters, now: float) -> list[GiveState]:
        """The request that has waited longest, if it can be served from the state as it is."""
        donate = self.donations.due(epoch, c, now) if self._may_give(epoch) else None
        if donate is None:
            return []
        made = self.copy or self._made(epoch, c)
        self.given += 1
        return [GiveState(donate, made.versions, made.step)]

    def _may_give(self, epoch: int) -> bool:
        """Whether the copy that is on its way, if any, may go to one more newcomer.

        Not what was kept before this learner trained, or in another epoch: see `DonationRequests`.
        """
        copy = self.copy
        return copy is None or (copy.epoch == epoch and copy.step >= 1 and self.given < GIVEN_MAX)

    def keep(self, epoch: int, moments: int, c: Counters, *, stepped: bool) -> list[Checkpoint]:
        """An own checkpoint, where one is due. `moments`: the epoch that these are of."""
        self.due = self.due or (stepped and c.step % self.every == 0)
        if self.copy or not self.due:
            return []
        self.due = False
        made = self._made(epoch, c)
        return [Checkpoint(moments, made.step, made.versions, final=False)]

    def gone(self) -> None:
        """What was on its way has arrived, or was given up."""
        self.copy = None

    def _made(self, epoch: int, c: Counters) -> CopyMoment:
        self.copy, self.given = CopyMoment(epoch, c.step, tuple(c.adopted_P)), 0
        return self.copy
