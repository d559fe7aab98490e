"""LocalCheckpoints of inner moments: the newest sound one, and why the others were passed over."""

import errno
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from settled import FAILS, UNKNOWN, Settled, settles_no_names

from diloco_learner.recovery import checkpoint_io
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints, epoch_of, sequence_of
from diloco_learner.recovery.moments import Buffer, State, check, pack, pieces, views

MOMENTS = {"mu/w": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(7, np.int32)}


def accept(data: State) -> None:
    check(views(data), MOMENTS)


def saved(folder: Path, *sequences: int, keep: int = 2) -> None:
    checkpoints = LocalCheckpoints(folder, keep)
    for n in sequences:
        checkpoints.save(n, [pack({name: array + n for name, array in MOMENTS.items()})])


def test_there_is_none_at_first(tmp_path: Path) -> None:
    checkpoints = LocalCheckpoints(tmp_path / "c", 2)
    assert checkpoints.newest is None
    assert checkpoints.load(accept) == (None, [])


def test_of_a_deleted_run_there_is_none_though_its_folder_was_there(tmp_path: Path) -> None:
    """Whoever finds that a run is deleted removes its folder, also while a learner recovers."""
    checkpoints = LocalCheckpoints(tmp_path / "c", 2)
    (tmp_path / "c").rmdir()
    assert checkpoints.newest is None
    assert checkpoints.load(accept) == (None, [])


@pytest.mark.parametrize("gone", ["volume", "volume/checkpoints/run"])
def test_a_folder_that_is_gone_is_made_again(tmp_path: Path, gone: str) -> None:
    """Somebody cleared the disk, or put an empty one in its place, while a learner works."""
    folder = tmp_path / "volume" / "checkpoints" / "run"
    checkpoints = LocalCheckpoints(folder, 2)
    checkpoints.save(1, [pack(MOMENTS)])
    shutil.rmtree(tmp_path / gone)
    checkpoints.save(2, pieces(MOMENTS))
    assert checkpoints.newest == 2 and not checkpoints.room.failed
    assert [p.name.partition(".")[0] for p in folder.iterdir()] == ["2"]
    data, faults = checkpoints.load(accept)
    assert data is not None and not faults


def test_the_folder_of_a_run_that_is_over_stays_removed(tmp_path: Path) -> None:
    checkpoints = LocalCheckpoints(tmp_path / "c", 2, lambda: False)
    (tmp_path / "c").rmdir()
    with pytest.raises(FileNotFoundError):
        checkpoints.save(1, [pack(MOMENTS)])
    assert not (tmp_path / "c").exists()


def test_the_last_ones_are_kept_and_the_newest_is_restored(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 1_000_000_003)
    checkpoints = LocalCheckpoints(tmp_path, 2)
    assert checkpoints.newest == 1_000_000_003
    assert sorted(p.name.partition(".")[0] for p in tmp_path.iterdir()) == ["1000000003", "2"]
    data, faults = checkpoints.load(accept)
    assert data is not None and faults == []
    restored = views(data)
    for name, array in MOMENTS.items():
        np.testing.assert_array_equal(restored[name], array + 1_000_000_003)
        assert restored[name].dtype == array.dtype


# Seconds since 2026: what numbers go on from where a hub was put back.
LATE = 28_800_000


@pytest.mark.parametrize("epoch", [0, 3, LATE])
@pytest.mark.parametrize("life", [0, LATE, 10**10 - 1, 10**15])
def test_a_checkpoint_is_of_its_epoch_however_late_its_life(epoch: int, life: int) -> None:
    assert epoch_of(sequence_of(epoch, life, 480)) == epoch
    assert sequence_of(epoch, life, 480) < sequence_of(epoch + 1, 0, 0)
    assert sequence_of(epoch, LATE, 480) < sequence_of(epoch, LATE + 1, 0)
    assert len(str(sequence_of(epoch, life, 10**12))) <= 32, "its file has a name that is read"


def test_written_piece_by_piece_it_is_the_same_file(tmp_path: Path) -> None:
    LocalCheckpoints(tmp_path / "whole", 2).save(1, [pack(MOMENTS)])
    LocalCheckpoints(tmp_path / "pieces", 2).save(1, pieces(MOMENTS))
    (whole,), (parts,) = (tmp_path / "whole").iterdir(), (tmp_path / "pieces").iterdir()
    assert whole.name == parts.name and whole.read_bytes() == parts.read_bytes()


@pytest.mark.parametrize("damage", ["torn", "one bit"])
def test_a_damaged_one_is_passed_over_and_said_so(tmp_path: Path, damage: str) -> None:
    """I11"""
    saved(tmp_path, 1, 2)
    (path,) = tmp_path.glob("2.*")
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body[: len(body) // 2] if damage == "torn" else body)
    data, faults = LocalCheckpoints(tmp_path, 2).load(accept)
    assert data is not None
    np.testing.assert_array_equal(views(data)["mu/w"], MOMENTS["mu/w"] + 1)
    assert len(faults) == 1 and faults[0].startswith("checkpoint 2 passed over")


def test_one_that_the_trainer_cannot_use_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 1)

    def refuse(data: State) -> None:
        raise ValueError("moments that are not finite")

    data, faults = LocalCheckpoints(tmp_path, 2).load(refuse)
    assert data is None and "not finite" in faults[0]


@pytest.mark.parametrize("name", ["5.part", "6", "notes", "lock"])
def test_what_is_not_a_complete_checkpoint_is_not_taken_for_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert LocalCheckpoints(tmp_path, 2).newest is None


def test_one_that_is_passed_over_is_let_go_of_before_another_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is as large as all moments: there is room for one."""
    checkpoints, read = LocalCheckpoints(tmp_path, 3), checkpoint_io._read
    for n in (1, 2, 3):
        checkpoints.save(n, [pack(MOMENTS)])
    before = list[weakref.ref[Buffer]]()

    def looked_at(path: Path) -> Buffer:
        assert all(data() is None for data in before)
        before.append(weakref.ref(data := read(path)))
        return data

    def refuse(data: State) -> None:
        raise ValueError("moments that are not finite")

    monkeypatch.setattr(checkpoint_io, "_read", looked_at)
    found, faults = checkpoints.load(refuse)
    assert found is None and len(before) == len(faults) == 3


def test_a_disk_that_fills_leaves_the_older_ones(tmp_path: Path) -> None:
    """And nothing of what could not be written, which would keep the disk full."""
    saved(tmp_path, 1)

    def full() -> Iterator[Buffer]:
        yield b"some"
        raise OSError("no space left on device")

    checkpoints = LocalCheckpoints(tmp_path, 2)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(2, full())
    assert checkpoints.newest == 1 and len(list(tmp_path.iterdir())) == 1
    assert "no space left" in checkpoints.room.saw(10**12, 0.0)
    checkpoints.save(3, [b"some"])
    assert not checkpoints.room.saw(10**12, 1.0)


def test_what_a_dead_process_was_writing_is_gone_before_the_next_is_written(
    tmp_path: Path,
) -> None:
    """It may be what fills the disk."""
    (tmp_path / "5.part").write_bytes(b"half")

    def looking() -> Iterator[Buffer]:
        assert not (tmp_path / "5.part").exists()
        yield b"some"

    LocalCheckpoints(tmp_path, 2).save(6, looking())


def test_what_a_dead_process_was_writing_is_removed_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "5.part").write_bytes(b"half")
    saved(tmp_path, 6)
    assert [p.name.partition(".")[0] for p in tmp_path.iterdir()] == ["6"]


def test_the_last_one_waits_for_one_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    """Its thread still writes: what it writes is not what a dead process left."""
    checkpoints, begun, other = LocalCheckpoints(tmp_path, 2), threading.Event(), threading.Event()

    def slow() -> Iterator[Buffer]:
        begun.set()
        other.wait(0.5)  # in vain, where the other one waits
        yield b"some"

    def last() -> Iterator[Buffer]:
        other.set()
        yield b"more"

    cancelled = threading.Thread(target=checkpoints.save, args=(5, slow()))
    cancelled.start()
    begun.wait()
    checkpoints.save(6, last())
    cancelled.join()
    assert sorted(p.name.partition(".")[0] for p in tmp_path.iterdir()) == ["5", "6"]
    assert checkpoints.newest == 6 and not checkpoints.room.failed


def test_what_was_passed_over_is_told_when_an_older_one_is_restored(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    newest = next(path for path in tmp_path.iterdir() if path.name.startswith("2"))
    newest.write_bytes(newest.read_bytes()[:-1])
    loaded: list[State] = []
    trainer = SimpleNamespace(check_inner_state=accept, load_inner_state=loaded.append)
    found, (fault,) = LocalCheckpoints(tmp_path, 2).restore(trainer)
    assert found
    assert fault.startswith("checkpoint 2 passed over: ")
    (state,) = loaded
    np.testing.assert_array_equal(views(state)["mu/w"], MOMENTS["mu/w"] + 1)
    nothing = LocalCheckpoints(tmp_path / "empty", 2)
    assert nothing.restore(trainer) == (False, []) and len(loaded) == 1


def test_a_folder_that_cannot_be_listed_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)

    def bad(self: Path) -> Iterator[Path]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "iterdir", bad)
    checkpoints = LocalCheckpoints(tmp_path, 2)
    assert checkpoints.newest is None and "cannot be listed" in checkpoints.fault
    trainer = SimpleNamespace(check_inner_state=accept)
    found, (fault,) = checkpoints.restore(trainer)
    assert not found and "cannot be listed" in fault


def test_a_disk_that_does_not_answer_is_waited_for_within_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it says later changes nothing: the trainer is at work by then."""
    saved(tmp_path, 1)
    checkpoints, answers = LocalCheckpoints(tmp_path, 2), threading.Event()
    monkeypatch.setattr(checkpoint_io, "STORED_S_MIN", 0.01)

    def slow(data: State) -> None:
        answers.wait()

    loaded: list[State] = []
    trainer = SimpleNamespace(check_inner_state=slow, load_inner_state=loaded.append)
    try:
        found, (fault,) = checkpoints.restore(trainer)
        assert not found and "did not answer within" in fault
    finally:
        answers.set()
    assert checkpoints.asking.left is not None
    checkpoints.asking.left.join()
    assert not loaded


def test_a_checkpoint_and_its_name_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "run").mkdir()
    settled = Settled(monkeypatch)
    saved(folder, 1)
    (file,) = folder.iterdir()
    # First what a life that was killed may have left: the folder's own name, and names in it.
    assert settled.calls == [{"run"}, set(), file.stat().st_size, {file.name}]


def sequences(folder: Path) -> list[int]:
    return sorted(int(path.name.partition(".")[0]) for path in folder.iterdir())


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_file_system_that_settles_no_names_takes_checkpoints_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of a network, for example. It puts them on the disk when it likes."""
    settles_no_names(monkeypatch, number)
    checkpoints = LocalCheckpoints(tmp_path, 2)
    for n in range(1, 6):
        checkpoints.save(n, [b"some"])
        assert checkpoints.newest == n and not checkpoints.room.failed
    assert sequences(tmp_path) == [4, 5]


def test_checkpoints_without_their_names_on_the_disk_fill_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest that a power cut leaves stays. Of the others so many as at any time, and one."""
    checkpoints = LocalCheckpoints(tmp_path, 2)
    checkpoints.save(1, [b"some"])
    with monkeypatch.context() as patched:
        settles_no_names(patched, FAILS)
        for n in range(2, 8):
            with pytest.raises(OSError, match="Input/output"):
                checkpoints.save(n, [b"some"])
            assert len(sequences(tmp_path)) <= 2 + 2
    assert sequences(tmp_path) == [1, 5, 6, 7] and checkpoints.newest == 1
    checkpoints.save(8, [b"some"])
    assert sequences(tmp_path) == [7, 8] and checkpoints.newest == 8
