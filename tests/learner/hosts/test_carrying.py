"""Several hosts store one contribution: all of it, or nothing that a manifest names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from learner.contexts import context
from learner.hosts.fragments import Fragment
from waiting import NotYet, until

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.corpus import load
from diloco_learner.data.leasing_io import Leases
from diloco_learner.data.shards import ShardCut
from diloco_learner.events import Contribute
from diloco_learner.exchange.uplink_io import Uplink
from diloco_learner.hosts import carrying_io, giving_io
from diloco_learner.hosts.carrying_io import (
    ERRAND,
    Carrier,
    CarrierFailed,
    Carriers,
    Got,
    Shared,
    SharedUpload,
)
from diloco_learner.hosts.giving_io import SharedStateUpload
from diloco_learner.hosts.link_io import BadFrame, HostLost, values_of
from diloco_learner.hosts.shares import CONTRIBUTION, MOMENTS, Composed, KeptPayload, compose, kept
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_learner.training.train import ToSend
from diloco_shared import ambient
from diloco_shared.bus.blobs import GaveUp, get_blob, put_blob
from diloco_shared.bus.port import Stored, StreamSpec, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Blob, ContributionManifest
from diloco_shared.protocol.wire import decode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

FRAGMENT = Fragment("int8", 40_000, hosts=3, devices=2)
CHUNK_BYTES = 1000
NUMBER = 7  # of an order
SUBJECT = subjects.contribution("r", "a", 0, 2, 5, 1)


@dataclass
class Island:
    """Process 0's carriers, and two others with theirs; what would go by sockets goes at once."""

    broker: MemoryBroker
    chunk_bytes: int = CHUNK_BYTES
    hosts: dict[int, Carrier] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    number: int = 0  # of the order that encoded what is carried

    def __post_init__(self) -> None:
        self.carriers = Carriers(self.tell)

    def tell(self, index: int, head: bytes) -> None:
        kind, *values = values_of(head)
        assert kind == ERRAND
        if index not in self.gone:
            self.hosts[index].told(*values)

    def add(self, index: int, connect: Any) -> Carrier:
        def say(kind: str, what: str, *values: Any) -> None:
            assert kind == ERRAND
            if index not in self.gone:
                self.carriers.heard(index, f"host {index}", what, *values)

        def give(number: int, got: Got) -> None:
            if index not in self.gone:
                self.carriers.came(index, number, got.indices, b"".join(got.parts))

        carrier = self.hosts[index] = Carrier(connect, say, give)
        self.tasks.append(asyncio.create_task(carrier.serve()))
        return carrier

    def bus(self, index: int) -> Any:
        @asynccontextmanager
        async def connect() -> AsyncIterator[MemoryBus]:
            yield MemoryBus(self.broker, f"host-{index}")

        return connect

    def dies(self, index: int) -> None:
        """As process 0 meets it: nothing comes of it any more, and the island ends."""
        self.gone.add(index)
        self.tasks[index - 1].cancel()
        self.carriers.lost(f"host {index} is gone")

    def contribution(self, fragment: Fragment = FRAGMENT) -> SharedUpload:
        """Encoded everywhere: the others keep their shares."""
        indices, shared = self._kept(fragment, CONTRIBUTION)
        return SharedUpload(self.carriers, self.number, indices, shared)

    def state(self, fragment: Fragment = FRAGMENT) -> SharedStateUpload:
        """The same bytes, as those of a state that is given away."""
        indices, shared = self._kept(fragment, MOMENTS)
        return SharedStateUpload(self.carriers, self.number, indices, shared)

    def _kept(self, fragment: Fragment, of: str) -> tuple[tuple[int, ...], Shared]:
        """(who keeps its share, what process 0 has)."""
        self.number += 1
        answers, indices, chunk_bytes = {}, self.carriers.ready(), self.chunk_bytes
        for index in range(1, fragment.hosts):
            parts = fragment.parts(index)
            if index in indices:
                mine, parts = kept(fragment.lying, index, parts, self.chunk_bytes, of)
                self.hosts[index].keep(self.number, mine)
            answers[index] = b"".join(parts)

        class Whole:
            def compose(self, subject: str) -> Composed:
                own = 0, fragment.parts(0)
                lying, header = fragment.lying, fragment.header
                return compose(subject, lying, header, own, answers, indices, chunk_bytes)

        return indices, Whole()


@asynccontextmanager
async def an_island(broker: MemoryBroker) -> AsyncIterator[Island]:
    found = Island(broker)
    for index in (1, 2):
        found.add(index, found.bus(index))
    await until(lambda: ready(found, 2), "connected carriers")
    try:
        yield found
    finally:
        for task in found.tasks:
            task.cancel()
        await asyncio.gather(*found.tasks, return_exceptions=True)


def ready(island: Island, many: int) -> tuple[int, ...]:
    if len(there := island.carriers.ready()) < many:
        raise NotYet(there)
    return there


async def own_bus(broker: MemoryBroker, bytes_max: int = 1 << 24) -> MemoryBus:
    bus = MemoryBus(broker, "host-0")
    await bus.ensure_stream(StreamSpec("UP-r", ("up.r.>",), bytes_max))
    return bus


def soon(seconds: float = 30.0) -> float:
    return ambient.monotonic() + seconds


async def there(bus: MemoryBus) -> dict[str, Stored]:
    """What the stream holds, by message id."""
    stored = await bus.fetch("UP-r", SUBJECT)
    return {
        s.headers["Diloco-Digest"] + s.headers["Diloco-Chunk"]: replace(s, seq=0) for s in stored
    }


async def test_all_store_their_share_and_the_hub_cannot_tell(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        came: dict[str, int] = {}

        def fault(client: str, operation: str, subject: str) -> Fate:
            if operation == "append":
                came[client] = came.get(client, 0) + 1
            return "deliver"

        bus = await own_bus(broker)
        broker.fault = fault
        blob = await island.contribution().put(bus, SUBJECT, soon())
        assert blob is not None
        shared = await there(bus)
        assert await get_blob(bus, "UP-r", blob, timeout_s=5) == FRAGMENT.payload
        chunks = blob.chunks
        assert sum(came.values()) == chunks, "each chunk is stored once"
        for index in (1, 2):
            assert came[f"host-{index}"] >= chunks / 3 - 4
            assert not island.hosts[index].kept, "nothing is kept for longer"
        # The same of one process alone.
        await bus.purge("UP-r", "up.r.>")
        other = MemoryBroker()
        alone = await own_bus(other)
        assert await put_blob(alone, SUBJECT, FRAGMENT.payload, chunk_bytes=CHUNK_BYTES) == blob
        assert await there(alone) == shared


async def test_one_without_a_connection_gives_what_it_has_to_process_0(
    broker: MemoryBroker,
) -> None:
    island = Island(broker)

    @asynccontextmanager
    async def nowhere() -> AsyncIterator[MemoryBus]:
        raise Unavailable("no NATS server at hub:4222")
        yield

    island.add(1, island.bus(1))
    island.add(2, nowhere)
    await until(lambda: ready(island, 1), "a connected carrier")
    assert island.carriers.ready() == (1,)
    assert island.carriers.known[2].why == "no NATS server at hub:4222"
    bus = await own_bus(broker)
    blob = await island.contribution().put(bus, SUBJECT, soon())
    assert blob is not None
    assert await get_blob(bus, "UP-r", blob, timeout_s=5) == FRAGMENT.payload
    for task in island.tasks:
        task.cancel()


async def test_where_only_the_first_one_carries_nobody_is_asked(broker: MemoryBroker) -> None:
    carriers = Carriers(lambda index, head: None, wanted=False)
    carriers.heard(1, "host 1", "state", True, "", 0, 0)
    assert carriers.ready() == ()


def holds(client: str, operation: str, subject: str) -> Fate:
    """A hub that does not hear host 2."""
    return "lose_request" if (client, operation) == ("host-2", "append") else "deliver"


async def test_a_host_that_dies_leaves_a_half_that_nothing_names(
    broker: MemoryBroker, spec: RunSpec, syncer: Any, tmp_path: Path
) -> None:
    async with an_island(broker) as island:
        await syncer.prepare()
        broker.fault = holds
        up = _uplink(spec, broker, tmp_path)
        sending = asyncio.create_task(up.send(ToSend(_contribute(), island.contribution())))
        await until(lambda: _stored(syncer.bus), "a half of it")
        island.dies(2)
        await sending
        broker.fault = None
        assert await there(syncer.bus), "a half is there"
        assert await syncer.bus.fetch("UP-r", "up.r.*.*.*.*.*.m") == []
        (event,) = await syncer.events("upload-abandoned")
        assert "host 2 is gone" in event.text
        with pytest.raises(HostLost):
            await island.contribution().put(syncer.bus, SUBJECT, soon())


async def test_a_whole_one_is_named_by_its_manifest(
    broker: MemoryBroker, spec: RunSpec, syncer: Any, tmp_path: Path
) -> None:
    async with an_island(broker) as island:
        await syncer.prepare()
        up = _uplink(spec, broker, tmp_path)
        await up.send(ToSend(_contribute(), island.contribution()))
        (stored,) = await syncer.bus.fetch("UP-r", "up.r.*.*.*.*.*.m")
        manifest = decode(stored.payload, ContributionManifest)
        assert await get_blob(syncer.bus, "UP-r", manifest.blob, timeout_s=5) == FRAGMENT.payload


async def test_a_host_that_cannot_store_its_share_is_not_asked_again_soon(
    broker: MemoryBroker,
) -> None:
    async with an_island(broker) as island:
        bus = await own_bus(broker)
        broker.fault = holds
        with pytest.raises(CarrierFailed, match="host 2"):
            await island.contribution().put(bus, SUBJECT, soon(0.6))
        await until(lambda: _gone(island, 2), "that it has let go")
        await until(lambda: _rests(island, 2), "that it rests")
        # The next one goes through process 0, whatever ails that host.
        blob = await island.contribution().put(bus, SUBJECT + "9", soon())
        assert blob is not None
        assert await get_blob(bus, "UP-r", blob, timeout_s=5) == FRAGMENT.payload


async def test_whoever_fails_again_and_again_rests_longer_until_it_has_stored_something(
    broker: MemoryBroker,
) -> None:
    """Rounds may be minutes apart: each would be lost to it."""
    said: list[int] = []
    carriers = Carriers(lambda index, frame: said.append(index))
    carriers.heard(1, "b", "state", True, "", 0, 0)
    rests = []
    for _ in range(9):
        carriers.rest(1)
        rests.append(carriers.known[1].rests_until - ambient.monotonic())
        carriers.rest(1)  # what was asked before it rested fails now
        carriers.known[1].rests_until = 0.0
    assert rests == pytest.approx([60, 120, 240, 480, 960, 1920, 3600, 3600, 3600], rel=1e-2)
    blob = await put_blob(await own_bus(broker), SUBJECT, b"x")
    storing = asyncio.create_task(carriers.put(1, NUMBER, blob, 60.0))
    await until(lambda: (1, NUMBER) in carriers.waiting and said, "that it is asked")
    carriers.heard(1, "b", "carried", NUMBER, "")
    await storing
    assert carriers.known[1].failures == 0
    for _ in range(2):
        carriers.rest(1)
        assert carriers.known[1].rests_until - ambient.monotonic() == pytest.approx(60, rel=1e-2)
        carriers.known[1].failures = 0  # what was asked before it rested is stored after all


async def test_what_has_no_time_left_comes_too_late_and_is_no_hosts_fault(
    broker: MemoryBroker,
) -> None:
    async with an_island(broker) as island:
        bus = await own_bus(broker)
        late = ambient.monotonic() + carrying_io.SHORTEST_S / 2
        assert await island.contribution().put(bus, SUBJECT, late) is None
        assert island.carriers.ready() == (1, 2)


async def test_where_process_0_could_not_either_no_other_host_is_named(
    broker: MemoryBroker,
) -> None:
    async with an_island(broker) as island:
        bus = await own_bus(broker)
        broker.fault = lambda client, operation, subject: (
            "lose_request" if subject.startswith("up.r") else "deliver"
        )
        with pytest.raises(GaveUp):
            await island.contribution().put(bus, SUBJECT, soon(0.6))
        assert island.carriers.ready() == (1, 2)


def _gone(island: Island, index: int) -> bool:
    if island.hosts[index].working or island.hosts[index].kept:
        raise NotYet("it still works on it")
    return True


def _rests(island: Island, index: int) -> bool:
    if index in island.carriers.ready():
        raise NotYet("it is ready")
    return True


async def test_a_full_stream_is_waited_for_by_all(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = await own_bus(broker, bytes_max=20_000)
        sending = asyncio.create_task(island.contribution().put(bus, SUBJECT, soon()))
        await until(lambda: _stored(bus), "some of it")
        await bus.ensure_stream(StreamSpec("UP-r", ("up.r.>",), 1 << 24))
        blob = await sending
        assert blob is not None
        assert await get_blob(bus, "UP-r", blob, timeout_s=5) == FRAGMENT.payload


async def test_whoever_is_cancelled_stops_the_others(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = await own_bus(broker)
        broker.fault = holds
        sending = asyncio.create_task(island.contribution().put(bus, SUBJECT, soon()))
        await until(lambda: _stored(bus), "a half of it")
        sending.cancel()
        await asyncio.wait({sending})
        await until(lambda: _gone(island, 2), "that it has let go")
        assert not island.carriers.waiting


async def test_what_is_too_late_is_not_stored_and_not_kept(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus = await own_bus(broker)
        assert await island.contribution().put(bus, SUBJECT, soon(-1.0)) is None
        assert await there(bus) == {}
        for index in (1, 2):
            await until(lambda index=index: _gone(island, index), "that it has let go")


async def test_bytes_of_all_are_counted_in_one_place(broker: MemoryBroker) -> None:
    bus = await own_bus(broker)
    carriers = Carriers(lambda index, head: None)
    carriers.traffic = bus.traffic
    for out, into in ((100, 10), (150, 30)):
        carriers.heard(1, "host 1", "state", True, "", out, into)
    carriers.heard(2, "host 2", "state", True, "", 7, 1)
    assert (bus.traffic.socket_bytes_out, bus.traffic.socket_bytes_in) == (157, 31)
    assert carriers.shown()["host 1"] == {"hub_bytes_out": 150, "hub_bytes_in": 30}
    with pytest.raises(BadFrame):
        carriers.heard(1, "host 1", "state", "yes")


async def test_who_keeps_too_much_forgets_the_oldest(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        carrier = island.hosts[1]
        mine, _ = kept(FRAGMENT.lying, 1, FRAGMENT.parts(1), CHUNK_BYTES)
        for number in range(1, 101):
            carrier.keep(number, mine)
        assert min(carrier.kept) == 37 and len(carrier.kept) == 64
        carrier.forget(100)
        assert not carrier.kept
        blob = Blob(subject=SUBJECT, bytes=9, chunk_bytes=9, chunks=1, digest="0" * 32)
        with pytest.raises(CarrierFailed, match="does not have that payload"):
            await island.carriers.put(1, 3, blob, 30.0)


# --------------------------------------------------------------------------------------------------
# What is given away: moments, and the parameters that a run begins with.


async def test_a_state_is_announced_before_it_is_stored_by_all(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus, state, announced = await own_bus(broker), island.state(), []

        async def announce(blob: Blob) -> None:
            assert await there(bus) == {}
            announced.append(blob)

        blob = await state.store(bus, SUBJECT, announce=announce)
        assert announced == [blob]
        assert await get_blob(bus, "UP-r", blob, timeout_s=5) == FRAGMENT.payload
        other = await own_bus(MemoryBroker())
        assert await put_blob(other, SUBJECT, FRAGMENT.payload, chunk_bytes=CHUNK_BYTES) == blob
        assert await there(other) == await there(bus)
        # It may be needed once more, until nobody needs it.
        assert island.hosts[1].kept and island.hosts[2].kept
        assert await state.whole() == FRAGMENT.payload
        state.let_go()
        for index in (1, 2):
            await until(lambda index=index: _gone(island, index), "that it has let go")


async def test_a_second_newcomer_gets_the_same_state_from_process_0(broker: MemoryBroker) -> None:
    """What the hosts are told to store has one number: at two places at once it meant neither."""
    async with an_island(broker) as island:
        bus, state = await own_bus(broker), island.state()
        broker.fault = holds
        first = asyncio.create_task(state.store(bus, SUBJECT))
        await until(lambda: _stored(bus), "a half of it")
        where, stored = [SUBJECT + "8", SUBJECT + "9"], set[str]()

        def by_whom(client: str, operation: str, subject: str) -> Fate:
            if operation == "append" and subject in where:
                stored.add(client)
            return holds(client, operation, subject)

        broker.fault = by_whom
        others = await asyncio.gather(*(state.store(bus, subject) for subject in where))
        for blob, subject in zip(others, where, strict=True):
            assert blob.subject == subject
            assert await get_blob(bus, "UP-r", blob, timeout_s=5) == FRAGMENT.payload
        assert stored == {"host-0"}
        assert await state.whole() is await state.whole(), "it lies here once, for all of them"
        broker.fault = lambda *_: "deliver"
        assert await get_blob(bus, "UP-r", await first, timeout_s=5) == FRAGMENT.payload


async def test_what_a_host_cannot_store_process_0_does(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_io, "PATIENCE_S", 0.3)
    async with an_island(broker) as island:
        bus, state = await own_bus(broker), island.state()
        broker.fault = holds
        blob = await state.store(bus, SUBJECT)
        assert await get_blob(bus, "UP-r", blob, timeout_s=5) == FRAGMENT.payload
        assert island.carriers.ready() == (1,), "that host is left alone for a while"
        # And those who have no connection at that time give all to process 0.
        other = await island.state().store(bus, SUBJECT + "9")
        assert await get_blob(bus, "UP-r", other, timeout_s=5) == FRAGMENT.payload


async def test_a_state_that_a_host_keeps_no_more_is_not_there(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus, state = await own_bus(broker), island.state()
        island.hosts[2].forget(island.number)
        with pytest.raises(CarrierFailed, match="does not keep that any more"):
            await state.store(bus, SUBJECT)
        with pytest.raises(CarrierFailed, match="does not keep that any more"):
            await state.whole()


async def test_one_who_gives_nothing_though_it_lives_is_not_waited_for_for_ever(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying_io, "ORDER_S_MAX", 0.1)
    async with an_island(broker) as island:
        state = island.state()
        island.gone.add(2)
        with pytest.raises(CarrierFailed, match="host 2 gave nothing more for"):
            await state.whole()
        assert not island.carriers.lent


async def test_whatever_fails_at_a_host_process_0_is_told(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: Any) -> Any:
        raise MemoryError("for a copy")

    async with an_island(broker) as island:
        state = island.state()
        monkeypatch.setattr(KeptPayload, "given", without_memory)
        with pytest.raises(CarrierFailed, match="MemoryError: for a copy"):
            await state.whole()


async def test_an_errand_with_too_few_values_is_answered_as_well(broker: MemoryBroker) -> None:
    heard: list[tuple[Any, ...]] = []
    carrier = Carrier(None, lambda *what: heard.append(what), lambda *_: None)  # type: ignore[arg-type]
    carrier.loop = asyncio.get_running_loop()
    carrier.told("put", 3)
    await until(lambda: bool(heard), "an answer")
    assert heard[0][:3] == (ERRAND, "carried", 3) and "TypeError" in heard[0][3]


@pytest.mark.filterwarnings("error")
async def test_an_errand_that_is_dropped_at_once_leaves_nothing(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        carrier = island.hosts[1]
        carrier.told("put", 3, "subject", 1, 1, 1, "digest", None)
        carrier.told("drop", 3)
        await until(lambda: not carrier.working, "the end of the errand")


async def test_one_who_dies_ends_what_waits_for_a_state(broker: MemoryBroker) -> None:
    async with an_island(broker) as island:
        bus, state = await own_bus(broker), island.state()
        broker.fault = holds
        storing = asyncio.create_task(state.store(bus, SUBJECT))
        await until(lambda: _stored(bus), "a half of it")
        island.dies(2)
        with pytest.raises(HostLost):
            await storing


async def test_of_moments_a_host_keeps_one_copy_beside_its_contributions(
    broker: MemoryBroker,
) -> None:
    async with an_island(broker) as island:
        carrier, parts = island.hosts[1], FRAGMENT.parts(1)
        for number, of in enumerate([CONTRIBUTION, MOMENTS, CONTRIBUTION, MOMENTS], 1):
            carrier.keep(number, kept(FRAGMENT.lying, 1, parts, CHUNK_BYTES, of)[0])
        assert sorted(carrier.kept) == [1, 3, 4]


async def _stored(bus: MemoryBus) -> int:
    """Chunks, once there are as many as will be: no more for a while."""
    if (few := len(await there(bus))) < 10:
        raise NotYet(few)
    return few


def _contribute() -> Contribute:
    return Contribute(0, 1, 5, 2, 3, 10, 14, 160, 224, None, deadline=soon())


def _uplink(spec: RunSpec, broker: MemoryBroker, folder: Path) -> Uplink:
    batches = Batches(ShardCut(load(spec.data).train, 8, 8, 0), 2)

    async def tell(kind: str, text: str, data: dict[str, Any]) -> None:
        raise AssertionError("nothing to tell here")

    place = context(spec, MemoryBus(broker, "host-0"))
    leases = Leases(place, batches, tuple, tell)
    return Uplink(place, (9, 9, 4), LocalCheckpoints(folder, 2), leases, print)
