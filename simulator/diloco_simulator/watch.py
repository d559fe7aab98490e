"""Hands what happens in a world to the checkers, and keeps what they report."""

from collections.abc import Sequence
from typing import Any

from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import Beat, Grant, Pull, TapeEnd, TapeRecord, TapeRound
from diloco_simulator.checkers import Anchors, Leases, Members, Merges, Refusals
from diloco_simulator.world import World

# Last words may be under way this many mean delays: a longer delay is one in e^23.
LATE_DELAYS = 12


class Watch:
    """All observations of one world."""

    def __init__(self, world: World, spec: RunSpec) -> None:
        self.world = world
        self.violations: list[str] = []
        self.anchors = Anchors(self.broken)
        self.merges = Merges(self.broken, spec)
        self.leases = Leases(self.broken)
        self.members = Members(self.broken, spec)
        self.refusals = Refusals(self.broken)
        self.spec = spec
        self.ended = ""
        self.rounds = 0
        self.round_at = 0.0  # when the newest round was recorded

    def broken(self, invariant: str, text: str) -> None:
        self.violations.append(f"{invariant} at {self.world.now:.2f} s: {text}")

    def record(self, seq: int, record: TapeRecord) -> None:
        """Every record as the tape takes it."""
        self.merges.record(record)
        if isinstance(record, TapeRound):
            self.rounds += 1
            self.round_at = self.world.now
            self.world.counts["refused"] += sum(v.outcome == "refused" for v in record.verdicts)
            self.members.round(record, self.world.now, faulty=self.world.faulty)
            self.refusals.round(record)
        if isinstance(record, TapeEnd):
            self.ended = record.outcome

    def lost(self, kept: Sequence[TapeRecord]) -> None:
        """The tape lost its last records: they never were. What is left was checked before."""
        self.merges.report = lambda invariant, text: None
        self.merges.begin(self.spec.algorithm.quorum)
        for record in kept:
            self.merges.record(record)
        self.merges.report = self.broken
        self.ended = self.merges.ended

    def pulled(self, leader: str, pull: Pull, participants: dict[str, int]) -> None:
        late_s = LATE_DELAYS * self.world.options.delay_s
        self.members.pull(leader, pull, participants, self.world.now, late_s)

    def granted(self, leader: str, grant: Grant) -> None:
        if grant.accepted:
            self.members.grant(leader, grant.learner, grant.incarnation)

    def beat(self, leader: str, beat: Beat) -> None:
        self.anchors.heads(leader, beat.epoch, beat.versions)

    def recovered(self, learner: str, source: str) -> None:
        self.world.counts[f"from {source}"] += 1
        self.world.counts["recoveries"] += 1

    def describe(self, message: Any) -> str:
        """A bad message in few words."""
        return f"a bad {type(message).__name__} of {getattr(message, 'learner', 'somebody')}"
