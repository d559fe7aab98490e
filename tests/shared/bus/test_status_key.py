"""The key of a status: who may write it, and what becomes of who may not."""

import pytest

from diloco_shared.bus.status_key import SILENT_S, Standing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Stamp
from diloco_shared.protocol.records import RunRecord, RunStatus
from diloco_shared.protocol.wire import decode, encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


def status(state: str = "running", run_id: str = "one", **changes: object) -> RunStatus:
    fields: dict[str, object] = {
        "run": "r",
        "run_id": run_id,
        "state": state,
        "reason": "",
        "epoch": 0,
        "term": 1,
        "leader": "s1",
        "quorum": 1,
        "versions": (1,),
        "stamp": Stamp(round=1, steps=8, fraction=0.1, fraction_per_step=0.01),
        "rounds_committed": 1,
        "rounds_skipped": 0,
        "contributions_merged": 2,
        "refused": {},
        "alive": (),
        "participating": (),
        "parameters": 1,
        "tokens_per_step": 1,
        "tokens_processed": 0,
        "tokens_useful": 0,
        "bytes_up": 0,
        "bytes_down": 0,
        "learners": {},
        "at": 1.0,
    }
    return RunStatus.model_validate(fields | changes)


async def hub(run_id: str = "one") -> MemoryBus:
    bus = MemoryBus(MemoryBroker(), "test")
    for bucket in subjects.BUCKETS:
        await bus.ensure_bucket(bucket)
    await submit(bus, run_id)
    return bus


async def submit(bus: MemoryBus, run_id: str) -> None:
    record = RunRecord(name="r", spec={"id": run_id}, desired="running", quorum=1, created_at=0.0)
    await bus.kv_put(subjects.RUNS, "r", encode(record))


async def shown(bus: MemoryBus) -> RunStatus | None:
    entry = await bus.kv_get(subjects.STATUS, "r")
    return None if entry is None or entry.value is None else decode(entry.value, RunStatus)


async def test_a_standby_that_leads_for_a_moment_after_the_end_changes_nothing() -> None:
    """Leader A writes settled and gives its lease back; standby B then writes."""
    bus = await hub()
    a, b = Standing(bus, "r", "one"), Standing(bus, "r", "one")
    assert await a.write(status()) == ""
    await b.read()
    assert await a.write(status("finished", settled=True)) == ""
    assert await b.write(status("finished", settled=False)) == "the run is settled"
    assert await b.write(status("finished", settled=False)) == "the run is settled"
    assert (await shown(bus)) == status("finished", settled=True)


async def test_a_deposed_leader_does_not_replace_what_its_successor_says() -> None:
    bus = await hub()
    old, new = Standing(bus, "r", "one"), Standing(bus, "r", "one")
    assert await old.write(status(term=1)) == ""
    assert await new.write(status(term=2)) == ""
    assert await old.write(status(term=1, at=2.0)) == "it is of term 2, this one of 1"
    assert (await shown(bus)) == status(term=2)
    assert await new.write(status(term=2, at=3.0)) == ""


async def test_a_leader_of_a_deleted_run_writes_nothing_into_the_next_of_that_name() -> None:
    bus = await hub()
    old, new = Standing(bus, "r", "one"), Standing(bus, "r", "two")
    assert await old.write(status()) == ""
    await bus.kv_delete(subjects.STATUS, "r")
    await bus.kv_delete(subjects.RUNS, "r")
    why = "the run is deleted, or another one has its name"
    assert await old.write(status(at=2.0)) == why
    assert await shown(bus) is None
    await submit(bus, "two")
    assert await old.write(status(at=2.0)) == why
    assert await new.write(status(run_id="two")) == ""
    assert await old.write(status(at=3.0)) == why
    assert (await shown(bus)) == status(run_id="two")


async def test_what_is_left_of_a_deleted_run_is_replaced() -> None:
    bus = await hub("two")
    await bus.kv_put(subjects.STATUS, "r", encode(status("stopped", settled=True, term=9)))
    assert await Standing(bus, "r", "two").write(status(run_id="two")) == ""


async def test_a_term_that_the_tape_has_lost_does_not_stand_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A power cut took term 7 from the tape: the leader of term 6 holds the lease, and is right."""
    bus = await hub()
    await bus.kv_put(subjects.STATUS, "r", encode(status(term=7)))
    now = [100.0]
    monkeypatch.setattr("diloco_shared.bus.status_key.ambient.monotonic", lambda: now[0])
    leader = Standing(bus, "r", "one")
    assert await leader.write(status(term=6)) == "it is of term 7, this one of 6"
    now[0] += SILENT_S / 2
    await bus.kv_put(subjects.STATUS, "r", encode(status(term=7, at=2.0)))  # somebody renews it
    now[0] += SILENT_S / 2 + 1
    assert await leader.write(status(term=6)) == "it is of term 7, this one of 6"
    now[0] += SILENT_S + 1
    assert await leader.write(status(term=6)) == ""


async def test_rubbish_is_replaced() -> None:
    """I11"""
    bus = await hub()
    await bus.kv_put(subjects.STATUS, "r", b"rubbish")
    assert await Standing(bus, "r", "one").write(status()) == ""
