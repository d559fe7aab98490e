"""Says that a run which ought to go on does not: no progress, learners that step, and no reason.

A safety net for faults nobody thought of. Pure; judges from what the leader's machine takes in.
"""

from diloco_syncer.events import (
    Appended,
    BusBack,
    ContributionSeen,
    Effect,
    Event,
    InitSeen,
    JoinSeen,
    Published,
    Staged,
    Tell,
)
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import Roster
from diloco_syncer.rounds.round import Phase, Round
from diloco_syncer.rounds.rounds import Rounds
from diloco_syncer.rounds.stragglers import SLOWER_MAX

# What moves a run on. A refused contribution is of no use, but its bytes came.
MOVES = Appended | ContributionSeen | InitSeen | JoinSeen | Published | Staged
# Leases without any of these: every wait of the protocol that is not bounded by a deadline of its
# own ends within one, and one more may be lost with a leader; beyond four there is a fault.
LEASES = 4
# Rounds come as learners step: so many intervals of the slowest may pass as well.
INTERVALS = 3
# Nobody knows how long the steps of a learner take that has not taken one: so long, at most, in
# seconds. A step of a large model takes a minute, and its first one is compiled.
FIRST_STEP_S = 600.0


class Watchdog:
    """Of one leader's term."""

    def __init__(self, history: History, roster: Roster, rounds: Rounds) -> None:
        self.history = history
        self.roster = roster
        self.rounds = rounds
        self.moved_at: float | None = None  # None: nothing has been looked at yet
        self.since: dict[int, tuple[Phase, float]] = {}  # round -> its phase, and from when on
        self.round_at: float | None = None
        self.told = False

    def saw(self, event: Event, now: float) -> None:
        """Everything that the machine takes in."""
        if self.moved_at is None:
            self.moved_at = self.round_at = now
        if isinstance(event, MOVES | BusBack):  # nothing can move while the bus is away
            self.moved_at = now

    def closed(self, now: float) -> None:
        """A round is on the tape."""
        self.round_at = now

    def idle(self, now: float) -> None:
        """There is a stated reason to wait: patience begins anew after it."""
        self.moved_at, self.told = now, False

    def seconds_since_round(self, now: float) -> float:
        return 0.0 if self.round_at is None else max(now - self.round_at, 0.0)

    def patience_s(self, now: float) -> float:
        """Seconds without progress that can be explained."""
        every, stepping = self.history.spec.algorithm.sync_every_steps, self.roster.stepping(now)
        said_s = max((m.progress.step_s for m in stepping if m.progress), default=0.0)
        # Beyond that its word is no reason: one learner's would explain any standstill.
        slowest_s = min(said_s, SLOWER_MAX * self.roster.usual_step_s(now))
        interval_s = slowest_s * every / len(self.history.owned)
        first_s = FIRST_STEP_S if any(m.progress and not m.progress.step_s for m in stepping) else 0
        waits = [r.deadline - r.pulled_at for r in self.rounds.open if r.phase is Phase.PULLING]
        waits += [r.grace_until - r.quorum_at for r in self.rounds.open if r.phase is Phase.GRACE]
        return max(LEASES * self.roster.lease_s, *waits, first_s) + INTERVALS * interval_s

    def stuck(self, now: float) -> str:
        """What is known about a standstill; "" while the run moves."""
        if self.moved_at is None:
            return ""
        # A round that closes because its time is over moves the run, though no event says so.
        closed = [r.closed_at for r in self.rounds.open if r.phase is Phase.STAGING]
        if now - max([self.moved_at, *closed]) <= self.patience_s(now):
            return ""
        known = "; ".join(self._known(r, now) for r in self.rounds.open[:4]) or "no round is open"
        return f"nothing for {now - self.moved_at:.0f} s and no reason is known: {known}"

    def look(self, now: float) -> None:
        """Remember since when each open round is where it is."""
        self.since = {
            r.n: known if (known := self.since.get(r.n)) and known[0] is r.phase else (r.phase, now)
            for r in self.rounds.open
        }

    def _known(self, r: Round, now: float) -> str:
        phase, since = self.since.get(r.n, (r.phase, now))
        awaited = r.unanswered if phase is Phase.PULLING else ()
        whom = f", awaits {', '.join(awaited[:4])}" if awaited else ""
        return f"round {r.n} of fragment {r.fragment} {phase.value} for {now - since:.0f} s{whom}"

    def tell(self, why: str) -> list[Effect]:
        """An event, once per standstill."""
        if not why or self.told:
            self.told = self.told and bool(why)
            return []
        self.told = True
        return [Tell("stuck", why[:500])]
