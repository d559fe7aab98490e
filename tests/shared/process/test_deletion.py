"""What a process keeps of a deleted run goes, and nothing else."""

import asyncio
from pathlib import Path

from waiting import until

from diloco_shared.process.disk_watch import remove_deleted
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Deleted
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
