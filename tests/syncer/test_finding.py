"""Run-wide checkpoints as a place to go on from: the newest that is sound."""

import math
import weakref
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from syncer.recording import SPEC, Recording
from waiting import PATIENCE_S

from diloco_shared.checkpoints import place_threads_io as place_threads
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.checkpoints.place_threads_io import PlaceThreads
from diloco_shared.checkpoints.vault_io import VaultError
from diloco_shared.protocol.checkpoints import reference
from diloco_syncer.checkpoints.parts_io import seal, write_part
from diloco_syncer.events import Capture, Seal
from diloco_syncer.snapshots import finding_io as finding
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

    async def found(self, after: int = 0, before: float = math.inf) -> int:
        """What record the state that is found is of; 0 for none."""
        found = await self.finder.newest_checkpoint(PlaceThreads(), after, before=before)
        return 0 if found is None else found.seq

    def bytes(self, number: int) -> int:
        """Of this shard's part."""
        there = RunCheckpoints(self.root)
        return there.manifest(reference(SPEC.folder, number))[0].shards[0].bytes


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


async def test_the_newest_is_found_if_it_is_newer_than_what_is_known(kept: Kept) -> None:
    assert await kept.found() == kept.covers[2]
    assert await kept.found(after=kept.covers[2]) == 0
    assert await kept.found(before=kept.covers[2]) == kept.covers[1]


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


@pytest.mark.parametrize("by", ["own", "newer"])
def test_one_that_is_passed_over_is_let_go_of_before_another_is_read(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Each is as large as all that the syncer has."""
    recording = Recording()
    recording.begin()
    assert recording.store is not None
    meta = {"history": recording.history.meta(), "store": recording.store.meta()}
    for covers in (5, 8):
        kept.finder.snapshots.save(covers, meta, recording.store.state_arrays())
    load, before = SnapshotStore._load, list[weakref.ref[Any]]()

    def looked_at(self: SnapshotStore, path: Path) -> Any:
        assert all(array() is None for array in before)
        found = load(self, path)
        before.extend(map(weakref.ref, found[1].values()))
        return found

    def refuse(self: Finder, *_: Any) -> None:
        raise ValueError("of another form")

    monkeypatch.setattr(SnapshotStore, "_load", looked_at)
    monkeypatch.setattr(Finder, "_store", refuse)
    found = kept.finder.newer(0) if by == "newer" else kept.finder.own()[0]
    assert found is None and before


async def test_each_is_waited_for_by_itself(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that hung at the first of hundreds was waited for as if it read them all."""
    monkeypatch.setattr(place_threads, "LEFT_S", 0.0)
    asked, answers = list[int](), Event()

    def allowed(size: int) -> float:
        asked.append(size)
        return 0.05 if len(asked) == 2 else PATIENCE_S

    def hangs(finder: Finder, ref: str) -> None:
        if ref != reference(SPEC.folder, 3):
            answers.wait()

    monkeypatch.setattr(finding, "stored_within_s", allowed)
    monkeypatch.setattr(Finder, "checkpoint", hangs)
    try:
        with pytest.raises(VaultError, match="did not answer"):
            await kept.found()
    finally:
        answers.set()
    assert asked == [kept.bytes(3), kept.bytes(2)] and min(asked) > 0


@pytest.mark.parametrize("what", ["*.safetensors", "manifest.json", "shard-0.json"])
async def test_a_damaged_one_hides_no_older_one(kept: Kept, what: str) -> None:
    for path in kept.there(3).glob(what):
        path.write_bytes(b"torn")
    assert await kept.found() == kept.covers[1]


async def test_nor_does_one_without_a_part_of_this_shard(kept: Kept) -> None:
    (kept.there(3) / "shard-0.json").unlink()
    assert await kept.found() == kept.covers[1]
