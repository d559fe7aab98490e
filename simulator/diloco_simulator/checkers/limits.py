"""Promises about what must never wait (I8) and never grow (I12), as far as a world shows them."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_learner.exchange.anchors import EARLY_MAX, KEPT_MAX, WAITING_MAX
from diloco_shared.protocol.messages import Beat
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.promises import Anchors, Report
from diloco_syncer.history import archiving_io as archiving
from diloco_syncer.snapshots.snapshots_io import KEEP

# States in which a leader tells learners to hold.
RESTING = ("paused", "finished", "stopped")
# What a snapshot covers has gone from TAPE to its archive within so many virtual seconds: after a
# failure an archiver waits for 5, and for an answer of the store for 10.
ARCHIVED_S = 60.0
# Beats of a leader may overtake each other: one of the newest few is in force.
NEWEST_BEATS = 5


def records_in_stream() -> int:
    """As this world has drawn it."""
    module: Any = archiving
    records: int = module.RECORDS_IN_STREAM
    return records


@dataclass(frozen=True, slots=True)
class LeaderHolds:
    """How much of each."""

    initialised: bool  # the run has parameters
    in_flight: int  # rounds
    payloads: int
    staged: int  # merges
    to_publish: int  # merges
    to_append: int  # records
    donations: int


@dataclass(frozen=True, slots=True)
class LearnerHolds:
    """How much of each; of what is kept by fragment, by round or by life, the most of one."""

    to_answer: int  # pulls
    answered: int  # rounds
    undecided: int  # contributions
    newcomers: int
    to_adopt: int  # anchors
    waiting: int  # deltas ahead of their base
    early: int  # deltas ahead of their epoch
    kept: int  # anchors
    values: int  # anchors' values
    files: int  # where its checkpoints are


class StepPace:
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
        """A beat was delivered to this life. One of an older epoch or leader counts nothing."""
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


def _within(report: Report, whose: str, what: str, size: int, limit: int) -> None:
    report.looked("I12")
    if size > limit:
        report("I12", f"{whose} holds {size} {what}, at most {limit} are promised")


class LearnerLimits:
    """I12: what a learner holds."""

    def __init__(self, report: Report, spec: RunSpec) -> None:
        self.report = report
        self.fragments, self.shards = spec.algorithm.fragments, spec.algorithm.shards
        self.checkpoints = spec.keeping.checkpoints
        # Each shard may have so many rounds open, and asks once more for those of before.
        self.asked = max(8, 2 * spec.algorithm.rounds_in_flight_max)

    def holds(self, life: str, has: LearnerHolds) -> None:
        """Looked at between two steps."""
        for what, size, limit in (
            ("pulls to answer", has.to_answer, self.asked * self.shards),
            ("rounds answered", has.answered, 8 * self.asked * self.shards),
            ("undecided contributions", has.undecided, 16),
            ("newcomers to serve", has.newcomers, 8),
            ("anchors to adopt", has.to_adopt, self.fragments),
            ("deltas ahead of their base", has.waiting, WAITING_MAX),
            ("deltas ahead of their epoch", has.early, EARLY_MAX),
            ("anchors of a fragment", has.kept, KEPT_MAX),
            ("anchors taken", has.values, 3 * self.fragments),
            # One whose name is not on the disk, and the newest whose name is, or half of one.
            ("files of checkpoints", has.files, self.checkpoints + 2),
        ):
            _within(self.report, life, what, size, limit)


class LeaderLimits:
    """I12: what one shard holds in its leader's memory, in streams and on disks."""

    def __init__(self, report: Report, spec: RunSpec, learners: int, shard: int = 0) -> None:
        self.report = report
        self.algorithm = spec.algorithm
        self.owned = spec.algorithm.owned(shard)
        self.learners = learners
        self.keyframe_every = spec.algorithm.keyframe_every
        self.tape_within_at = math.inf  # when the tape held no more than it may

    def holds(self, leader: str, has: LeaderHolds) -> None:
        """Looked at with every beat."""
        in_flight = self.algorithm.rounds_in_flight_max
        # Contributions of the rounds in flight, and initial parameters before there are any.
        payloads = self.learners * (in_flight + 1)
        if not has.initialised:
            payloads += len(self.owned) * self.learners
        for what, size, limit in (
            ("rounds in flight", has.in_flight, in_flight),
            ("payloads", has.payloads, payloads),
            ("staged merges", has.staged, in_flight),
            ("merges to publish", has.to_publish, in_flight),
            ("records to append", has.to_append, in_flight + 4),
            ("donations", has.donations, self.learners),
        ):
            _within(self.report, leader, what, size, limit)

    def payload_bytes(self, leader: str, held: int, most: int) -> None:
        """Of encoded values, where its operator has said how many there may be."""
        _within(self.report, leader, "bytes of payloads", held, most)

    def keeps(self, leader: str, snapshots: int) -> None:
        """On its disk, once one is written."""
        _within(self.report, leader, "snapshots", snapshots, KEEP)

    def covers(self, leader: str, newest: int, next_round: int) -> None:
        """A leader's newest snapshot is of a round that was closed: else no other would be due for
        many rounds, and UP would fill."""
        self.report.looked("I12")
        if newest >= next_round:
            why = f"{leader} takes round {newest} for covered, and {next_round} is due"
            self.report("I12", why)

    def tape(self, leader: str, held: int, uncovered: int, now: float) -> None:
        """Records of the shard in TAPE, and those of them that come after the older of its kept
        snapshots, once nothing is in the way of its archive. `now`: in virtual seconds."""
        self.report.looked("I12")
        most = records_in_stream() * self.algorithm.shards + uncovered
        if held <= most:
            self.tape_within_at = now
        elif now - self.tape_within_at > ARCHIVED_S:
            self.tape_within_at = math.inf  # it is told once
            self.report(
                "I12", f"TAPE holds {held} records of {leader}, at most {most} are promised"
            )

    def purges(self, leader: str, needed: Sequence[str]) -> None:
        """A purge of UP begins. `needed`: what it takes of rounds that no snapshot covers."""
        self.report.looked("I12")
        if needed:
            why = f"{leader} purges {len(needed)} messages that are needed, {needed[0]} first"
            self.report("I12", why)

    def purged(self, leader: str, left: int) -> None:
        """A purge of UP is done: nothing is left that came before the first pull of any round that
        no snapshot covered when it was wanted. `left`: contributions."""
        _within(self.report, leader, "contributions on UP that a snapshot covers", left, 0)

    def down(self, held: Iterable[int], terms: int, restores: int) -> None:
        """At the end: of every fragment the newest keyframe, and what came after it.

        Every term may have added a keyframe, and one purge may have been lost with its leader.
        After a restore all is kept until the next keyframe. `held`: fragments of the manifests.
        """
        limit = (2 + restores) * self.keyframe_every + terms
        there = list(held)
        for p in self.owned:
            _within(self.report, "DN", f"publications of fragment {p}", there.count(p), limit)


# --------------------------------------------------------------------------------------------------
# A run never stops silently: what it says of itself while nothing comes of it (liveness).
#
# Judged once the world is healed, from what leaders tell and what their tapes take.

# States in which records must follow each other; all others give a reason why nothing happens.
WORKING = frozenset({"running", "finishing"})
# A round of the slowest learner and a few pulls in vain take a quarter of this.
SILENT_S = 120.0


class Alive:
    """Of one syncer shard."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.since = 0.0  # the newest record, or the heal
        self.told = False
        self.limit_s = SILENT_S

    def record(self, now: float) -> None:
        """The tape takes something."""
        self.since = now

    def beat(self, beat: Beat, now: float) -> None:
        """A leader says where the run is, in a healed world."""
        self.report.looked("liveness")
        if beat.state not in WORKING:
            self.since = now
        silent_s = now - self.since
        if silent_s > self.limit_s and not self.told:
            self.told = True
            self.report(
                "liveness",
                f"silent: says {beat.state!r} ({beat.reason}), no record for {silent_s:.0f} s",
            )
