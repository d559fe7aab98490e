"""Hands what happens in a world to the checkers, and keeps what they report."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import (
    Beat,
    Grant,
    PublicationManifest,
    Pull,
    TapeEnd,
    TapeRecord,
    TapeRound,
    TapeSnapshot,
)
from diloco_simulator.checkers import Anchors, Leases, Members, Merges, Refusals
from diloco_simulator.checkers_claims import Claims
from diloco_simulator.checkers_ledger import Tokens
from diloco_simulator.checkers_limits import Limits, Pace
from diloco_simulator.checkers_numbers import Numbers
from diloco_simulator.coverage import of_record, of_syncer_death
from diloco_simulator.world import SLOW, Item, World

if TYPE_CHECKING:
    from diloco_simulator.learner_life import LearnerLife
    from diloco_simulator.syncer_life import SyncerLife

# Last words may be under way this many mean delays: a longer delay is one in e^23.
LATE_DELAYS = 12


class Watch:
    """All observations of one world."""

    def __init__(self, world: World, spec: RunSpec, *, numbers: bool = True) -> None:
        """`numbers`: compute every merge again; keeps all that was ever uploaded."""
        self.world = world
        self.violations: list[str] = []
        self.anchors = Anchors(self.broken)
        self.merges = Merges(self.broken, spec)
        self.leases = Leases(self.broken)
        self.members = Members(self.broken, spec)
        self.refusals = Refusals(self.broken)
        self.claims = Claims(self.broken, self.merges, lambda: not self.world.counts["power cuts"])
        self.tokens = Tokens(self.broken, spec, self.claims)
        self.pace = Pace(self.broken, spec, self.anchors)
        self.limits = Limits(self.broken, spec, world.options.learners)
        self.numbers = Numbers(self.broken, spec) if numbers else None
        self.spec = spec
        self.ended = ""
        self.rounds = 0
        self.round_at = 0.0  # when the newest round was recorded
        self.terms = 0
        # For coverage alone.
        self.away: set[str] = set()  # learners without a process
        self.recovering: set[str] = set()
        self.leaders: list[SyncerLife] = []
        self.skipped_before = False
        self.granted_nonces: set[str] = set()
        self.duties: dict[str, str] = {}

    def broken(self, invariant: str, text: str) -> None:
        self.violations.append(f"{invariant} at {self.world.now:.2f} s: {text}")

    def reached(self, *words: str) -> None:
        """A state that is worth counting."""
        self.world.counts[" ".join(words)] += 1

    def stored(self, item: Item) -> None:
        """UP takes something."""
        if self.numbers is not None:
            self.numbers.stored(item)

    # --- the tape ------------------------------------------------------------------------------

    def record(self, seq: int, record: TapeRecord) -> None:
        """Every record as the tape takes it."""
        self.merges.record(record)
        if self.numbers is not None:
            self.numbers.record(record)
        self.tokens.record(record)
        of_record(self, record)
        if isinstance(record, TapeRound):
            self.rounds += 1
            self.round_at = self.world.now
            self.world.counts["refused"] += sum(v.outcome == "refused" for v in record.verdicts)
            self.members.round(record, self.world.now, faulty=self.world.faulty)
            self.refusals.round(record)
        if isinstance(record, TapeSnapshot):
            self.limits.covered(record.round)
        if isinstance(record, TapeEnd):
            self.ended = record.outcome

    def lost(self, kept: Sequence[TapeRecord]) -> None:
        """The tape lost its last records: they never were. What is left was checked before."""
        self.merges.report = lambda invariant, text: None
        self.merges.begin(self.spec.algorithm.quorum)
        for record in kept:
            self.merges.record(record)
        self.merges.report = self.broken
        if self.numbers is not None:
            self.numbers.lost(len(kept))
        self.tokens.lost(kept)
        self.anchors.lost()
        self.ended = self.merges.ended

    # --- syncers -------------------------------------------------------------------------------

    def leads(self, life: "SyncerLife") -> None:
        """A process begins a term."""
        self.terms += 1
        if any(other.alive and other.machine.leading for other in self.leaders):
            self.reached("two leaders at once")
        self.leaders.append(life)

    def died(self, life: "SyncerLife") -> None:
        of_syncer_death(self, life)

    def pulled(self, leader: str, pull: Pull, participants: dict[str, int]) -> None:
        late_s = LATE_DELAYS * self.world.options.delay_s
        if self.world.options.slow_links:
            late_s *= SLOW
        self.members.pull(leader, pull, participants, self.world.now, late_s)

    def granted(self, leader: str, grant: Grant) -> None:
        if grant.accepted:
            self.members.grant(leader, grant.learner, grant.incarnation)

    def beat(self, life: "SyncerLife", beat: Beat) -> None:
        self.anchors.heads(life.leader, beat.epoch, beat.versions)
        self.limits.of_syncer(life)
        self._account(life)
        self.duties = {beat.initializer: "initializer", beat.evaluator: "evaluator"}

    def _account(self, life: "SyncerLife") -> None:
        """What the leader would show of every token, now."""
        h, roster, now = life.machine.history, life.machine.roster, life.now
        self.tokens.ledger(life.leader, h.seq, h.ledger.meta())
        present = h.ledger.with_counts(roster.counts.unrecorded(h.ledger))
        shown = present.tokens_P(
            lambda learner, incarnation: roster.silent(learner, incarnation, now)
        )
        over = bool(h.outcome)
        self.tokens.shown(life.leader, h.seq, present.processed, shown, over=over)

    def published(self, leader: str, m: PublicationManifest, payload: bytes) -> None:
        self.anchors.published(m.epoch, m.fragment, m.version, m.anchor_digest, leader)
        if self.numbers is not None:
            self.numbers.published(m, payload)

    # --- learners ------------------------------------------------------------------------------

    def recovers(self, learner: str) -> None:
        """A process of a learner joins."""
        self.away.discard(learner)
        self.recovering.add(learner)
        if len(self.recovering) > 1 and self.rounds:
            self.reached("two recoveries at once")

    def recovered(self, learner: str, source: str) -> None:
        self.recovering.discard(learner)
        self.world.counts[f"from {source}"] += 1
        self.world.counts["recoveries"] += 1

    def learner_died(self, life: "LearnerLife") -> None:
        self.away.add(life.name)
        self.recovering.discard(life.name)
        if duty := self.duties.get(life.name):
            self.reached(duty, "dies")

    def describe(self, message: Any) -> str:
        """A bad message in few words."""
        return f"a bad {type(message).__name__} of {getattr(message, 'learner', 'somebody')}"
