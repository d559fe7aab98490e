"""Checkpoints that all hosts write, where the place takes nothing, or answers nothing."""

import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from settled import UNKNOWN, Settled, settles_no_names
from unsynced import says

from diloco_learner.hosts import sharded_io
from diloco_learner.hosts.keeping_io import HostsCheckpoints, KeptCheckpoint, Nobody
from diloco_learner.hosts.sharded import CompleteCheckpoint
from diloco_learner.hosts.sharded_io import TOLD_S, Shards
from diloco_learner.hosts.whole import ORDER_S_MAX
from diloco_learner.recovery.checkpoint_io import Asking, stored_within_s

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
    monkeypatch.setattr(sharded_io, "stored_within_s", lambda size: 0.05)
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
    monkeypatch.setattr(sharded_io, "stored_within_s", lambda size: 60.0)
    checkpoints.save(3, checkpoints.begin(0, 3))
    assert checkpoints.newest == 3
    kept = [path for path in (tmp_path / "r.0/l-1").iterdir() if path.name == "3"]
    (data,) = kept[0].glob("whole.*.json")
    assert b'"mu"' in data.read_bytes()


def test_a_large_part_has_the_time_that_a_slow_place_takes(
    monkeypatch: pytest.MonkeyPatch, checkpoints: HostsCheckpoints
) -> None:
    """Of the moments of twelve billion parameters four hosts hold 24 GB each: at ten megabytes a
    second that takes forty minutes. No host that writes for so long counts as one that hangs."""
    assert stored_within_s(24_000_000_000) > 2 * ORDER_S_MAX
    monkeypatch.setattr(sharded_io, "stored_within_s", lambda size: 2 * ORDER_S_MAX)
    waited: list[float] = []

    class Others(Nobody):
        def answers(self, number: int, patience_s: float = 0.0) -> dict[int, Any]:
            waited.append(patience_s)
            return {}

    checkpoints.others = Others()
    checkpoints.save(1, checkpoints.begin(0, 1))
    assert waited == [2 * ORDER_S_MAX + TOLD_S]


def test_a_restore_that_is_left_behind_touches_no_device(
    monkeypatch: pytest.MonkeyPatch, checkpoints: HostsCheckpoints
) -> None:
    """Training has begun with moments made anew: a second set of them has no room beside those."""
    checkpoints.save(1, checkpoints.begin(0, 1))
    goes_on, checked, read = threading.Event(), list[str](), list[int]()
    digest = sharded_io._digest

    def slow(path: Any, moved: Callable[[], object]) -> str:
        checked.append(path.name)
        goes_on.wait(60.0)
        return digest(path, moved)

    monkeypatch.setattr(sharded_io, "_digest", slow)
    monkeypatch.setattr(sharded_io, "_read", lambda *of: read.append(1))
    monkeypatch.setattr(sharded_io, "stored_within_s", lambda size: 0.05)
    leaves = {"mu": jnp.full(8, 1.0), "count": jnp.zeros((), jnp.int32)}
    shards = checkpoints.shards
    with pytest.raises(OSError, match="did not answer"):
        shards.restore(1, leaves, {}, None)
    goes_on.set()
    assert shards.asking.left is not None
    shards.asking.left.join()
    assert read == [] and not any(leaf.is_deleted() for leaf in leaves.values())
    assert len(checked) == 1, "nor does it read on: nobody waits for it"


def test_moments_are_made_anew_in_the_room_of_those_that_there_were(
    monkeypatch: pytest.MonkeyPatch, checkpoints: HostsCheckpoints
) -> None:
    """No checkpoint could be read in time. A device need not have room for two sets."""
    checkpoints.save(1, checkpoints.begin(0, 1))
    checkpoints.save(2, checkpoints.begin(0, 2))
    learner, goes_on = checkpoints.trainer, threading.Event()
    old = dict(learner.opt_state)

    def fresh(params: Any) -> dict[str, Any]:
        assert all(leaf.is_deleted() for leaf in old.values())
        return {"mu": jnp.zeros(8), "count": jnp.zeros((), jnp.int32)}

    learner.params, learner.program.init_state = None, fresh  # type: ignore[misc]
    monkeypatch.setattr(sharded_io, "_digest", lambda path, moved: goes_on.wait(60.0))
    monkeypatch.setattr(sharded_io, "stored_within_s", lambda size: 0.05)
    loaded, (first, second) = checkpoints.restore(learner)
    goes_on.set()
    assert "checkpoint 2 passed over: oslo: the place of checkpoints did not answer" in first
    assert "checkpoint 1 passed over: oslo: the place of checkpoints has not answered" in second
    assert not loaded and not learner.opt_state["mu"].is_deleted()


def test_a_large_restore_has_the_time_that_a_slow_place_takes(
    monkeypatch: pytest.MonkeyPatch, checkpoints: HostsCheckpoints
) -> None:
    """However large: a host that reads for so long says that it does, and is waited for."""
    checkpoints.save(1, checkpoints.begin(0, 1))
    monkeypatch.setattr(sharded_io, "stored_within_s", lambda size: 3 * ORDER_S_MAX)
    shards, waited, said = checkpoints.shards, list[float](), list[bool]()

    def within(seconds: float, work: Callable[[], Any], waits: Any = lambda: None) -> Any:
        waited.append(seconds)
        found = work()
        waits()
        said.append(shards.reading.taken())
        return found

    monkeypatch.setattr(shards.asking, "within", within)
    assert checkpoints.restore(checkpoints.trainer) == (True, [])
    _, *both = waited  # first it is listed what lies there
    assert both == [3 * ORDER_S_MAX] * 2 and said == [False, True, True]


def test_who_waits_for_a_place_is_told_of_every_second() -> None:
    asking, seconds = Asking("a place"), list[int]()
    goes_on = threading.Event()

    def waits() -> None:
        seconds.append(1)
        goes_on.set()

    asking.within(60.0, lambda: goes_on.wait(60.0), waits)
    assert seconds


def test_a_place_that_does_not_answer_is_named_and_holds_one_thread() -> None:
    shards, stands = Shards("/nowhere"), threading.Event()
    tries: list[int] = []

    def hangs() -> None:
        tries.append(1)
        stands.wait(30)

    for why in ("did not answer within 0 s", "has not answered", "has not answered"):
        with pytest.raises(OSError, match=why):
            shards.within(0.01, hangs)
    assert len(tries) == 1, "no thread more, however often it is tried"
    stands.set()
    assert shards.asking.left is not None
    shards.asking.left.join()
    assert shards.within(5.0, lambda: np.int32(3)) == 3


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_that_is_due_while_another_is_written_is_left_out_and_is_no_failure(
    tmp_path: Path, checkpoints: HostsCheckpoints
) -> None:
    first = checkpoints.begin(0, 1)
    second = checkpoints.begin(0, 2)
    checkpoints.save(1, first)
    checkpoints.save(2, second)
    assert checkpoints.newest == 1 and not checkpoints.room.failed
    checkpoints.save(3, checkpoints.begin(0, 3))
    assert names_in(tmp_path / "r.0/l-1") == ["1", "3"]


def test_none_begins_while_older_ones_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: HostsCheckpoints
) -> None:
    """It would be taken for one that was never completed."""
    meanwhile, there = list[KeptCheckpoint](), checkpoints.shards.sequences

    def sequences() -> dict[int, bool]:
        meanwhile.append(checkpoints.begin(0, 2))
        return there()

    with monkeypatch.context() as slow:
        slow.setattr(checkpoints.shards, "sequences", sequences)
        checkpoints.save(1, checkpoints.begin(0, 1))
    (second,) = meanwhile
    checkpoints.save(2, second)
    checkpoints.save(3, checkpoints.begin(0, 3))
    assert second.left_out and checkpoints.newest == 3
    assert names_in(tmp_path / "r.0/l-1") == ["1", "3"]


def test_what_another_life_writes_meanwhile_stays(
    tmp_path: Path, checkpoints: HostsCheckpoints
) -> None:
    """An island that was given up, but still runs, keeps its last one."""
    checkpoints.save(1, checkpoints.begin(0, 1))
    (tmp_path / "r.0/l-1/0").mkdir()
    (tmp_path / f"r.0/l-1/{10**9}").mkdir()  # of the life in its place, not complete yet
    checkpoints.save(2, checkpoints.begin(0, 2))
    assert names_in(tmp_path / "r.0/l-1") == ["1", str(10**9), "2"]


def test_one_that_nobody_saves_does_not_hold_the_next_ones_off(
    checkpoints: HostsCheckpoints,
) -> None:
    begun = checkpoints.begin(0, 1)
    checkpoints.let_go(checkpoints.begin(0, 2))
    assert checkpoints.begin(0, 3).left_out, "the first one is still on its way"
    assert begun.writing is not None
    begun.writing.told()
    checkpoints.let_go(begun)
    checkpoints.save(4, checkpoints.begin(0, 4))
    assert checkpoints.newest == 4


def test_what_cannot_be_removed_makes_the_place_of_no_less_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: HostsCheckpoints
) -> None:
    checkpoints.save(1, checkpoints.begin(0, 1))
    (tmp_path / "r.0/l-1/7").mkdir()
    (tmp_path / "r.0/l-1/8").write_text("no folder")

    def kept(self: Shards, sequence: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Shards, "remove", kept)
    shards = Shards(str(tmp_path))
    again = HostsCheckpoints(trainer(1.0), shards, Nobody(), {0: "oslo"}, "r.0/l-1", 1, 2)
    assert not again.fault and again.newest == 1
    again.save(10**9 + 1, again.begin(0, 1))
    assert again.newest == 10**9 + 1 and not again.room.failed


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("gs://bucket/folder", "gcsfs"),
        ("{file}/below", "Not a directory"),
        ("/proc/none", "No such"),
    ],
)
def test_a_place_of_no_use_is_named_and_training_goes_on(
    tmp_path: Path, place: str, why: str
) -> None:
    (tmp_path / "file").touch()
    shards = Shards(place.format(file=tmp_path / "file"))
    found = HostsCheckpoints(trainer(1.0), shards, Nobody(), {0: "oslo"}, "r.0/l-1", 0, 2)
    assert why in found.fault and found.restore(found.trainer) == (False, [])
    assert found.room.failed == found.fault, "it is known, and need not be told again"
    with pytest.raises(OSError, match=why):
        found.save(1, found.begin(0, 1))
    assert why in found.room.saw(None, 0.0)
    assert (found.room.folder is None) == place.startswith("gs:"), "whose disk is no bucket's"


def test_what_the_library_cannot_find_again_does_not_count_as_complete(tmp_path: Path) -> None:
    """It looks for the parts of hosts by a pattern: the setting refuses such a path."""
    shards = Shards(str(tmp_path / "a [1]"))
    found = HostsCheckpoints(trainer(1.0), shards, Nobody(), {0: "oslo"}, "r.0/l-1", 0, 2)
    with pytest.raises(OSError, match="orbax has not put together"):
        found.save(1, found.begin(0, 1))
    assert found.newest is None and shards.sequences() == {}


def test_one_that_is_complete_is_not_written_over(checkpoints: HostsCheckpoints) -> None:
    checkpoints.save(1, checkpoints.begin(0, 1))
    checkpoints.save(1, checkpoints.begin(0, 1))
    assert checkpoints.restore(checkpoints.trainer) == (True, [])


def test_one_of_another_model_is_refused_before_anything_of_this_one_is_given_up(
    checkpoints: HostsCheckpoints,
) -> None:
    checkpoints.save(1, checkpoints.begin(0, 1))
    leaves = {"mu": jnp.zeros(4), "count": jnp.zeros((), jnp.int32)}
    with pytest.raises(ValueError, match="an inner state of another model: mu"):
        checkpoints.shards.restore(1, leaves, {}, None)
    assert not leaves["mu"].is_deleted()


def test_what_a_host_writes_must_be_seen_by_process_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a host sees what others have written, and keeps its own writes to itself."""
    monkeypatch.setattr(sharded_io, "SIGN_S", 0.1)
    first, other = Shards(str(tmp_path), 0, 2), Shards(str(tmp_path), 1, 2)
    first.look("r.0/l-1", "token", first=True)
    with pytest.raises(OSError, match=r"what host 1 writes in .* is not seen here"):
        first.looked("token")
    other.look("r.0/l-1", "token")
    first.looked("token")
    assert names_in(tmp_path / "r.0/l-1") == [], "the signs are gone"
    first.look("r.0/l-1", "another", first=True)
    with pytest.raises(OSError, match="is not the folder that process 0 sees"):
        other.look("r.0/l-1", "token")


def test_what_another_host_has_written_must_be_seen_before_it_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sharded_io, "seen", lambda paths: all(path.exists() for path in paths))
    shards = Shards(str(tmp_path))
    shards.look("r.0/l-1", "token", first=True)
    told = shards.keep(1, {"mu": jnp.ones(8)}).told()
    theirs = "moments/ocdbt.process_1/d/0"
    leaves: dict[str, Any] = {"mu": ("float32", (8,))}
    with pytest.raises(OSError, match=f"{theirs} was written by another host and is not seen"):
        shards.complete(1, CompleteCheckpoint(leaves, None, {**told.files, theirs: (8, "0" * 32)}))
    assert shards.sequences() == {1: False}
    shards.complete(1, CompleteCheckpoint(leaves, None, told.files))
    assert shards.sequences() == {1: True}


def test_a_place_that_is_mended_is_used_from_the_next_one_on(tmp_path: Path) -> None:
    (tmp_path / "place").touch()
    shards = Shards(str(tmp_path / "place"))
    found = HostsCheckpoints(trainer(1.0), shards, Nobody(), {0: "oslo"}, "r.0/l-1", 0, 2)
    assert found.fault
    begun = found.begin(0, 1)
    (tmp_path / "place").unlink()
    found.save(1, begun)
    assert not found.fault and not found.room.failed and found.newest is None
    found.save(2, found.begin(0, 2))
    assert found.newest == 2


def test_what_makes_one_complete_is_there_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: HostsCheckpoints
) -> None:
    def torn(path: Path, data: bytes) -> None:
        path.with_name(path.name + ".part").write_bytes(data[:9])
        raise OSError(errno.EIO, "the power is gone")

    checkpoints.save(1, checkpoints.begin(0, 1))
    with monkeypatch.context() as short:
        short.setattr(sharded_io, "replace", torn)
        short.setattr(checkpoints.shards, "remove", lambda sequence: None)
        with pytest.raises(OSError, match="the power is gone"):
            checkpoints.save(2, checkpoints.begin(0, 2))
    assert checkpoints.shards.sequences() == {1: True, 2: False}


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_file_system_that_settles_no_names_takes_checkpoints_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: HostsCheckpoints, number: int
) -> None:
    settles_no_names(monkeypatch, number)
    for n in range(1, 4):
        checkpoints.save(n, checkpoints.begin(0, n))
        assert checkpoints.newest == n and not checkpoints.room.failed
    assert names_in(tmp_path / "r.0/l-1") == ["2", "3"]


def test_what_makes_a_checkpoint_whole_is_on_the_disk_with_all_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: HostsCheckpoints
) -> None:
    settled = Settled(monkeypatch)
    checkpoints.save(1, checkpoints.begin(0, 1))
    folder = tmp_path / "r.0/l-1/1"
    (whole,) = folder.glob("whole.*.json")
    inside = set(names_in(folder / "moments"))
    assert settled.calls.index(inside) < settled.calls.index(whole.stat().st_size)
    assert settled.calls[-2:] == [{"moments", whole.name}, {"1"}]


A_PART = """
import sys
import jax.numpy as jnp
from diloco_learner.hosts.sharded_io import Shards
shards = Shards(sys.argv[1])
shards.look("r.0", "token", first=True)
print(shards.keep(1, {"mu": jnp.full(8, 1.0)}).told().fault)
"""


def test_the_part_of_a_host_is_on_the_disk(tmp_path: Path) -> None:
    """Orbax writes it: what comes of it where the system refuses every fsync."""
    assert "fsync" in says(A_PART, str(tmp_path))
