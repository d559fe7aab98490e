"""Going back to a checkpoint takes no second place in memory, and loses nothing if it fails."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from syncer.contexts import alone, context
from syncer.recording import SPEC, Recording

from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.memory.pages import Pages
from diloco_shared.numerics import codec
from diloco_shared.protocol.checkpoints import reference
from diloco_shared.protocol.messages import TapeRestore
from diloco_shared.protocol.records import Restore
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.checkpoints.parts_io import load, seal, write_part
from diloco_syncer.events import Capture, Event, Loaded, Seal
from diloco_syncer.history.follow_io import Follower
from diloco_syncer.history.replay import RestoredState
from diloco_syncer.history.tape_io import Tape, Unread
from diloco_syncer.merging.store import Contribution, FragmentStore
from diloco_syncer.snapshots.finding_io import Finder

pytestmark = pytest.mark.virtual

REF = reference(SPEC.folder, 1)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """A run with a checkpoint after its second round."""
    found = Recording()
    found.begin()
    for _ in range(2):
        found.round()
    assert found.store is not None
    history, root = found.history.meta(), str(tmp_path / "kept")
    arrays = found.store.state_arrays()
    part = write_part(SPEC, 0, root, 1, history, found.store.meta(), arrays)
    capture = Capture(1, history["seq"], "as the user asked", 1.0)
    seal(SPEC, root, capture, [(history, part)], Seal(1, {}, {}))
    return found


def checkpointer(folder: Path, told: list[Event]) -> Checkpointer:
    bus = MemoryBus(MemoryBroker(), "s")
    return Checkpointer(
        context(SPEC, bus, folder=folder, checkpoint_root=str(folder / "kept")), told.append, alone
    )


def mapped(values: Any) -> bool:
    """Whether the values of an array lie in a file."""
    while not isinstance(values, Pages):
        if values is None:
            return False
        values = values.obj if isinstance(values, memoryview) else getattr(values, "base", None)
    return True


def masters_mapped(store: FragmentStore) -> set[bool]:
    return {mapped(fragment.master) for fragment in store.fragments.values()}


def merged(store: FragmentStore, p: int) -> tuple[str, str, str]:
    """What a round makes of fragment p."""
    size = store.layout.sizes[p]
    delta = np.arange(size, dtype=np.float32)
    given = Contribution("a", 1.0, store.version(p), codec.encode("fp32", delta), "fp32")
    staged = store.stage(p, [given], keyframe=False)
    store.install(p, staged)
    return staged.anchor_digest, staged.master_digest, staged.payload_digest


def test_what_lies_aside_is_what_lies_in_memory(tmp_path: Path, recording: Recording) -> None:
    """Bit for bit, and so is what rounds make of it, which lies in memory again."""
    root = str(tmp_path / "kept")
    here = load(SPEC, 0, REF, root).store
    aside = load(SPEC, 0, REF, root, aside=tmp_path / "not there yet").store
    ours, theirs = here.state_arrays(), aside.state_arrays()
    assert not any(map(mapped, ours.values())) and all(map(mapped, theirs.values()))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert not any((tmp_path / "not there yet").iterdir()), "its file has no name"
    for p in (0, 1, 0):
        assert merged(here, p) == merged(aside, p)
    assert not mapped(aside.fragments[0].master)


async def test_a_leader_loads_a_checkpoint_aside(tmp_path: Path, recording: Recording) -> None:
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    await maker.load(Restore(serial=1, source=REF))
    (answer,) = told
    assert isinstance(answer, Loaded) and not answer.fault
    assert masters_mapped(maker.install(1)) == {True}


async def test_where_the_disk_has_no_room_nothing_is_read_and_the_figures_are_told(
    tmp_path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the kernel ended the process for want of memory, and the next leader's as well."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 20))
    read: list[str] = []
    pieces = Vault.pieces

    def watched(self: Vault, key: str, *where: int) -> Any:
        read.append(key)
        return pieces(self, key, *where)

    monkeypatch.setattr(Vault, "pieces", watched)
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    await maker.load(Restore(serial=1, source=REF))
    (answer,) = told
    assert isinstance(answer, Loaded) and not maker.loaded
    assert not [key for key in read if key.endswith(".safetensors")]
    assert "to go back takes" in answer.fault and "and 20 B are free" in answer.fault


async def test_a_damaged_checkpoint_leaves_what_is_there(
    tmp_path: Path, recording: Recording
) -> None:
    for path in (tmp_path / "kept" / REF).glob("*.safetensors"):
        body = bytearray(path.read_bytes())
        body[-1] ^= 1
        path.write_bytes(body)
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    await maker.load(Restore(serial=1, source=REF))
    (answer,) = told
    assert isinstance(answer, Loaded) and "damaged" in answer.fault and not maker.loaded


def follower(tmp_path: Path) -> Follower:
    bus = MemoryBus(MemoryBroker(), "s")
    at = context(SPEC, bus, folder=tmp_path)
    finder = Finder(SPEC, 0, tmp_path, at.snapshots, str(tmp_path / "kept"))
    return Follower(SPEC, bus, Tape(bus, SPEC.name), finder)


def restore(tmp_path: Path, recording: Recording) -> TapeRestore:
    state = load(SPEC, 0, REF, str(tmp_path / "kept"))
    return TapeRestore(
        epoch=1,
        term=1,
        serial=1,
        source=REF,
        digest=state.digest,
        run=SPEC.name,
        versions=tuple(recording.history.versions),
        anchor_digests=tuple(recording.history.anchor_digests),
        at=9.0,
    )


@pytest.mark.parametrize("has_a_store", [True, False])
async def test_a_standby_that_has_a_store_loads_aside(
    tmp_path: Path, recording: Recording, has_a_store: bool
) -> None:
    """Whoever has none yet has the memory for it, and may have no room on its disk."""
    standby = follower(tmp_path)
    standby.store = recording.store if has_a_store else None
    back = await standby._back(restore(tmp_path, recording))
    assert isinstance(back, RestoredState) and masters_mapped(back.store) == {has_a_store}


async def test_a_standby_whose_disk_is_full_keeps_its_store(
    tmp_path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = follower(tmp_path)
    standby.store = recording.store
    record = restore(tmp_path, recording)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 20))
    with pytest.raises(Unread, match=r"the tape goes back to .*, and to go back takes"):
        await standby._back(record)
    assert standby.store is recording.store
