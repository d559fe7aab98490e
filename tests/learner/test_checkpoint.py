"""Checkpoints of inner moments: the newest sound one, and why the others were passed over."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from diloco_learner.edges.checkpoint import Checkpoints

MOMENTS = {"mu/w": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(7, np.int32)}


def accept(data: bytes) -> None:
    assert load(data)


def saved(folder: Path, *sequences: int, keep: int = 2) -> None:
    checkpoints = Checkpoints(folder, keep)
    for n in sequences:
        moments = {name: array + n for name, array in MOMENTS.items()}
        checkpoints.save(n, moments, {"step": n})
        checkpoints.wait()
    checkpoints.close()


def test_there_is_none_at_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 2)
    assert checkpoints.newest is None
    assert checkpoints.load(MOMENTS, accept) == (None, [])
    checkpoints.close()


def test_the_last_ones_are_kept_and_the_newest_is_restored(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 1_000_000_003)
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.newest == 1_000_000_003
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [
        2,
        1_000_000_003,
    ]
    data, faults = checkpoints.load(MOMENTS, accept)
    assert data is not None and faults == []
    restored = load(data)
    for name, array in MOMENTS.items():
        np.testing.assert_array_equal(restored[name], array + 1_000_000_003)
        assert restored[name].dtype == array.dtype
    checkpoints.close()


def test_a_torn_one_is_passed_over_and_said_so(tmp_path: Path) -> None:
    """I11"""
    saved(tmp_path, 1, 2)
    for path in (tmp_path / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    checkpoints = Checkpoints(tmp_path, 2)
    data, faults = checkpoints.load(MOMENTS, accept)
    assert data is not None
    np.testing.assert_array_equal(load(data)["mu/w"], MOMENTS["mu/w"] + 1)
    assert len(faults) == 1 and faults[0].startswith("checkpoint 2 passed over")
    checkpoints.close()


def test_one_that_the_trainer_cannot_use_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 1)

    def refuse(data: bytes) -> None:
        raise ValueError("moments that are not finite")

    checkpoints = Checkpoints(tmp_path, 2)
    data, faults = checkpoints.load(MOMENTS, refuse)
    assert data is None and "not finite" in faults[0]
    checkpoints.close()


@pytest.mark.parametrize("name", ["5.orbax-checkpoint-tmp-123", "notes", "lock"])
def test_what_is_not_a_complete_checkpoint_is_not_taken_for_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path, 2).newest is None


def test_another_models_moments_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    other: dict[str, Any] = {"mu/other": np.zeros(4, np.float32)}
    checkpoints = Checkpoints(tmp_path, 2)
    data, faults = checkpoints.load(other, accept)
    assert data is None and len(faults) == 1
    checkpoints.close()
