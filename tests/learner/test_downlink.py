"""What arrives: publications in order, whatever the bus does; inner state only as granted."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import structlog
from learner.contexts import context
from waiting import until

from diloco_learner.events import (
    BeatSeen,
    GrantSeen,
    StateBad,
    StateComing,
    StateMoved,
    StateSeen,
)
from diloco_learner.exchange import downlink_io as downlink
from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.exchange.downlink_io import Downlink
from diloco_learner.hosts.whole import HostLost
from diloco_learner.recovery.moments import Received
from diloco_learner.training.train import Anchored
from diloco_shared.bus import blobs
from diloco_shared.bus.blobs import announcement_subject, put_blob
from diloco_shared.bus.port import Delivery, Unavailable
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.process.health import traffic_metrics
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import HEADER_DIGEST, cut, describe
from diloco_shared.protocol.messages import Blob, Join, PublicationManifest, Stamp, StateManifest
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

SIZE = 4


class Rig:
    def __init__(self, broker: MemoryBroker, syncer: Any) -> None:
        self.syncer = syncer
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.bus = MemoryBus(broker, "learner")
        place, book = context(syncer.spec, self.bus, "b", 3), AnchorBook((SIZE,) * 3)
        self.down = Downlink(place, book, self.arrived.put_nowait, self.check)

    def check(self, data: bytes) -> None:
        if data != b"moments":
            raise ValueError("an inner state of another model")

    async def next(self) -> Any:
        async with asyncio.timeout(30):
            return await self.arrived.get()

    @asynccontextmanager
    async def running(self, *works: Any) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in works]
        await asyncio.sleep(0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def rig(broker: MemoryBroker, syncer: Any) -> Rig:
    return Rig(broker, syncer)


def values(x: float) -> Any:
    return np.full(SIZE, x, np.float32)


def seen(anchored: Any) -> tuple[int, int, float]:
    assert isinstance(anchored, Anchored)
    r = anchored.ready
    return r.fragment, r.version, float(anchored.values_F[0])


async def test_publications_there_before_and_new_ones_arrive_once(rig: Rig) -> None:
    await rig.syncer.prepare()
    await rig.syncer.publish(0, values(1))
    await rig.syncer.publish(1, values(2))
    async with rig.running(rig.down.publications()):
        assert seen(await rig.next()) == (0, 0, 1.0)
        assert seen(await rig.next()) == (1, 0, 2.0)
        # The same version again, as a new leader repeats it under its own term.
        await repeated(rig, 0, values(1))
        await rig.syncer.publish(0, values(3))
        assert seen(await rig.next()) == (0, 1, 3.0)
        assert rig.down.refused == 0


async def test_a_publication_that_a_lost_host_keeps_out_is_not_refused(rig: Rig) -> None:
    """The island ends elsewhere; what follows is taken in as long as it lives."""
    lost = [True]

    def hold(fragment: int, anchor_F: Any) -> Any:
        if lost.pop():
            raise HostLost("host 1 is gone")
        return anchor_F

    rig.down.book = AnchorBook((SIZE,) * 3, hold)
    await rig.syncer.prepare()
    await rig.syncer.publish(0, values(1))
    async with rig.running(rig.down.publications()):
        await until(lambda: not lost, "an anchor that could not be given away")
        lost.append(False)
        await rig.syncer.publish(1, values(2))
        assert seen(await rig.next()) == (1, 0, 2.0)
    assert rig.down.refused == 0 and not rig.down.book.refused
    assert rig.down.book.versions == (-1, 0, -1)


async def repeated(rig: Rig, p: int, anchor_F: Any) -> None:
    subject = subjects.publication("r", 0, p, 0, 2)
    blob = await put_blob(rig.syncer.bus, subject, codec.encode("fp32", anchor_F))
    await rig.syncer.bus.append(subject + ".m", encode(manifest(rig, p, 0, 2, anchor_F, blob)))


def manifest(
    rig: Rig, p: int, version: int, term: int, anchor_F: Any, blob: Blob
) -> PublicationManifest:
    return PublicationManifest(
        run="r",
        epoch=0,
        term=term,
        round=version,
        fragment=p,
        version=version,
        prev_version=-1,
        codec="fp32",
        values=SIZE,
        anchor_digest=digest_array(anchor_F),
        config_hash=rig.syncer.hash,
        participants=(),
        last_merged={},
        stamp=Stamp(round=version, steps=0, fraction=0.0, fraction_per_step=0.0),
        blob=blob,
    )


async def test_version_0_is_not_fetched_by_who_makes_it_itself(rig: Rig) -> None:
    """I4: only if its digest is that of what was published."""
    await rig.syncer.prepare()
    own = {0: values(1), 1: values(7)}
    rig.down.initial = lambda p: own[p]
    bus, stream = rig.syncer.bus, subjects.dn_stream("r")
    for p in (0, 1):
        await rig.syncer.publish(p, values(p + 1))
    await bus.purge(stream, subjects.publication("r", 0, 0, 0, 1))
    async with rig.running(rig.down.publications()):
        assert {seen(await rig.next()) for _ in own} == {(0, 0, 1.0), (1, 0, 2.0)}
        # Nobody looks whether a later one is the same.
        own.clear()
        await rig.syncer.publish(0, values(1))
        assert seen(await rig.next()) == (0, 1, 1.0)
    assert rig.down.refused == 0


async def test_parameters_that_are_trained_are_nobodys_version_0(rig: Rig) -> None:
    """What another thread changes from now on is not looked at, and what is being read is."""
    await rig.syncer.prepare()
    looked, go_on = threading.Event(), threading.Event()

    def initial(p: int) -> Any:
        looked.set()
        assert go_on.wait(30)
        return values(1)

    rig.down.initial = initial
    async with rig.running(rig.down.publications()):
        await rig.syncer.publish(0, values(1))
        await until(looked.is_set)
        giving_up = asyncio.create_task(rig.down.no_initial())
        await asyncio.sleep(0)
        assert not giving_up.done(), "the thread still reads"
        go_on.set()
        await giving_up
        assert seen(await rig.next()) == (0, 0, 1.0)
        looked.clear()
        await rig.syncer.publish(1, values(1))
        assert seen(await rig.next()) == (1, 0, 1.0)
        assert not looked.is_set()


async def test_a_keyframe_that_was_not_whole_is_fetched_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next keyframe may be far, and a run that ends has none."""
    monkeypatch.setattr(downlink, "AGAIN_S", 0.0)
    monkeypatch.setattr(blobs, "silence_s", lambda _: 0.2)
    await rig.syncer.prepare()
    bus, subject = rig.syncer.bus, subjects.publication("r", 0, 0, 5, 1)
    payload = codec.encode("fp32", values(1))
    blob = describe(subject, payload)
    await bus.append(subject + ".m", encode(manifest(rig, 0, 5, 1, values(1), blob)))
    async with rig.running(rig.down.publications()):
        await until(lambda: rig.down.refused)
        await rig.syncer.publish(1, values(2))
        assert seen(await rig.next()) == (1, 0, 2.0), "the others go on"
        await put_blob(bus, subject, payload)
        assert seen(await rig.next()) == (0, 5, 1.0)
        assert not rig.down.incomplete


async def test_fetching_one_again_holds_up_no_other_and_takes_none_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile more are found incomplete, and the oldest give way to them."""
    monkeypatch.setattr(downlink, "AGAIN_S", 0.0)
    monkeypatch.setattr(downlink, "INCOMPLETE_MAX", 2)
    await rig.syncer.prepare()
    waiting, fetched = rig.down.incomplete, []

    async def publication(m: Any) -> None:
        if m.fragment == 0:
            await asyncio.Event().wait()
        fetched.append(m.fragment)

    monkeypatch.setattr(rig.down, "_publication", publication)
    for p in range(3):
        subject = subjects.publication("r", 0, p, 5, 1)
        blob = describe(subject, codec.encode("fp32", values(1)))
        waiting[0, p, 5] = manifest(rig, p, 5, 1, values(1), blob)
        await rig.syncer.bus.append(subject + ".m", encode(waiting[0, p, 5]))
    last = rig.bus.last

    async def looks(*place: str) -> Any:
        rig.down.incomplete.pop((0, 2, 5), None)
        return await last(*place)

    monkeypatch.setattr(rig.bus, "last", looks)
    async with rig.running(rig.down._fetch_again()):
        await until(lambda: fetched == [1, 2])


async def test_one_that_was_replaced_meanwhile_is_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downlink, "AGAIN_S", 0.0)
    await rig.syncer.prepare()
    subject = subjects.publication("r", 0, 0, 5, 1)
    blob = describe(subject, codec.encode("fp32", values(1)))
    rig.down.incomplete[0, 0, 5] = manifest(rig, 0, 5, 1, values(1), blob)
    async with rig.running(rig.down.publications()):
        await until(lambda: not rig.down.incomplete)
        await rig.syncer.publish(0, values(2))
        assert seen(await rig.next()) == (0, 0, 2.0)
        assert not rig.down.refused


async def test_a_bad_publication_holds_up_nothing_else(rig: Rig) -> None:
    """I11: rubbish, a manifest on another subject, chunks that are not the blob."""
    await rig.syncer.prepare()
    bus = rig.syncer.bus
    await bus.append(subjects.publication("r", 0, 0, 9, 1) + ".m", b"rubbish")
    subject = subjects.publication("r", 0, 0, 0, 1)
    blob = await put_blob(bus, subject, codec.encode("fp32", values(1)))
    elsewhere = subjects.publication("r", 0, 0, 8, 1) + ".m"
    await bus.append(elsewhere, encode(manifest(rig, 0, 0, 1, values(1), blob)))
    await rig.syncer.publish(1, values(2))
    # The chunks of one anchor under the digest of another.
    await bus.append(subject + ".m", encode(manifest(rig, 0, 0, 1, values(7), blob)))
    # A blob that never was.
    absent = subjects.publication("r", 0, 0, 1, 1)
    never = blob.model_copy(update={"subject": absent, "digest": "0" * 32})
    await put_blob(bus, absent, codec.encode("fp32", values(9)))
    await bus.append(absent + ".m", encode(manifest(rig, 0, 1, 1, values(9), never)))
    await rig.syncer.publish(2, values(3))
    async with rig.running(rig.down.publications()):
        assert seen(await rig.next()) == (1, 0, 2.0)
        assert seen(await rig.next()) == (2, 0, 3.0)
        # Two that are no manifests of theirs, and an anchor of another digest. The absent one is
        # still waited for: it holds up its own fragment only.
        assert rig.down.refused == 3
        assert rig.down.book.refused["digest"] == 1


# What is changed about a publication of fragment 0, and what it is counted as.
MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "of another run": ({"run": "other"}, "run"),
    "of another term": ({"term": 2}, "term"),
    "of another version": ({"version": 4}, "place"),
    "of another configuration": ({"config_hash": "0" * 32}, "configuration"),
    "of another layout": ({"values": SIZE + 1}, "size"),
    "of another codec": ({"codec": "bf16"}, "size"),
    "of an unknown codec": ({"codec": "zip"}, "codec"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
async def test_a_manifest_that_is_not_right_is_refused_before_its_chunks(
    rig: Rig, kind: str
) -> None:
    """I11: counted by reason, and the next one is taken."""
    changed, counted = MANIFESTS[kind]
    await rig.syncer.prepare()
    subject = subjects.publication("r", 0, 0, 0, 1)
    blob = await put_blob(rig.syncer.bus, subject, codec.encode("fp32", values(1)))
    wrong = manifest(rig, 0, 0, 1, values(1), blob).model_copy(update=changed)
    await rig.syncer.bus.append(subject + ".m", encode(wrong))
    await rig.syncer.publish(1, values(2))
    with structlog.testing.capture_logs() as logs:
        async with rig.running(rig.down.publications()):
            assert seen(await rig.next()) == (1, 0, 2.0)
    assert rig.bus.traffic.refused == {("manifest", counted): 1}
    assert [entry["event"] for entry in logs].count("refused") == 1


async def test_chunks_beside_the_good_ones_are_counted_by_reason(rig: Rig) -> None:
    """Truncated, corrupted, of another attempt, and a good one twice: the publication arrives."""
    await rig.syncer.prepare()
    bus, subject = rig.syncer.bus, subjects.publication("r", 0, 0, 0, 1)
    outgoing = cut(subject, codec.encode("fp32", values(1)), chunk_bytes=16)
    first, last = bytes(outgoing.data(0)), bytes(outgoing.data(1))
    headers = outgoing.headers(0)
    await bus.append(subject, first[:-1], headers=headers)
    await bus.append(subject, bytes(16), headers=headers)
    await bus.append(subject, first, headers=headers | {HEADER_DIGEST: "0" * 32})
    await bus.append(subject, first, headers=headers)
    await bus.append(subject, first, headers=headers)
    await bus.append(subject, last, headers=outgoing.headers(1))
    sent = manifest(rig, 0, 0, 1, values(1), outgoing.blob)
    await bus.append(subject + ".m", encode(sent))
    async with rig.running(rig.down.publications()):
        assert seen(await rig.next()) == (0, 0, 1.0)
    kinds = ("size", "check", "attempt", "repeat")
    assert rig.bus.traffic.refused == {("chunk", kind): 1 for kind in kinds}
    (family,) = (
        m for m in traffic_metrics({"data": rig.bus.traffic}) if m.name == "diloco_bus_refused"
    )
    shown = {(s.labels["what"], s.labels["reason"]): s.value for s in family.samples}
    assert shown == rig.bus.traffic.refused


async def test_a_publication_replaced_while_it_is_fetched_is_left(rig: Rig) -> None:
    """A learner that catches up meets manifests whose chunks a keyframe has just purged."""
    await rig.syncer.prepare()
    await rig.syncer.publish(0, values(1))
    bus = rig.syncer.bus
    await bus.purge(subjects.dn_stream("r"), subjects.publication("r", 0, 0, 0, 1))
    async with rig.running(rig.down.publications()):
        await asyncio.sleep(0)
        await bus.purge(subjects.dn_stream("r"), subjects.publication("r", 0, 0, 0, 1) + ".m")
        await rig.syncer.publish(0, values(2))
        assert seen(await rig.next()) == (0, 1, 2.0)


async def test_one_far_behind_goes_on_with_the_newest_keyframe(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many deltas were purged while it looked at the first of them."""
    monkeypatch.setattr(downlink, "LOOK_S", 3600.0)  # one look at a time
    monkeypatch.setattr(blobs, "silence_s", lambda _: 0.2)
    await rig.syncer.prepare()
    bus, stream = rig.syncer.bus, subjects.dn_stream("r")
    never = describe(subjects.publication("r", 0, 0, 1, 1), codec.encode("bf16", values(1)))
    for version in range(1, 40):
        where = subjects.publication("r", 0, 0, version, 1)
        blob = never.model_copy(update={"subject": where})
        delta = manifest(rig, 0, version, 1, values(1), blob).model_copy(
            update={"prev_version": version - 1, "codec": "bf16"}
        )
        await bus.append(where + ".m", encode(delta))
    where = subjects.publication("r", 0, 0, 40, 1)
    blob = await put_blob(bus, where, codec.encode("fp32", values(4)))
    await bus.append(where + ".m", encode(manifest(rig, 0, 40, 1, values(4), blob)))
    async with rig.running(rig.down.publications()):
        assert seen(await rig.next()) == (0, 40, 4.0)
        assert rig.down.refused <= 1, "the one that was being fetched"
    assert (await bus.stream_info(stream)).messages > 40


async def test_a_bus_that_is_away_loses_no_publication(rig: Rig, broker: MemoryBroker) -> None:
    await rig.syncer.prepare()
    fails = {"left": 5}

    def fault(client: str, operation: str, subject: str) -> Fate:
        if client == "learner" and operation == "api" and fails["left"] and "DN" in subject:
            fails["left"] -= 1
            return "lose_request"
        return "deliver"

    broker.fault = fault
    async with rig.running(rig.down.publications()):
        for p in range(3):
            await rig.syncer.publish(p, values(p))
        assert {seen(await rig.next())[0] for _ in range(3)} == {0, 1, 2}


async def test_beats_and_grants_come_as_events_and_rubbish_is_counted(rig: Rig) -> None:
    await rig.syncer.prepare()
    async with rig.running(rig.down.beats(), rig.down.grants()):
        await rig.syncer.bus.publish(subjects.beat("r"), b"rubbish")
        await rig.syncer.beat()
        assert isinstance(await rig.next(), BeatSeen)
        assert rig.down.refused == 1
        await rig.syncer.grant(Join(learner="b", incarnation=3, nonce="n", config={}), "a")
        granted = await rig.next()
        assert isinstance(granted, GrantSeen) and granted.grant.donor == "a"


async def send_state(rig: Rig, payload: bytes, **change: Any) -> None:
    subject = subjects.state("r", "a", "b", "n-1")
    blob = await put_blob(rig.syncer.bus, subject, payload)
    fields: dict[str, Any] = {
        "run": "r",
        "donor": "a",
        "donor_incarnation": 0,
        "newcomer": "b",
        "newcomer_incarnation": 3,
        "nonce": "n-1",
        "epoch": 0,
        "versions": (0, 0, 0),
        "donor_step": 5,
        "config_hash": rig.syncer.hash,
        "blob": blob,
    }
    await rig.syncer.bus.append(subject + ".m", encode(StateManifest(**{**fields, **change})))


async def test_inner_state_is_taken_from_the_granted_donor(rig: Rig) -> None:
    await rig.syncer.prepare()
    async with rig.running(rig.down.state("a", "n-1")):
        await send_state(rig, b"moments")
        assert await rig.next() == StateComing("a", "n-1")
        assert await rig.next() == StateSeen("a", "n-1")
        assert rig.down.states == {"n-1": Received(b"moments", describe("s", b"moments").digest)}
    await rig.down.forget_state()
    assert rig.down.states == {}
    assert await rig.syncer.bus.fetch(subjects.state_stream("r"), "state.r.>") == []


async def test_a_leader_is_asked_to_remove_inner_state(rig: Rig) -> None:
    """Who may not remove it need not: there is nothing left to do once a leader has answered."""
    await rig.syncer.prepare()
    await send_state(rig, b"moments")
    asked: list[str] = []

    async def forget(request: Delivery) -> bytes:
        asked.append(request.subject)
        return b""

    async with rig.syncer.bus.serve(subjects.forget_state("r", "*"), forget):
        await rig.down.forget_state()
    assert asked == [subjects.forget_state("r", "b")]
    assert await rig.syncer.bus.fetch(subjects.state_stream("r"), "state.r.>") != []


async def test_a_leader_that_is_away_is_asked_again_to_remove_inner_state(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that knows who writes lets no learner remove it: what stays crowds the stream."""
    monkeypatch.setattr(downlink, "FORGET_PAUSES_S", (0.01, 0.01))
    await rig.syncer.prepare()
    refused, answered, asked = list[str](), list[str](), asyncio.Event()

    async def purge(stream: str, subject: str, **_: Any) -> None:
        refused.append(subject)
        raise Unavailable("nobody answers who may not")

    async def forget(request: Delivery) -> bytes:
        answered.append(request.subject)
        asked.set()
        return b""

    monkeypatch.setattr(rig.down.data, "purge", purge)
    await rig.down.forget_state()  # which waits for no leader, since a life that ends would
    async with (
        rig.running(rig.down.donations()),
        rig.syncer.bus.serve(subjects.forget_state("r", "*"), forget),
    ):
        await asked.wait()
    assert answered == [subjects.forget_state("r", "b")]
    assert len(refused) == 1, "each attempt takes seconds, and tells the hub of a violation"


async def test_whoever_asks_in_vain_for_long_to_remove_inner_state_gives_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def purge(*_: Any, **__: Any) -> None:
        raise Unavailable("nobody answers who may not")

    asked = list[str]()

    async def request(subject: str, *_: Any, **__: Any) -> bytes:
        asked.append(subject)
        assert len(asked) < 3, "it asks on"
        raise Unavailable("no leader")

    monkeypatch.setattr(rig.down.data, "purge", purge)
    monkeypatch.setattr(rig.down.control, "request", request)
    monkeypatch.setattr(downlink, "FORGET_S", 0.0)
    monkeypatch.setattr(downlink, "FORGET_PAUSES_S", (0.01, 0.01))
    await rig.syncer.prepare()
    await rig.down.forget_state()
    await rig.down._ask_leaders()
    assert len(asked) == 2


async def test_memory_of_an_inner_state_is_not_kept_for_what_is_smaller(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is many times as large as a publication, and comes once."""
    takes: list[Any] = []
    room = downlink.receiving
    monkeypatch.setattr(
        downlink, "receiving", lambda bus, blob, *take: (takes.extend(take), room(bus, blob))[1]
    )
    await rig.syncer.prepare()
    async with rig.running(rig.down.state("a", "n-1")):
        await send_state(rig, b"moments")
        while not isinstance(await rig.next(), StateSeen):
            pass
    assert takes == [blobs.fresh]


@pytest.mark.parametrize(
    "change",
    [
        {"newcomer_incarnation": 2},
        {"config_hash": "0" * 32},
        {"nonce": "n-0"},
        {"donor": "c"},
    ],
)
async def test_inner_state_for_another_life_or_run_is_bad(rig: Rig, change: Any) -> None:
    await rig.syncer.prepare()
    async with rig.running(rig.down.state("a", "n-1")):
        await send_state(rig, b"moments", **change)
        assert isinstance(await rig.next(), StateBad)
        assert rig.down.states == {}


async def test_inner_state_that_the_trainer_cannot_use_is_bad(rig: Rig) -> None:
    await rig.syncer.prepare()
    async with rig.running(rig.down.state("a", "n-1")):
        await send_state(rig, b"other moments")
        assert await rig.next() == StateComing("a", "n-1")
        bad = await rig.next()
        assert bad == StateBad("a", "n-1", "an inner state of another model")


async def test_an_announced_state_is_fetched_while_its_donor_still_sends(rig: Rig) -> None:
    """Its manifest comes last, and is not waited for once every chunk is here."""
    await rig.syncer.prepare()
    bus, subject = rig.syncer.bus, subjects.state("r", "a", "b", "n-1")
    payload = b"moments"
    outgoing = cut(subject, payload, chunk_bytes=2)
    announced = StateManifest(
        run="r",
        donor="a",
        donor_incarnation=0,
        newcomer="b",
        newcomer_incarnation=3,
        nonce="n-1",
        epoch=0,
        versions=(0, 0, 0),
        donor_step=1,
        config_hash=rig.syncer.hash,
        blob=outgoing.blob,
    )
    async with rig.running(rig.down.state("a", "n-1")):
        await bus.append(announcement_subject(subject), encode(announced))
        assert await rig.next() == StateMoved("a", "n-1")
        for index in range(outgoing.blob.chunks):
            data = bytes(outgoing.data(index))
            await bus.append(subject, data, headers=outgoing.headers(index))
        while isinstance(event := await rig.next(), StateMoved):
            assert event.bytes <= len(payload)
        assert event == StateSeen("a", "n-1")
        assert rig.down.states == {"n-1": Received(payload, outgoing.blob.digest)}


@pytest.mark.parametrize("size", [0, 1 << 50])
async def test_a_state_that_lies_elsewhere_or_is_far_too_large_is_bad(rig: Rig, size: int) -> None:
    """Memory is taken for as many bytes as it says, before a chunk is here."""
    await rig.syncer.prepare()
    rig.down.state_bytes = 7
    blob = describe(subjects.state("r", "a", "b", "n-1" if size else "n-0"), b"moments")
    if size:
        change = {"bytes": size, "chunk_bytes": 1 << 40, "chunks": size >> 40}
        blob = blob.model_copy(update=change)
    async with rig.running(rig.down.state("a", "n-1")):
        await send_state(rig, b"moments", blob=blob)
        assert isinstance(await rig.next(), StateBad)
        assert rig.down.states == {}
