"""Snapshots on disk: whole or passed over, with the reason; no debris."""

import errno
import json
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import structlog
from safetensors.numpy import save_file
from settled import FAILS, UNKNOWN, Settled, settles_no_names

from diloco_syncer.merging.anchor_files_io import FileShelf
from diloco_syncer.merging.store import in_memory
from diloco_syncer.snapshots import snapshots_io as snapshots
from diloco_syncer.snapshots.snapshots_io import META, SnapshotStore, table_of


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "0.master": rng.standard_normal(50).astype(np.float32),
        "0.outer.0": np.array(seed, dtype=np.int32),
    }


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots")


def names(store: SnapshotStore) -> list[str]:
    return sorted(p.name for p in store.folder.iterdir())


def newest(store: SnapshotStore) -> tuple[Any, list[str]]:
    return store.newest(lambda meta, arrays: (meta, arrays))


def newest_seed(store: SnapshotStore) -> tuple[int | None, list[str]]:
    found, faults = newest(store)
    if found is None:
        return None, faults
    meta, loaded = found
    for name, array in arrays(meta["seed"]).items():
        assert loaded[name].tobytes() == array.tobytes()
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
    return meta["seed"], faults


def test_a_folder_that_is_not_there_holds_no_snapshot(store: SnapshotStore) -> None:
    assert newest(store) == (None, [])


def test_what_is_saved_comes_back_to_the_bit(store: SnapshotStore) -> None:
    store.save(7, {"seed": 1}, arrays(1))
    assert newest_seed(store) == (1, [])


def test_one_that_nothing_can_be_made_of_is_passed_over(store: SnapshotStore) -> None:
    """A process that ended while it wrote left one without the last arrays, say."""
    store.save(7, {"seed": 1}, arrays(1))
    store.save(8, {"seed": 2}, {"0.master": arrays(2)["0.master"]})
    found, faults = store.newest(lambda meta, arrays: (meta["seed"], arrays["0.outer.0"]))
    assert found is not None and found[0] == 1
    assert len(faults) == 1 and "0.outer.0" in faults[0]


def test_the_newest_are_kept(store: SnapshotStore) -> None:
    # In numbers, not in letters: 10 comes after 9.
    for covers in (8, 9, 10, 11):
        store.save(covers, {"seed": covers}, arrays(covers))
    assert names(store) == ["snapshot-000000000010", "snapshot-000000000011"]
    assert newest_seed(store) == (11, [])


def test_the_same_record_may_be_covered_again(store: SnapshotStore) -> None:
    store.save(3, {"seed": 1}, arrays(1))
    store.save(3, {"seed": 2}, arrays(2))
    assert names(store) == ["snapshot-000000000003"]
    assert newest_seed(store) == (2, [])


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def list_instead(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("0.*", tear),
        ("0.*", flip),
        ("0.*", empty),
        ("0.*", longer),
        ("0.*", Path.unlink),
        ("meta.json", tear),
        ("meta.json", empty),
        ("meta.json", list_instead),
        ("meta.json", Path.unlink),
    ],
)
def test_a_torn_one_is_passed_over_with_the_reason(
    store: SnapshotStore, name: str, damage: Any
) -> None:
    store.save(1, {"seed": 1}, arrays(1))
    damage(next(store.save(2, {"seed": 2}, arrays(2)).glob(name)))
    seed, faults = newest_seed(store)
    assert seed == 1
    assert len(faults) == 1 and faults[0].startswith("snapshot-000000000002: ")


def test_when_all_are_torn_there_is_none_and_every_reason(store: SnapshotStore) -> None:
    for covers in (1, 2):
        tear(next(store.save(covers, {"seed": covers}, arrays(covers)).glob("0.*")))
    found, faults = newest(store)
    assert found is None and len(faults) == 2


@pytest.mark.parametrize("step", ["_write", "_write_text", "settle_names"])
def test_a_full_disk_leaves_no_debris_and_the_old_one(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store.save(1, {"seed": 1}, arrays(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshots, step, full)
    with pytest.raises(OSError, match="No space left"):
        store.save(2, {"seed": 2}, arrays(2))
    assert names(store) == ["snapshot-000000000001"]
    monkeypatch.undo()
    assert newest_seed(store) == (1, [])
    assert "No space left" in store.room.saw(10**12, 0.0)
    # Once there is room again, the same snapshot can be written.
    store.save(2, {"seed": 2}, arrays(2))
    assert newest_seed(store) == (2, [])
    assert store.room.needed == sum(a.nbytes for a in arrays(2).values())
    assert not store.room.saw(10**12, 1.0)


def test_what_dead_processes_left_is_gone_before_the_next_is_written(store: SnapshotStore) -> None:
    """Whatever it was to cover: it may be what fills the disk."""
    left = store.folder / ".writing-000000000007"
    left.mkdir(parents=True)
    (left / "0.writing").write_bytes(b"half")
    store.save(9, {"seed": 9}, arrays(9))
    assert not left.exists()


def test_what_a_power_cut_left_aside_is_no_snapshot(store: SnapshotStore) -> None:
    store.save(1, {"seed": 1}, arrays(1))
    aside = store.folder / ".writing-000000000002"
    aside.mkdir()
    (aside / "meta.json").write_text(json.dumps({"covers": 2}))
    assert newest_seed(store) == (1, [])
    store.save(2, {"seed": 2}, arrays(2))
    assert names(store) == ["snapshot-000000000001", "snapshot-000000000002"]


@pytest.mark.parametrize("second", ["saved", "adopted"])
def test_two_threads_write_one_after_the_other(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """A leader that was deposed still writes when its own standby writes."""
    other = SnapshotStore(tmp_path / "other")
    other.save(2, {"seed": 2}, arrays(2))
    covers, meta = other.newest_meta() or (0, b"")
    for listed in store.missing(meta):
        path = other.file(covers, listed.digest)
        assert path is not None
        store.receive(listed, path.read_bytes())
    begun: list[Thread] = []

    def write() -> None:
        if second == "saved":
            store.save(2, {"seed": 2}, arrays(2))
        else:
            store.adopt(covers, meta)

    def meanwhile(point: str) -> None:
        if not begun:
            begun.append(Thread(target=write))
            begun[0].start()
            begun[0].join(0.2)  # as long as it may take where nothing holds it up

    monkeypatch.setattr(snapshots, "passing", meanwhile)
    with store.receiving():
        store.save(1, {"seed": 1}, arrays(1))
        begun[0].join()
    assert store.covers() == [1, 2]
    assert all(store.sound(covers) for covers in (1, 2))


def test_values_that_json_cannot_hold_are_refused(store: SnapshotStore) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.save(1, {"norm": float("nan")}, arrays(1))
    assert names(store) == []


# --- only what has changed -----------------------------------------------------------------------


def fragments(**seeds: int) -> dict[str, np.ndarray]:
    """Of every fragment a master, and the anchor before."""
    found = {}
    for p, seed in seeds.items():
        for name in ("master", "previous"):
            values = np.random.default_rng(seed).standard_normal(40).astype(np.float32)
            found[f"{p[1:]}.{name}"] = values
    return found


def inodes(path: Path) -> dict[str, int]:
    return {f.name.split(".")[0]: f.stat().st_ino for f in path.iterdir() if f.name != META}


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in wanted.items()}


def test_what_has_not_changed_is_linked_and_not_written(store: SnapshotStore) -> None:
    held = fragments(p0=1, p1=2, p2=3)
    first = inodes(store.save(1, {}, dict(held)))
    written = store.bytes_written
    assert written == sum(array.nbytes for array in held.values())
    held |= fragments(p1=4)
    second = inodes(store.save(2, {}, dict(held)))
    assert store.bytes_written - written == sum(a.nbytes for a in fragments(p1=4).values())
    assert (first["0"], first["2"]) == (second["0"], second["2"])
    assert first["1"] != second["1"]
    assert same(store.load(2)[1], held)


def test_equal_values_in_other_arrays_are_written(store: SnapshotStore) -> None:
    """Arrays are known by themselves: a version may come again with other values."""
    first = inodes(store.save(1, {}, fragments(p0=1)))
    assert inodes(store.save(2, {}, fragments(p0=1))) != first


def test_what_was_loaded_is_linked_too(store: SnapshotStore) -> None:
    store.save(1, {}, fragments(p0=1, p1=2))
    again = SnapshotStore(store.folder)
    found, _ = newest(again)
    assert found is not None
    arrays = found[1] | fragments(p1=5)
    path = again.save(2, {}, dict(arrays))
    assert again.bytes_written == sum(array.nbytes for array in fragments(p1=5).values())
    assert same(again.load(2)[1], arrays) and len(inodes(path)) == 2


@pytest.mark.parametrize("damage", [Path.unlink, tear])
def test_a_file_that_cannot_be_linked_is_written_again(store: SnapshotStore, damage: Any) -> None:
    held = fragments(p0=1)
    damage(next(store.save(1, {}, dict(held)).glob("0.*")))
    store.save(2, {}, dict(held))
    assert same(store.load(2)[1], held)


def test_without_links_everything_is_written(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(snapshots.os, "link", unknown)
    held = fragments(p0=1)
    assert inodes(store.save(1, {}, dict(held))) != inodes(store.save(2, {}, dict(held)))
    assert same(store.load(2)[1], held)


def test_a_disk_that_fills_in_the_middle_leaves_the_older_one_good(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = fragments(p0=1, p1=2, p2=3)
    store.save(1, {}, dict(held))
    more, real, calls = held | fragments(p1=4, p2=5), snapshots._write, iter((0, 1))

    def full(*args: Any) -> Any:
        if next(calls):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(snapshots, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(2, {}, dict(more))
    monkeypatch.undo()
    assert names(store) == ["snapshot-000000000001"]
    assert same(store.load(1)[1], held)
    store.save(2, {}, dict(more))
    assert same(store.load(2)[1], more) and same(store.load(1)[1], held)


def test_a_snapshot_of_before_is_read_and_followed_by_ours(store: SnapshotStore) -> None:
    held = fragments(p0=1, p1=2)
    old = store.folder / "snapshot-000000000007"
    old.mkdir(parents=True)
    save_file(held, old / "arrays.safetensors")
    digest = snapshots._old_digest(old / "arrays.safetensors")
    body = {"covers": 7, "arrays": digest, "meta": {"seed": 1}}
    (old / META).write_text(json.dumps(body))
    assert store.newest_meta() is None, "it is not cut by fragment, so it is not handed over"
    found, faults = newest(store)
    assert found is not None and not faults
    assert found[0] == {"seed": 1} and same(found[1], held)
    store.save(8, {"seed": 2}, dict(found[1]))
    assert same(store.load(8)[1], held)
    flip(old / "arrays.safetensors")
    with pytest.raises(ValueError, match="digest"):
        store.load(7)


def test_one_that_is_being_handed_over_stays(store: SnapshotStore) -> None:
    store.save(1, {}, fragments(p0=1))
    store.pinned |= {"leader": 1, "s1": 1}
    for covers in (2, 3, 4):
        store.save(covers, {}, fragments(p0=covers))
    assert store.covers() == [1, 3, 4]
    store.pinned.pop("leader")
    store.save(5, {}, fragments(p0=5))
    assert store.covers() == [1, 4, 5], "another still hands it over"
    store.pinned.pop("s1")
    store.save(6, {}, fragments(p0=6))
    assert store.covers() == [5, 6]


# --- received from another -----------------------------------------------------------------------


def test_received_file_by_file_and_only_what_is_missing(
    store: SnapshotStore, tmp_path: Path
) -> None:
    held = fragments(p0=1, p1=2, p2=3)
    theirs = SnapshotStore(tmp_path / "theirs")
    theirs.save(4, {"seed": 1}, dict(held))
    covers, meta = theirs.newest_meta() or (0, b"")
    assert [listed.name[0] for listed in store.missing(meta)] == ["0", "1", "2"]
    first = store.missing(meta)[0]
    path = theirs.file(covers, first.digest)
    assert path is not None
    with pytest.raises(ValueError, match="digest"):
        store.receive(first, path.read_bytes()[:-1] + b"x")
    store.receive(first, path.read_bytes())
    # Another process goes on with it.
    store = SnapshotStore(store.folder)
    assert [listed.name[0] for listed in store.missing(meta)] == ["1", "2"]
    for listed in store.missing(meta):
        path = theirs.file(covers, listed.digest)
        assert path is not None
        store.receive(listed, path.read_bytes())
    store.adopt(covers, meta)
    assert same(store.load(4)[1], held) and names(store) == ["snapshot-000000000004"]
    # Of the next one it has what did not change.
    theirs.save(9, {"seed": 2}, held | fragments(p1=7))
    _, meta = theirs.newest_meta() or (0, b"")
    assert [listed.name[0] for listed in store.missing(meta)] == ["1"]


def test_what_was_received_and_is_damaged_is_fetched_again(
    store: SnapshotStore, tmp_path: Path
) -> None:
    theirs = SnapshotStore(tmp_path / "theirs")
    theirs.save(4, {}, fragments(p0=1))
    covers, meta = theirs.newest_meta() or (0, b"")
    (listed,) = store.missing(meta)
    store.receive(listed, (theirs.file(covers, listed.digest) or Path()).read_bytes())
    assert store.missing(meta) == []
    flip(store.folder / snapshots.RECEIVED / listed.name)
    assert store.missing(meta) == [listed]


def test_what_was_received_in_vain_goes_with_the_next_snapshot_of_its_own(
    store: SnapshotStore, tmp_path: Path
) -> None:
    """A standby died when it had most of it, and came back by the tape: it was kept for good."""
    theirs = SnapshotStore(tmp_path / "theirs")
    theirs.save(4, {}, fragments(p0=1, p1=2))
    covers, meta = theirs.newest_meta() or (0, b"")
    first, second = store.missing(meta)
    store.receive(first, (theirs.file(covers, first.digest) or Path()).read_bytes())
    store = SnapshotStore(store.folder)
    with store.receiving():
        store.save(5, {}, fragments(p0=3))
        assert store.missing(meta) == [second], "a leader that was deposed wrote the last one"
    assert (store.folder / snapshots.RECEIVED).exists()
    store.save(6, {}, fragments(p0=4))
    assert names(store) == ["snapshot-000000000005", "snapshot-000000000006"]
    assert len([*store.folder.iterdir()]) == 2
    assert store.missing(meta) == [first, second]


@pytest.mark.parametrize(
    "name", ["../0.{}.arrays", "a/0.{}.arrays", "0.arrays", "0.{}", "meta.json"]
)
def test_a_table_names_no_other_files(name: str) -> None:
    digest = "0" * 32
    entry = {"name": name.format(digest), "digest": digest, "bytes": 1, "arrays": []}
    with pytest.raises(ValueError, match="no name of a file"):
        table_of(json.dumps({"files": [entry]}).encode())


# --- the shelf -----------------------------------------------------------------------------------


def test_the_shelf_keeps_the_bits_in_a_file_without_a_name(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    values[3] = np.nan
    kept = FileShelf(tmp_path)(values)
    assert kept.tobytes() == values.tobytes() and kept.dtype == np.float32
    assert not kept.flags.writeable and not np.shares_memory(kept, values)
    assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps").read_text()
    assert any(str(tmp_path) in line and "(deleted)" in line for line in maps.splitlines())
    del kept
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_what_a_full_disk_does_not_take_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    values = np.ones(10, np.float32)
    shelf = FileShelf(tmp_path / "not there yet")
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr("tempfile.TemporaryFile", full)
                for _ in range(3):
                    assert shelf(values) is values and shelf.refused
            assert shelf(values) is not values and not shelf.refused
    assert len(logs) == 2, "told once, until it takes one again"


def test_only_previous_anchors_go_to_the_shelf(tmp_path: Path) -> None:
    put: list[int] = []

    def shelf(values: np.ndarray) -> np.ndarray:
        put.append(values.size)
        return in_memory(values)

    SnapshotStore(tmp_path).save(1, {}, fragments(p0=1, p1=2))
    SnapshotStore(tmp_path, shelf=shelf).load(1)
    assert put == [40, 40]


def test_what_is_written_is_let_go(store: SnapshotStore) -> None:
    """Rounds replace arrays meanwhile: a long snapshot must not keep all of the old ones."""
    held, alive = fragments(p0=1, p1=2), []

    class Written(dict[str, np.ndarray]):
        def pop(self, name: str, *_: Any) -> np.ndarray:  # type: ignore[override]
            alive.append(sorted(self))
            return super().pop(name)

    store.save(1, {}, Written(held))
    assert alive[2] == ["1.master", "1.previous"], "fragment 0 is written and gone"
    assert same(store.load(1)[1], held)


def test_a_folder_under_another_name_is_no_snapshot(store: SnapshotStore) -> None:
    """What somebody set aside is neither read nor counted, and stays."""
    aside = store.folder / "snapshot-000000000001.old"
    aside.mkdir(parents=True)
    for covers in (3, 5, 7):
        store.save(covers, {}, {"0.x": np.zeros(1)})
    assert store.covers() == [5, 7] and aside.is_dir()


def test_a_snapshot_is_on_the_disk_before_and_after_it_gets_its_name(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = Settled(monkeypatch)
    path = store.save(7, {"seed": 1}, arrays(1))
    inside = {file.name: file.stat().st_size for file in path.iterdir()}
    assert settled.calls[-2:] == [set(inside), {path.name}]
    _, folder, *files = settled.calls[:-2]
    assert folder == {store.folder.name}, "it is new"
    assert sorted(files) == sorted(inside.values()), "META as well"


def test_what_is_copied_of_a_snapshot_since_there_are_no_links_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    (tmp_path / "a").write_bytes(b"four")
    monkeypatch.setattr(snapshots.os, "link", none)
    settled = Settled(monkeypatch)
    snapshots._link(tmp_path / "a", tmp_path / "b")
    assert settled.calls == [4] and (tmp_path / "b").read_bytes() == b"four"


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_file_system_that_settles_no_names_takes_snapshots_all_the_same(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of a network, for example. It puts them on the disk when it likes."""
    settles_no_names(monkeypatch, number)
    for covers in range(1, 6):
        store.save(covers, {"seed": covers}, arrays(covers))
    assert store.covers() == [4, 5] and newest_seed(store) == (5, [])


def test_snapshots_without_their_names_on_the_disk_fill_no_disk(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they take the place of those that were told of."""
    for covers in (1, 2):
        store.save(covers, {"seed": covers}, arrays(covers))

    def fails(folder: Path) -> None:
        if folder == store.folder:
            raise OSError(FAILS, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "settle_names", fails)
        for covers in range(3, 7):
            with pytest.raises(OSError, match="Input/output"):
                store.save(covers, {"seed": covers}, arrays(covers))
        assert names(store) == ["snapshot-000000000001", "snapshot-000000000002"]
        with pytest.raises(OSError, match="Input/output"):
            store.save(2, {"seed": 7}, arrays(7))
    assert store.covers() == [1, 2], "nor is one lost that was written once more"
    store.save(3, {"seed": 3}, arrays(3))
    assert store.covers() == [2, 3] and newest_seed(store) == (3, [])
