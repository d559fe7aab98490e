"""The history that a restore went back to outlives its checkpoint."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from syncer.contexts import alone, context

from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeRestore
from diloco_shared.protocol.records import ShardLease
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints import gone_back_io as gone_back
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import RestoredState

pytestmark = pytest.mark.virtual

SPEC = RunSpec.model_validate({"name": "r", "id": "ab", "budget": {"steps": 80}})
KEPT = ShardLease(shard=1, holder="a", incarnation=3, sequences=40, passes=2)


def checkpointer(folder: Path) -> Checkpointer:
    bus = MemoryBus(MemoryBroker(), "s")
    root = str(folder / "kept")
    return Checkpointer(
        context(SPEC, bus, folder=folder, checkpoint_root=root), lambda _: None, alone
    )


def state(digest: str = "d" * 32) -> RestoredState:
    manifest: Any = SimpleNamespace(leases=(KEPT,))
    return RestoredState(manifest, digest, History(SPEC).meta(), None, (KEPT,))  # type: ignore[arg-type]


def restore(serial: int = 1, digest: str = "d" * 32) -> TapeRestore:
    return TapeRestore(
        epoch=1,
        term=1,
        serial=serial,
        source="r.ab/000001",
        digest=digest,
        run="r",
        versions=(0,),
        anchor_digests=("",),
        at=1.0,
    )


async def test_it_is_kept_before_the_record_is_on_the_tape(tmp_path: Path) -> None:
    maker = checkpointer(tmp_path)
    await ensure_buckets(maker.control)
    maker.loaded[1] = state()
    await maker.rewind(1)
    assert gone_back.found(SPEC, 0, maker.root, restore()) == History(SPEC).meta()
    # Of another restore, another checkpoint, and another shard there is none.
    assert gone_back.found(SPEC, 0, maker.root, restore(serial=2)) is None
    assert gone_back.found(SPEC, 0, maker.root, restore(digest="e" * 32)) is None
    assert gone_back.found(SPEC, 1, maker.root, restore()) is None


async def test_a_run_goes_back_where_there_is_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = checkpointer(tmp_path)
    await ensure_buckets(maker.control)
    maker.loaded[1] = state()

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Vault, "write", full)
    await maker.rewind(1)
    assert (await maker.control.kv_all(subjects.SHARDS)).keys() == {"r.1"}


async def test_a_run_goes_back_where_its_place_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record of any kind would follow."""
    maker = checkpointer(tmp_path)
    await ensure_buckets(maker.control)
    maker.loaded[1] = state()

    async def hangs(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "to_thread", hangs)
    await maker.rewind(1)
    assert (await maker.control.kv_all(subjects.SHARDS)).keys() == {"r.1"}


def test_the_newest_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gone_back, "KEPT_MAX", 2)
    for serial in (9, 10, 11):
        gone_back.keep(SPEC, 0, str(tmp_path), serial, state())
    there = [gone_back.found(SPEC, 0, str(tmp_path), restore(n)) is not None for n in (9, 10, 11)]
    assert there == [False, True, True]
    gone_back.keep(SPEC, 0, str(tmp_path), 3, state())  # the hub was put back since
    there = [gone_back.found(SPEC, 0, str(tmp_path), restore(n)) is not None for n in (3, 10, 11)]
    assert there == [True, False, True]


def test_what_is_no_history_is_said(tmp_path: Path) -> None:
    gone_back.keep(SPEC, 0, str(tmp_path), 1, state())
    (file,) = tmp_path.rglob("*.json")
    for damaged in (b"[1]", b"{", b"7"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"0000000001|Expecting"):
            gone_back.found(SPEC, 0, str(tmp_path), restore())
