"""The promises every world is checked against, kept apart from the product's own code.

Each checker takes observations and compares them with what it has seen before. None reads or
touches the product's state; `watch.py` holds those of a run together.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from diloco_shared.protocol.messages import (
    Pull,
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSetting,
    TapeSnapshot,
    TapeTerm,
    Verdict,
)
from diloco_shared.spec.run import RunSpec

# Faults that no contribution has by bad luck.
LIES = ("config", "malformed", "tokens", "counters", "non-finite")
# How a leader says that a contribution, or a round, cannot be merged: the gate has let it pass.
UNMERGEABLE, UNMERGED = "unmergeable", "the merge failed"
Anchor = tuple[int, int, str]  # (fragment, version, digest)


class Report:
    """Where checkers tell of what is broken: (invariant, what was seen). Counts what they look at,
    so that a check that is never made is seen too."""

    def __init__(self, tell: Callable[[str, str], None], looks: Counter[str] | None = None) -> None:
        self.tell = tell
        self.looks: Counter[str] = Counter() if looks is None else looks

    def __call__(self, invariant: str, text: str) -> None:
        self.tell(invariant, text)

    def looked(self, *invariants: str) -> None:
        """A check of each is made."""
        self.looks.update(invariants)

    def named(self, prefix: str) -> "Report":
        """The same, but every text begins with `prefix`."""
        return Report(lambda invariant, text: self(invariant, prefix + text), self.looks)

    def silent(self) -> "Report":
        """What was checked before is read again: nothing is told or counted."""
        return Report(lambda invariant, text: None)


@dataclass(frozen=True, slots=True)
class Mark:
    """A shard as its tape had it where a checkpoint was begun."""

    number: int
    epoch: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    next_round: int
    tokens: Any  # what I5 has counted
    numbers: Any  # what I9 has computed
    data: Any = None  # which sequences were merged
    budget: Any = None  # how much of it was used


class Anchors:
    """I1: within an epoch, versions only grow, at every observer. I4: all copies are equal."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.digests: dict[tuple[int, int, int], tuple[str, str]] = {}
        self.public: set[tuple[int, int, int]] = set()  # more than leaders have them
        self.by_life: dict[tuple[str, int, int], int] = {}
        self.announced: dict[tuple[str, int], tuple[int, ...]] = {}

    def held(self, epoch: int, p: int, version: int, digest: str, whose: str) -> None:
        """Somebody holds or has rebuilt an anchor."""
        self.report.looked("I4")
        known, first = self.digests.setdefault((epoch, p, version), (digest, whose))
        if known != digest:
            self.report(
                "I4",
                f"epoch {epoch}, fragment {p}, version {version}: {whose} has {digest}, "
                f"{first} had {known}",
            )

    def published(self, epoch: int, p: int, version: int, digest: str, whose: str) -> None:
        """An anchor is there for everybody."""
        self.public.add((epoch, p, version))
        self.held(epoch, p, version, digest, whose)

    def lost(self) -> None:
        """With the records and their leaders goes what nobody else ever had."""
        self.digests = {key: seen for key, seen in self.digests.items() if key in self.public}

    def adopted(self, life: str, epoch: int, p: int, version: int, digest: str) -> None:
        """One process of a learner adopts an anchor."""
        self.report.looked("I1")
        before = self.by_life.get((life, epoch, p), -1)
        if version <= before:
            self.report("I1", f"{life} adopts version {version} of fragment {p} after {before}")
        self.by_life[(life, epoch, p)] = version
        self.published(epoch, p, version, digest, life)

    def heads(self, leader: str, epoch: int, versions_P: tuple[int, ...]) -> None:
        """A leader announces its heads."""
        self.report.looked("I1")
        before = self.announced.get((leader, epoch), versions_P)
        if any(v < b for v, b in zip(versions_P, before, strict=True)):
            self.report("I1", f"{leader} announces {versions_P} after {before}")
        self.announced[(leader, epoch)] = versions_P


class Lost:
    """What a power cut took from a tape after somebody may have seen it, and nothing else.

    It is the only excuse for what others remember of it.
    """

    def __init__(self) -> None:
        self.work: set[tuple[str, int, int, int]] = set()  # as in Merges.merged
        self.epochs: set[int] = set()  # in which versions were lost
        self.mark = 0  # newest number of a checkpoint
        self.restores: set[int] = set()  # serials of wishes to go back that it had heeded
        # (fragment, version, digest) of the anchors of lost records: what was published of them may
        # be gone on from.
        self.made: set[Anchor] = set()
        self.covers = 0  # the newest record that is left of those that lost snapshots cover

    def record(self, record: TapeRecord, epoch: int, end: int) -> None:
        """It was on the tape, in that epoch, and is no more. `end`: the newest that is left."""
        self.epochs.add(epoch)
        if isinstance(record, TapeInit):
            self.made |= {(p, 0, digest) for p, digest in enumerate(record.anchor_digests)}
        elif isinstance(record, TapeRestore | TapeRebirth):
            anchors = zip(record.versions, record.anchor_digests, strict=True)
            self.made |= {(p, *anchor) for p, anchor in enumerate(anchors)}
        if isinstance(record, TapeRound):
            self.epochs.add(record.epoch)
            if record.outcome == "committed":
                self.made.add((record.fragment, record.version, record.anchor_digest))
            self.work |= {
                (v.learner, v.incarnation, record.fragment, record.round)
                for v in record.verdicts
                if v.outcome == "merged"
            }
        elif isinstance(record, TapeCheckpoint):
            self.mark = max(self.mark, record.number)
        elif isinstance(record, TapeRestore):
            self.restores.add(record.serial)
        elif isinstance(record, TapeSnapshot):
            self.covers = max(self.covers, min(record.covers, end))


class Merges:
    """I2: nothing is merged twice. I3: no round commits below K. I7: one leader commits.

    Also I1 of the tape: each round's version follows from the one before. Of one syncer shard.
    """

    def __init__(self, report: Report, spec: RunSpec, shard: int = 0) -> None:
        self.report = report
        self.fragments = spec.algorithm.fragments
        self.owned = spec.algorithm.owned(shard)
        self.in_flight = spec.algorithm.rounds_in_flight_max
        self.lost = Lost()
        self.begin(spec.algorithm.quorum)

    def begin(self, quorum: int) -> None:
        """From an empty tape."""
        self.quorum = self.quorum_before = quorum  # K in force, and before it was last changed
        # K that were in force -> the last round that was open then: it may count to it.
        self.former: dict[int, int] = {}
        self.initialised = False
        self.epoch = 0
        self.term = 0
        self.next_round = 0
        self.versions = [-1] * self.fragments
        self.digests = [""] * self.fragments  # of the anchors
        self.restored = -1  # epoch that began with a checkpoint
        self.checkpoint = 0  # newest mark
        self.blobs: set[tuple[str, str]] = set()
        self.merged: set[tuple[str, int, int, int]] = set()  # learner, life, fragment, round
        self.undone: set[tuple[str, int, int, int]] = set()  # of those, by a restore or a rebirth
        self.made_in: dict[tuple[int, int], int] = {}  # (fragment, version) -> round
        # Of every anchor since the beginning, or the newest restore.
        self.made: set[Anchor] = set()
        # (learner, incarnation, fragment) -> the step up to which its work is merged.
        self.steps: dict[tuple[str, int, int], int] = {}
        self.left: set[tuple[str, int]] = set()  # lives that are over, as the tape says
        self.ended = ""

    def record(self, record: TapeRecord, mark: Mark | None = None) -> None:
        """A record as it is committed; `mark`: what a restore goes back to."""
        if isinstance(record, TapeRound | TapeEnd):
            self.left |= {(c.learner, c.incarnation) for c in record.counts if c.left}
        if self.ended:
            self.report.looked("I6")
            if not isinstance(record, TapeEpoch | TapeRestore):
                self.report("I6", f"a record of kind {record.kind} behind the end of the run")
        match record:
            case TapeInit():
                self.report.looked("I1")
                if self.initialised:
                    self.report("I1", "a second init record")
                self.initialised, self.digests = True, list(record.anchor_digests)
                for p in self.owned:
                    self.versions[p] = 0
                self.made = self._heads()
            case TapeSnapshot():
                self.report.looked("I12")
                if record.round >= self.next_round:
                    what = f"a snapshot is of round {record.round}, and {self.next_round} is due"
                    self.report("I12", what)
            case TapeEpoch():
                self._epoch(record.epoch)
            case TapeCheckpoint(outcome="begun"):
                self.checkpoint = record.number
            case TapeRestore() if mark is not None:
                self._epoch(record.epoch)
                self.initialised, self.restored, self.ended = True, record.epoch, ""
                self.versions, self.digests = list(mark.versions), list(mark.digests)
                self.next_round, self.made = mark.next_round, self._heads()
                self.undone |= {one for one in self.merged if one[3] >= mark.next_round}
            case TapeTerm():
                self._term(record.term)
            case TapeRebirth():
                self._term(record.term)
                self._epoch(record.epoch)
                self._reborn(record)
            case TapeRound():
                self._round(record)
            case TapeSetting(name="quorum"):
                self.former[self.quorum] = self.next_round + self.in_flight - 1
                self.quorum_before, self.quorum = self.quorum, record.value
            case TapeEnd():
                self.ended = record.outcome
            case _:
                pass

    def _heads(self) -> set[Anchor]:
        return {(p, self.versions[p], self.digests[p]) for p in self.owned}

    def _term(self, term: int) -> None:
        self.report.looked("I7")
        if term <= self.term:
            self.report("I7", f"term {term} begins after {self.term}")
        self.term = term

    def _reborn(self, record: TapeRebirth) -> None:
        """What was committed and never published is no more; nor does anybody know who is over."""
        self.left = set()
        for p in self.owned:
            gone = range(record.versions[p] + 1, self.versions[p] + 1)
            rounds = {self.made_in.get((p, version)) for version in gone}
            self.undone |= {one for one in self.merged if one[2] == p and one[3] in rounds}
            self.versions[p], self.digests[p] = record.versions[p], record.anchor_digests[p]
        self.report.looked("I1")
        if strange := self._heads() - self.made - self.lost.made:
            p, version, _ = min(strange)
            what = f"version {version} of fragment {p}, which its history since the newest restore"
            self.report("I1", f"the run begins again from {what} does not have")

    def _epoch(self, epoch: int) -> None:
        self.report.looked("I1")
        if epoch <= self.epoch:
            self.report("I1", f"epoch {epoch} begins after {self.epoch}")
        self.epoch = epoch
        self.former = {}  # what was open is void

    def _round(self, r: TapeRound) -> None:
        self.report.looked("I1", "I3", "I7")
        if r.epoch != self.epoch:
            self.report("I1", f"round {r.round} of epoch {r.epoch} is committed in {self.epoch}")
        if r.term != self.term:
            self.report("I7", f"round {r.round} of term {r.term} is committed in {self.term}")
        if r.round != self.next_round:
            self.report("I1", f"round {r.round} where {self.next_round} was due")
        self.next_round = r.round + 1
        merged = [v for v in r.verdicts if v.outcome == "merged"]
        committed = r.outcome == "committed"
        if r.version != self.versions[r.fragment] + committed:
            self.report(
                "I1",
                f"{r.outcome} round {r.round}: version {r.version} of fragment {r.fragment} "
                f"after {self.versions[r.fragment]}",
            )
        self.versions[r.fragment] = r.version
        if committed:
            self.digests[r.fragment] = r.anchor_digest
            self.made_in[r.fragment, r.version] = r.round
            self.made.add((r.fragment, r.version, r.anchor_digest))
        if r.quorum != self.quorum and r.round > self.former.get(r.quorum, -1):
            self.report("I3", f"round {r.round} counts to {r.quorum}, K is {self.quorum}")
        # The rule is written here once more: to ask the policy would prove nothing of it.
        if committed and len(merged) < max(r.quorum, 1):
            self.report("I3", f"round {r.round} commits with {len(merged)} of {r.quorum}")
        if merged and not committed:
            self.report("I3", f"round {r.round} is skipped and merges {len(merged)}")
        for v in merged:
            self._merged(r, v)

    def _merged(self, r: TapeRound, v: Verdict) -> None:
        self.report.looked("I2")
        if (v.subject, v.digest) in self.blobs:
            self.report("I2", f"round {r.round} merges {v.subject} again")
        self.blobs.add((v.subject, v.digest))
        if v.subject.split(".")[3] != str(r.epoch):
            self.report("I1", f"round {r.round} of epoch {r.epoch} merges {v.subject}")
        work = (v.learner, v.incarnation, r.fragment, r.round)
        self.merged.add(work)
        self.undone.discard(work)
        key = (v.learner, v.incarnation, r.fragment)
        if v.step_to <= self.steps.get(key, -1):
            self.report(
                "I2",
                f"round {r.round} merges {v.learner} up to step {v.step_to} of fragment "
                f"{r.fragment} again",
            )
        self.steps[key] = v.step_to


class LeaderLeases:
    """I7: two machines never both trust a lease. The tape would be the fence even so."""

    def __init__(self, report: Report, lease_s: float) -> None:
        self.report = report
        self.lease_s = lease_s
        self.until: dict[str, float] = {}
        self.deleting = False  # the run is: whoever leads it has yet to hear that its lease is gone

    def held(self, process: str, sent_at: float, until: float, now: float) -> None:
        """A process was given the lease, or a renewal, which it asked for at `sent_at`."""
        self.report.looked("I7")
        for other, theirs in self.until.items():
            if other != process and min(until, theirs) > now and not self.deleting:
                self.report("I7", f"{process} has the lease, {other} trusts its own for longer")
        # Clocks that begin anywhere add and subtract with an error in their last digits.
        if until - sent_at > self.lease_s + 1e-6 or sent_at > now + 1e-6:
            self.report("I7", f"{process} trusts a lease from {sent_at:.2f} s to {until:.2f} s")
        self.until[process] = until

    def gone(self, process: str) -> None:
        """It is dead, has given the lease back, or knows that another holds it."""
        self.until.pop(process, None)


class LearnerLife(Protocol):
    """One process of a learner in its training, as it really is."""

    rounds: int  # within so many it is merged, once nothing goes wrong
    step_s: float
    drained: bool  # told to leave before the end

    @property
    def able_at(self) -> float:
        """Since when it has gone on."""

    @property
    def silent_since(self) -> float:
        """When it died, stood still or left; infinity while it goes on."""

    @property
    def gives(self) -> bool:
        """Whether it goes on, and is not about to leave."""


class KnownMembers:
    """I10: the stopped are not asked, the returned are merged, two processes never act as one."""

    def __init__(self, report: Report, spec: RunSpec) -> None:
        self.report = report
        self.lease_s = spec.membership.lease_s
        self.lives: dict[tuple[str, int], LearnerLife] = {}
        self.forgiven_at = 0.0
        # (term, learner, incarnation) -> when that leader last heard of it.
        self.heard_at: dict[tuple[int, str, int], float] = {}
        self.asked: set[tuple[int, int, int]] = set()
        self.newest_merged: dict[tuple[str, int], int] = {}  # by learner and fragment
        self.admitted: dict[tuple[str, str], int] = {}  # (leader, learner) -> incarnation
        # (learner, incarnation) that trains -> rounds until it must have been merged.
        self.waiting: dict[tuple[str, int], int] = {}
        self.merged_at: dict[str, float] = {}
        self.goodbyes: dict[str, int] = {}  # learner -> its newest life that has said it

    def goodbye(self, learner: str, incarnation: int) -> None:
        """A life has said it to some leader."""
        self.goodbyes[learner] = max(incarnation, self.goodbyes.get(learner, -1))

    def trains(self, learner: str, incarnation: int, life: LearnerLife) -> None:
        """A process has recovered and steps. It is to be merged within H rounds of its own speed;
        those in flight began without it."""
        self.lives[learner, incarnation] = life
        self.waiting[learner, incarnation] = life.rounds

    def heard(self, term: int, learner: str, incarnation: int, now: float) -> None:
        """Progress of a life has reached the leader of a term."""
        self.heard_at[term, learner, incarnation] = now

    def heard_within(self, learner: str, seconds: float, now: float) -> bool:
        """Whether any leader heard of it so lately, or none has ever."""
        at = [at for (_, who, _), at in self.heard_at.items() if who == learner]
        return not at or now - max(at) <= seconds

    def grant(self, leader: str, learner: str, incarnation: int) -> None:
        """A leader admits a life."""
        self.report.looked("I10")
        key = (leader, learner)
        if incarnation < self.admitted.get(key, -1):
            self.report("I10", f"{leader} admits {learner} {incarnation} after a newer one")
        self.admitted[key] = max(incarnation, self.admitted.get(key, -1))

    def put_back(self) -> None:
        """The hub was, from a backup: who was let in since is in no record, so that a life from
        before may be the newest again."""
        self.admitted.clear()

    def pull(
        self, leader: str, pull: Pull, participants: dict[str, int], now: float, late_s: float
    ) -> None:
        """A round is pulled for the first time: nobody is asked who is silent for a lease.

        `late_s`: how long last words may be under way. A pull that is only sent again was
        decided earlier.
        """
        if (pull.epoch, pull.term, pull.round) in self.asked:
            return
        self.report.looked("I10")
        self.asked.add((pull.epoch, pull.term, pull.round))
        for learner, incarnation in participants.items():
            whose = f"round {pull.round} asks {learner} {incarnation}"
            if incarnation < self.admitted.get((leader, learner), -1):
                self.report("I10", f"{whose}, superseded")
            life = self.lives.get((learner, incarnation))
            since = math.inf if life is None else life.silent_since
            if now > max(since, self.forgiven_at) + self.lease_s + late_s:
                self.report("I10", f"{whose}, silent since {since:.2f} s")
            heard_at = self.heard_at.get((pull.term, learner, incarnation), -math.inf)
            if now > max(heard_at, self.forgiven_at) + self.lease_s + 1e-6:
                self.report("I10", f"{whose}, not heard of since {heard_at:.2f} s")

    def round(self, r: TapeRound, now: float, *, faulty: bool) -> None:
        """A round is on the tape. How soon somebody is merged is only judged without faults."""
        self.report.looked("I10")
        for v in r.verdicts:
            if v.outcome != "merged":
                continue
            # Of one fragment: what an older life has sent for another one may wait for the quorum
            # of a round before it, in which a newer life has its part by then.
            place = v.learner, r.fragment
            newest = self.newest_merged.get(place, -1)
            if v.incarnation < newest:
                self.report(
                    "I10",
                    f"round {r.round} merges {v.learner} {v.incarnation} after {newest}",
                )
            self.newest_merged[place] = max(v.incarnation, newest)
            self.merged_at[v.learner] = now
        merged = {(v.learner, v.incarnation) for v in r.verdicts if v.outcome == "merged"}
        for key, left in self.waiting.items():
            life = self.lives[key]
            again = faulty or key in merged or not life.gives
            self.waiting[key] = life.rounds if again else left - 1
            if self.waiting[key] == -1:
                self.report("I10", f"{key[0]} trains and was not merged in {life.rounds} rounds")


class KnownRefusals:
    """I11: what is bad changes no state, is counted, and is never merged."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.bad: dict[int, object] = {}  # by id; the reference keeps the id its own
        self.blobs: set[tuple[str, str, int]] = set()

    def mark(self, message: object, learner: str = "", subject: str = "", life: int = 0) -> None:
        """The world is about to hand this to the product."""
        self.bad[id(message)] = message
        if subject:
            self.blobs.add((subject, learner, life))

    def handled(self, what: str, before: object, after: object, counted: int) -> None:
        """A bad message was handled: durable state before and after, and how many more counts."""
        self.report.looked("I11")
        if before != after:
            self.report("I11", f"{what} changed the history")
        if counted < 1:
            self.report("I11", f"{what} was not counted")

    def round(self, r: TapeRound) -> None:
        """A closed round. What it refuses for a lie was one, and nothing that was is merged."""
        if r.reason.startswith(UNMERGED):
            self.report("I11", f"round {r.round} was not merged: {r.reason}")
        for v in r.verdicts:
            bad = (v.subject, v.learner, v.incarnation) in self.blobs
            if v.outcome == "refused" and not v.reason:
                self.report("I11", f"round {r.round} refuses {v.learner} without a reason")
            kind = v.reason.split(":")[0]
            if v.outcome == "refused" and kind == UNMERGEABLE:
                self.report("I11", f"the gate let {v.learner} into round {r.round}: {v.reason}")
            if v.outcome == "refused" and kind in LIES and not bad:
                self.report("I11", f"round {r.round} refuses {v.learner}, wrongly: {v.reason}")
            if v.outcome != "merged":
                continue
            if bad or v.step_to <= v.step_from or not v.weight > 0:
                self.report("I11", f"round {r.round} merges a bad contribution of {v.learner}")
