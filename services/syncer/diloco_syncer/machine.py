"""The syncer's decisions: one door, `handle(event, now) -> effects`, and a `deadline` to read.

Composes what it knows from the tape (`history`), who there is (`roster`), rounds in flight
(`rounds`) and requests for inner state (`donations`). Pure: no clock, network, disk or arrays.
`now` is monotonic seconds; records carry wall time, which `Led` ties to it.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from diloco_shared.protocol.messages import (
    Join,
    Message,
    Progress,
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
)
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints import restoring
from diloco_syncer.events import (
    Append,
    Appended,
    BusBack,
    ContributionSeen,
    Drop,
    Effect,
    Event,
    Full,
    InitMoved,
    InitSeen,
    InstallInit,
    InstallLoaded,
    JoinSeen,
    Kept,
    Led,
    Loaded,
    Malformed,
    MarkFound,
    MergeWaits,
    NumberFound,
    ProgressSeen,
    Publish,
    Published,
    PurgeDown,
    PurgeUnsealed,
    PurgeUp,
    Rewound,
    Sealed,
    SendGrant,
    Snapshot,
    SnapshotBrokenOff,
    SnapshotDone,
    SnapshotFailed,
    SnapshotOver,
    Staged,
    StageFailed,
    StreamSeen,
    Suspended,
    Tell,
    TimePassed,
    Wanted,
)
from diloco_syncer.history.history import History
from diloco_syncer.leadership import bootstrap, rebirth
from diloco_syncer.leadership.bootstrap import Bootstrap
from diloco_syncer.leadership.ending import Ending
from diloco_syncer.leadership.user_requests import UserRequests, covering
from diloco_syncer.members.admission import Admission
from diloco_syncer.members.claims import Claims, too_far
from diloco_syncer.members.donations import Donations
from diloco_syncer.members.roster import Roster
from diloco_syncer.merging.acknowledged import torn, with_coming
from diloco_syncer.rounds.gate import Refusals, impossible
from diloco_syncer.rounds.rounds import Rounds
from diloco_syncer.status.announce import Announcer

# A disk that took no snapshot is asked again with the next round; or, where none comes before a
# stream has room, after this many seconds: each attempt writes until the disk is full.
SNAPSHOT_RETRY_S = 5.0


class Machine:
    """One leader's term. Mutated only through `handle`."""

    def __init__(self, spec: RunSpec, history: History) -> None:
        self.spec = spec
        self.history = history
        self.roster = Roster.of(spec, history)
        self.rounds = Rounds(history, self.roster)
        self.room = self.rounds.room
        self.admission = Admission(spec, history, self.roster)
        self.announcer = Announcer(spec, history, self.roster, self.rounds)
        self.refused = Refusals()
        self.claims = Claims()
        self.bootstrap = Bootstrap(spec, history, self.roster, self.refused)
        self.wall_offset = 0.0
        self.leading = False
        self.to_append: deque[TapeRecord] = deque()  # at most D rounds and a few settings
        self.appending: TapeRecord | None = None
        self.snapshotting = False  # one is being written, or its record is on its way
        self.snapshot_due = False  # another, once that is over
        self.snapshot_failed_at = float("-inf")
        self.covered: int | None = None  # rounds up to this one, which UP still has
        self.user_requests = UserRequests(spec, history, self.roster)
        self.lapse = ""  # why the lease is in doubt, if it is
        # Newest version of each fragment on DN in this epoch, as far as is known; -1 none.
        self.published: tuple[int, ...] = ()
        self.keyframes: tuple[int, ...] = ()
        # Publications that are on their way to DN, by epoch, fragment and version: whether whole.
        self.under_way: dict[tuple[int, int, int], bool] = {}
        self.ending = Ending(history, self.roster, self.rounds)
        self.owed = ""  # why another epoch has to begin, once nothing stands in its way
        self.unsure = False  # whether UP still has what the tape names
        self.uncovered = False  # whether a snapshot of our own covers what it may not have

    # --- the door ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event; return what the caller must do, in this order."""
        effects = self._take(event, now)
        for e in effects:
            if isinstance(e, Publish):
                self.under_way[e.epoch, e.fragment, e.version] = e.prev_version < 0
        self.announcer.watchdog.saw(event, now)
        if self.leading:
            effects += [*self.admission.due(now), *self.announcer.appoint(now)]
            effects += self._put(self.user_requests.advance(now, self._wall(now), self._pending))
            self.rounds.over = self._over
            self.rounds.suspended = self.lapse or self.user_requests.restoring.reason
            effects += self._begin_owed(now)
            effects += self.rounds.advance(now)
            effects += self.ending.advance(self.user_requests.stopping, now)
            effects += self._record(now)
            effects += self._finish(now)
            effects += self.announcer.look(now)
            effects += self.announcer.beat(now)
        return effects

    @property
    def deadline(self) -> float | None:
        """When TimePassed is due at the latest; None before this process leads."""
        if not self.leading:
            return None
        times = [
            self.announcer.beat_at,
            self.rounds.deadline,
            self.admission.donations.deadline,
            self.user_requests.deadline,
            self.ending.deadline,
        ]
        return min(t for t in times if t is not None)

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Led():
                self.roster.wall_offset = self.wall_offset = event.at - now
                # It hears of learners from now on, though it leads once its first record is there.
                self.roster.since = now
                return self._lead(event)
            case ProgressSeen():
                return self._progress(event.progress, now)
            case JoinSeen():
                # Whoever joined before a restore would begin with the wrong moments.
                able = self.leading and not self.user_requests.restoring.due
                return self._join(event.join, now) if able else []
            case InitSeen():
                if self.user_requests.restoring.due:
                    return [Drop(s) for s in event.subjects]
                wall, on_the_way = self._wall(now), self._pending
                seen = self.bootstrap.seen(event, wall, on_the_way, leading=self.leading)
                return self._put(seen)
            case InitMoved():
                n = self.admission.layouts.parameters()
                self.announcer.initial_moved(event, n, now)
            case ContributionSeen():
                if not self.leading:
                    return [Drop(event.manifest.blob.subject)]
                # Marked before the round that it may be merged in is recorded.
                self.user_requests.checkpoints.met(
                    event.manifest.checkpoint, event.manifest.learner
                )
                kind, effects = self.rounds.contribution(event, now)
                return [*effects, *self.refused.contribution(kind, event.manifest.learner)]
            case Malformed():
                self.rounds.unusable(event)
                return self.refused.message(event)
            case Staged() | StageFailed():
                return self.rounds.staged(event, now)
            case Appended():
                return self._appended(event, now)
            case Published():
                return self._published(event, now)
            case StreamSeen() | Full() | Rewound() | MergeWaits():
                return self._of_storage(event, now)
            case Wanted() | Kept() | NumberFound() | Sealed() | Loaded():
                return self._put(self.user_requests.take(event, now, self._wall(now)))
            case MarkFound():
                liar = self.user_requests.checkpoints.marked(event)
                what = f"{liar} told of a checkpoint that was never begun, and was not believed"
                return self.refused.tell("unknown-mark" if liar else "", what)
            case Suspended():
                self.lapse = event.reason
            case SnapshotDone() | SnapshotBrokenOff() | SnapshotFailed():
                return self._snapshot_over(event, now)
            case BusBack():
                self.roster.forgive(self.announcer.alive, now)
                self.rounds.disturbed(now)
            case TimePassed():
                pass
        return []

    def _wall(self, now: float) -> float:
        return now + self.wall_offset

    # --- leading -------------------------------------------------------------------------------

    def _lead(self, led: Led) -> list[Effect]:
        h, self.published, self.keyframes = self.history, led.published, led.keyframes
        self.unsure, self.uncovered = led.unsure, led.uncovered
        if h.outcome:
            # No term follows the end; but should the one before have died over it, this one tells.
            self.leading = True
            return [*self._unpublished()]
        if led.reborn is not None:
            return self._push(rebirth.record(h, led.reborn, led.leader, led.at), first=True)
        return self._push(
            TapeTerm(epoch=h.epoch, term=h.term + 1, leader=led.leader, at=led.at), first=True
        )

    @property
    def _pending(self) -> tuple[TapeRecord, ...]:
        """Records on their way to the tape."""
        return (*((self.appending,) if self.appending else ()), *self.to_append)

    @property
    def _over(self) -> bool:
        """Whether the end of the run is on the tape, or on its way there."""
        return bool(self.history.outcome) or any(isinstance(r, TapeEnd) for r in self._pending)

    def _put(self, done: Iterable[Effect | TapeRecord]) -> list[Effect]:
        """Push the records among them."""
        effects: list[Effect] = []
        for each in done:
            effects += self._push(each) if isinstance(each, Message) else [each]
        return effects

    def _push(self, record: TapeRecord, *, first: bool = False) -> list[Effect]:
        """Queue a record; send it when none is outstanding. Only a new epoch follows the end.

        That of a restore only where other shards may have gone back meanwhile.
        """
        behind = TapeEpoch if self.spec.algorithm.shards == 1 else TapeEpoch | TapeRestore
        if self._over and not isinstance(record, behind):
            return []
        queue = self.to_append.appendleft if first else self.to_append.append
        queue(record)
        return self._send_record()

    def _send_record(self) -> list[Effect]:
        if self.appending is not None or not self.to_append:
            return []
        # Raises for one that cannot follow: this process may end by it, but not the run.
        self.history.check(self.to_append[0])
        self.appending = self.to_append.popleft()
        return [Append(self.appending)]

    def _appended(self, event: Appended, now: float) -> list[Effect]:
        record = self.appending
        assert record is not None, "Appended without an outstanding record"
        self.appending = None
        if isinstance(record, TapeRestore):
            self.history.resume(self.user_requests.loaded, record, event.seq)
        else:
            self.history.apply(record, event.seq)
        if isinstance(record, TapeInit | TapeRebirth | TapeEpoch | TapeRestore):
            self.published = (-1,) * self.history.fragments  # of what begins now
            self.keyframes = self.published
            self.covered = None  # rounds of before, whose numbers may come again
            self.owed = ""
        effects = self._follow(record, event, now)
        return [*effects, *self._send_record()]

    def _follow(self, record: TapeRecord, event: Appended, now: float) -> list[Effect]:
        """What a record on the tape brings about."""
        h = self.history
        match record:
            case TapeTerm():
                self.leading, self.roster.since = True, now
                effects: list[Effect] = [*self._unpublished(), *self._superseded()]
                effects.append(self._leads(record))
                if lost := self._lost(self.published):
                    self.owed = f"DN {lost}"
                    effects += self._begin_owed(now)
                if h.initialised and (self.uncovered or (self.unsure and self._closed > 0)):
                    effects += self._snapshot()
                return effects + self._put(self.bootstrap.leads(event.at, self._pending))
            case TapeRebirth():
                self.leading, self.roster.since = True, now
                return [
                    *(self._keyframe(p) for p in h.owned),
                    *self._snapshot(),
                    Tell("rebirth", rebirth.told(h, record)),
                ]
            case TapeInit():
                return [
                    InstallInit(record.layout, record.subjects),
                    *(self._keyframe(p) for p in h.owned),
                    *self._snapshot(),
                    Tell("init", bootstrap.told(record)),
                ]
            case TapeRound():
                self.announcer.watchdog.closed(now)
                effects = [*self.rounds.recorded(record), *self.roster.recoveries.closed(record)]
                if self._closed >= self.spec.keeping.snapshot_every_rounds:
                    return [*effects, *self._snapshot_once()]
                return [*effects, *self._snapshot_early()]
            case TapeSnapshot():
                self.room.snapshot_failed = ""
                stale = record.covers < h.snapshot_covers
                if stale or self.spec.keeping.contributions == "all":
                    return self._snapshot_next()
                self.covered = record.round
                self.room.seen.pop("UP", None)  # it was seen with all that goes now
                return [*self._free_up(), *self._snapshot_next()]
            case TapeEpoch():
                self.admission.donations = Donations()
                return [
                    *self.rounds.abort(),
                    *(self._keyframe(p) for p in h.owned if h.versions[p] >= 0),
                    Tell("epoch", f"epoch {record.epoch} begins: {record.reason}"),
                ]
            case TapeRestore():
                self.admission.donations = Donations()
                self.ending.restored()
                self.announcer.restored()
                text = f"epoch {record.epoch} begins with {record.source}"
                return [
                    *self.rounds.abort(),
                    InstallLoaded(record.serial),
                    *(self._keyframe(p) for p in h.owned),
                    *self._snapshot(),
                    Tell("restored", text, restoring.told_of(h, record.serial)),
                ]
            case TapeCheckpoint():
                return self.user_requests.checkpoints.recorded(record, event.seq, now)
            case TapeSetting():
                self.rounds.hurry(now)
                text = f"{record.name} = {record.value}: {record.reason}"
                return [Tell("setting", text, {"name": record.name, "value": record.value})]
            case TapeEnd():
                # No record of what is open is taken any more: nothing may wait for one.
                return [*self.rounds.abort(), Tell("end", f"{record.outcome}: {record.reason}")]

    def _unpublished(self) -> list[Publish]:
        """Keyframes of what the leader before did not publish."""
        versions = enumerate(self.history.versions)
        return [self._keyframe(p) for p, version in versions if self.published[p] < version]

    def _keyframe(self, fragment: int) -> Publish:
        """The current anchor, exactly, for everybody."""
        h = self.history
        return Publish(
            round=-1,
            fragment=fragment,
            epoch=h.epoch,
            term=h.term,
            version=h.versions[fragment],
            prev_version=-1,
            participants=(),
            last_merged=dict(h.last_merged[fragment]),
            stamp=h.stamp,
            checkpoint=h.checkpoint,
        )

    def _snapshot(self) -> list[Effect]:
        """One of now; while another is being written, one as soon as that is over."""
        self.snapshotting, self.snapshot_due = True, self.snapshotting
        if self.snapshot_due:
            return []
        return [Snapshot(self.history.seq, self.history.next_round - 1)]

    def _snapshot_next(self) -> list[Effect]:
        """The one under way is over."""
        self.snapshotting = False
        return self._snapshot() if self.snapshot_due else []

    @property
    def _closed(self) -> int:
        """Rounds since the newest snapshot."""
        return self.history.next_round - 1 - self.history.snapshot_round

    def _snapshot_over(self, event: SnapshotOver, now: float) -> list[Effect]:
        if isinstance(event, SnapshotBrokenOff):
            return self._snapshot_next()
        if isinstance(event, SnapshotFailed):
            known, self.room.snapshot_failed = self.room.snapshot_failed, event.reason
            self.snapshot_failed_at = now
            # Every round tries again: told when it begins.
            told = [] if known else [Tell("snapshot-failed", event.reason)]
            return [*told, *self._snapshot_next()]
        effects = self._put(covering(self.history, self._pending, event, self._wall(now)))
        if any(isinstance(r, TapeSnapshot) for r in self._pending):
            return effects
        return [*effects, *self._snapshot_next()]  # of before a restore, or after the end

    def _snapshot_once(self) -> list[Effect]:
        return [] if self.snapshotting else self._snapshot()

    def _snapshot_early(self) -> list[Effect]:
        """Before its time, where a stream that it lets be purged is short of room."""
        early = self.leading and self.history.initialised and self.room.crowded
        return self._snapshot_once() if early and self._closed > 0 else []

    def _of_storage(
        self, event: StreamSeen | Full | Rewound | MergeWaits, now: float
    ) -> list[Effect]:
        match event:
            case MergeWaits():
                return self.room.merge_waits(event)
            case StreamSeen():
                self.room.saw(event)
                again = now >= self.snapshot_failed_at + SNAPSHOT_RETRY_S
                return self._snapshot_early() if again else []
            case Full():
                begins = event.place == "DN" and event.reason
                return [*self.room.take(event), *(self._make_room() if begins else ())]
            case Rewound():
                return self._rewound(event, now)

    def _rewound(self, event: Rewound, now: float) -> list[Effect]:
        """What was acknowledged is gone: published once more, and not needed from UP any more."""
        if not self.leading or not self.history.initialised:
            return []
        text = "the message server lost what it had acknowledged: it was killed, or lost its power"
        effects: list[Effect] = [*self._snapshot(), Tell("rewound", text)]
        if event.published is None:
            return effects
        self.published = event.published
        h, coming = self.history, set[int]()  # fragments
        for p in h.owned:
            under_way = {v: k for (e, q, v), k in self.under_way.items() if (e, q) == (h.epoch, p)}
            whole, seen = with_coming(event.published[p], event.seen[p], under_way)
            if whole >= h.versions[p]:
                coming.add(p)
            elif torn(h.versions[p], whole, seen):
                self.owed = f"DN lost what version {h.versions[p]} of fragment {p} builds on"
                return effects + self._begin_owed(now)
        return [*(e for e in self._unpublished() if e.fragment not in coming), *effects]

    def _superseded(self) -> list[Effect]:
        """What keyframes on DN have replaced, and is there all the same: the leader that published
        them may have died over it, or a deposed one was still sending. Until the next keyframe
        there may be no room."""
        h, known = self.history, [(p, v) for p, v in enumerate(self.keyframes) if v >= 0]
        return [PurgeDown(h.epoch, p, v) for p, v in known if p in h.owned]

    def _make_room(self) -> list[Effect]:
        """On DN, which is full. Whoever led before has been gone for longer than that takes."""
        return [*self._superseded(), PurgeUnsealed(self.history.term)]

    def _published(self, event: Published, now: float) -> list[Effect]:
        """A keyframe makes everything before it superfluous, of earlier epochs too; and itself,
        where a later one came first: it had to be sent again, to a server that had lost it."""
        self.rounds.published(event, now)
        self.under_way.pop((event.epoch, event.fragment, event.version), None)
        if event.epoch == self.history.epoch:
            p, known = event.fragment, list(self.published)
            known[p] = max(known[p], event.version)
            self.published = tuple(known)
        effects = self._free_up()
        if not event.keyframe:
            return effects
        newest = event.version
        if event.epoch == self.history.epoch:  # else it makes room for this epoch's own
            keyframes = list(self.keyframes or (-1,) * self.history.fragments)
            newest = keyframes[event.fragment] = max(keyframes[event.fragment], event.version)
            self.keyframes = tuple(keyframes)
        return [*effects, PurgeDown(event.epoch, event.fragment, newest)]

    def _free_up(self) -> list[Effect]:
        """What a snapshot covers, UP need not have any more, once every fragment is published: if
        all syncers lost their disks before, nothing would be there to begin again from."""
        if self.covered is None or any(self.published[p] < 0 for p in self.history.owned):
            return []
        covered, self.covered = self.covered, None
        return [PurgeUp(covered)]

    def _leads(self, record: TapeTerm) -> Tell:
        shard = f"shard {self.history.shard} of " if self.spec.algorithm.shards > 1 else ""
        return Tell("term", f"{record.leader} leads {shard}the run now (term {record.term})")

    # --- learners ------------------------------------------------------------------------------

    def _progress(self, progress: Progress, now: float) -> list[Effect]:
        h = self.history
        if why := impossible(progress, h.fragments, self.spec.tokens_per_step):
            what = f"a report of {progress.learner} was refused: {why}"
            return self.refused.tell("malformed", what)
        if too_far(progress.epoch, h.epoch):
            return self._not_believed(progress.learner, f"is in epoch {progress.epoch}")
        before = self.roster.newest(progress.learner)
        if why := self.roster.progress(progress, now) or "":
            what = f"a report of {progress.learner} was refused: {why}"
            return self.refused.tell("incarnation", what)
        effects: list[Effect] = []
        if progress.incarnation > before and self.leading:
            life = f"life {progress.incarnation}"
            text = f"{progress.learner} reports for the first time ({life})"
            effects.append(Tell("learner-seen", text, {"learner": progress.learner}))
        self.user_requests.progress(progress, now)
        if self.leading and progress.epoch == h.epoch:
            if lost := self._lost(progress.adopted):
                effects += self._believe(progress.learner, h.epoch + 1, lost, now)
        elif self.leading and progress.epoch > h.epoch:
            effects += self._catch_up(progress.learner, progress.epoch, now)
        return effects

    def _join(self, join: Join, now: float) -> list[Effect]:
        effects = self.admission.join(join, now)
        let_in = any(isinstance(e, SendGrant) and e.grant.accepted for e in effects)
        if let_in and join.epoch > self.history.epoch:
            effects += self._catch_up(join.learner, join.epoch, now)
        return effects

    def _catch_up(self, learner: str, epoch: int, now: float) -> list[Effect]:
        """A learner is ahead of the tape: with another shard, or its record is lost."""
        if too_far(epoch, self.history.epoch):
            return self._not_believed(learner, f"is in epoch {epoch}")
        alone = self.spec.algorithm.shards == 1  # no other shard began it
        why = f"is in epoch {epoch}, the tape in {self.history.epoch}"
        return self._believe(learner, epoch + alone, why, now)

    def _lost(self, held: Sequence[int]) -> str:
        """Why history restarts, or "": a version `held` above the tape's head was published, and
        its record is lost."""
        h = self.history
        for p, version in enumerate(held):
            if p not in h.owned or version <= h.versions[p]:
                continue
            where = f"holds version {version} of fragment {p}, the tape ends at {h.versions[p]}"
            return f"{where}: records were lost"
        return ""

    def _believe(self, learner: str, epoch: int, why: str, now: float) -> list[Effect]:
        """Begin an epoch on a learner's word, unless it has begun too many."""
        if not self._epoch_may_begin:
            return []
        if not self.claims.counts(learner, now):
            return self._not_believed(learner, why, "says too often")
        return self._begin_epoch(epoch, f"{learner} {why}", self._wall(now))

    def _not_believed(self, learner: str, what: str, says: str = "says") -> list[Effect]:
        told = f"{learner} {says} that it {what}, and was not believed"
        return self.refused.tell("epoch", told)

    @property
    def _epoch_may_begin(self) -> bool:
        h = self.history
        pending = any(isinstance(r, TapeEpoch | TapeRestore) for r in self._pending)
        # Another shard may have lost its state and begun again before this one has begun at all:
        # learners wait until all are in one epoch.
        able = h.initialised or self.spec.algorithm.shards > 1
        return able and not pending and not self.user_requests.restoring.due

    def _begin_epoch(self, epoch: int, reason: str, at: float) -> list[Effect]:
        if not self._epoch_may_begin:
            return []
        return self._push(TapeEpoch(epoch=epoch, term=self.history.term, reason=reason, at=at))

    def _begin_owed(self, now: float) -> list[Effect]:
        """Of what DN cannot give any more, nobody else tells: a restore that was under way when it
        was lost may have failed since."""
        if not self.owed:
            return []
        return self._begin_epoch(self.history.epoch + 1, self.owed, self._wall(now))

    # --- what time and the user bring ----------------------------------------------------------

    def _record(self, now: float) -> list[Effect]:
        # Not behind a record that begins another epoch: it could not follow.
        if any(isinstance(r, TapeEpoch | TapeRestore) for r in self._pending):
            return []
        if self.user_requests.checkpoints.overdue(self._pending):
            return []
        append = self.rounds.next_record(self._wall(now))
        return self._push(append.record) if append else []

    def _finish(self, now: float) -> list[Effect]:
        """The end record, once the last round of every fragment is published."""
        end = self.ending.record(self._wall(now), restoring=self.user_requests.restoring.due)
        return self._push(end) if end else self.ending.tell()
