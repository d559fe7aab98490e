"""The syncer process but for the process: what it cannot do, it says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from diloco_shared import VERSION
from diloco_shared.bus.port import BusError, StreamSpec
from diloco_shared.bus.stored_records import record_at
from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.process.membership import DataFolder
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Assignment, Event, MemberRecord, RunRecord
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.app import Settings, Syncer
from diloco_syncer.leadership.candidate_io import Candidate


async def assigned(broker: MemoryBroker, **tables: Any) -> MemoryBus:
    """A hub on which syncer s is assigned to run r."""
    bus = MemoryBus(broker, "s")
    for bucket in subjects.BUCKETS:
        await bus.ensure_bucket(bucket)
    await bus.ensure_stream(StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,), 1 << 20))
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}, **tables})
    record = RunRecord(
        name="r", spec=spec.model_dump(mode="json"), desired="running", quorum=1, created_at=0.0
    )
    await bus.kv_put(subjects.RUNS, "r", encode(record))
    await bus.kv_put(subjects.ASSIGNMENTS, "s", encode(Assignment(member="s", run="r", at=0.0)))
    return bus


async def told(bus: MemoryBus, broker: MemoryBroker, folder_path: Path, kind: str) -> str:
    """What the syncer says under this kind; it ends after that."""
    folder = DataFolder(folder_path, "s")
    syncer = Syncer(Settings(id="s", data=folder_path), bus, MemoryBus(broker, "d"), folder)
    work = asyncio.create_task(syncer.run())
    try:
        async with asyncio.timeout(30):
            async with bus.read(subjects.EVENTS_STREAM, subjects.event("r", kind)) as messages:
                stored = await anext(messages)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        folder.release()
    return decode(stored.payload, Event).text


async def test_a_run_of_a_later_release_is_not_worked_for(tmp_path: Path) -> None:
    """A setting that is unknown cannot be done; the process lives, and says what it is missing."""
    broker = MemoryBroker()
    bus = await assigned(broker)
    found = await record_at(bus, subjects.RUNS, "r", RunRecord)
    assert found is not None
    data = {**found.record.spec["data"], "colour": "red"}
    later = found.record.model_copy(update={"spec": {**found.record.spec, "data": data}})
    await bus.kv_put(subjects.RUNS, "r", encode(later))
    folder = DataFolder(tmp_path, "s")
    syncer = Syncer(Settings(id="s", data=tmp_path), bus, MemoryBus(broker, "d"), folder)
    work = asyncio.create_task(syncer.run())

    async def says_so() -> bool:
        shown = await record_at(bus, subjects.MEMBERS, "s", MemberRecord)
        return shown is not None and shown.record.state == "ineligible"

    try:
        await until(says_so)
        assert "data.colour: Extra inputs" in syncer.membership.record.reason
        assert f"of release {VERSION}" in syncer.membership.record.reason
        assert not work.done()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        folder.release()


async def test_a_run_of_another_place_of_checkpoints_is_not_worked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever let it in: the syncer judges by its own settings, and opens nothing there."""
    opened: list[str] = []
    monkeypatch.setattr(Vault, "__init__", lambda vault, root: opened.append(root))
    broker = MemoryBroker()
    bus = await assigned(broker, keeping={"run_checkpoint_root": "s3://evil/x"})
    folder = DataFolder(tmp_path, "s")
    syncer = Syncer(Settings(id="s", data=tmp_path), bus, MemoryBus(broker, "d"), folder)
    work = asyncio.create_task(syncer.run())
    try:
        await until(lambda: syncer.membership.record.state == "ineligible")
        reason = syncer.membership.record.reason
        assert reason.startswith("keeping.run_checkpoint_root: 's3://evil/x' is not below a place")
        assert await bus.kv_get(subjects.LEASES, subjects.leader_lease("r", 0)) is None
        assert not opened
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        folder.release()


async def test_one_that_cannot_read_the_tape_says_so_and_does_not_lead(tmp_path: Path) -> None:
    broker = MemoryBroker()
    bus = await assigned(broker)
    await bus.ensure_stream(StreamSpec(subjects.tape_stream("r"), ("tape.r.>",), 1 << 24))
    await bus.append(subjects.tape("r", 0), b"no record")
    assert "s cannot lead: " in await told(bus, broker, tmp_path, "standby-unfit")
    entry = await bus.kv_get(subjects.LEASES, subjects.leader_lease("r", 0))
    assert entry is None, "it did not even try"


@pytest.mark.parametrize(
    "fault",
    [
        KeyError("dn.r.0.0.1.1"),
        BusError("no such stream"),
        ExceptionGroup("tasks", [RuntimeError("deep"), OSError("other")]),
    ],
)
async def test_a_leader_that_ends_says_why_whatever_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    async def run(candidate: Candidate) -> str:
        raise fault

    monkeypatch.setattr(Candidate, "run", run)
    broker = MemoryBroker()
    text = await told(await assigned(broker), broker, tmp_path, "lead-failed")
    first = fault.exceptions[0] if isinstance(fault, ExceptionGroup) else fault
    assert f"{type(first).__name__}: {first}" in text
