"""Where UP ended is known before anything is purged in a new life of the message server."""

import asyncio

import pytest
from syncer.contexts import alone, context
from waiting import until

from diloco_shared.bus.port import StreamSpec
from diloco_shared.protocol import subjects
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.streams import tail_io
from diloco_syncer.streams.purging_io import UpPurger
from diloco_syncer.streams.tail_io import Tail

pytestmark = pytest.mark.virtual

UP = subjects.up_stream("r")


class Seen:
    """A leader's memory of UP, where contributions of two messages lie."""

    def __init__(self, nodes: int = 1) -> None:
        self.bus = MemoryBus(MemoryBroker(), "s")
        self.bus.broker.nodes = nodes
        self.covered = 0
        self.told: list[tuple[int, bool]] = []
        self.tail = Tail(self.bus, "r", lambda: self.covered, lambda *lost: self.told.append(lost))

    async def begin(self, contributions: int = 0) -> None:
        await self.bus.ensure_stream(StreamSpec(UP, ("up.r.>",), 1 << 20, synced=False))
        for n in range(contributions):
            await self.put(n, seen=True)

    async def put(self, n: int, *, seen: bool = False) -> None:
        subject = f"up.r.a.0.0.{n}.1"
        await self.bus.append(subject, b"a chunk")
        seq = await self.bus.append(f"{subject}.m", b"a manifest")
        if seen:
            self.tail.saw(seq, f"{subject}.m")

    def lose(self, messages: int) -> None:
        self.bus.broker.lose(UP, messages)


@pytest.mark.parametrize(("lost", "end"), [(1, 38), (2, 38), (3, 36), (25, 14), (39, 0), (40, 0)])
async def test_what_was_lost_is_found_although_others_have_its_place(lost: int, end: int) -> None:
    seen = Seen()
    await seen.begin(20)
    seen.lose(lost)
    for n in range(20, 50):
        await seen.put(n)
    assert not seen.tail.sure
    await seen.tail.look()
    assert seen.told == [(end, True)]
    assert seen.tail.sure
    await seen.tail.look()
    assert len(seen.told) == 1, "it is told once"


async def test_a_server_that_was_only_started_anew_lost_nothing() -> None:
    seen = Seen()
    await seen.begin(3)
    seen.bus.broker.restart()
    await seen.tail.look()
    assert seen.tail.sure
    assert not seen.told


async def test_what_comes_again_before_it_was_looked_is_not_taken_for_what_was_there() -> None:
    seen = Seen()
    await seen.begin(3)
    seen.lose(2)
    await seen.put(7, seen=True)
    await seen.tail.look()
    assert seen.told == [(4, True)], "its chunk is no part of what was there before"


async def test_where_all_was_covered_nothing_is_known_of_the_end() -> None:
    """What was purged cannot be asked for; and nothing that is needed can be lost."""
    seen = Seen()
    await seen.begin(3)
    seen.covered = 7
    seen.lose(4)
    await seen.tail.look()
    assert seen.told == [(0, False)]


async def test_a_sequence_that_comes_again_is_doubted_in_the_same_life() -> None:
    seen = Seen()
    await seen.begin(3)
    seen.tail.saw(4, "up.r.b.0.0.9.1.m")
    assert not seen.tail.sure
    await seen.tail.look()
    assert seen.tail.sure
    assert not seen.told, "everything is there"


async def test_a_node_of_several_loses_nothing() -> None:
    seen = Seen(nodes=3)
    await seen.begin(3)
    seen.bus.broker.life += 1
    assert seen.tail.sure


async def test_nothing_is_purged_until_it_is_known_what_was_lost() -> None:
    seen = Seen()
    await seen.begin(3)
    run = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    place = context(run, seen.bus, "s1")
    await seen.bus.ensure_bucket(subjects.MEMBERS)
    purger = UpPurger(place, Outbox(place), lambda: seen.tail.sure, lambda: 0, alone)
    seen.bus.broker.restart()
    purger.want(10, 5, 1)
    work = asyncio.create_task(purger.work())
    await asyncio.sleep(30.0)
    assert (await seen.bus.stream_info(UP)).messages == 6
    await seen.tail.look()
    await until(lambda: purger.removed == 1, "a purge")
    assert (await seen.bus.stream_info(UP)).messages == 2
    work.cancel()


async def test_where_nothing_is_known_of_the_end_no_round_counts_as_removed() -> None:
    seen = Seen()
    await seen.begin(3)
    run = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    place = context(run, seen.bus, "s1")
    await seen.bus.ensure_bucket(subjects.MEMBERS)
    purger = UpPurger(place, Outbox(place), lambda: True, lambda: 0, alone)
    purger.want(10, 5, 1)
    purger.rewound(0)
    work = asyncio.create_task(purger.work())
    await asyncio.sleep(30.0)
    assert purger.removed == -1
    assert (await seen.bus.stream_info(UP)).messages == 6
    work.cancel()


async def test_it_looks_by_itself() -> None:
    seen = Seen()
    await seen.begin(1)
    work = asyncio.create_task(seen.tail.keep())
    seen.lose(1)
    await asyncio.sleep(3 * tail_io.LOOK_S)
    assert seen.told == [(0, True)]
    work.cancel()
