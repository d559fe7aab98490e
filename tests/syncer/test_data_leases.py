"""Leases of data that the leader writes: for whoever asks in its own name, and for nobody else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
from syncer.contexts import NamedBus, context

from diloco_shared import ambient
from diloco_shared.bus.port import Delivery, KeyEntry, Unavailable
from diloco_shared.bus.stored_records import Found, record_at
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import LeaseReply, LeaseWish, Place, ShardLease
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import Event, Malformed
from diloco_syncer.history.tape_io import Deposed
from diloco_syncer.messages.data_leases_io import HELD_MAX, KNOWN_S, DataLeases, granted, why_not

LIVE = ("a", "b")


def lease(
    holder: str, shard: int = 3, began: tuple[int, int] = (0, 0), life: int = 0
) -> ShardLease:
    return ShardLease(
        shard=shard, holder=holder, incarnation=life, passes=began[0], sequences=began[1]
    )


@pytest.mark.parametrize(
    ("wished", "revision", "there", "refusal"),
    [
        (lease("a"), 0, None, ""),
        (lease("a"), 7, lease(""), ""),
        (lease("a"), 7, lease("a"), ""),  # of an earlier attempt whose answer was lost
        (lease("a", life=2), 7, lease("a", life=1), ""),
        (lease("a"), 7, lease("c"), ""),  # that one is gone
        (lease(""), 7, lease("a"), ""),
        (lease("a"), 7, lease("b"), "b holds it, and is live"),
        (lease(""), 7, lease("b"), "another one holds it"),
        (lease(""), 7, lease(""), "another one holds it"),
        (lease(""), 0, None, "another one holds it"),
        (lease("b"), 0, None, "a speaks for b"),
        (lease("a"), 6, lease(""), "it has changed meanwhile"),
        (lease("a"), 0, lease(""), "it has changed meanwhile"),
        (lease("a", shard=64), 0, None, "there are 64 data shards"),
        (lease("a", life=1), 7, lease("a", life=2), "a later life of this learner holds it"),
    ],
)
def test_who_may_have_a_lease(
    wished: ShardLease, revision: int, there: ShardLease | None, refusal: str
) -> None:
    found = None if there is None else Found(there, 7)
    wish = LeaseWish(lease=wished, revision=revision)
    assert why_not(wish, found, learner="a", live=LIVE, held=0, shards=64) == refusal


def test_nobody_takes_more_than_it_can_use_or_takes_any_while_it_is_gone() -> None:
    wish = LeaseWish(lease=lease("a"), revision=0)
    most = why_not(wish, None, learner="a", live=LIVE, held=HELD_MAX, shards=64)
    assert most == f"a holds {HELD_MAX} data shards"
    assert why_not(wish, None, learner="a", live=("b",), held=0, shards=64) == "a is not live"


@pytest.mark.parametrize(
    ("wished", "there", "merged", "written"),
    [
        ((0, 0), None, (0, 0), (0, 0)),
        ((0, 5), (0, 0), (0, 5), (0, 5)),
        ((0, 4), (0, 0), (0, 5), (0, 4)),  # it reads something again
        ((9, 0), (0, 2), (0, 5), (0, 5)),  # or would have all others skip nine passes
        ((1, 0), (0, 2), (1, 0), (1, 0)),
        ((1, 0), (0, 2), (0, 5), (0, 5)),  # given back unmerged
    ],
)
def test_no_shard_is_put_beyond_what_is_merged(
    wished: tuple[int, int],
    there: tuple[int, int] | None,
    merged: tuple[int, int],
    written: tuple[int, int],
) -> None:
    known = None if there is None else lease("", began=there)
    assert granted(lease("a", began=wished), known, merged).began == written


# --------------------------------------------------------------------------------------------------


class Desk:
    """A leader's, with the learners a and b."""

    def __init__(self, bus: MemoryBus, shard: int = 0) -> None:
        spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
        self.bus = bus
        self.leading = True
        self.told: list[Event] = []
        self.unwritten: dict[str, Place] = {}  # of this leader, by key
        self.leases = DataLeases(
            context(spec, bus, shard=shard),
            lambda: LIVE,
            lambda: self.leading,
            self.told.append,
            self.places,
        )

    async def places(self) -> None:
        if not self.leading:
            raise Deposed("another one appended")
        for key, place in self.unwritten.items():
            await self.bus.kv_put(subjects.PLACES, key, encode(place))

    async def ask(self, learner: str, wished: ShardLease, revision: int = 0) -> LeaseReply:
        wish = encode(LeaseWish(lease=wished, revision=revision))
        return decode(await self.bus.request(subjects.lease("r", learner), wish), LeaseReply)


@asynccontextmanager
async def desk(shard: int = 0) -> AsyncIterator[Desk]:
    bus = NamedBus(MemoryBroker(), "s")
    for bucket in (subjects.SHARDS, subjects.PLACES):
        await bus.ensure_bucket(bucket)
    found = Desk(bus, shard)
    task = asyncio.create_task(found.leases.serve())
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_asked_for_is_written_and_told_with_its_revision() -> None:
    async with desk() as at:
        await at.bus.kv_put(subjects.PLACES, "r.3.1", encode(Place(shard=3, sequences=4, passes=0)))
        reply = await at.ask("a", lease("a", began=(0, 9)))
        assert reply.lease == lease("a", began=(0, 4))
        assert await record_at(at.bus, subjects.SHARDS, "r.3", ShardLease) == (
            reply.lease,
            reply.revision,
        )
        assert (await at.ask("b", lease("b"), reply.revision)).lease is None
        back = await at.ask("a", lease("", life=-1), reply.revision)
        assert back.lease is not None
        assert (await at.ask("b", lease("b"), back.revision)).lease is not None
        assert at.told == []


async def test_what_is_merged_and_not_written_yet_is_written_before_a_lease() -> None:
    async with desk() as at:
        at.unwritten["r.3.0"] = Place(shard=3, sequences=6, passes=0)
        reply = await at.ask("a", lease("a", began=(0, 9)))
        assert reply.lease == lease("a", began=(0, 6))


async def test_whoever_is_deposed_while_it_writes_grants_nothing() -> None:
    async with desk() as at:
        at.leases.leading = lambda: True  # it has yet to hear
        at.leading = False
        assert (await at.ask("a", lease("a"))).reason == "another syncer leads"
        assert await record_at(at.bus, subjects.SHARDS, "r.3", ShardLease) is None


async def test_who_holds_what_is_read_now_and_then_and_not_for_each_wish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run may have thousands of shards, and every learner wishes for some."""
    async with desk() as at:
        there, read = list[str](), at.bus.kv_all

        async def counted(bucket: str, key: str = ">") -> dict[str, KeyEntry]:
            there.extend([key] if bucket == subjects.SHARDS else [])
            return await read(bucket, key)

        monkeypatch.setattr(at.bus, "kv_all", counted)
        replies = [await at.ask("a", lease("a", shard=n)) for n in range(HELD_MAX + 1)]
        assert [r.reason for r in replies if r.lease is None] == [f"a holds {HELD_MAX} data shards"]
        assert (await at.ask("a", lease("", shard=2), replies[2].revision)).lease
        assert (await at.ask("a", lease("a", shard=HELD_MAX))).lease, "it has given one back"
        assert there == ["r.>"]
        at.leases.read_at -= KNOWN_S
        assert (await at.ask("b", lease("b", shard=HELD_MAX + 1))).lease
        assert there == ["r.>"] * 2


async def test_what_is_written_while_it_is_read_who_holds_what_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk() as at:
        read = at.bus.kv_all

        async def late(bucket: str, key: str = ">") -> dict[str, KeyEntry]:
            found = await read(bucket, key)
            monkeypatch.undo()
            at.leases.holders.clear()
            assert (await at.ask("b", lease("b"))).lease
            return found

        at.leases.read_at = ambient.monotonic()
        monkeypatch.setattr(at.bus, "kv_all", late)
        await at.leases._read()
        assert at.leases.holders == {3: "b"}


async def test_whoever_speaks_for_another_is_counted() -> None:
    async with desk() as at:
        assert (await at.ask("a", lease("b"))).lease is None
        assert (await at.bus.request(subjects.lease("r", "a"), b"\xff")) != b""
        assert [e.source for e in at.told if isinstance(e, Malformed)] == ["ctl.r.lease.a"] * 2
        assert await at.bus.kv_all(subjects.SHARDS) == {}


async def test_who_may_not_lead_writes_nothing() -> None:
    async with desk() as at:
        at.leading = False
        assert (await at.ask("a", lease("a"))).reason == "another syncer may lead"


async def test_whoever_asks_for_ever_fills_no_log() -> None:
    async with desk() as at:
        held = (await at.ask("b", lease("b"))).revision
        with structlog.testing.capture_logs() as logs:
            for _ in range(9):
                await at.ask("a", lease("a"), held)
    assert [line["times"] for line in logs] == [1, 2, 4, 8]
    assert {(line["learner"], line["shard"], line["reason"]) for line in logs} == {
        ("a", 3, "b holds it, and is live")
    }


async def test_a_learner_has_one_wish_at_a_time() -> None:
    """Those of a flood wait for nothing, and hold up nobody else's."""
    async with desk() as at:
        at.leases.asking.add("a")
        assert "not answered yet" in (await at.ask("a", lease("a"))).reason
        assert (await at.ask("b", lease("b"))).lease is not None


async def test_one_shard_of_the_syncer_answers_for_all() -> None:
    async with desk(shard=1) as at:
        with pytest.raises(Unavailable):
            await at.bus.request(subjects.lease("r", "a"), b"", timeout_s=0.01)


async def test_a_record_that_nobody_can_read_is_nobodys_fault() -> None:
    async with desk() as at:
        await at.bus.kv_put(subjects.SHARDS, "r.3", b"rubbish")
        wish = Delivery(subjects.lease("r", "a"), encode(LeaseWish(lease=lease("a"), revision=1)))
        reply = decode(await at.leases._answer(wish), LeaseReply)
        assert "cannot be written" in reply.reason and at.told == []
