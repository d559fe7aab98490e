"""Process 0's side of checkpoints that all hosts write: see `sharded` and `sharded_io`.

    checkpoints = HostsCheckpoints(...)                # looks at the place, with all hosts
    kept = checkpoints.begin(epoch, step)              # of the thread that trains: copies are made
    checkpoints.save(sequence, kept)                   # of another: waits, and makes it complete
    checkpoints.restore(trainer)                       # the newest sound one, on the present mesh

For the rest of a learner they are what `LocalCheckpoints` are.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from diloco_learner.hosts import plan
from diloco_learner.hosts.parts import Buffer
from diloco_learner.hosts.sharded import (
    CompleteCheckpoint,
    Told,
    anew,
    described,
    fault_of,
    faults_of,
    restored,
)
from diloco_learner.hosts.sharded_io import LOOK_S, SEEN_S, TOLD_S, Shards, Writing
from diloco_learner.hosts.whole import ORDER_S_MAX
from diloco_learner.models import to_named
from diloco_learner.recovery.checkpoint_io import sequence_of
from diloco_learner.training.trainer import Trainer
from diloco_shared import ambient
from diloco_shared.process.crash_points import passing
from diloco_shared.process.disk_room import DiskRoom

log = structlog.get_logger()

# To list what lies there, and to remove it.
LIST_S = 120.0


class Others(Protocol):
    """The other processes: see `hosts.trainer.Link`."""

    @property
    def turn(self) -> Any: ...
    def tell(self, order: plan.Order) -> int: ...
    def answers(self, number: int, patience_s: float = ...) -> Mapping[int, Buffer]: ...


class Nobody:
    """The others of an island of one process."""

    turn = nullcontext()

    def tell(self, order: plan.Order) -> int:
        return 0

    def answers(self, number: int, patience_s: float = 0.0) -> Mapping[int, Buffer]:
        return {}


@dataclass(slots=True)
class KeptCheckpoint:
    """One that is begun. `number`: of the order, once the others are told."""

    number: int | None = None
    sequence: int = 0
    writing: Writing | None = None
    fault: str = ""  # why it was not even begun
    left_out: bool = False  # nor need be: another one is on its way
    taken: bool = False  # somebody saves it


@dataclass(slots=True)
class HostsCheckpoints:
    """Of one life of a learner. `begin` and `save` may be called by two threads, each by one."""

    trainer: Trainer
    shards: Shards
    others: Others
    names: Mapping[int, str]  # of the hosts
    name: str  # of the folder within the place: of the run and the learner
    incarnation: int
    keep: int
    room: DiskRoom = field(init=False)
    newest: int | None = field(init=False, default=None)
    fault: str = field(init=False, default="")  # why the place could not be used at the beginning
    saving: bool = field(init=False, default=False)
    # A save looks at the place once more where that was of no use, waits until it sees what the
    # other hosts have written, and removes older ones.
    beside_s: float = field(init=False, default=2 * LOOK_S + SEEN_S + 2 * LIST_S)

    def __post_init__(self) -> None:
        without = "training goes on, and a restart begins with moments of before"
        self.room = DiskRoom(self.shards.place, "a checkpoint", without)
        self.room.needed = self.trainer.inner_state_bytes
        try:
            self._look()
        except OSError as error:
            log.warning("checkpoints of all hosts cannot be kept", reason=str(error))
            self.room.failed = self.fault  # told with it, and not once more when one is due

    def _look(self) -> None:
        """Every host sees the same folder and may write there; what is complete is known then, and
        what is not is removed. Raises OSError, and `fault` is the reason."""
        try:
            self._looked()
        except Exception as error:  # a bucket's library has exceptions of its own
            self.fault = f"{self.shards.place}: {fault_of(error)}"[:500]
            raise OSError(self.fault) from error
        self.fault = ""

    def _looked(self) -> None:
        token = ambient.unique()[:16]
        self.shards.look(self.name, token, first=True)
        with self._telling(plan.Look(self.name, token)) as number:
            pass
        if fault := faults_of(self._answers(number), self.names):
            raise OSError(fault)
        self.shards.looked(token)
        there = self.shards.within(LIST_S, self.shards.sequences)
        self.newest = max((s for s, complete in there.items() if complete), default=None)
        self._remove_all(s for s, complete in there.items() if not complete)

    # --- writing -------------------------------------------------------------------------------

    def begin(self, epoch: int, step: int, *, final: bool = False) -> KeptCheckpoint:
        """Of the moments as they are now. Each host copies what it holds before its next step.

        `final`: no step follows, so that copies are made once it is its turn to be written.
        """
        if final:
            return KeptCheckpoint()
        if self.fault:
            return KeptCheckpoint(fault=self.fault)
        sequence = sequence_of(epoch, self.incarnation, step)
        if self.saving or sequence == self.newest:
            return KeptCheckpoint(left_out=True)
        if self.shards.busy:  # and nobody waits for it any more
            return KeptCheckpoint(fault="an earlier one is still being written")
        self.saving = True
        return self._begun(sequence)

    def let_go(self, kept: KeptCheckpoint) -> None:
        """Nobody saves it, or does so any longer."""
        if kept.number is not None and not kept.taken:
            self.saving = False

    def _begun(self, sequence: int) -> KeptCheckpoint:
        with self._telling(plan.Keep(str(sequence))) as number:
            writing = self.shards.keep(sequence, to_named(self.trainer.opt_state))
        return KeptCheckpoint(number, sequence, writing)

    def save(self, sequence: int, kept: KeptCheckpoint) -> None:
        """Until it is complete. Raises OSError where it cannot be."""
        if kept.left_out:
            log.info("an earlier checkpoint is still being written", left_out=sequence)
            return
        kept.taken = True
        try:
            with self.room.writing():
                self._kept(sequence, kept)
            self._prune(sequence)
        finally:
            # Not before the older ones are gone: what hangs over that holds the next ones off.
            self.saving = self.saving and bool(kept.fault)

    def _kept(self, sequence: int, kept: KeptCheckpoint) -> None:
        if self.fault:
            self._look()  # it may be mended meanwhile
            log.info("checkpoints of all hosts can be kept now", place=self.shards.place)
            if kept.fault:
                return  # nobody has copied anything for this one
        if kept.fault:
            raise OSError(kept.fault)
        if sequence == self.newest:
            return  # of the same step: told to stop right after it
        try:
            self._save(sequence, kept)
        except Exception as error:  # Orbax raises many kinds
            with suppress(Exception):
                self._remove(sequence)
            raise OSError(fault_of(error)) from error
        self.newest = sequence

    def _save(self, sequence: int, kept: KeptCheckpoint) -> None:
        if kept.number is None:
            self._remove(sequence)  # what an attempt at the same step has left
            kept = self._begun(sequence)
        assert kept.number is not None and kept.writing is not None
        assert kept.sequence == sequence, "it was begun as another one"
        # Their parts are as large as this one: each is told before it counts as one that hangs.
        patience_s = max(ORDER_S_MAX, kept.writing.limit_s + TOLD_S)
        told = {0: kept.writing.told()} | self._answers(kept.number, patience_s)
        if fault := faults_of(told, self.names):
            raise OSError(fault)
        files = {name: file for one in told.values() for name, file in one.files.items()}
        leaves = described(to_named(self.trainer.opt_state))
        whole = CompleteCheckpoint(leaves, self.trainer.program.model.stacked, files)
        passing("checkpoint")
        self.shards.complete(sequence, whole)

    def _prune(self, sequence: int) -> None:
        """Of those up to `sequence`, which is complete, all but the newest, and what was never
        completed. What comes after it is of a later life: an island that was given up may still
        run, beside the one that works in its place."""
        try:
            there = self.shards.within(LIST_S, self.shards.sequences)
        except Exception as error:
            log.warning("older checkpoints are not removed", error=fault_of(error))
            return
        complete = sorted(s for s, is_complete in there.items() if is_complete)
        kept = set(complete[-self.keep :])
        self._remove_all(sorted(s for s in there if s <= sequence and s not in kept))

    def _remove_all(self, sequences: Iterable[int]) -> None:
        """As far as that goes: what is left takes room, and harms nothing else."""
        for sequence in sequences:
            try:
                self._remove(sequence)
            except Exception as error:
                log.warning("a checkpoint is not removed", of=sequence, error=fault_of(error))

    def _remove(self, sequence: int) -> None:
        self.shards.within(LIST_S, lambda: self.shards.remove(sequence))

    # --- reading -------------------------------------------------------------------------------

    def restore(self, trainer: Trainer) -> tuple[bool, list[str]]:
        """Take over the newest sound one: whether there is any, and why newer ones were passed
        over."""
        try:
            there = {} if self.fault else self.shards.within(LIST_S, self.shards.sequences)
        except Exception as error:  # a bucket's library has exceptions of its own
            return False, [fault_of(error)]
        faults: list[str] = []
        for sequence in sorted((s for s, complete in there.items() if complete), reverse=True):
            if not (fault := self._restored(trainer, sequence)):
                return True, faults
            faults.append(f"checkpoint {sequence} passed over: {fault}"[:300])
        if faults:
            with self._telling(plan.Anew()):
                anew(trainer)
        return False, faults

    def _restored(self, trainer: Trainer, sequence: int) -> str:
        """Why it could not be, or ""."""
        with self._telling(plan.Restore(str(sequence))) as number:
            own = restored(trainer, self.shards, sequence)
        return faults_of({0: own} | self._answers(number), self.names)

    # --- the others ----------------------------------------------------------------------------

    @contextmanager
    def _telling(self, order: plan.Order) -> Iterator[int]:
        with self.others.turn:
            yield self.others.tell(order)

    def _answers(self, number: int, patience_s: float = ORDER_S_MAX) -> dict[int, Told]:
        answers = self.others.answers(number, patience_s)
        return {index: Told.decoded(data) for index, data in answers.items()}
