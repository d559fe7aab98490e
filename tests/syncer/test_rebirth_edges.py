"""Syncers under new names and on empty disks, on one in-memory bus: a run is not lost by that."""

import asyncio
import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import pytest
from syncer.test_standby import SPEC, Hub
from waiting import until

from diloco_shared.bus import blobs
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    PublicationManifest,
    TapeEpoch,
    TapeRebirth,
    TapeRecord,
    TapeSnapshot,
    TapeTerm,
)
from diloco_shared.protocol.records import LeaderLease, MemberRecord, RunRecord
from diloco_shared.protocol.wire import decode, decode_tape, encode
from diloco_shared.spec.run import RunSpec
from diloco_syncer.history import audit_io as audit
from diloco_syncer.leadership.lease_io import LeaseKeeper

pytestmark = pytest.mark.virtual
T = TypeVar("T")


async def within(what: Awaitable[T]) -> T:
    """A generous limit: these wait for several leases, and for retries of some seconds."""
    return await asyncio.wait_for(what, 120)  # type: ignore[arg-type]


async def begun(tmp_path: Path, **keeping: object) -> Hub:
    """A run whose parameters are published, and whose contributions are purged."""
    hub = Hub(tmp_path)
    await hub.prepare()
    await set_keeping(hub, begin_again_after_s=0.1, **keeping)
    await hub.initialise()
    async with hub.syncer("s1"):
        await within(hub.comes(lambda r: isinstance(r, TapeSnapshot) or r.kind == "term"))
        await within(hub.becomes("s1", "leading"))
        await within(published(hub, epoch=0))
    await hub.append(TapeSnapshot(term=2, covers=2, round=-1, path="x", at=3.0))
    # It covers the initial parameters by a snapshot of its own, and then they go.
    async with hub.syncer("s1"):
        await within(hub.comes(lambda r: isinstance(r, TapeSnapshot) and r.term == 3))
    await hub.bus.purge(subjects.up_stream("r"), "up.r.>")
    return hub


async def set_keeping(hub: Hub, **keeping: object) -> None:
    body = SPEC.model_dump(mode="json")
    body["keeping"] |= keeping
    entry = await hub.bus.kv_get(subjects.RUNS, "r")
    assert entry is not None and entry.value
    record = decode(entry.value, RunRecord).model_copy(update={"spec": body})
    await hub.bus.kv_put(subjects.RUNS, "r", encode(record))


async def published(hub: Hub, epoch: int) -> dict[int, PublicationManifest]:
    """Wait until every fragment is published in that epoch."""
    found: dict[int, PublicationManifest] = {}
    async with hub.bus.read(subjects.dn_stream("r"), f"dn.r.{epoch}.*.*.*.m") as messages:
        async for stored in messages:
            m = decode(stored.payload, PublicationManifest)
            found[m.fragment] = m
            if len(found) == 2:
                return found
    raise AssertionError


def reborn(record: TapeRecord) -> bool:
    return isinstance(record, TapeRebirth)


async def test_another_syncer_beside_it_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    hub = await begun(tmp_path)
    before = sorted(p.name for p in (tmp_path / "s1").rglob("*"))
    async with hub.syncer("s9"):
        await within(hub.becomes("s9", "leading"))
        event = await within(hub.told("recovered"))
    assert not any(isinstance(r, TapeRebirth) for r in await hub.tape())
    assert sorted(p.name for p in (tmp_path / "s1").rglob("*")) == before, "read, never written"
    assert event is not None


async def test_a_standby_gives_its_snapshot_when_nobody_leads(tmp_path: Path) -> None:
    hub = await begun(tmp_path)
    # Whoever has the lease renews it and says nothing: s1 could lead, and does not.
    renewing = asyncio.create_task(somebody_renews(hub))
    try:
        async with hub.syncer("s1"):
            await within(hub.becomes("s1", "standby"))
            async with hub.syncer("s9", "elsewhere"):
                await within(hub.told("snapshot-fetched"))
                await within(hub.becomes("s9", "standby"))
    finally:
        renewing.cancel()
    assert not any(isinstance(r, TapeRebirth) for r in await hub.tape())


async def somebody_renews(hub: Hub) -> None:
    lease = encode(LeaderLease(holder="s0", boot="b", lock="l", at=0.0))
    while True:
        await hub.bus.kv_put(subjects.LEASES, subjects.leader_lease("r", 0), lease)
        await asyncio.sleep(0.05)


async def test_without_any_disk_it_goes_on_from_what_is_published(tmp_path: Path) -> None:
    hub = await begun(tmp_path)
    shutil.rmtree(tmp_path / "s1")
    first = await published(hub, 0)
    async with hub.syncer("s8", "one"), hub.syncer("s9", "another"):
        record = await within(hub.comes(reborn))
        assert isinstance(record, TapeRebirth)
        again = await within(published(hub, record.epoch))
        await within(hub.told("rebirth"))
        await within(hub.comes(lambda r: isinstance(r, TapeSnapshot) and r.term == record.term))
        # Whichever of them did not begin it executes the record, or has its snapshot.
        other = {"s8", "s9"} - {record.leader}
        await within(hub.becomes(other.pop(), "standby"))
    assert (record.epoch, record.versions) == (1, (0, 0))
    assert {p: m.anchor_digest for p, m in again.items()} == {  # type: ignore[attr-defined]
        p: m.anchor_digest for p, m in first.items()
    }
    assert len([r for r in await hub.tape() if reborn(r)]) == 1
    # A later leader executes it, or begins after it.
    async with hub.syncer("s8", "one"):
        await within(hub.becomes("s8", "leading"))


async def test_it_waits_for_the_user_where_the_run_says_so(tmp_path: Path) -> None:
    hub = await begun(tmp_path, begin_again="ask")
    shutil.rmtree(tmp_path / "s1")
    async with hub.syncer("s9", "elsewhere"):
        member = await within(unfit(hub, "s9", "diloco begin-again r"))
        assert "only outer momentum" in member.reason  # type: ignore[attr-defined]
        assert not any(isinstance(r, TapeRebirth) for r in await hub.tape())
        entry = await hub.bus.kv_get(subjects.RUNS, "r")
        assert entry is not None and entry.value
        info = await hub.bus.stream_info(subjects.tape_stream("r"))
        wish = decode(entry.value, RunRecord).model_copy(update={"begin_again": info.last_seq})
        await hub.bus.kv_put(subjects.RUNS, "r", encode(wish))
        await within(hub.comes(reborn))


async def test_a_wish_of_before_the_newest_record_is_none(tmp_path: Path) -> None:
    hub = await begun(tmp_path, begin_again="ask")
    shutil.rmtree(tmp_path / "s1")
    entry = await hub.bus.kv_get(subjects.RUNS, "r")
    assert entry is not None and entry.value
    info = await hub.bus.stream_info(subjects.tape_stream("r"))
    old = decode(entry.value, RunRecord).model_copy(update={"begin_again": info.last_seq - 1})
    await hub.bus.kv_put(subjects.RUNS, "r", encode(old))
    async with hub.syncer("s9", "elsewhere"):
        await within(unfit(hub, "s9", "diloco begin-again r"))
    assert not any(isinstance(r, TapeRebirth) for r in await hub.tape())


async def unfit(hub: Hub, name: str, reason: str) -> MemberRecord:
    """Wait until it shows why it cannot lead."""
    async with hub.bus.kv_watch(subjects.MEMBERS, name) as entries:
        async for entry in entries:
            m = decode(entry.value, MemberRecord) if entry.value else None
            if m is not None and m.state == "ineligible" and reason in m.reason:
                return m
    raise AssertionError


async def test_a_damaged_contribution_is_told_and_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "silence_s", lambda chunk_bytes: 0.3)
    hub = Hub(tmp_path)
    await hub.prepare()
    await set_keeping(hub, begin_again_after_s=0.1)
    await hub.initialise()
    async with hub.syncer("s1"):
        await within(hub.becomes("s1", "leading"))
        await within(published(hub, epoch=0))
    shutil.rmtree(tmp_path / "s1")
    chunks = subjects.initial("r", "a", 0, 0)
    await hub.bus.purge(subjects.up_stream("r"), chunks)  # the manifest stays
    async with hub.syncer("s9"):
        member = await within(unfit(hub, "s9", "damaged"))
        assert chunks in member.reason  # type: ignore[attr-defined]
        await within(hub.comes(reborn))


async def test_what_is_checked_again_begins_after_it(tmp_path: Path) -> None:
    hub = await begun(tmp_path)
    shutil.rmtree(tmp_path / "s1")
    async with hub.syncer("s9"):
        record = await within(hub.comes(reborn))
        await within(
            hub.comes(lambda r: isinstance(r, TapeSnapshot) and r.term == record.term)  # type: ignore[attr-defined]
        )
        spec = await spec_of(hub)
        stored = await hub.bus.fetch(subjects.tape_stream("r"), subjects.tape("r", 0))
        records = [(s.seq, decode_tape(s.payload)) for s in stored]
        (seq,) = [n for n, r in records if isinstance(r, TapeRebirth)]
        verified = await audit.verify(spec, hub.bus, records, str(tmp_path / "c"))
        assert (verified.faults, verified.rebirths) == ((), (seq,))
        folders = [tmp_path / "s9" / "snapshots" / "r"]
        replayed = await audit.reexecute(spec, hub.bus, records, folders, str(tmp_path / "c"))
        assert (replayed.fault, replayed.began_at) == (None, seq)
        nowhere = await audit.reexecute(spec, hub.bus, records, [], str(tmp_path / "c"))
        assert nowhere.fault is not None
        assert f"record {seq} begins again from what was published" in nowhere.fault.text


async def spec_of(hub: Hub) -> RunSpec:
    entry = await hub.bus.kv_get(subjects.RUNS, "r")
    assert entry is not None and entry.value
    return RunSpec.model_validate(decode(entry.value, RunRecord).spec)


async def test_a_keeper_of_the_lease_that_dies_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    dies = asyncio.Event()
    keep = LeaseKeeper.keep

    async def kept(self: LeaseKeeper) -> None:
        keeping = asyncio.create_task(keep(self))
        await dies.wait()
        keeping.cancel()
        raise RuntimeError("the keeper is dead")

    monkeypatch.setattr(LeaseKeeper, "keep", kept)
    async with hub.syncer("s1") as process:
        await within(hub.becomes("s1", "leading"))
        dies.set()
        with pytest.raises(BaseExceptionGroup) as told:
            await within(process)
        assert told.group_contains(RuntimeError, match="the keeper is dead")


async def test_a_snapshot_of_records_that_the_tape_has_lost_leads_nowhere(tmp_path: Path) -> None:
    """A message server that lost its newest records goes on with others in their place."""
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    await overtaken_by_a_power_cut(hub)
    async with hub.syncer("s1"):
        # From the beginning of the tape, since UP still has the initial parameters.
        await within(hub.becomes("s1", "leading"))
    assert not any(isinstance(r, TapeRebirth) for r in await hub.tape())
    covers = [record for record, _ in snapshots_of(tmp_path / "s1")]
    assert LOST not in covers, "it would pass for newer than what follows"


async def test_nor_does_that_of_another_syncer(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await set_keeping(hub, begin_again_after_s=0.1)
    await hub.initialise()
    await overtaken_by_a_power_cut(hub)
    await hub.bus.purge(subjects.up_stream("r"), "up.r.>")
    async with hub.syncer("s9"):
        # Beside s1, whose snapshot it finds and does not take.
        await within(hub.comes(reborn))
        await within(hub.becomes("s9", "leading"))
    assert [record for record, _ in snapshots_of(tmp_path / "s1")] == [LOST]


LOST = 4  # a record that s1 has a snapshot of


@pytest.mark.parametrize("epoch", [0, 1000])
async def test_a_snapshot_past_the_end_of_the_tape_goes_if_the_tape_was_taken_back(
    epoch: int, tmp_path: Path
) -> None:
    """A restored backup begins a later epoch. A server that lost its records does not."""
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    await covered(hub)
    hub.broker.lose(subjects.tape_stream("r"), 3, synced=True)
    if epoch:
        await hub.append(TapeEpoch(epoch=epoch, term=1, reason="restored", at=50.0))
    end = len(await hub.tape())
    assert end < LOST
    async with hub.syncer("s1"):
        if epoch:
            await within(hub.becomes("s1", "leading"))
            covers = [record for record, _ in snapshots_of(tmp_path / "s1")]
            assert LOST not in covers
        else:
            await within(hub.becomes("s1", "ineligible"))
            assert [record for record, _ in snapshots_of(tmp_path / "s1")] == [LOST]
            assert len(await hub.tape()) == end, "it decides nothing"


async def covered(hub: Hub) -> None:
    """s1 has a snapshot of record LOST, which is not the tape's last."""
    async with hub.syncer("s1"):
        await within(hub.becomes("s1", "leading"))
        await within(published(hub, epoch=0))
    await hub.append(TapeSnapshot(term=2, covers=2, round=-1, path="x", at=3.0))
    renewing = asyncio.create_task(somebody_renews(hub))
    try:  # a leader would let go of the initial parameters, which UP is to have still
        async with hub.syncer("s1"):
            await until(lambda: snapshots_of(hub.folder / "s1"), "a standby's snapshot")
    finally:
        renewing.cancel()
    await hub.append(TapeTerm(epoch=0, term=3, leader="s1", at=4.0))
    assert [record for record, _ in snapshots_of(hub.folder / "s1")] == [LOST]


async def overtaken_by_a_power_cut(hub: Hub) -> None:
    """s1 covers a record, which is lost with the one after; others stand there now."""
    await covered(hub)
    hub.broker.lose(subjects.tape_stream("r"), 2, synced=True)
    for term in (3, 4, 5):
        await hub.append(TapeTerm(epoch=0, term=term, leader="other", at=50.0 + term))


def snapshots_of(folder: Path) -> list[tuple[int, Path]]:
    found = folder.rglob("snapshot-*")
    return sorted((int(path.name.removeprefix("snapshot-")), path) for path in found)
