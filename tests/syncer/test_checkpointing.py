"""What carries a checkpoint out tells the machine what came of it, once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from syncer.contexts import alone, context

from diloco_shared.bus.repeating import AT_ONCE
from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import ShardPart
from diloco_shared.protocol.records import Restore, RunRecord, ShardLease
from diloco_shared.protocol.run_states import NEEDS
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints import checkpointing_io as checkpointing
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.checkpoints.parts_io import belongs, clear, write_part, written_part
from diloco_syncer.events import Capture, Event, Kept, Loaded, NumberFound, Seal, Sealed
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import RestoredState
from diloco_syncer.history.tape_io import Deposed
from diloco_syncer.machine import Machine
from diloco_syncer.status.status import status

pytestmark = pytest.mark.virtual

SPEC = RunSpec.model_validate({"name": "r", "id": "ab", "budget": {"steps": 80}})


def checkpointer(folder: Path, told: list[Event]) -> Checkpointer:
    bus = MemoryBus(MemoryBroker(), "s")
    return Checkpointer(
        context(SPEC, bus, folder=folder, checkpoint_root=str(folder / "kept")), told.append, alone
    )


async def test_a_checkpoint_that_is_not_there_is_not_gone_back_to(tmp_path: Path) -> None:
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    wish = Restore(serial=1, source="r.ab/000007")
    await maker.load(wish)
    (answer,) = told
    assert isinstance(answer, Loaded) and answer.restore == wish
    assert "000007" in answer.fault and answer.digest == "" and not maker.loaded


async def test_a_checkpoint_that_cannot_be_sealed_is_told_once_and_removes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    pruned: list[Any] = []
    monkeypatch.setattr(checkpointing, "seal", full)
    monkeypatch.setattr(checkpointing, "prune", lambda *given: pruned.append(given))
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    maker.captured = (Capture(7, 1, "asked for", 1.0), {"sizes_P": [1]}, None)  # type: ignore[assignment]
    await maker.seal(Seal(7, {}, {}))
    assert told == [Sealed(7, fault="No space left on device")] and not pruned


async def test_a_checkpoint_that_another_run_needs_stays_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run may wait for free machines, and whoever joins it later begins with its moments."""
    monkeypatch.setattr(checkpointing, "seal", lambda *_: {})
    root = tmp_path / "kept"
    for number in range(1, 10):
        (root / f"r.ab/{number:06}").mkdir(parents=True)
        (root / f"r.ab/{number:06}/manifest.json").write_bytes(b"{}")
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    maker.captured = (Capture(9, 1, "asked for", 1.0), {"sizes_P": [1]}, None)  # type: ignore[assignment]
    await maker.seal(Seal(9, {}, {}))
    assert len(list((root / "r.ab").iterdir())) == 9, "nobody can tell who needs which"
    await ensure_buckets(maker.control)
    fields: dict[str, Any] = {"desired": "running", "quorum": 1, "created_at": 0.0}
    for name, more in {
        "begins": {"restore": Restore(serial=1, source="r.ab/000002")},
        "elsewhere": {"restore": Restore(serial=3, source="gs://bucket/r.ab/000004")},
        "nonsense": {"restore": Restore(serial=1, source="000001"), "spec": {"model": 7}},
        "weights": {"spec": {"model": {"weights": "checkpoint:r.ab/000005"}}},
        "folder": {"spec": {"model": {"weights": "r.ab/000006"}}},
    }.items():
        record = RunRecord.model_validate({"name": name, "spec": {}, **fields, **more})
        await maker.control.kv_put(subjects.RUNS, name, encode(record))
    await maker.seal(Seal(9, {}, {}, needed=("r.ab/000003",)))
    left = {int(path.name) for path in (root / "r.ab").iterdir()}
    assert left == {2, 3, 4, 5, 7, 8, 9}
    assert [type(each) for each in told] == [Sealed, Sealed]


async def test_what_another_run_went_back_to_stays_until_it_has_gone_back_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record names the newest wish alone. `shown`: by each syncer shard, the newest wish that
    it has answered and the checkpoints that it needs; none: of release 0.2, or nothing at all."""
    monkeypatch.setattr(checkpointing, "seal", lambda *_: {})
    root, told = tmp_path / "kept", list[Event]()
    maker = checkpointer(tmp_path, told)
    maker.captured = (Capture(9, 1, "asked for", 1.0), {"sizes_P": [1]}, None)  # type: ignore[assignment]
    await ensure_buckets(maker.control)
    wish = Restore(serial=2, source="r.ab/000002")
    fields: dict[str, Any] = {"desired": "running", "quorum": 1, "created_at": 0.0}
    nothing_yet = status(Machine(SPEC, History(SPEC)), 0.0, 0.0, bytes_up=0, bytes_down=0)
    of_b = {"run": "b", "run_id": "cd"}
    open_, refused, gone = (1, ["r.ab/000001"]), (2, ["r.ab/000001"]), (2, ["r.ab/000002"])
    for shown, left in (
        ([open_], {1, 2}),
        ([refused], {1}),
        ([(2, ["gs://bucket/r.ab/000001"])], {1}),
        ([gone], {2}),
        ([(2, None)], {2}),
        ([None], {2}),
        ([(2, [])], set()),
        ([refused, open_], {1, 2}),
        ([refused, None], {1, 2}),
        ([refused, gone], {1, 2}),
    ):
        algorithm = {"algorithm": {"shards": len(shown)}}
        record = RunRecord(name="b", spec={"id": "cd", **algorithm}, restore=wish, **fields)
        await maker.control.kv_put(subjects.RUNS, "b", encode(record))
        for shard, says in enumerate(shown):
            key = subjects.status_key("b", shard)
            await maker.control.kv_delete(subjects.STATUS, key)
            if says is not None:
                learners = {} if says[1] is None else {NEEDS: {NEEDS: says[1]}}
                update = {**of_b, "shard": shard, "restores": says[0], "learners": learners}
                value = encode(nothing_yet.model_copy(update=update))
                await maker.control.kv_put(subjects.STATUS, key, value)
        for number in range(1, 10):
            (root / f"r.ab/{number:06}").mkdir(parents=True, exist_ok=True)
            (root / f"r.ab/{number:06}/manifest.json").write_bytes(b"{}")
        await maker.seal(Seal(9, {}, {}))
        assert {int(path.name) for path in (root / "r.ab").iterdir()} == left | {7, 8, 9}, shown


async def test_what_is_left_of_earlier_ones_goes_before_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be what fills the disk, and no later one would ever be sealed."""

    def written(*_: Any) -> Any:
        return sorted(int(path.name) for path in root.iterdir())

    monkeypatch.setattr(checkpointing, "write_part", written)
    root = tmp_path / "kept" / "r.ab"
    for number in (3, 4, 6):
        (root / f"{number:06}").mkdir(parents=True)
        (root / f"{number:06}/shard-0.json").write_bytes(b"{}")
    (root / "000003/manifest.json").write_bytes(b"{}")
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    await maker.capture(Capture(5, 1, "asked for", 1.0), {"checkpoint": 5}, {}, {})
    assert maker.captured is not None
    there: Any = maker.captured[2]
    assert there == [3, 6] and told == [Kept(5)]

    def refused(*_: Any) -> None:
        raise OSError("403 Forbidden")

    monkeypatch.setattr(checkpointing, "clear", refused)
    await maker.capture(Capture(7, 1, "asked for", 1.0), {"checkpoint": 7}, {}, {})
    assert told == [Kept(5), Kept(7)], "whoever may only write has its checkpoint all the same"


@pytest.mark.parametrize(("order", "kept"), [((1, 2), 2), ((2, 1), 2), ((1, 1), 1)])
async def test_of_two_wishes_the_later_ones_state_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int], kept: int
) -> None:
    """However long each took to read: states are as large as the run's own."""

    def state(*_: Any, **__: Any) -> Any:
        manifest: Any = type("Manifest", (), {"run": "r"})
        return RestoredState(manifest, "", {}, None)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpointing, "bytes_of", lambda *_: 0)
    monkeypatch.setattr(checkpointing, "load", state)
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    for serial in order:
        await maker.load(Restore(serial=serial, source="r.ab/000001"))
    assert [*maker.loaded] == [kept] and len(told) == 2


def with_shards(folder: Path, told: list[Event], shards: int = 2) -> Checkpointer:
    algorithm = {"shards": shards, "fragments": 2 * shards}
    spec = RunSpec.model_validate({**SPEC.model_dump(), "algorithm": algorithm})
    bus = MemoryBus(MemoryBroker(), "s")
    return Checkpointer(
        context(spec, bus, folder=folder, checkpoint_root=str(folder / "kept")), told.append, alone
    )


async def test_the_first_shard_seals_over_the_parts_of_all_once_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    sealed: list[Any] = []
    history = {"checkpoint": 7, "epoch": 2, "restores": 1}

    def part(spec: Any, shard: int, root: str, number: int) -> Any:
        looks.append(shard)
        return (history | {"shard": shard}, f"object {shard}") if len(looks) >= 3 else None

    def seal(spec: Any, root: str, captured: Any, parts: Any, effect: Any) -> Any:
        sealed.append(parts)
        return {"a": None}

    monkeypatch.setattr(checkpointing, "written_part", part)
    monkeypatch.setattr(checkpointing, "seal", seal)
    monkeypatch.setattr(checkpointing, "prune", lambda *_: None)
    told: list[Event] = []
    maker = with_shards(tmp_path, told, 3)
    own = history | {"sizes_P": [1]}
    maker.captured = (Capture(7, 1, "asked for", 1.0), own, "object 0")  # type: ignore[assignment]
    await maker.seal(Seal(7, {"a": 0}, {}))
    assert looks == [1, 1, 1, 2]
    assert sealed == [
        [
            (own, "object 0"),
            (history | {"shard": 1}, "object 1"),
            (history | {"shard": 2}, "object 2"),
        ],
    ]
    assert told == [Sealed(7, ("a",))]


async def test_a_shard_that_gives_no_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "stored_within_s", lambda size: 3.0)
    told: list[Event] = []
    maker = with_shards(tmp_path, told)
    maker.captured = (Capture(7, 1, "asked for", 1.0), {"sizes_P": [1]}, None)  # type: ignore[assignment]
    await maker.seal(Seal(7, {}, {}))
    (answer,) = told
    assert isinstance(answer, Sealed) and answer.fault == "syncer shard 1 gave no part in 3 s"


async def test_other_shards_are_waited_for_as_long_as_its_own_part_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs are as large."""
    monkeypatch.setattr(checkpointing, "stored_within_s", float)
    told: list[Event] = []
    maker = with_shards(tmp_path, told)
    history = History(maker.spec, 0)
    arrays = {"0.anchor": np.zeros(4, np.uint8), "0.momentum": np.zeros(3, np.uint8)}
    await maker.capture(Capture(7, 1, "asked for", 1.0), history.meta(), {}, arrays)
    await maker.seal(Seal(7, {}, {}))
    (kept, answer) = told
    assert kept == Kept(7)
    assert isinstance(answer, Sealed) and answer.fault == "syncer shard 1 gave no part in 7 s"


def kept_part(maker: Checkpointer, shard: int, epoch: int, restores: int) -> tuple[Any, Any]:
    """A shard's part of checkpoint 5, which lies there: its `History.meta`, and the object."""
    history = History(maker.spec, shard)
    history.checkpoint, history.epoch, history.restores = 5, epoch, restores
    meta = history.meta()
    return meta, write_part(maker.spec, shard, maker.root, 5, meta, {}, {})


@pytest.mark.parametrize(
    ("epoch", "restores", "fault"),
    [
        (3, 1, "syncer shard 1 gave no part in 3 s"),
        (4, 1, ""),
        (5, 1, ""),
        (4, 2, "the run was going back to a checkpoint, and syncer shards 0 and 1 were not"),
        (5, 2, "the run was going back to a checkpoint, and syncer shards 0 and 1 were not"),
        (4, 0, "the run was going back to a checkpoint, and syncer shards 0 and 1 were not"),
    ],
)
async def test_parts_of_two_histories_are_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int, restores: int, fault: str
) -> None:
    """The first shard's is of epoch 4, which began after one restore."""
    monkeypatch.setattr(checkpointing, "stored_within_s", lambda size: 3.0)
    told: list[Event] = []
    maker = with_shards(tmp_path, told)
    await ensure_buckets(maker.control)
    maker.captured = (Capture(5, 1, "asked for", 1.0), *kept_part(maker, 0, 4, 1))
    kept_part(maker, 1, epoch, restores)
    await maker.seal(Seal(5, {}, {}))
    (answer,) = told
    assert isinstance(answer, Sealed) and answer.fault.startswith(fault)
    complete = RunCheckpoints(maker.root).complete(maker.spec.folder)
    assert bool(answer.fault) == bool(fault) == (complete == [])


async def test_a_leader_that_another_one_replaced_completes_no_checkpoint(tmp_path: Path) -> None:
    """The other one has told that it failed, and counts it for none."""
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    maker.captured = (Capture(5, 1, "asked for", 1.0), *kept_part(maker, 0, 4, 1))

    async def replaced() -> None:
        raise Deposed("the lease is not ours any more")

    maker.ours = replaced
    with pytest.raises(Deposed):
        await maker.seal(Seal(5, {}, {}))
    assert RunCheckpoints(maker.root).complete(SPEC.folder) == [] == told


async def test_a_checkpoint_whose_part_another_leader_removed_is_never_complete(
    tmp_path: Path,
) -> None:
    """It would count among those that are kept, and push out a sound one."""
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    maker.captured = (Capture(5, 1, "asked for", 1.0), *kept_part(maker, 0, 4, 1))
    clear(SPEC, maker.root, 6)
    await maker.seal(Seal(5, {}, {}))
    (answer,) = told
    assert isinstance(answer, Sealed) and "is gone: the checkpoint is not whole" in answer.fault
    assert RunCheckpoints(maker.root).complete(SPEC.folder) == []


async def test_what_lies_there_of_a_number_that_the_tape_lost_is_waited_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub was put back from before mark 5: the part of the mark that is lost is replaced."""
    told: list[Event] = []
    maker = with_shards(tmp_path, told)
    await ensure_buckets(maker.control)
    maker.captured = (Capture(5, 1, "asked for", 1.0), *kept_part(maker, 0, 1000, 1))
    kept_part(maker, 1, 2, 1)
    looks, read = [], checkpointing.written_part

    def later(*asked: Any) -> Any:
        looks.append(asked)
        if len(looks) == 3:
            kept_part(maker, 1, 1000, 1)
        return read(*asked)

    monkeypatch.setattr(checkpointing, "written_part", later)
    await maker.seal(Seal(5, {}, {}))
    assert told == [Sealed(5)] and len(looks) == 3
    there = RunCheckpoints(maker.root)
    manifest, _ = there.manifest(f"{maker.spec.folder}/000005")
    parts = [there.part(f"{maker.spec.folder}/000005", o, ShardPart) for o in manifest.shards]
    assert [p.history["epoch"] for p in parts] == [1000, 1000]


async def test_the_newest_number_there_is_that_of_a_checkpoint_or_of_what_is_left_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    await maker.look()
    for number, name in ((4, "manifest.json"), (12, "learner-a.json"), (9, "shard-0.json")):
        (tmp_path / f"kept/r.ab/{number:06}").mkdir(parents=True)
        (tmp_path / f"kept/r.ab/{number:06}/{name}").write_bytes(b"{}")
    (tmp_path / "kept/other.cd/000077").mkdir(parents=True)
    (tmp_path / "kept/other.cd/000077/manifest.json").write_bytes(b"{}")
    await maker.look()

    def refused(*_: Any) -> int:
        raise OSError("403 Forbidden")

    monkeypatch.setattr(checkpointing, "newest_there", refused)
    await maker.look()
    assert told == [NumberFound(0), NumberFound(12), NumberFound(0)]


async def test_the_part_of_a_shard_that_is_over_is_of_the_mark_that_its_tape_has_not(
    tmp_path: Path,
) -> None:
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    history = History(SPEC).meta()
    await maker.capture(Capture(5, 7, "its mark was met", 12.5), history, {}, {})
    assert told == [Kept(5)] and history["checkpoint"] == 0
    part = written_part(maker.spec, 0, maker.root, 5)
    assert part is not None
    assert (part[0]["mark"], part[0]["mark_at"]) == (5, 12.5)
    assert belongs(5, part[0], history) and not belongs(4, part[0], history)
    assert part[0]["checkpoint"] == 0, "whoever goes on from it has what is on the tape"


async def test_data_is_read_on_from_where_the_checkpoint_had_it(tmp_path: Path) -> None:
    """A part of the data that was never read by then, and is now, is read from its beginning."""
    maker = checkpointer(tmp_path, [])
    await ensure_buckets(maker.control)
    kept = ShardLease(shard=1, holder="a", incarnation=3, sequences=40, passes=2)
    for shard in (1, 2):
        lease = ShardLease(shard=shard, holder="b", incarnation=9, sequences=90, passes=9)
        await maker.control.kv_put(subjects.SHARDS, f"r.{shard}", encode(lease))
    manifest: Any = SimpleNamespace(leases=(kept,))
    maker.loaded[1] = RestoredState(manifest, "", {}, None, (kept,))  # type: ignore[arg-type]
    await maker.rewind(1)
    there = await maker.control.kv_all(subjects.SHARDS)
    assert {name: decode(entry.value or b"", ShardLease) for name, entry in there.items()} == {
        "r.1": kept,
        "r.2": ShardLease(shard=2, holder="", incarnation=-1, sequences=0, passes=0),
    }


async def test_leases_are_set_back_some_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = checkpointer(tmp_path, [])
    await ensure_buckets(maker.control)
    kept = ShardLease(shard=0, holder="", incarnation=-1, sequences=40, passes=2)
    leases = [kept.model_copy(update={"shard": n}) for n in range(AT_ONCE)]
    under_way, most, create = set[str](), list[int](), maker.control.kv_create

    async def late(bucket: str, key: str, value: bytes, **more: Any) -> int:
        under_way.add(key)
        await asyncio.sleep(0)
        most.append(len(under_way))
        under_way.remove(key)
        return await create(bucket, key, value, **more)

    monkeypatch.setattr(maker.control, "kv_create", late)
    await maker.lease_from(leases)
    assert len(await maker.control.kv_all(subjects.SHARDS)) == AT_ONCE == max(most)


async def test_what_was_leased_further_on_meanwhile_is_read_on_from_there_too(
    tmp_path: Path,
) -> None:
    """By a learner of the history that was left. A later life that is right keeps its lease."""
    maker = checkpointer(tmp_path, [])
    await ensure_buckets(maker.control)
    kept = [
        ShardLease(shard=n, holder="", incarnation=-1, sequences=40, passes=2) for n in (1, 2, 3)
    ]
    there = {
        1: ShardLease(shard=1, holder="a", incarnation=3, sequences=41, passes=2),
        2: ShardLease(shard=2, holder="a", incarnation=4, sequences=40, passes=2),
        5: ShardLease(shard=5, holder="b", incarnation=0, sequences=0, passes=1),
    }
    for shard, lease in there.items():
        await maker.control.kv_put(subjects.SHARDS, f"r.{shard}", encode(lease))
    await maker.lease_from(kept, beyond=True)
    found = await maker.control.kv_all(subjects.SHARDS)
    assert {name: decode(entry.value or b"", ShardLease) for name, entry in found.items()} == {
        "r.1": kept[0],
        "r.2": there[2],
        "r.3": kept[2],
        "r.5": ShardLease(shard=5, holder="", incarnation=-1, sequences=0, passes=0),
    }
