"""What is known of an export, which may begin, and which go. Pure.

running --its process has made the folder--> complete
        --it failed, or the coordinator ended meanwhile--> failed
"""

import errno
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from diloco_shared.protocol.exports import (
    Dtype,
    ExportedFile,
    ExportManifest,
    ExportMoved,
)
from diloco_shared.protocol.messages import Count, Message, Reason, Seconds, Version
from diloco_shared.protocol.subjects import Id

State = Literal["running", "complete", "failed"]
# Exports that failed and are still listed, of all runs: for whoever asks why.
FAILED_MAX = 20
CUT_OFF = "the coordinator was ended while it was being made: ask for it again"
# So many in a row may be what ends the coordinator: the next one waits until it is due by rounds.
CUT_OFF_MAX = 3
# The rate is that of the last so many seconds: longer than a fragment's own ups and downs.
RATE_S = 10.0


def why_unwritten(error: OSError) -> str:
    """Why not even an export's record can be written, and what to do."""
    where = error.filename or "the coordinator's data folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the coordinator's disk is full at {where}: free disk space there"
    return (
        f"the coordinator cannot use {where} ({error.strerror or error}): see that its disk, and "
        "the place of the run's checkpoints, can be reached and written"
    )


class Asked(Message):
    """What is to be exported: what is published, by default the newest, or a checkpoint."""

    version: Count | None = None
    checkpoint: str = ""
    dtype: Dtype = "fp32"


class ExportRecord(Message):
    """One export, as it is kept beside its files."""

    id: Id
    run: Id
    run_id: str
    folder: str  # of the run: no other run's, nor an earlier one's of this name
    asked: Asked
    automatic: bool = False  # by `keeping.export_every_rounds`
    rounds: Count = 0  # that the run had committed when it was begun
    final: bool = False  # the run was over when it was begun
    in_epoch: Count | None = None  # of the run when it was begun; None: an older build wrote this
    state: State = "running"
    reason: Reason = ""  # why it failed
    serial: Count = 0  # among all of its coordinator; 0: an older build wrote this
    begun_at: Seconds
    ended_at: Seconds = 0.0
    epoch: Count = 0
    steps: Count = 0
    versions: tuple[Version, ...] = ()
    files: tuple[ExportedFile, ...] = Field(default=())  # `diloco.json` itself among them

    def completed(
        self, manifest: ExportManifest, files: Sequence[ExportedFile], at: float
    ) -> "ExportRecord":
        """It is there."""
        return self.model_copy(
            update={
                "state": "complete",
                "ended_at": at,
                "epoch": manifest.epoch,
                "steps": manifest.steps,
                "versions": tuple(f.version for f in manifest.fragments),
                "files": tuple(files),
            }
        )

    def failed(self, reason: str, at: float) -> "ExportRecord":
        """It will never be."""
        return self.model_copy(update={"state": "failed", "reason": reason[:500], "ended_at": at})

    @property
    def order(self) -> tuple[int, float]:
        """As they were begun. Not by the clock alone, which may have been ahead for a time: what is
        made after that would be the oldest, and the first to go."""
        return self.serial, self.begun_at

    @property
    def cut_off(self) -> bool:
        """Whether only the end of its coordinator kept it from being made."""
        return (self.state, self.reason) == ("failed", CUT_OFF)

    def of_history(self, epoch: int, committed: int) -> bool:
        """Whether it is of what a run is now that is in `epoch` with so many rounds: not of what a
        restored checkpoint, or a hub that was put back, took away."""
        began = self.epoch if self.in_epoch is None else self.in_epoch
        return began == epoch and self.rounds <= committed


class ExportPace:
    """How far an export is, and how fast it gets there."""

    def __init__(self) -> None:
        self.stage = "starting"
        self.done = self.total = 0
        self._seen: deque[tuple[float, int]] = deque()

    def moved(self, line: ExportMoved, now: float) -> None:
        """`now`: seconds, monotonic."""
        self.stage, self.done, self.total = line.stage, line.done, line.total
        self._seen.append((now, line.done))
        # The oldest that is kept is as old as RATE_S, if anything is.
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_S:
            self._seen.popleft()

    def view(self) -> dict[str, Any]:
        """For people; null for what nobody can tell yet."""
        rate = self._rate()
        left = (self.total - self.done) / rate if rate else None
        return {
            "stage": self.stage,
            "bytes_done": self.done,
            "bytes_total": self.total,
            "bytes_per_s": rate,
            "seconds_left": left,
        }

    def _rate(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began and last > first else None


# --------------------------------------------------------------------------------------------------
# Which may begin, which begin by themselves, which go.


def hindrance(records: Iterable[ExportRecord], run_id: str, at_once: int) -> str:
    """Why no export of this run may begin now; "" if one may."""
    running = [r for r in records if r.state == "running"]
    same = next((r for r in running if r.run_id == run_id), None)
    if same is not None:
        return f"export {same.id} of {same.run!r} is being made: wait for it"
    if len(running) >= at_once:
        # Unnamed: whoever asks may not see the others.
        return f"exports of other runs are being made, and no more than {at_once} at a time: wait"
    return ""


def due(
    records: Iterable[ExportRecord],
    run_id: str,
    every: int | None,
    committed: int,
    over: bool,
    epoch: int = 0,
    since: int | None = None,
) -> bool:
    """Whether one of a run in `epoch` that has `committed` so many rounds begins by itself.

    What was asked for by hand counts too, and what failed: a disk that is full is not asked again
    before another `every` rounds. What was cut off with its coordinator is begun again. Once the
    run is over, the last parameters are worth one of their own; and what an earlier epoch made is
    of a history that may be lost. Before, it counts as far as the run had come when this epoch was
    seen first, after `since` rounds: an epoch often begins with the very parameters that were
    exported. Where that is not known, it counts as far as the run has come.
    """
    if every is None or not committed:
        return False
    of_run = [r for r in records if r.run_id == run_id and not r.asked.checkpoint]
    tried = _tried(of_run)
    if not over:
        before = committed if since is None else min(since, committed)
        known = (r for r in tried if r.rounds <= before or r.of_history(epoch, committed))
        reached = (r.rounds for r in known)
        return committed - max(reached, default=0) >= every
    counted = [r for r in tried if r.of_history(epoch, committed)]
    before = max((r.rounds for r in counted), default=0)
    return committed > before and not any(r.final for r in counted)


def _tried(of_run: Sequence[ExportRecord]) -> list[ExportRecord]:
    """Those that are not begun again: all that were not cut off, and all if the newest were."""
    newest = sorted(of_run, key=lambda r: r.order)[-CUT_OFF_MAX:]
    if len(newest) == CUT_OFF_MAX and all(r.cut_off for r in newest):
        return [*of_run]
    return [r for r in of_run if not r.cut_off]


def surplus(
    records: Iterable[ExportRecord],
    kept_max: int,
    automatic_max: int | None,
    run_id: str,
    runs: Collection[str],
) -> list[ExportRecord]:
    """Which go, after one of the run `run_id` ended: the oldest, never one that is being made.

    Of the run's own automatic ones `automatic_max` stay (None: nobody knows how many); of all
    together `kept_max`, and automatic ones go before those that somebody asked for. First go those
    of no run in `runs` (ids): a hub that was put back from a backup does not know it, so nobody can
    ask for them. Then the run's own go, and of no other run the newest: whoever may operate one run
    alone pushes out nobody else's only one. So there may be more than `kept_max`, but then no more
    than one of each run.
    """
    ended = sorted((r for r in records if r.state != "running"), key=lambda r: r.order)
    failed = [r for r in ended if r.state == "failed"]
    gone = failed[: max(len(failed) - FAILED_MAX, 0)]
    kept = [r for r in ended if r.state == "complete"]
    if automatic_max is not None:
        own = [r for r in kept if r.automatic and r.run_id == run_id]
        gone += own[: max(len(own) - automatic_max, 0)]
    rest = [r for r in kept if r not in gone]
    return gone + _spare(rest, run_id, runs)[: max(len(rest) - kept_max, 0)]


def _spare(kept: Sequence[ExportRecord], run_id: str, runs: Collection[str]) -> list[ExportRecord]:
    """What may go of those that are kept (oldest first), in the order in which it goes."""
    wanted = sorted(kept, key=lambda r: (not r.automatic, r.order))
    own = [r for r in wanted if r.run_id == run_id]
    lost = [r for r in wanted if r.run_id not in {*runs, run_id}]
    newest = {r.run_id: r.id for r in kept}
    others = [r for r in wanted if r.run_id in runs and r.run_id != run_id]
    return lost + own[:-1] + [r for r in others if r.id != newest[r.run_id]]
