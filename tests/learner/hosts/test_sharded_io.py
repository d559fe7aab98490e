"""Checkpoints that all hosts write, where the place takes nothing, or answers nothing."""

import errno
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.hosts import sharded_io
from diloco_learner.hosts.keeping_io import HostsCheckpoints, Nobody
from diloco_learner.hosts.sharded_io import Shards

FULL = OSError(errno.ENOSPC, "No space left on device")


class Future:
    """Of one part that is written by another thread."""

    def __init__(self, fault: Exception | None = None, until: threading.Event | None = None):
        self.fault, self.until = fault, until

    def result(self) -> None:
        if self.until is not None:
            self.until.wait(30)
        if self.fault is not None:
            raise self.fault


def trainer(value: float) -> Any:
    """What checkpoints need of one."""
    return SimpleNamespace(
        opt_state={"mu": jnp.full(8, value), "count": jnp.zeros((), jnp.int32)},
        inner_state_bytes=36,
        program=SimpleNamespace(model=SimpleNamespace(stacked=None), lying=lambda tree: None),
    )


@pytest.fixture
def checkpoints(tmp_path: Path) -> HostsCheckpoints:
    return HostsCheckpoints(
        trainer(1.0), Shards(str(tmp_path)), Nobody(), {0: "oslo"}, "r.0/l-1", 0, 2
    )


def in_place(monkeypatch: pytest.MonkeyPatch, *, fault: Exception | None, future: Future) -> None:
    async def begin(folder: Any, leaves: Mapping[str, jax.Array]) -> Sequence[Any]:
        folder.mkdir(parents=True)
        if fault is not None:
            raise fault
        return [future]

    monkeypatch.setattr(sharded_io, "_begin", begin)


@pytest.mark.parametrize("later", [False, True])
def test_a_full_disk_is_told_and_the_next_one_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: HostsCheckpoints, later: bool
) -> None:
    with monkeypatch.context() as full:
        in_place(full, fault=None if later else FULL, future=Future(FULL))
        begun = checkpoints.begin(0, 1)
        with pytest.raises(OSError, match=r"oslo: .*No space left"):
            checkpoints.save(1, begun)
    assert checkpoints.room.failed and checkpoints.newest is None
    assert list((tmp_path / "r.0/l-1").iterdir()) == [], "what was begun takes no room"
    checkpoints.save(2, checkpoints.begin(0, 2))
    assert checkpoints.newest == 2 and not checkpoints.room.failed


def test_one_that_hangs_ends_no_training_and_holds_the_next_ones_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: HostsCheckpoints
) -> None:
    monkeypatch.setattr(sharded_io, "limit_s", lambda size: 0.05)
    goes_on = threading.Event()
    with monkeypatch.context() as hanging:
        in_place(hanging, fault=None, future=Future(until=goes_on))
        with pytest.raises(OSError, match="oslo: it was not stored within"):
            checkpoints.save(1, checkpoints.begin(0, 1))
        with pytest.raises(OSError, match="an earlier one is still being written"):
            checkpoints.save(2, checkpoints.begin(0, 2))
    writing = checkpoints.shards.writing
    assert writing is not None and writing.thread is not None
    goes_on.set()
    writing.thread.join()
    monkeypatch.setattr(sharded_io, "limit_s", lambda size: 60.0)
    checkpoints.save(3, checkpoints.begin(0, 3))
    assert checkpoints.newest == 3
    kept = [path for path in (tmp_path / "r.0/l-1").iterdir() if path.name == "3"]
    (data,) = kept[0].glob("whole.*.json")
    assert b'"mu"' in data.read_bytes()


def test_a_place_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stands = threading.Event()
    with pytest.raises(OSError, match="did not answer within 0 s"):
        sharded_io.within(0.01, lambda: stands.wait(30))
    stands.set()
    assert sharded_io.within(5.0, lambda: np.int32(3)) == 3
