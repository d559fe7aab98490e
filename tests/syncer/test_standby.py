"""Leader and standbys as real syncers on one in-memory bus: who leads, and what the others do."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from syncer.contexts import context
from syncer.small_run import TENSORS, drawn, first_record

from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.numerics import codec
from diloco_shared.process.membership import DataFolder
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    InitManifest,
    TapeEnd,
    TapeEpoch,
    TapeRecord,
    TapeSetting,
    TapeSnapshot,
    TapeTerm,
)
from diloco_shared.protocol.records import (
    Assignment,
    Event,
    LeaderLease,
    MemberRecord,
    RunRecord,
    RunStatus,
)
from diloco_shared.protocol.wire import decode, decode_tape, encode
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.app import Settings, Syncer
from diloco_syncer.history.follow_io import Purged, Replaced
from diloco_syncer.history.state_search_io import StateSearch
from diloco_syncer.leadership.candidate_io import Candidate

pytestmark = pytest.mark.virtual

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 2, "sync_every_steps": 8},
        "membership": {"leader_lease_s": 0.6},
        "budget": {"steps": 80},
    }
)


class Hub:
    """The bus and what is on it."""

    def __init__(self, folder: Path, leader_lease_s: float = 0.6) -> None:
        membership = SPEC.membership.model_copy(update={"leader_lease_s": leader_lease_s})
        self.spec = SPEC.model_copy(update={"membership": membership})
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, "test")
        self.folder = folder

    async def prepare(self) -> None:
        for bucket in subjects.BUCKETS:
            await self.bus.ensure_bucket(bucket)
        events = (subjects.EVENTS_FILTER,)
        await self.bus.ensure_stream(StreamSpec(subjects.EVENTS_STREAM, events, 1 << 20))
        for name, captured in subjects.run_streams("r").items():
            await self.bus.ensure_stream(StreamSpec(name, (captured,), 1 << 30))
        record = RunRecord(
            name="r",
            spec=self.spec.model_dump(mode="json"),
            desired="running",
            quorum=1,
            created_at=0.0,
        )
        await self.bus.kv_put(subjects.RUNS, "r", encode(record))

    @asynccontextmanager
    async def syncer(self, name: str, data: str = "") -> AsyncIterator["asyncio.Task[None]"]:
        """A syncer at work; stopped as by a signal at the end unless it is over.

        `data`: a root of its own, as on another machine.
        """
        await self.bus.kv_put(
            subjects.ASSIGNMENTS, name, encode(Assignment(member=name, run="r", at=0.0))
        )
        root = self.folder / data
        folder = DataFolder(root, name)
        control, bulk = MemoryBus(self.broker, f"{name}-c"), MemoryBus(self.broker, f"{name}-d")
        syncer = Syncer(Settings(id=name, data=root), control, bulk, folder)
        task = asyncio.create_task(syncer.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await syncer.membership.leave()
            folder.release()

    async def member(self, name: str) -> MemberRecord | None:
        entry = await self.bus.kv_get(subjects.MEMBERS, name)
        return None if entry is None or not entry.value else decode(entry.value, MemberRecord)

    async def becomes(self, name: str, state: str) -> MemberRecord:
        """Wait until the member shows `state`."""
        async with self.bus.kv_watch(subjects.MEMBERS, name) as entries:
            async for entry in entries:
                if entry.value and (m := decode(entry.value, MemberRecord)).state == state:
                    return m
        raise AssertionError

    async def tape(self) -> list[TapeRecord]:
        stored = await self.bus.fetch(subjects.tape_stream("r"), subjects.tape("r", 0))
        return [decode_tape(s.payload) for s in stored]

    async def terms(self) -> list[str]:
        return [r.leader for r in await self.tape() if isinstance(r, TapeTerm)]

    async def comes(self, found: Callable[[TapeRecord], bool]) -> TapeRecord:
        """Wait for a record."""
        stream = subjects.tape_stream("r")
        async with self.bus.read(stream, subjects.tape("r", 0)) as messages:
            async for stored in messages:
                record = decode_tape(stored.payload)
                if found(record):
                    return record
        raise AssertionError

    async def led_by(self, name: str) -> TapeRecord:
        """Wait for its term."""
        return await self.comes(lambda r: isinstance(r, TapeTerm) and r.leader == name)

    async def told(self, kind: str) -> Event:
        """Wait for an event."""
        async with self.bus.read(subjects.EVENTS_STREAM, subjects.event("r", kind)) as messages:
            async for stored in messages:
                return decode(stored.payload, Event)
        raise AssertionError

    async def append(self, record: TapeRecord) -> None:
        await self.bus.append(subjects.tape("r", 0), encode(record))

    async def initialise(self, *, lie: bool = False) -> None:
        """What a leader `gone` and a learner would have left: parameters and their record."""
        values, names = drawn(np.random.default_rng(1)), []
        for p, values_F in enumerate(values):
            names.append(subjects.initial("r", "a", 0, p))
            blob = await put_blob(self.bus, names[p], codec.encode("fp32", values_F))
            manifest = InitManifest(
                run="r",
                learner="a",
                incarnation=0,
                fragment=p,
                config_hash=config_hash(self.spec),
                layout=TENSORS,
                blob=blob,
            )
            await self.bus.append(names[p] + ".m", encode(manifest))
        await self.append(TapeTerm(epoch=0, term=1, leader="gone", at=1.0))
        record = first_record(self.spec, names, values)
        lies = ("0" * 32,) * len(values)
        await self.append(record.model_copy(update={"anchor_digests": lies}) if lie else record)


# Patience for what is awaited, in seconds.
WITHIN_S = 20.0


async def within(what: "asyncio.Future[object] | object") -> object:
    return await asyncio.wait_for(what, WITHIN_S)  # type: ignore[arg-type]


async def test_the_second_stands_by_and_leads_at_once_when_the_first_stops(tmp_path: Path) -> None:
    # A lease that was not given back would run out long after our patience has.
    hub = Hub(tmp_path, leader_lease_s=3 * WITHIN_S)
    await hub.prepare()
    await hub.initialise()
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        await first.enter_async_context(hub.syncer("s1"))
        await within(hub.becomes("s1", "leading"))
        await within(hub.led_by("s1"))
        await second.enter_async_context(hub.syncer("s2"))
        await within(hub.becomes("s2", "standby"))
        assert await hub.terms() == ["gone", "s1"]
        await first.aclose()
        await within(hub.led_by("s2"))
        assert await hub.terms() == ["gone", "s1", "s2"]
        await first.enter_async_context(hub.syncer("s1"))
        standby = await within(hub.becomes("s1", "standby"))
        assert isinstance(standby, MemberRecord) and standby.tape_seq >= 4, "executed them all"


async def test_one_that_cannot_reproduce_a_digest_never_leads(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise(lie=True)
    async with hub.syncer("s1"):
        event = await within(hub.told("standby-unfit"))
        assert isinstance(event, Event)
        assert "s1 cannot lead: record 2: digest of the version 0 of fragment 0" in event.text
        member = await hub.becomes("s1", "ineligible")
        assert "record 2" in member.reason
        assert await hub.terms() == ["gone"]


async def test_a_standby_that_needs_what_was_purged_gets_a_snapshot(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    async with hub.syncer("s1"):
        await within(hub.becomes("s1", "leading"))
        await within(hub.led_by("s1"))
    # It had time to cover the initial parameters by a snapshot of its own.
    await hub.append(TapeSnapshot(term=2, covers=2, round=-1, path="x", at=3.0))
    async with hub.syncer("s1"):
        await within(hub.becomes("s1", "leading"))
        await hub.bus.purge(subjects.up_stream("r"), "up.r.>")
        async with hub.syncer("s2", "elsewhere"):
            event = await within(hub.told("snapshot-fetched"))
            assert isinstance(event, Event) and event.source == "s2"
            await within(hub.becomes("s2", "standby"))
            info = await hub.bus.stream_info(subjects.state_stream("r"))
            assert info.messages == 0, "nothing of the transfer is left"
    # Its snapshot is a good one: it leads with it.
    async with hub.syncer("s2", "elsewhere"):
        await within(hub.becomes("s2", "leading"))


async def test_without_a_leader_to_ask_it_waits_and_says_why(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    await hub.bus.purge(subjects.up_stream("r"), "up.r.>")
    async with hub.syncer("s1"):
        member = await within(hub.becomes("s1", "ineligible"))
        assert isinstance(member, MemberRecord)
        assert "no longer in UP-r" in member.reason and "no leader answers" in member.reason


async def test_an_end_that_is_not_shown_yet_is_shown_and_by_nobody_again(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    await hub.append(
        TapeEnd(term=1, outcome="stopped", reason="as the user asked", versions=(0, 0), at=3.0)
    )
    lease = subjects.LEASES, subjects.leader_lease("r", 0)
    async with hub.syncer("s1"), hub.bus.kv_watch(subjects.STATUS, "r") as shown:
        status = await within(anext(shown))
        assert decode(status.value, RunStatus).state == "stopped"  # type: ignore[attr-defined]
    before = await hub.bus.kv_get(*lease)
    async with hub.syncer("s2"):
        await within(hub.becomes("s2", "standby"))
    assert await hub.bus.kv_get(*lease) == before
    assert await hub.terms() == ["gone"]


async def test_on_a_hub_that_was_put_back_all_read_the_tape_again(tmp_path: Path) -> None:
    """It has as many records as leader and standby have executed, and the last is another one."""
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    async with hub.syncer("s1") as first, hub.syncer("s2") as second:
        await within(hub.comes(lambda r: isinstance(r, TapeTerm) and r.leader in ("s1", "s2")))
        await asyncio.sleep(0.5)  # the other one executes that, too
        hub.broker.lose(subjects.tape_stream("r"), 1, synced=True)
        again = TapeEpoch(epoch=1000, term=1001, reason="the hub was restored", at=3.0)
        await hub.append(again)
        record = await within(hub.comes(lambda r: isinstance(r, TapeTerm) and r.epoch == 1000))
        assert isinstance(record, TapeTerm) and record.term == 1002
        assert [r.term for r in await hub.tape() if isinstance(r, TapeTerm)] == [1, 1002]
        assert not first.done() and not second.done()


async def test_who_stands_by_leads_from_what_a_hub_that_was_put_back_has(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    async with AsyncExitStack() as first, hub.syncer("s2"):
        await first.enter_async_context(hub.syncer("s1"))
        await within(hub.comes(lambda r: isinstance(r, TapeTerm) and r.leader in ("s1", "s2")))
        await asyncio.sleep(0.5)  # the other one executes that, too
        (_, leader) = await hub.terms()
        hub.broker.lose(subjects.tape_stream("r"), 1, synced=True)
        await hub.append(TapeEpoch(epoch=1000, term=1001, reason="put back", at=3.0))
        place = subjects.LEASES, subjects.leader_lease("r", 0)
        await hub.bus.kv_delete(*place)  # as on a hub that was put back
        if leader == "s1":
            await first.aclose()
        record = await within(hub.comes(lambda r: isinstance(r, TapeTerm) and r.term > 1))
        assert isinstance(record, TapeTerm) and (record.epoch, record.term) == (1000, 1002)


async def test_a_deposed_leader_stands_by_in_the_same_process(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    await hub.prepare()
    await hub.initialise()
    async with hub.syncer("s1") as process:
        await within(hub.becomes("s1", "leading"))
        await within(hub.led_by("s1"))
        # Somebody else takes the lease (a partition is over) and appends.
        place = subjects.LEASES, subjects.leader_lease("r", 0)
        await hub.bus.kv_delete(*place)
        theirs = encode(LeaderLease(holder="s9", boot="b", lock="l", at=0.0))
        await hub.bus.kv_put(*place, theirs)
        await hub.append(TapeTerm(epoch=0, term=3, leader="s9", at=4.0))
        await hub.append(
            TapeSetting(term=3, name="quorum", value=2, reason="as the user asked", at=5.0)
        )
        await within(hub.told("deposed"))
        # s9 falls silent: after a whole period s1 leads again, in a later term.
        record = await within(
            hub.comes(lambda r: isinstance(r, TapeTerm) and r.leader == "s1" and r.term > 3)
        )
        assert isinstance(record, TapeTerm) and record.term == 4
        assert not process.done()


async def test_who_stands_by_goes_on_once_the_bus_is_back() -> None:
    """And what is no trouble of the bus is not waited out."""
    came: list[Any] = [Unavailable("away"), False, Unavailable("away"), True, Purged("gone")]

    async def caught_up() -> bool:
        if isinstance(next_ := came.pop(0), Exception):
            raise next_
        return bool(next_)

    async def recovered() -> str:
        return "all of it"

    history = SimpleNamespace(seq=7, outcome="")
    follower: Any = SimpleNamespace(catch_up=caught_up, recovered=recovered, history=history)
    keeper: Any = SimpleNamespace(leading=True, changed=asyncio.Event())
    shown: list[int] = []
    place: Any = SimpleNamespace(**dict.fromkeys(CONTEXT))
    candidate = Candidate(place, keeper, lambda state, why, seq: shown.append(seq))
    assert await candidate._follow(follower) == "all of it"
    assert shown == [7]
    with pytest.raises(Purged):
        await candidate._follow(follower)


async def test_who_reads_the_tape_again_on_another_hub_does_not_show_what_it_was_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stood by, or was ineligible for a reason that a hub that was put back has not."""
    came: list[Any] = [Replaced("it is another one"), "all of it"]
    shown: list[tuple[str, str, int]] = []

    async def follow_on(*_: object) -> Any:
        if isinstance(next_ := came.pop(0), Exception):
            shown.append(("standby", "", 9))
            raise next_
        return next_

    async def load() -> None: ...

    bus, keeper = MemoryBus(MemoryBroker(), "s"), cast(Any, None)
    place = context(SPEC, bus, "s1", folder=tmp_path, checkpoint_root=str(tmp_path))
    candidate = Candidate(place, keeper, lambda *what: shown.append(what))
    monkeypatch.setattr(candidate, "_follower", lambda: SimpleNamespace(load=load))
    monkeypatch.setattr(candidate, "_follow_on", follow_on)
    assert await candidate._stand_by() == "all of it"
    assert shown[-1] == ("catching up", "", 0)


# Of a place of a run, what a candidate takes up.
CONTEXT = (
    *("spec", "shard", "me", "control", "data", "snapshots", "folder"),
    *("checkpoint_root", "checkpoint_places"),
)


async def test_who_is_stuck_looks_whether_the_hub_was_put_back() -> None:
    """A snapshot after the record at which it stands may not come for hours, or ever."""
    follower: Any = SimpleNamespace(history=SimpleNamespace(seq=700))

    async def look_back() -> None:
        raise Replaced("record 700 of the tape is another one than it was")

    follower.look_back = look_back
    search: Any = SimpleNamespace(checkpoints_at=math.inf)
    with pytest.raises(Replaced):
        await StateSearch._way_on(search, follower, Purged("record 701 is gone"))
