"""What the user wishes of a run, and its tape must take up: settings, checkpoints, a restore.

Pure. Answers with effects, and with records that the machine appends.
"""

from collections.abc import Collection
from typing import Any

from diloco_shared.protocol.messages import (
    Progress,
    TapeCheckpoint,
    TapeEpoch,
    TapeRecord,
    TapeRestore,
    TapeSetting,
    TapeSnapshot,
)
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints.checkpoints import CheckpointDecisions
from diloco_syncer.checkpoints.restoring import Restoring
from diloco_syncer.events import (
    Effect,
    Kept,
    Loaded,
    NumberFound,
    Sealed,
    SnapshotDone,
    Unload,
    Wanted,
)
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import Roster


class UserRequests:
    """Of one leader's term."""

    def __init__(self, spec: RunSpec, history: History, roster: Roster) -> None:
        self.history, self.roster = history, roster
        self.wanted: Wanted | None = None
        self.checkpoints = CheckpointDecisions(spec, history, roster)
        self.restoring = Restoring(history)
        self.loaded: dict[str, Any] = {}  # `History.meta` that a restore record is about

    @property
    def stopping(self) -> bool:
        """Whether the user wants the run to end."""
        return self.wanted is not None and self.wanted.stopping

    @property
    def deadline(self) -> float | None:
        times = (self.checkpoints.deadline, self.restoring.deadline)
        return min((t for t in times if t is not None), default=None)

    def take(
        self, event: Wanted | Kept | NumberFound | Sealed | Loaded, now: float, wall: float
    ) -> list[Effect | TapeRecord]:
        """Apply one event."""
        match event:
            case Wanted():
                self.wanted, self.restoring.wanted = event, event.restore
                self.checkpoints.wanted = event.checkpoint
            case Kept():
                self.checkpoints.kept(event)
            case NumberFound():
                self.checkpoints.numbered(event)
            case Sealed():
                ended = self.checkpoints.sealed(event, wall)
                return [ended] if ended else []
            case Loaded():
                found = self.restoring.loaded(event, now, wall)
                if isinstance(found, TapeRestore):
                    self.loaded = event.history
                    return [found]
                return [Unload(event.restore.serial), *([found] if found else [])]
        return []

    def progress(self, progress: Progress, now: float) -> None:
        """A learner tells which checkpoint it has settled, its epoch, and the restore it knows."""
        self.checkpoints.progress(progress)
        told = (progress.epoch, progress.restore)
        self.restoring.heard = max(self.restoring.heard, told)
        if progress.restore > self.restoring.known:
            self.restoring.known = max(self.restoring.known, self._restored(now))

    def _restored(self, now: float) -> int:
        """Serial of the newest restore that two live learners know of, or the only one; not of one
        in an epoch of before, which may repeat an old word for minutes."""
        present = [m.progress for m in self.roster.live(now) if m.progress is not None]
        told = sorted(p.restore for p in present if p.epoch >= self.history.epoch)[-2:]
        # Whoever speaks first to a new leader is not the only one yet.
        alone = len(present) == 1 and now - self.roster.since > self.roster.lease_s
        return min(told, default=0) if len(told) > 1 or alone else 0

    def _goes_back(self, pending: Collection[TapeRecord]) -> bool:
        """Whether a mark that is set now might cut through states of before and after a restore.

        The first shard begins none while it has to go back, for another one may have gone back
        already. Another shard sets the mark that it has heard of, unless learners tell of an epoch
        that is newer than its own: the first one may have set it after it had gone back. Nor does
        it set one behind the record of a restore that is on its way to the tape: whether there is
        a mark to set is known once that is in force.
        """
        h, restoring = self.history, self.restoring
        recording = any(isinstance(r, TapeRestore) for r in pending)
        return recording or (restoring.due and (h.shard == 0 or restoring.heard[0] > h.epoch))

    def advance(
        self, now: float, wall: float, pending: Collection[TapeRecord]
    ) -> list[Effect | TapeRecord]:
        """What is to be done now; one record of a kind at a time, of those not `pending`."""
        self.restoring.held = any(isinstance(r, TapeEpoch) for r in pending)
        self.checkpoints.held = self._goes_back(pending)
        self.checkpoints.goes_back = self.restoring.due
        self.checkpoints.needed = self.restoring.needed
        done: list[Effect | TapeRecord] = [
            *self.restoring.advance(now),
            *self.checkpoints.advance(now, wall),
        ]
        if not any(isinstance(r, TapeSetting) for r in pending):
            change = setting(self.history, self.wanted, wall)
            done += [change] if change else []
        if not any(isinstance(r, TapeCheckpoint) for r in pending):
            mark = self.checkpoints.next_record(wall)
            done += [mark] if mark else []
        return done


def setting(history: History, wanted: Wanted | None, wall: float) -> TapeSetting | None:
    """The next change that the user asks for and the tape does not have yet."""
    h = history
    if wanted is None or h.outcome:
        return None
    changes = (
        ("paused", int(h.paused), int(wanted.paused)),
        ("quorum", h.quorum, wanted.quorum),
        ("stopping", int(h.stopping), int(wanted.stopping or h.stopping)),
    )
    for name, is_, shall in changes:
        if is_ != shall:
            return TapeSetting.model_validate(
                {
                    "term": h.term,
                    "name": name,
                    "value": shall,
                    "reason": "as the user asked",
                    "at": wall,
                }
            )
    return None


def covering(
    history: History, pending: Collection[TapeRecord], done: SnapshotDone, wall: float
) -> list[TapeSnapshot]:
    """The record of a snapshot that is durable; none for one of before a restore, whose record may
    still be on its way to the tape.

    Rounds are counted anew behind a restore. No snapshot would seem due there for as many of them
    as the run went back.
    """
    restoring = any(isinstance(r, TapeRestore) for r in pending)
    if restoring or done.covers < history.snapshot_covers:
        return []
    return [
        TapeSnapshot(
            term=history.term, covers=done.covers, round=done.round, path=done.path, at=wall
        )
    ]
