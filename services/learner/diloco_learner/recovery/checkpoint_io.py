"""Own checkpoints of inner moments and counts, each one file; the last N are kept."""

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
import xxhash

from diloco_learner.events import KeepPart
from diloco_learner.recovery import moments
from diloco_learner.recovery.moments import Buffer, Check
from diloco_shared import ambient
from diloco_shared.checkpoints.checkpoints_io import CheckpointError, RunCheckpoints
from diloco_shared.durable import begin_folder, settle_names
from diloco_shared.memory.pages import pages
from diloco_shared.numerics.arrays import Arrays, pack
from diloco_shared.process.crash_points import passing
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.protocol.checkpoints import LearnerPart, reference
from diloco_shared.protocol.chunks import digest_bytes
from diloco_shared.protocol.pace import STORED_BYTES_PER_S
from diloco_shared.spec.run import RunSpec

T = TypeVar("T")

log = structlog.get_logger()

# A checkpoint's file: its sequence, and the digest of what is in it.
_NAME = re.compile(r"(\d{1,32})\.([0-9a-f]{32})\.safetensors")
# What is being written, or was when the process died.
_UNFINISHED = ".part"


# Above them a step or a life would change what stands before it. Of a hub that was put back from a
# backup, epochs and lives go on from the seconds since 2026: ten digits last for three centuries.
_STEPS, _LIVES = 10**9, 10**10


def sequence_of(epoch: int, incarnation: int, step: int) -> int:
    """What a checkpoint is kept under: grows with each, first of all with the epoch.

    It may take more than 64 bits. Files that releases up to this one wrote have six digits for the
    life: their epoch reads as an earlier one, so that a run-wide checkpoint is preferred to them.
    """
    return (epoch * _LIVES + min(incarnation, _LIVES - 1)) * _STEPS + min(step, _STEPS - 1)


def epoch_of(sequence: int) -> int:
    return sequence // (_STEPS * _LIVES)


class OwnCheckpoints(Protocol):
    """A learner's, wherever they lie. None of it is for an event loop, but for what is known."""

    room: DiskRoom
    fault: str  # why none can be kept, as known at the beginning, or ""
    beside_s: float  # seconds that `save` may wait beside what its bytes take

    newest: int | None  # sequence of the newest complete one, if there is any

    def save(self, sequence: int, pieces: Any) -> None:
        """Durably, under an ever-growing `sequence`. OSError where that cannot be."""

    def let_go(self, kept: Any) -> None:
        """Nobody saves what was handed out for it, or does so any longer."""

    def restore(self, trainer: Any) -> tuple[bool, list[str]]:
        """Take over the newest sound one: whether there is any, and why newer ones were passed
        over."""


class LocalCheckpoints:
    """One folder per run. Parameters are not among them: they come from the anchors.

    Not for an event loop: every method may touch the disk.
    """

    beside_s = 0.0

    def __init__(self, folder: Path, keep: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Looks what is there. OSError where the folder cannot be made.

        `wanted`: whether the folder is to be made again where it is gone.
        """
        self.folder, self.wanted = folder.absolute(), wanted
        begin_folder(self.folder)
        self.keep = keep
        without = "training goes on, and a restart begins with moments of before"
        self.room = DiskRoom(self.folder, "a checkpoint", without)
        self.asking = Asking(f"the disk of {self.folder}")
        self.saving = threading.Lock()
        self.newest: int | None = None
        self.fault = ""
        try:
            self.newest = max(self._complete(), default=None)
        except OSError as error:  # a bad disk: what is there may as well be nothing
            self.fault = f"what is in {self.folder} cannot be listed: {error}"[:500]
        with suppress(OSError):  # as far as it can: whoever was killed may not have come to it
            settle_names(self.folder)

    def save(self, sequence: int, pieces: Iterable[Buffer]) -> None:
        """Write the bytes of an inner state under an ever-growing `sequence`, durably.

        They are written as they come: no copy is made of them. OSError when the disk is full. One
        after the other: where nobody waits for one any more, its thread writes on all the same.
        """
        with self.saving, self.room.writing():
            self._begin_again()
            self._save(sequence, pieces)

    def _begin_again(self) -> None:
        """Somebody may have cleared the disk, or put an empty one in its place: no checkpoint would
        ever be kept again. But a run that is deleted has its folder removed (`remove_deleted`). If
        this life has not heard of that yet, what is made here is removed by the next look."""
        if self.wanted() and not self.folder.is_dir():
            begin_folder(self.folder)
            log.warning("own checkpoints were gone: the next ones are kept", folder=self.folder)

    def _save(self, sequence: int, pieces: Iterable[Buffer]) -> None:
        digest, unfinished = xxhash.xxh3_128(), self.folder / f"{sequence}{_UNFINISHED}"
        self._clear()  # before it is written: what a dead process left may fill the disk
        self._prune()  # and so may those whose names could not be put on the disk
        try:
            with unfinished.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                    digest.update(piece)
                file.flush()
                os.fsync(file.fileno())
            passing("checkpoint")
            unfinished.rename(self.folder / f"{sequence}.{digest.hexdigest()}.safetensors")
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        settle_names(self.folder)
        self.newest = sequence
        self._prune()

    def let_go(self, kept: Any) -> None:
        """See `OwnCheckpoints`: the state is whoever's who handed it out."""

    def load(self, check: Check) -> tuple[Buffer | None, list[str]]:
        """The newest sound inner state, and why newer ones were passed over.

        `check` raises ValueError for one that cannot be used.
        """
        faults: list[str] = []
        try:
            there = self._complete()
        except OSError as error:
            return None, [f"what is in {self.folder} cannot be listed: {error}"[:300]]
        for sequence, path in sorted(there.items(), reverse=True):
            data: Buffer | None = None  # one that is passed over goes before another is read
            try:
                data = _read(path)
                check(data)
            except (OSError, ValueError) as error:
                faults.append(f"checkpoint {sequence} passed over: {str(error)[:200]}")
            else:
                return data, faults
        return None, faults

    def restore(self, trainer: Any) -> tuple[bool, list[str]]:
        """See `OwnCheckpoints`. What is not read within a limit is passed over as well."""
        limit_s = stored_within_s(self.keep * self.room.needed)
        try:
            load = partial(self.load, trainer.check_inner_state)
            data, faults = self.asking.within(limit_s, load)
        except OSError as error:
            return False, [f"its own checkpoints are passed over: {error}"[:300]]
        if data is not None:
            trainer.load_inner_state(data)
        return data is not None, faults

    def _complete(self) -> dict[int, Path]:
        # Whoever finds that the run is deleted removes the folder, at any moment.
        with suppress(FileNotFoundError):
            named = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
            return {int(found[1]): path for found, path in named if found}
        return {}

    def _prune(self) -> None:
        """All but the last ones go. The newest whose name is on the disk stays beside them: a power
        cut may take those after it."""
        complete = self._complete()
        for sequence in sorted(complete)[: -self.keep]:
            if sequence != self.newest:
                complete[sequence].unlink(missing_ok=True)

    def _clear(self) -> None:
        for path in self.folder.glob(f"*{_UNFINISHED}"):
            path.unlink(missing_ok=True)


def _read(path: Path) -> Buffer:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    data = pages(path.stat().st_size)
    with path.open("rb") as file:
        size = file.readinto(data)
    if size != len(data) or digest_bytes(data) != found[2]:
        raise ValueError("what is on the disk is not what was written: it is damaged")
    return data


# --------------------------------------------------------------------------------------------------
# A learner's part of a run-wide checkpoint: its inner state, written and read back as it is.
#
# Not for an event loop: every function waits for the vault.


def write_part(
    spec: RunSpec,
    root: str,
    learner: str,
    incarnation: int,
    effect: KeepPart,
    data: Buffer,
) -> int:
    """Write it whole; its bytes. OSError when the vault cannot be written."""
    there, ref = RunCheckpoints(root), reference(spec.folder, effect.number)
    name = f"learner-{learner}"
    part = LearnerPart(
        learner=learner,
        incarnation=incarnation,
        epoch=effect.epoch,
        step=effect.step,
        versions=effect.versions,
        arrays=there.write_arrays(ref, name, pack(moments.views(data))),
    )
    return there.write_part(ref, name, part).bytes


def read_part(
    root: str, source: str, learner: str, check: Check, further: Sequence[str] = ()
) -> tuple[Arrays | None, list[str]]:
    """A sound inner state, this learner's own first, and why others were passed over.

    `check` raises ValueError for moments that cannot be used. A source with an address of its own
    must be in `root` or in a further place.
    """
    faults: list[str] = []
    try:
        there, ref = RunCheckpoints.at(source, root, further)
        manifest, _ = there.manifest(ref)
    except (OSError, CheckpointError) as error:
        return None, [str(error)[:300]]
    # Anybody's moments are better than fresh ones, as with a donor.
    for name in sorted(manifest.learners, key=lambda m: (m != learner, m)):
        # What is passed over goes before another one is read.
        arrays, blob = Arrays(), memoryview(b"")
        try:
            part = there.part(ref, manifest.learners[name], LearnerPart)
            for blob in there.blobs(ref, part):
                arrays |= moments.views(blob)  # the blobs stay where they are, once
            check(arrays)
            return arrays, faults
        except (OSError, ValueError) as error:
            faults.append(f"the part of {name} in {source}: {str(error)[:200]}")
    return None, [*faults, f"{source} holds no part of a learner that can be used"]


# --------------------------------------------------------------------------------------------------
# Waits that end: a vault or a disk that hangs says nothing at all.

# What has not ended by then hangs: a bucket may be away for a minute, and the slowest place takes
# STORED_BYTES_PER_S.
STORED_S_MIN = 60.0


def stored_within_s(size: int) -> float:
    """Seconds in which so many bytes are written, or read, unless the place hangs."""
    return STORED_S_MIN + size / STORED_BYTES_PER_S


class Storing:
    """One place, for an event loop. What hangs keeps its thread: there is at most one of those."""

    def __init__(self) -> None:
        self._hanging: asyncio.Task[Any] | None = None
        self.took_s = 0.0  # at most, when it went well

    async def __call__(
        self, size: int, work: Callable[..., T], *args: Any, beside_s: float = 0.0
    ) -> T:
        """Let `work` write or read so many bytes, in a thread; OSError also after too long.

        `beside_s`: seconds that it may wait for something else.
        """
        if self.hanging is not None:
            raise OSError("an earlier one still hangs there")
        limit_s, began = stored_within_s(size) + beside_s, ambient.monotonic()
        task = asyncio.create_task(asyncio.to_thread(work, *args))
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            found = task.result()
            self.took_s = max(self.took_s, ambient.monotonic() - began)
            return found
        self._hanging = task
        task.add_done_callback(self._ended)
        raise OSError(f"the place did not answer within {limit_s:.0f} s")

    @property
    def hanging(self) -> "asyncio.Task[Any] | None":
        """What was given up and is not done. Any thread may ask."""
        given_up = self._hanging
        return None if given_up is None or given_up.done() else given_up

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        """What became of it nobody asks any more. What it raised knows all that it was given."""
        self._hanging = None
        if not task.cancelled():
            task.exception()


class Asking:
    """One place, for a thread. What hangs keeps a thread: there is at most one of those."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.left: threading.Thread | None = None  # waits for what does not answer

    def check(self) -> None:
        """Of a thread that asks: raises OSError once it was left behind, and should ask no more."""
        if threading.current_thread() is self.left:
            raise OSError("nobody waits for it any more")

    def within(
        self, seconds: float, work: Callable[[], T], waits: Callable[[], object] = lambda: None
    ) -> T:
        """What it returns or raises; OSError once it has taken longer. `waits`: called at every
        second of it.

        Its thread is left behind then. Until that has ended nothing else is asked of the place.
        """
        if self.left is not None and self.left.is_alive():
            raise OSError(f"{self.place} has not answered what it was asked before")
        found: list[T] = []
        failed: list[BaseException] = []

        def body() -> None:
            try:
                found.append(work())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=body, name="store", daemon=True)
        thread.start()
        left_s = seconds
        while thread.is_alive() and left_s > 0:
            thread.join(min(left_s, 1.0))
            left_s -= 1.0
            waits()
        if failed:
            raise failed[0]
        if not found:
            self.left = thread
            raise OSError(f"{self.place} did not answer within {seconds:.0f} s")
        return found[0]
