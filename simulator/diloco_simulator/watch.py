"""Hands what happens in a world to the checkers, and keeps what they report."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import (
    Beat,
    Grant,
    PublicationManifest,
    Pull,
    TapeRecord,
    TapeRound,
)
from diloco_simulator.checkers import Anchors, Merges, Refusals, Report
from diloco_simulator.checkers_alive import SILENT_S
from diloco_simulator.checkers_claims import Claims
from diloco_simulator.checkers_cuts import Parts
from diloco_simulator.checkers_limits import Pace
from diloco_simulator.coverage import of_record, of_syncer_death
from diloco_simulator.watch_shard import OfShard
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
        self.report = report = Report(self.broken)
        self.anchors = Anchors(report)
        self.refusals = Refusals(report)
        self.claims = Claims(report, self._merges_of)
        self.parts = Parts(report)
        self.pace = Pace(report, spec, self.anchors)
        self.spec = spec
        self.of = [
            OfShard(
                report,
                spec,
                shard,
                learners=world.options.learners_ever,
                claims=self.claims,
                parts=self.parts,
                numbers=numbers,
            )
            for shard in range(spec.algorithm.shards)
        ]
        # For coverage alone.
        self.away: set[str] = set()  # learners without a process
        self.recovering: set[str] = set()
        self.granted_nonces: set[tuple[int, str]] = set()
        self.duties: dict[str, str] = {}

    def broken(self, invariant: str, text: str) -> None:
        self.violations.append(f"{invariant} at {self.world.now:.2f} s: {text}")

    def reached(self, *words: str) -> None:
        """A state that is worth counting."""
        self.world.counts[" ".join(words)] += 1

    def _merges_of(self, fragment: int) -> Merges:
        return self.of[fragment % len(self.of)].merges

    @property
    def ended(self) -> str:
        """What became of the run, once every shard has said so."""
        outcomes = {shard.ended for shard in self.of}
        if "" in outcomes:
            return ""
        return "stopped" if "stopped" in outcomes else "finished"

    @property
    def rounds(self) -> int:
        return sum(shard.rounds for shard in self.of)

    def healed(self) -> None:
        """From now on nothing goes wrong."""
        for shard in self.of:
            shard.alive.record(self.world.now)
            shard.alive.limit_s = SILENT_S * self.world.options.step_s

    def stored(self, item: Item) -> None:
        """UP takes something."""
        for shard in self.of:
            if shard.numbers is not None:
                shard.numbers.stored(item)

    # --- the tape ------------------------------------------------------------------------------

    def record(self, shard: int, seq: int, record: TapeRecord) -> None:
        """Every record as its tape takes it."""
        of = self.of[shard]
        of_record(self, of, record)
        of.record(record, self.world.now, faulty=self.world.faulty)
        if len({other.merges.epoch for other in self.of}) > 1:
            self.reached("shards in two epochs")
        if isinstance(record, TapeRound):
            self.world.counts["refused"] += sum(v.outcome == "refused" for v in record.verdicts)
            self.refusals.round(record)

    def lost(self, shard: int, kept: Sequence[TapeRecord], gone: Sequence[TapeRecord]) -> None:
        """A tape lost its last records: they never were."""
        self.of[shard].lost(kept, gone)
        self.anchors.lost()

    # --- syncers -------------------------------------------------------------------------------

    def leads(self, life: "SyncerLife") -> None:
        """A process begins a term."""
        of = life.checks
        of.terms += 1
        if any(other.alive and other.machine.leading for other in of.leaders):
            self.reached("two leaders at once")
        of.leaders.append(life)

    def died(self, life: "SyncerLife") -> None:
        of_syncer_death(self, life)

    def pulled(self, life: "SyncerLife", pull: Pull, participants: dict[str, int]) -> None:
        late_s = LATE_DELAYS * self.world.options.delay_s
        if self.world.options.slow_links:
            late_s *= SLOW
        life.checks.members.pull(life.leader, pull, participants, self.world.now, late_s)

    def granted(self, life: "SyncerLife", grant: Grant) -> None:
        if grant.accepted:
            life.checks.members.grant(life.leader, grant.learner, grant.incarnation)

    def beat(self, life: "SyncerLife", beat: Beat) -> None:
        self.anchors.heads(life.leader, beat.epoch, beat.versions)
        life.checks.limits.of_syncer(life)
        # A contribution that the hub lost after it had acknowledged it is waited for in vain until
        # its round's deadline: no reason is known, and that is told.
        lost = self.world.counts["tails lost"]
        if beat.state == "stuck" and not self.world.faulty and not lost:
            self.broken("liveness", f"{life.leader} is stuck although all is well: {beat.reason}")
        if not self.world.faulty:
            life.checks.alive.beat(beat, self.world.now)
        self._account(life)
        if beat.shard == 0:
            self.duties = {beat.initializer: "initializer", beat.evaluator: "evaluator"}

    def _account(self, life: "SyncerLife") -> None:
        """What the leader would show of every token, now."""
        h, roster, now = life.machine.history, life.machine.roster, life.now
        tokens = life.checks.tokens
        tokens.ledger(life.leader, h.seq, h.ledger.meta())
        present = h.ledger.with_counts(roster.counts.unrecorded(h.ledger))
        shown = present.tokens_P(
            lambda learner, incarnation: roster.silent(learner, incarnation, now)
        )
        over = bool(h.outcome)
        tokens.shown(life.leader, h.seq, present.processed, shown, over=over)

    def published(self, leader: str, m: PublicationManifest, payload: bytes) -> None:
        self.anchors.published(m.epoch, m.fragment, m.version, m.anchor_digest, leader)
        numbers = self.of[m.fragment % len(self.of)].numbers
        if numbers is not None:
            numbers.published(m, payload)

    # --- learners ------------------------------------------------------------------------------

    def silent(self, learner: str, incarnation: int) -> None:
        """A process of a learner is gone, or stands still."""
        for shard in self.of:
            shard.members.silent(learner, incarnation, self.world.now)

    def back(self, learner: str, incarnation: int) -> None:
        """It stood still and goes on."""
        for shard in self.of:
            shard.members.back(learner, incarnation)

    def trains(self, learner: str, incarnation: int, step_s: float) -> None:
        """It has recovered, and steps."""
        for shard in self.of:
            shard.members.trains(learner, incarnation, step_s)

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
