"""The end of a run: by its budget once every round is through, by its user within a stated time.

A stop asks for one more round of every fragment, and gives all of them STOP_S together. What waits
for somebody then is closed with what it has, what was never published stays on the tape for
whoever leads next, and the end is recorded. Pure.
"""

from diloco_shared.protocol.messages import TapeEnd
from diloco_syncer.events import Effect, Ended
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import Roster
from diloco_syncer.rounds.round import Phase
from diloco_syncer.rounds.rounds import Rounds

# What a leader waits for after it has heard of a stop, in seconds. A stop shall have ended the run
# within ten: 3 s of a lease that runs out if the leader is gone, these, and the rest for its news.
STOP_S = 5.0
STOPS = "the run stops"


class Ending:
    """Of one leader's term; time decides, and the rounds in flight."""

    def __init__(self, history: History, roster: Roster, rounds: Rounds) -> None:
        self.history = history
        self.roster = roster
        self.rounds = rounds
        self.until: float | None = None  # of a stop that is under way
        self.told = False
        self.now = 0.0

    def restored(self) -> None:
        """History goes on where it had ended."""
        self.until, self.told, self.rounds.stopped = None, False, False

    @property
    def due(self) -> bool:
        """Whether a stop has had its time."""
        return self.until is not None and self.now >= self.until

    @property
    def deadline(self) -> float | None:
        """When `advance` must be called at the latest; None once it has been."""
        return None if self.due else self.until

    def advance(self, asked: bool, now: float) -> list[Effect]:
        """Once a stop has had its time: close what waits for somebody, and open nothing more."""
        self.now = now
        if self.until is None and (asked or self.history.stopping):
            self.until = now + STOP_S
        if not self.due or self.history.outcome:
            return []
        self.rounds.stopped = True
        return [effect for r in list(self.rounds.open) for effect in self.rounds.cut(r, now, STOPS)]

    @property
    def through(self) -> bool:
        """Whether no round is in flight that the end has to wait for."""
        waits = (r for r in self.rounds.open if not (self.due and r.phase is Phase.PUBLISHING))
        return next(waits, None) is None

    def record(self, wall: float, *, restoring: bool) -> TapeEnd | None:
        """The end, once nothing is in flight and no round is left; or as soon as a stop may."""
        h = self.history
        if h.outcome or not self.through or not (h.stopping or h.finished_rounds):
            return None
        # Nobody trains: there is nothing to wait for.
        stepping = [m.learner for m in self.roster.stepping(self.now)]
        nobody = h.stopping and not h.enough.answer(stepping).enough
        early = self.due and h.stopping
        if restoring and not early:
            return None
        if not (h.finished_rounds or nobody or early):
            return None
        return TapeEnd(
            term=h.term,
            outcome="stopped" if h.stopping else "finished",
            reason="stopped by the user" if h.stopping else "the budget is used",
            versions=tuple(h.versions),
            at=wall,
            counts=self.roster.counts.to_record(h.ledger),
        )

    def tell(self) -> list[Effect]:
        """That it is over, once; nobody waits for a publication that no stream takes."""
        if not self.history.outcome or self.told or not self.through:
            return []
        self.told = True
        return [Ended(self.history.outcome)]
