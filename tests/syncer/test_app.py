"""The syncer process but for the process: what it cannot do, it says."""

import asyncio
from pathlib import Path

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import StreamSpec
from diloco_shared.edges.membership import DataFolder
from diloco_shared.edges.memory_broker import MemoryBroker
from diloco_shared.edges.memory_bus import MemoryBus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Assignment, Event, RunRecord
from diloco_shared.protocol.wire import decode, encode
from diloco_syncer.app import Syncer
from diloco_syncer.settings import Settings


async def test_one_that_cannot_read_the_tape_says_so_and_does_not_lead(tmp_path: Path) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "s")
    for bucket in subjects.BUCKETS:
        await bus.ensure_bucket(bucket)
    await bus.ensure_stream(StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,), 1 << 20))
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    record = RunRecord(
        name="r", spec=spec.model_dump(mode="json"), desired="running", quorum=1, created_at=0.0
    )
    await bus.kv_put(subjects.RUNS, "r", encode(record))
    await bus.kv_put(subjects.ASSIGNMENTS, "s", encode(Assignment(member="s", run="r", at=0.0)))
    await bus.ensure_stream(StreamSpec(subjects.tape_stream("r"), ("tape.r.>",), 1 << 24))
    await bus.append(subjects.tape("r", 0), b"no record")

    folder = DataFolder(tmp_path, "s")
    syncer = Syncer(Settings(id="s", data=tmp_path), bus, MemoryBus(broker, "d"), folder)
    work = asyncio.create_task(syncer.run())
    try:
        async with asyncio.timeout(30):
            async with bus.read(
                subjects.EVENTS_STREAM, subjects.event("r", "standby-unfit")
            ) as messages:
                stored = await anext(messages)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        folder.release()
    assert "s cannot lead: " in decode(stored.payload, Event).text
    entry = await bus.kv_get(subjects.LEASES, subjects.leader_lease("r", 0))
    assert entry is None, "it did not even try"
