"""Snapshots on disk: whole or passed over, with the reason; no debris."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_syncer.edges import snapshots
from diloco_syncer.edges.snapshots import SnapshotStore


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


def newest_seed(store: SnapshotStore) -> tuple[int | None, list[str]]:
    found, faults = store.newest()
    if found is None:
        return None, faults
    meta, loaded = found
    for name, array in arrays(meta["seed"]).items():
        assert loaded[name].tobytes() == array.tobytes()
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
    return meta["seed"], faults


def test_a_folder_that_is_not_there_holds_no_snapshot(store: SnapshotStore) -> None:
    assert store.newest() == (None, [])


def test_what_is_saved_comes_back_to_the_bit(store: SnapshotStore) -> None:
    store.save(7, {"seed": 1}, arrays(1))
    assert newest_seed(store) == (1, [])


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


def empty(path: Path) -> None:
    path.write_bytes(b"")


def list_instead(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("arrays.safetensors", tear),
        ("arrays.safetensors", flip),
        ("arrays.safetensors", empty),
        ("arrays.safetensors", Path.unlink),
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
    damage(store.save(2, {"seed": 2}, arrays(2)) / name)
    seed, faults = newest_seed(store)
    assert seed == 1
    assert len(faults) == 1 and faults[0].startswith("snapshot-000000000002: ")


def test_when_all_are_torn_there_is_none_and_every_reason(store: SnapshotStore) -> None:
    for covers in (1, 2):
        tear(store.save(covers, {"seed": covers}, arrays(covers)) / "arrays.safetensors")
    found, faults = store.newest()
    assert found is None and len(faults) == 2


@pytest.mark.parametrize("step", ["save_file", "_sync"])
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
    # Once there is room again, the same snapshot can be written.
    store.save(2, {"seed": 2}, arrays(2))
    assert newest_seed(store) == (2, [])


def test_what_a_power_cut_left_aside_is_no_snapshot(store: SnapshotStore) -> None:
    store.save(1, {"seed": 1}, arrays(1))
    aside = store.folder / ".writing-000000000002"
    aside.mkdir()
    (aside / "meta.json").write_text(json.dumps({"covers": 2}))
    assert newest_seed(store) == (1, [])
    store.save(2, {"seed": 2}, arrays(2))
    assert names(store) == ["snapshot-000000000001", "snapshot-000000000002"]


def test_values_that_json_cannot_hold_are_refused(store: SnapshotStore) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.save(1, {"norm": float("nan")}, arrays(1))
    assert names(store) == []
