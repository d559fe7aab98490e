"""What is checked of whole stacks, which take minutes, sees a snapshot that is wrong."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from live.tape_checks import Executed, execute, snapshots_in
from syncer.recording import SPEC, Recording

from diloco_shared.protocol.messages import TapeRecord
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

ROUNDS = 3


class Left:
    """What a syncer left in `folder`: a tape, and a snapshot of its last record."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.recording = folder, Recording()
        self.recording.begin()
        for _ in range(ROUNDS):
            self.recording.round()

    def snapshot(self, *, covers: int, moved: float = 0.0) -> None:
        """As of now, said to be of the record `covers`; every momentum is `moved`."""
        assert self.recording.store is not None
        arrays = {
            name: array + np.asarray(moved, array.dtype) if ".outer." in name else array
            for name, array in self.recording.store.state_arrays().items()
        }
        meta = {
            "history": self.recording.history.meta(),
            "store": self.recording.store.meta(),
        }
        folder = self.folder / "syncer-1" / "snapshots" / SPEC.folder
        SnapshotStore(folder).save(covers, meta, arrays)

    async def executed(self) -> Executed:
        async def payloads(_: TapeRecord) -> Mapping[str, bytes]:
            return self.recording.payloads

        tape = enumerate(self.recording.tape, 1)
        return await execute(SPEC, tape, payloads, snapshots_in(self.folder, SPEC))


async def test_a_snapshot_of_the_state_as_of_its_record_is_sound(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.snapshot(covers=len(left.recording.tape))
    assert (await left.executed()).merges == ROUNDS


@pytest.mark.parametrize("beyond", [1, 100])
async def test_a_snapshot_of_a_record_that_is_not_on_the_tape_is_seen(
    tmp_path: Path, beyond: int
) -> None:
    """It was passed over, beside those that match."""
    left = Left(tmp_path)
    left.snapshot(covers=len(left.recording.tape))
    left.snapshot(covers=len(left.recording.tape) + beyond)
    with pytest.raises(AssertionError, match="not on the tape"):
        await left.executed()


async def test_a_snapshot_of_another_momentum_is_seen(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.snapshot(covers=len(left.recording.tape), moved=0.5)
    with pytest.raises(AssertionError, match="outer"):
        await left.executed()


async def test_no_snapshot_at_all_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no snapshot"):
        await Left(tmp_path).executed()
