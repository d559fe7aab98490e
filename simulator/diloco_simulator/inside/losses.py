"""Who is lost, as a leader decides it, and as its outbox tells it: that leaves out what is too much
of one learner. Pure.
"""

import math

from diloco_syncer.events import Tell
from diloco_syncer.members.claims import TOLD_AGAIN_S

# From where it is decided to where it is told; both are done in the same instant, or nearly.
SOON_S = 1.0


class Losses:
    """Of one term. `first`: it leads the first shard, which alone tells of learners.

    All times are seconds of the leader's own clock.
    """

    def __init__(self, *, first: bool) -> None:
        self.first = first
        self.decided: dict[str, float] = {}  # who is lost -> since when
        self.told: set[str] = set()  # who was told lost, and not alive since
        self.beat_at = -math.inf

    def decides(self, tell: Tell, now: float) -> None:
        if tell.kind == "learner-lost":
            self.decided.setdefault(tell.data["learner"], now)
        elif tell.kind == "learner-alive":
            self.decided.pop(tell.data["learner"], None)

    def tells(self, tell: Tell) -> None:
        if tell.kind == "learner-lost":
            self.told.add(tell.data["learner"])
        elif tell.kind == "learner-alive":
            self.told.discard(tell.data["learner"])

    def known(self, now: float) -> set[str]:
        """Who is told lost, or need not be as yet. Asked with each beat, before it is sent: with
        the one before, whatever was left out for long was to be told."""
        before, self.beat_at = self.beat_at, now
        late = {who for who, at in self.decided.items() if at + TOLD_AGAIN_S + SOON_S < before}
        return self.decided.keys() - (late - self.told if self.first else set())

    def stale(self) -> set[str]:
        """Who was told lost, and is alive without being told so. Asked between events."""
        return self.told - self.decided.keys()
