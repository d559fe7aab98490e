"""What a process keeps of a deleted run goes, and nothing else."""

import asyncio
from pathlib import Path

import pytest
from waiting import until

from diloco_shared.bus.run_streams import spec_of
from diloco_shared.process import disk_watch
from diloco_shared.process.disk_watch import remove_deleted
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Deleted, RunRecord
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


async def test_folders_go_also_of_a_run_that_was_deleted_while_the_process_was_down(
    tmp_path: Path,
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "test")
    await bus.ensure_bucket(subjects.DELETED)
    for name in ("r.aa", "r.bb", "s.cc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    mark = encode(Deleted(run="r", at=0.0))
    await bus.kv_put(subjects.DELETED, "aa", mark)
    removing = asyncio.create_task(remove_deleted(MemoryBus(broker, "process"), tmp_path))
    await until(lambda: names() == {"r.bb", "s.cc"})
    await bus.kv_put(subjects.DELETED, "cc", mark)
    await until(lambda: names() == {"r.bb"})
    removing.cancel()


async def test_what_is_made_after_the_mark_was_seen_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who heard of its assignment late. But not what another run of the name has."""
    monkeypatch.setattr(disk_watch, "AGAIN_S", 0.01)
    folder = tmp_path / "checkpoints"
    bus = MemoryBus(MemoryBroker(), "process")
    await bus.ensure_bucket(subjects.DELETED)
    await bus.kv_put(subjects.DELETED, "aa", encode(Deleted(run="r", at=0.0)))
    (folder / "r.aa").mkdir(parents=True)
    removing = asyncio.create_task(remove_deleted(bus, folder))
    await until(lambda: not (folder / "r.aa").exists())
    for name in ("r.aa", "r.bb"):
        (folder / name).mkdir()
    await until(lambda: [path.name for path in folder.iterdir()] == ["r.bb"])
    removing.cancel()


@pytest.mark.parametrize("phase", ["there", "deleting"])
async def test_nobody_begins_to_work_for_a_run_that_is_being_deleted(phase: str) -> None:
    bus = MemoryBus(MemoryBroker(), "process")
    await bus.ensure_bucket(subjects.RUNS)
    spec = {"id": "aa", "name": "r", "model": {"factory": "m:m"}, "budget": {"steps": 1}}
    record = RunRecord.model_validate(
        {
            "name": "r",
            "spec": spec,
            "created_at": 0.0,
            "phase": phase,
            "desired": "running",
            "quorum": 1,
        }
    )
    await bus.kv_put(subjects.RUNS, "r", encode(record))
    assert (await spec_of(bus, "r", "aa") is None) == (phase == "deleting")
    assert await spec_of(bus, "r", "bb") is None
