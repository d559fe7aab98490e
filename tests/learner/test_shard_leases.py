"""Data shard leases on the bus: compare-and-set, cursors, lost answers, rivals."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner.contexts import context
from syncer.contexts import NamedBus, alone
from syncer.contexts import context as syncer_context
from waiting import until

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.corpus import load
from diloco_learner.data.leasing_io import FINISHED_MAX, NONE_FREE_S, VERIFY_S, Leases
from diloco_learner.data.shards import ShardCut
from diloco_shared.corpora.sequences import WrongToken
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Cursor
from diloco_shared.protocol.records import LeaseReply, LeaseWish, ShardLease
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history.ledger import Ledger
from diloco_syncer.messages.data_leases_io import HELD_MAX, DataLeases
from diloco_syncer.messages.merged_positions_io import MergedPositions

pytestmark = pytest.mark.virtual


class Fleet:
    """Learners that lease from one bucket, without anything that trains."""

    def __init__(self, broker: MemoryBroker, spec: RunSpec) -> None:
        self.broker = broker
        self.spec = spec
        self.bus = MemoryBus(broker, "test")
        self.live: tuple[str, ...] = ()
        self.lately = True
        self.bus_of = MemoryBus
        self.cut = ShardCut(load(spec.data).train, spec.data.virtual_shards, 8, spec.seed)
        self.batch = 2
        self.told: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.merged: dict[int, tuple[int, int]] = {}

    @asynccontextmanager
    async def learner(self, name: str, incarnation: int = 0) -> AsyncIterator[Leases]:
        async def tell(kind: str, text: str, data: dict[str, Any]) -> None:
            self.told.append((name, kind))
            self.texts.append(text)

        place = context(self.spec, self.bus_of(self.broker, name), name, incarnation)
        leases = Leases(
            place,
            Batches(self.cut, self.batch),
            lambda: self.live,
            tell,
            lately=lambda: self.lately,
        )
        task = asyncio.create_task(leases.supply())
        try:
            yield leases
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def small(self, shards: int, sequences: int, batch: int) -> None:
        """Shards of so many sequences, whose tokens are their places."""
        data = self.spec.data.model_copy(update={"virtual_shards": shards})
        self.spec = self.spec.model_copy(update={"data": data})
        self.cut = ShardCut(np.arange(shards * sequences * 8 + 1), shards, 8, seed=0)
        self.batch = batch

    async def merge(self, cursor: Cursor) -> None:
        """As the leader does once a contribution with this cursor is on the tape."""
        ledger = Ledger.empty(1, self.spec.data.virtual_shards)
        for shard, (passes, sequences) in self.merged.items():
            ledger.places[shard] = (passes, sequences)
        ledger.read(cursor)
        self.merged = ledger.places
        await MergedPositions(self.bus, "r", lambda: ledger, alone).write()

    async def leases(self) -> dict[int, ShardLease]:
        found = (await self.bus.kv_all(subjects.SHARDS)).values()
        all_ = [decode(e.value, ShardLease) for e in found if e.value is not None]
        return {lease.shard: lease for lease in all_}


@pytest.fixture
def fleet(broker: MemoryBroker, spec: RunSpec) -> Fleet:
    return Fleet(broker, spec)


def desk_of(fleet: Fleet, leader: MemoryBus) -> DataLeases:
    """Of a leader that has written all places."""

    async def written() -> None:
        pass

    context = syncer_context(fleet.spec, leader)
    return DataLeases(context, lambda: fleet.live, lambda: True, lambda _: None, written)


async def ready(fleet: Fleet) -> None:
    for bucket in (subjects.SHARDS, subjects.PLACES):
        await fleet.bus.ensure_bucket(bucket)


async def read_out(leases: Leases, shard: int) -> None:
    """Until the next shard is begun."""
    batches = leases.batches
    batches.take()
    while batches.reader is not None and batches.reader.shard == shard:
        await until(lambda: bool(batches.granted))
        batches.take()


async def test_two_shards_are_leased_the_present_one_and_one_ahead(fleet: Fleet) -> None:
    await ready(fleet)
    fleet.live = ("a", "b")
    async with fleet.learner("a") as a, fleet.learner("b") as b:
        for leases in (a, b):
            await leases.first()
            leases.batches.take()
        await until(lambda: len(a.held) == 2 and len(b.held) == 2)
        assert not a.held.keys() & b.held.keys()
        stored = await fleet.leases()
        assert {s: lease.holder for s, lease in stored.items()} == (
            dict.fromkeys(a.held, "a") | dict.fromkeys(b.held, "b")
        )


async def test_nothing_is_leased_before_the_syncer_counts_the_learner_as_live(
    fleet: Fleet,
) -> None:
    await ready(fleet)
    fleet.live = ("b",)
    async with fleet.learner("b") as b:
        await b.first()
        async with fleet.learner("a") as a:
            b.batches.take()
            await until(lambda: len(b.held) == 2)  # what is free can be had
            await a.look(0.0)  # b's looks say nothing of when a's supply has had one
            assert a.held == {} and not a.batches.ready
            fleet.live = ("a", "b")
            await a.first()


async def test_a_restarted_learner_goes_on_behind_what_the_tape_says_is_merged(
    fleet: Fleet,
) -> None:
    """Even if its last life died before it heard of that."""
    await ready(fleet)
    fleet.live = ("a",)
    async with fleet.learner("a") as a:
        await a.first()
        for _ in range(3):
            a.batches.take()
        cursor = a.batches.cursor
        assert cursor is not None
        await fleet.merge(cursor.model_copy(update={"sequences": 4}))
    # Killed: nothing was given back.
    async with fleet.learner("a", incarnation=1) as again:
        await again.first()
        again.batches.take()
        now = again.batches.cursor
        assert now == Cursor(shard=cursor.shard, sequences=4 + 2)
        assert (await fleet.leases())[cursor.shard].incarnation == 1


async def test_the_shards_of_a_learner_that_is_gone_are_taken_over(fleet: Fleet) -> None:
    """And whoever lost one while it was thought dead reads it no longer (I10)."""
    await ready(fleet)
    fleet.live = ("a", "b")
    async with fleet.learner("a") as a:
        await a.first()
        (shard,) = a.held
        a.batches.take()
        await fleet.merge(Cursor(shard=shard, sequences=6))
        fleet.live = ("b",)
        async with fleet.learner("b") as b:
            while shard not in b.held:
                await until(lambda: bool(b.batches.granted))
                reader, _ = b.batches.granted.popleft()  # read at once: the next one, please
                if reader.shard == shard:
                    assert reader.consumed == 6
            await a.look(a.verified_at + VERIFY_S)
            assert shard not in a.held and not a.batches.leased
            lease = (await fleet.leases())[shard]
            assert (lease.holder, lease.sequences) == ("b", 6)


async def test_what_was_leased_before_the_run_went_back_is_not_read_on(fleet: Fleet) -> None:
    """What comes before it is not merged any more, and would be left out."""
    fleet.small(1, 16, batch=2)
    await ready(fleet)
    fleet.live = ("a",)
    await fleet.merge(Cursor(shard=0, sequences=12))
    async with fleet.learner("a") as a:
        await a.first()
        assert [reader.consumed for reader, _ in a.batches.granted] == [12]
        ledger = Ledger.empty(1, 1)
        ledger.places[0] = (0, 4)
        await MergedPositions(fleet.bus, "r", lambda: ledger, alone).write()
        free = ShardLease(shard=0, holder="", incarnation=-1, sequences=4, passes=0)
        await fleet.bus.kv_put(subjects.SHARDS, "r.0", encode(free))
        async with a.looking:  # a lease of before is on its way
            again = asyncio.create_task(a.first(gone_back=True))
            await asyncio.sleep(1.0)
            a.batches.grant(0, 12, 0, leased=False)
        await again
        assert [(reader.consumed, leased) for reader, leased in a.batches.granted] == [(4, True)]


async def test_a_lease_that_nobody_can_read_is_lost(fleet: Fleet) -> None:
    fleet.small(2, 16, batch=2)
    await ready(fleet)
    fleet.live = ("a",)
    async with fleet.learner("a") as a:
        await a.first()
        (shard,) = a.held
        await fleet.bus.kv_put(subjects.SHARDS, f"r.{shard}", b"junk")
        await a.look(a.verified_at + VERIFY_S)
        assert shard not in a.held


async def test_an_old_word_frees_no_shard_of_a_learner_that_may_be_back(fleet: Fleet) -> None:
    fleet.small(2, 8, batch=2)
    await ready(fleet)
    fleet.live = ("a", "b")
    async with fleet.learner("a") as a:
        await a.first()
        (held,) = a.held
        fleet.live, fleet.lately = ("b",), False
        async with fleet.learner("b") as b:
            await until(lambda: bool(b.batches.granted))
            b.batches.granted.popleft()  # read at once: the next one, please
            await until(lambda: b.none_free)
            assert held not in b.held
            fleet.lately = True  # and now the leader says so again
            while held not in b.held:
                b.batches.granted.clear()
                await until(lambda: bool(b.batches.granted))


async def test_a_write_whose_answer_was_lost_loses_no_lease(fleet: Fleet) -> None:
    await ready(fleet)
    fleet.live = ("a",)
    lose = {"next": False}

    def fault(client: str, operation: str, subject: str) -> Fate:
        if lose["next"] and client == "a" and operation == "append":
            lose["next"] = False
            return "lose_answer"
        return "deliver"

    fleet.broker.fault = fault
    async with fleet.learner("a") as a:
        await a.first()
        (shard,) = a.held
        held, revision = a.held[shard]
        # As if an own write had gone through unheard.
        await fleet.bus.kv_put(subjects.SHARDS, f"r.{shard}", encode(held))
        assert (await fleet.leases())[shard].holder == "a" and revision == a.held[shard][1]
        lose["next"] = True
        a.batches.finished = ((shard, 0),)
        a.merged(Cursor(shard=99, sequences=0, finished=((shard, 0),)))
        await until(lambda: shard not in a.held)
        lease = (await fleet.leases())[shard]
        assert (lease.holder, lease.passes) == ("", 1)


async def test_a_lease_whose_taking_was_not_answered_is_found_again(fleet: Fleet) -> None:
    await ready(fleet)
    fleet.live = ("a",)
    fates: list[Fate] = ["lose_answer"]

    def fault(client: str, operation: str, subject: str) -> Fate:
        return fates.pop() if client == "a" and operation == "append" and fates else "deliver"

    fleet.broker.fault = fault
    async with fleet.learner("a") as a:
        await a.first()
        assert a.held.keys() == (await fleet.leases()).keys()
        assert not fates


async def test_a_shard_goes_back_once_all_of_it_is_merged_and_counts_a_pass(fleet: Fleet) -> None:
    await ready(fleet)
    fleet.live = ("a",)
    async with fleet.learner("a") as a:
        await a.first()
        (first,) = a.held
        await read_out(a, first)
        await a.look(0.0)
        assert first in a.held, "its end may still have to be read again"
        cursor = a.batches.cursor
        assert cursor is not None and cursor.finished == ((first, 0),)
        a.merged(cursor)
        await until(lambda: first not in a.held)
        lease = (await fleet.leases())[first]
        assert (lease.holder, lease.passes, lease.sequences) == ("", 1, 0)
        assert a.batches.finished == ()


async def test_finished_shards_that_no_round_merges_are_not_kept_without_end_i12(
    fleet: Fleet,
) -> None:
    await ready(fleet)
    fleet.live = ("a",)
    async with fleet.learner("a") as a:
        await a.first()
        for shard in range(FINISHED_MAX + 1):
            a.batches.finished = (*a.batches.finished, (shard, 0))
        await a.look(0.0)
        await a.look(0.0)
        assert len(a.batches.finished) == FINISHED_MAX
        assert ("a", "shard-unmerged") in fleet.told


async def test_more_learners_than_shards_share_and_say_so(fleet: Fleet) -> None:
    """Training never waits for a lease (I8)."""
    await ready(fleet)
    names = [f"l-{n}" for n in range(10)]
    fleet.live = tuple(names)
    async with fleet.learner("l-0") as first:
        await first.first()
        for shard in range(fleet.spec.data.virtual_shards):
            await fleet.bus.kv_put(subjects.SHARDS, f"r.{shard}", _held_by("l-0", shard))
        async with fleet.learner("l-1") as other:
            await other.first()
            assert other.held == {}
            other.batches.take()
        assert fleet.told == [("l-1", "shard-shared")]


def counted(leases: Leases) -> list[str]:
    """Buckets of which it reads what the whole run holds."""
    asked, all_of = list[str](), leases.bus.kv_all

    async def noted(bucket: str, key: str = ">") -> Any:
        assert key == "r.>", "no other run's"
        asked.append(bucket)
        return await all_of(bucket, key)

    leases.bus.kv_all = noted  # type: ignore[method-assign]
    return asked


async def test_who_finds_no_shard_free_looks_again_seldom(fleet: Fleet) -> None:
    """It may be so for good: with 64 data shards, from 33 learners on. And all of them look."""
    await ready(fleet)
    fleet.live = ("a", "b")
    for shard in range(fleet.spec.data.virtual_shards):
        await fleet.bus.kv_put(subjects.SHARDS, f"r.{shard}", _held_by("b", shard))
    async with fleet.learner("a") as a:
        asked = counted(a)
        await a.first()
        a.batches.take()
        await asyncio.sleep(10 * NONE_FREE_S)
        searches = asked.count(subjects.SHARDS)
        assert 5 <= searches <= 11 and a.none_free and not a.held
        free = ShardLease(shard=0, holder="", incarnation=-1, sequences=0, passes=0)
        await fleet.bus.kv_put(subjects.SHARDS, "r.0", encode(free))
        await until(lambda: 0 in a.held)
        assert asked.count(subjects.SHARDS) <= searches + 2


async def test_what_a_learner_gives_back_it_may_lease_at_once(fleet: Fleet) -> None:
    """Though none was free a moment ago."""
    await ready(fleet)
    fleet.live = ("a", "b")
    async with fleet.learner("a") as a:
        await a.first()
        (shard,) = a.held
        for other in range(fleet.spec.data.virtual_shards):
            if other != shard:
                await fleet.bus.kv_put(subjects.SHARDS, f"r.{other}", _held_by("b", other))
        while not a.batches.repeats:
            a.batches.take()
        cursor = a.batches.cursor
        assert cursor is not None
        await until(lambda: a.none_free)
        searched_at = a.searched_at
        a.batches.leased = False  # as if it read something else by now
        a.batches.finished = ((shard, 0),)
        a.merged(cursor.model_copy(update={"finished": ((shard, 0),)}))
        await a.look(searched_at)
        assert a.held[shard][0].passes == 1 and a.searched_at == searched_at


async def test_of_what_is_held_its_own_records_are_looked_at_alone(fleet: Fleet) -> None:
    await ready(fleet)
    fleet.live = ("a",)
    async with fleet.learner("a") as a:
        await a.first()
        a.batches.take()
        await until(lambda: not a.batches.wants)
        asked, before = counted(a), a.verified_at
        await until(lambda: a.verified_at > before)
        assert not asked and len(a.held) == 2


async def test_a_shard_that_runs_out_is_read_again_rather_than_waited_for(fleet: Fleet) -> None:
    await ready(fleet)
    fleet.live = ("a",)
    async with fleet.learner("a") as a:
        await a.first()
        # No other side runs between these: the shard ends before a look for the next.
        while not a.batches.repeats:
            a.batches.take()
        await until(lambda: ("a", "shard-repeated") in fleet.told)


async def test_what_is_left_out_is_told_at_1_2_4_times(fleet: Fleet) -> None:
    await ready(fleet)
    async with fleet.learner("a") as a:
        told: list[tuple[str, Any]] = []

        async def tell(kind: str, text: str, data: dict[str, Any]) -> None:
            told.append((text, data))

        a.tell = tell
        for _ in range(5):
            a.batches.left_out.wrong(WrongToken("c has the number 300"))
            await a._supplied()
    assert [data["times"] for _, data in told] == [1, 2, 4]
    assert told[0][0] == "a leaves a sequence out (once): c has the number 300"


async def read(leases: Leases, steps: int) -> list[int]:
    """Where each sequence begins, of so many steps, each after a look of the other side."""
    found: list[int] = []
    for _ in range(steps):
        await until(lambda: not leases.batches.wants)
        assert len(leases.held) <= HELD_MAX
        found += leases.batches.take()[:, 0].tolist()
    return found


async def test_steps_of_several_small_shards_find_them_leased(fleet: Fleet) -> None:
    """Else the same few sequences would stand several times in one batch."""
    await ready(fleet)
    fleet.small(64, 3, batch=8)
    fleet.live = ("a",)
    async with fleet.learner("a") as a:
        await a.first()
        seen = await read(a, 20)
        assert len(set(seen)) == len(seen) == 160 and a.batches.repeats == 0
        # Of the shards that no round merges, the log is not filled with one after another.
        assert a.unmerged_times > 30
        assert 4 <= fleet.told.count(("a", "shard-unmerged")) <= 6


async def test_the_first_of_several_leases_is_not_waited_for_until_the_last(fleet: Fleet) -> None:
    await ready(fleet)
    fleet.small(64, 3, batch=8)
    fleet.live = ("a",)
    many: list[int] = []

    def fault(client: str, operation: str, subject: str) -> Fate:
        if operation == "append" and len(a.held) == 1:
            many.append(a.supplied.is_set())
        return "deliver"

    async with fleet.learner("a") as a:
        fleet.broker.fault = fault
        await until(lambda: len(a.held) > 3)
        assert many == [True]


@pytest.mark.parametrize(
    ("batch", "taken", "says"),
    [
        (2, False, "no other was leased in time$"),
        (
            8,
            False,
            "leased in time, and it has 3 sequences where a step takes 8. With fewer data.v",
        ),
        (2, True, "no other is free. With more data.virtual_shards there are some for every l"),
        (8, True, "no other is free, and it has 3 sequences where a step takes 8. With fewer data"),
    ],
)
async def test_why_data_is_read_again_is_said(
    fleet: Fleet, batch: int, taken: bool, says: str
) -> None:
    await ready(fleet)
    fleet.small(16, 3, batch)
    fleet.live = ("a", "b")
    async with fleet.learner("a") as a:
        await a.first()
        await until(lambda: not a.batches.wants)
        for shard in range(16 if taken else 0):
            if shard not in a.held:
                await fleet.bus.kv_put(subjects.SHARDS, f"r.{shard}", _held_by("b", shard))
        while not a.batches.repeats:
            a.batches.take()
            if taken:
                await until(lambda: a.none_free or not a.batches.wants)
        await until(lambda: ("a", "shard-repeated") in fleet.told)
        assert re.search(f"^a reads data shard .* again: .*{says}", fleet.texts[-1])


def _held_by(learner: str, shard: int) -> bytes:
    return encode(ShardLease(shard=shard, holder=learner, incarnation=0, sequences=0, passes=0))


def test_the_corpus_is_what_these_tests_take_it_for(spec: RunSpec, corpus: Path) -> None:
    cut = ShardCut(load(spec.data).train, spec.data.virtual_shards, 8, spec.seed)
    assert cut.sequences_per_shard > 100


async def test_a_learner_with_credentials_of_its_own_has_the_leader_write_its_leases(
    fleet: Fleet,
) -> None:
    await ready(fleet)
    leader, written = NamedBus(fleet.broker, "s"), list[str]()
    fleet.live = ("a", "b")
    desk = desk_of(fleet, leader)
    task = asyncio.create_task(desk.serve())
    fleet.bus_of = NamedBus
    fleet.broker.on_store = lambda stream, message: written.append(message.subject)
    async with fleet.learner("a") as one, fleet.learner("b") as other:
        for leases in (one, other):
            await leases.first()
            leases.batches.take()
        await until(lambda: len(one.held) == len(other.held) == 2)
        assert not one.held.keys() & other.held.keys()
        assert {n: x.holder for n, x in (await fleet.leases()).items() if x.holder} == {
            **dict.fromkeys(one.held, "a"),
            **dict.fromkeys(other.held, "b"),
        }
        await one.release()
        assert {x.holder for x in (await fleet.leases()).values()} == {"", "b"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert written and all(subject.startswith("$KV.shards.r.") for subject in written)


async def test_a_leader_writes_as_many_leases_as_small_shards_need_and_none_twice(
    fleet: Fleet,
) -> None:
    """It takes no word for what is read, only what is merged: whoever gives a shard back unmerged
    would find it free, and no more read than the others."""
    await ready(fleet)
    fleet.small(64, 3, batch=8)
    fleet.live, fleet.bus_of = ("a",), NamedBus
    leader = NamedBus(fleet.broker, "s")
    desk = desk_of(fleet, leader)
    task = asyncio.create_task(desk.serve())
    async with fleet.learner("a") as a:
        await a.first()
        seen = await read(a, 22)
        assert len(set(seen)) == len(seen) == 176 and a.batches.repeats == 0
    assert not desk.refused
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_learner_waits_for_a_leader_that_asks_a_far_hub(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several times, one after the other, before it answers."""
    await ready(fleet)
    fleet.live = ("a",)
    leader = NamedBus(fleet.broker, "s")
    desk = desk_of(fleet, leader)
    written, asked = desk._written, list[str]()

    async def slowly(wish: LeaseWish, learner: str) -> LeaseReply:
        asked.append(learner)
        await asyncio.sleep(6.0)
        return await written(wish, learner)

    monkeypatch.setattr(desk, "_written", slowly)
    task = asyncio.create_task(desk.serve())
    fleet.bus_of = NamedBus
    async with fleet.learner("a") as one:
        await one.first()
        assert one.held and asked == ["a"] * len(asked) and len(asked) <= 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
