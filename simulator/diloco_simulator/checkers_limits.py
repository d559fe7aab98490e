"""Promises about what must never wait (I8) and never grow (I12), as far as a world shows them."""

from collections import deque
from typing import TYPE_CHECKING

from diloco_learner.anchors import EARLY_MAX, KEPT_MAX, WAITING_MAX
from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import Beat, PublicationManifest
from diloco_simulator.checkers import Anchors, Report
from diloco_simulator.world import Log
from diloco_syncer.edges.snapshots import KEEP

if TYPE_CHECKING:
    from diloco_simulator.learner_life import LearnerLife
    from diloco_simulator.syncer_life import SyncerLife

# States in which a leader tells learners to hold.
RESTING = ("paused", "finished", "stopped")
# Beats of a leader may overtake each other: one of the newest few is in force.
NEWEST_BEATS = 5


class Pace:
    """I8: a learner takes step after step; only the user, the end or a new epoch make it rest.

    Judged from what was delivered to the process: beats, and the epochs of publications.
    """

    def __init__(self, report: Report, spec: RunSpec, anchors: Anchors) -> None:
        self.report = report
        self.fragments = range(spec.algorithm.fragments)
        self.anchors = anchors
        self.beats: dict[str, deque[str]] = {}
        self.leads: dict[str, tuple[int, int]] = {}  # newest epoch and term heard of
        self.over: set[str] = set()  # processes that were told of the end
        self.epochs: dict[str, int] = {}
        self.begun: set[str] = set()

    def told(self, life: str, beat: Beat) -> None:
        if beat.epoch < self.epochs.get(life, 0):
            return  # of before records were lost: it waits for a leader that knows its epoch
        led = (beat.epoch, beat.term)
        if led > self.leads.get(life, (-1, -1)):
            self.leads[life] = led
            self.beats[life] = deque(maxlen=NEWEST_BEATS)
        if led == self.leads[life]:
            self.beats[life].append(beat.state)
        if beat.state in ("finished", "stopped"):
            self.over.add(life)
        self.published(life, beat.epoch)

    def published(self, life: str, epoch: int) -> None:
        """Something of that epoch came."""
        self.epochs[life] = max(epoch, self.epochs.get(life, 0))

    def begins(self, life: str) -> None:
        """It has what it needs to train."""
        self.begun.add(life)

    def rests(self, life: str, left: bool) -> str:
        """It does not begin a step at a boundary; why, as far as can be told from outside."""
        if left or life in self.over or life not in self.begun:
            return "over"
        if any(state in RESTING for state in self.beats.get(life, ())):
            return "paused"
        epoch = self.epochs.get(life, 0)
        if any((life, epoch, p) not in self.anchors.by_life for p in self.fragments):
            return "epoch"
        self.report("I8", f"{life} takes no step, and nothing told it to rest")
        return ""


class Limits:
    """I12: what is held in memory, in streams and on disks stays within its limits."""

    def __init__(self, report: Report, spec: RunSpec, learners: int, shard: int = 0) -> None:
        self.report = report
        self.algorithm = spec.algorithm
        self.owned = spec.algorithm.owned(shard)
        self.learners = learners
        self.keyframe_every = spec.algorithm.keyframe_every
        self.purged_at = 0  # newest of UP when a purge was last done
        self.purged_round = -1  # rounds that were covered then
        self.covered_round = -1

    def _within(self, whose: str, what: str, size: int, limit: int) -> None:
        self.report.looked("I12")
        if size > limit:
            self.report("I12", f"{whose} holds {size} {what}, at most {limit} are promised")

    def of_syncer(self, life: "SyncerLife") -> None:
        """What a leader holds, looked at with every beat."""
        machine, whose = life.machine, life.leader
        in_flight = self.algorithm.rounds_in_flight_max
        # Contributions of the rounds in flight, and initial parameters before there are any.
        payloads = self.learners * (in_flight + 1)
        if not machine.history.initialised:
            payloads += len(self.owned) * self.learners
        self._within(whose, "rounds in flight", len(machine.rounds.open), in_flight)
        self._within(whose, "payloads", len(life.payloads), payloads)
        self._within(whose, "staged merges", len(life.staged), in_flight)
        self._within(whose, "merges to publish", len(life.installed), in_flight)
        self._within(whose, "records to append", len(machine.to_append), in_flight + 4)
        self._within(whose, "donations", len(machine.admission.donations.under_way), self.learners)
        self._within(whose, "snapshots", life.node.disk.count(), KEEP)

    def of_learner(self, life: "LearnerLife") -> None:
        """What a learner holds, looked at with every report."""
        exchange, whose = life.exchange, life.life
        assert exchange is not None
        fragments, shards = self.algorithm.fragments, self.algorithm.shards
        book = life.book
        waiting = max(len(shelf.waiting) for shelf in book.shelves)
        kept = max(len(shelf.anchors) for shelf in book.shelves)
        sent = max((len(rounds) for rounds in exchange.undecided.sent.values()), default=0)
        self._within(whose, "pulls to answer", len(exchange.pulls.pending), 8 * shards)
        self._within(whose, "rounds answered", len(exchange.pulls.answered), 64 * shards)
        self._within(whose, "undecided contributions", sent, 16)
        self._within(whose, "newcomers to serve", len(exchange.giving.requests), 8)
        self._within(whose, "anchors to adopt", len(exchange.ready), fragments)
        self._within(whose, "deltas ahead of their base", waiting, WAITING_MAX)
        self._within(whose, "deltas ahead of their epoch", len(book.early), EARLY_MAX)
        self._within(whose, "anchors of a fragment", kept, KEPT_MAX)
        self._within(whose, "anchors taken", life.values_held, 3 * fragments)

    def covered(self, round_: int) -> None:
        """A snapshot record covers rounds up to this one."""
        self.covered_round = round_

    def restored(self) -> None:
        """Rounds go back to lower numbers."""
        self.purged_at, self.purged_round, self.covered_round = 0, -1, -1

    def rewound(self, end: int) -> None:
        """UP lost what came after `end`: its sequences come again."""
        self.purged_at = min(self.purged_at, end)

    def purged_up(self, up: Log) -> None:
        """A purge of UP is done: what the one before could have taken, this one has.

        But where no more rounds are covered than before: what came after the first pull of the next
        one stays then.
        """
        old = [
            i
            for i in up.items
            if i.seq <= self.purged_at
            and i.message.fragment in self.owned
            and getattr(i.message, "round", -1) <= self.purged_round
        ]
        if old and self.covered_round > self.purged_round:
            self.report("I12", f"UP keeps {len(old)} messages that a snapshot covers")
        self.purged_at, self.purged_round = up.seq, self.covered_round

    def down(self, dn: Log, terms: int, restores: int) -> None:
        """At the end: of every fragment the newest keyframe, and what came after it.

        Every term may have added a keyframe, and one purge may have been lost with its leader.
        After a restore all is kept until the next keyframe.
        """
        limit = (2 + restores) * self.keyframe_every + terms
        for p in self.owned:
            manifests = [i.message for i in dn.items]
            held = [m for m in manifests if isinstance(m, PublicationManifest) and m.fragment == p]
            self._within("DN", f"publications of fragment {p}", len(held), limit)
