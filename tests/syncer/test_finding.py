"""Run-wide checkpoints as a place to go on from: the newest that is sound."""

from pathlib import Path

import pytest
from syncer.recording import SPEC, Recording

from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.protocol.checkpoints import reference
from diloco_syncer.checkpoints.parts_io import seal, write_part
from diloco_syncer.events import Capture, Seal
from diloco_syncer.snapshots.finding_io import Finder
from diloco_syncer.snapshots.snapshots_io import SnapshotStore


class Kept:
    """A run with a checkpoint after each of three rounds; `covers`: of what record each is."""

    def __init__(self, folder: Path) -> None:
        self.root, self.covers = str(folder / "checkpoints"), list[int]()
        recording = Recording()
        recording.begin()
        for number in (1, 2, 3):
            recording.round()
            assert recording.store is not None
            history, store = recording.history.meta(), recording.store
            arrays = store.state_arrays()
            part = write_part(SPEC, 0, self.root, number, history, store.meta(), arrays)
            capture = Capture(number, history["seq"], "as the user asked", 1.0)
            seal(SPEC, self.root, capture, [(history, part)], Seal(number, {}, {}))
            self.covers.append(history["seq"])
        self.finder = Finder(SPEC, 0, folder / "s1", SnapshotStore(folder / "s1"), self.root)

    def there(self, number: int) -> Path:
        return Path(self.root) / reference(SPEC.folder, number)

    def found(self, after: int = 0) -> int:
        """What record the state that is found is of; 0 for none."""
        found = self.finder.checkpoint(after)
        return 0 if found is None else found.seq


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_the_newest_is_found_if_it_is_newer_than_what_is_known(kept: Kept) -> None:
    assert kept.found() == kept.covers[2]
    assert kept.found(after=kept.covers[2]) == 0
    before = kept.finder.checkpoint(0, before=kept.covers[2])
    assert before is not None and before.seq == kept.covers[1]


def test_a_snapshot_that_no_store_can_be_made_of_hides_no_older_one(kept: Kept) -> None:
    """Its process ended while it wrote, and its files are as its table says."""
    recording = Recording()
    recording.begin()
    for covers in (5, 8):
        assert recording.store is not None
        meta = {"history": recording.history.meta(), "store": recording.store.meta()}
        arrays = recording.store.state_arrays()
        first = {name: a for name, a in arrays.items() if covers == 5 or name.startswith("0.")}
        kept.finder.snapshots.save(covers, meta, first)
    found, faults = kept.finder.own()
    assert found is not None and len(faults) == 1 and "000008" in faults[0]


def test_what_is_read_at_most_is_all_that_may_have_to_be_passed_over(kept: Kept) -> None:
    parts = [
        RunCheckpoints(kept.root).manifest(reference(SPEC.folder, n))[0].shards[0]
        for n in (1, 2, 3)
    ]
    assert kept.finder.checkpoint_bytes() == 3 * parts[2].bytes > 0
    (kept.there(3) / "manifest.json").write_bytes(b"torn")
    assert kept.finder.checkpoint_bytes() == 3 * parts[1].bytes
    for number in (1, 2):
        (kept.there(number) / "manifest.json").write_bytes(b"torn")
    assert kept.finder.checkpoint_bytes() == 0


@pytest.mark.parametrize("what", ["*.safetensors", "manifest.json", "shard-0.json"])
def test_a_damaged_one_hides_no_older_one(kept: Kept, what: str) -> None:
    for path in kept.there(3).glob(what):
        path.write_bytes(b"torn")
    assert kept.found() == kept.covers[1]


def test_nor_does_one_without_a_part_of_this_shard(kept: Kept) -> None:
    (kept.there(3) / "shard-0.json").unlink()
    assert kept.found() == kept.covers[1]
