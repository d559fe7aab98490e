"""What carries a checkpoint out tells the machine what came of it, once."""

from pathlib import Path
from typing import Any

import pytest
from syncer.contexts import context

from diloco_shared.protocol.records import Restore
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints import checkpointing_io as checkpointing
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.events import Capture, Event, Loaded, Seal, Sealed
from diloco_syncer.history.replay import RestoredState

SPEC = RunSpec.model_validate({"name": "r", "id": "ab", "budget": {"steps": 80}})


def checkpointer(folder: Path, told: list[Event]) -> Checkpointer:
    bus = MemoryBus(MemoryBroker(), "s")
    return Checkpointer(
        context(SPEC, bus, folder=folder, checkpoint_root=str(folder / "kept")), told.append
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


@pytest.mark.parametrize(("order", "kept"), [((1, 2), 2), ((2, 1), 2), ((1, 1), 1)])
async def test_of_two_wishes_the_later_ones_state_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int], kept: int
) -> None:
    """However long each took to read: states are as large as the run's own."""

    def state(*_: Any, **__: Any) -> Any:
        manifest: Any = type("Manifest", (), {"run": "r"})
        return RestoredState(manifest, "", {}, None)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpointing, "load", state)
    told: list[Event] = []
    maker = checkpointer(tmp_path, told)
    for serial in order:
        await maker.load(Restore(serial=serial, source="r.ab/000001"))
    assert [*maker.loaded] == [kept] and len(told) == 2
