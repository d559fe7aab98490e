"""How publications are fetched: a few at a time, the most needed first, and what is told of it."""

import asyncio
from typing import Any

import pytest
from learner.test_downlink import Rig, manifest, seen, values
from waiting import until

from diloco_learner.events import BeatSeen, PublicationMoved
from diloco_learner.exchange import downlink_io as downlink
from diloco_learner.exchange.priority_semaphore_io import PrioritySemaphore
from diloco_shared.bus import blobs
from diloco_shared.bus.port import Unavailable
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import cut, describe
from diloco_shared.protocol.messages import Blob
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import MemoryBroker


@pytest.fixture
def rig(broker: MemoryBroker, syncer: Any) -> Rig:
    return Rig(broker, syncer)


async def test_so_many_are_fetched_at_a_time_and_what_is_lacking_comes_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads share the link, and no step is taken before every fragment is here."""
    rig.down.downloads = PrioritySemaphore(1)
    fetch, fetched, go_on = downlink.get_blob, list[tuple[int, int]](), asyncio.Event()

    async def held(bus: Any, stream: str, blob: Blob, **how: Any) -> memoryview:
        fetched.append(tuple(int(part) for part in blob.subject.split(".")[3:5]))  # type: ignore[arg-type]
        await go_on.wait()
        return await fetch(bus, stream, blob, **how)

    await rig.syncer.prepare()
    for p in (0, 1):
        await rig.syncer.publish(p, values(p))
    async with rig.running(rig.down.publications()):
        for _ in range(2):
            await rig.next()
        monkeypatch.setattr(downlink, "get_blob", held)
        for p in (0, 1, 2):
            await rig.syncer.publish(p, values(p + 5))
        await until(lambda: len(rig.down.downloads._waiting) == 2, "two that wait")
        assert fetched == [(0, 1)]
        go_on.set()
        assert [seen(await rig.next())[:2] for _ in range(3)] == [(0, 1), (2, 0), (1, 1)]


def test_the_newest_epoch_is_fetched_first(rig: Rig) -> None:
    """What is of an older one is void as soon as it is here."""
    blob = describe("s", codec.encode("fp32", values(1)))
    of = [manifest(rig, p, 1, 1, values(1), blob) for p in (0, 1)]
    ranks = [rig.down._rank(m.model_copy(update={"epoch": 1 - m.fragment})) for m in of]
    assert ranks[0] < ranks[1]


async def test_one_of_which_nothing_comes_gives_its_turn_to_another(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downlink, "LOOK_S", 0.01)
    monkeypatch.setattr(downlink, "STILL_S", 0.03)
    rig.down.downloads = PrioritySemaphore(1)
    await rig.syncer.prepare()
    bus, subject = rig.syncer.bus, subjects.publication("r", 0, 0, 5, 1)
    blob = describe(subject, codec.encode("fp32", values(1)))
    await bus.append(subject + ".m", encode(manifest(rig, 0, 5, 1, values(1), blob)))
    async with rig.running(rig.down.publications()):
        await until(lambda: not rig.down.downloads.left, "that it is fetched")
        await rig.syncer.publish(1, values(2))
        assert seen(await rig.next()) == (1, 0, 2.0)
        assert not rig.down.refused, "it is still waited for"


async def test_that_the_last_publications_come_is_told_and_never_twice_of_the_same_bytes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end a learner stays as long as more comes: one that is never whole holds nobody."""
    monkeypatch.setattr(downlink, "AGAIN_S", 0.0)
    monkeypatch.setattr(downlink, "MOVED_S", 0.0)
    monkeypatch.setattr(blobs, "LOOK_S", 0.01)
    monkeypatch.setattr(blobs, "silence_s", lambda _: 0.1)
    await rig.syncer.prepare()
    bus, subject = rig.syncer.bus, subjects.publication("r", 0, 0, 5, 1)
    outgoing = cut(subject, codec.encode("fp32", values(1)), chunk_bytes=4)
    for n in range(2):
        await bus.append(subject, bytes(outgoing.data(n)), headers=outgoing.headers(n))
    await bus.append(subject + ".m", encode(manifest(rig, 0, 5, 1, values(1), outgoing.blob)))
    async with rig.running(rig.down.publications(), rig.down.beats()):
        await until(lambda: rig.down.refused >= 2, "attempts while it trains")
        assert rig.arrived.empty()
        rig.syncer.state = "finished"
        await rig.syncer.beat()
        assert isinstance(await rig.next(), BeatSeen)
        assert isinstance(await rig.next(), PublicationMoved)
        refused = rig.down.refused
        await until(lambda: rig.down.refused >= refused + 3, "more attempts at it")
        assert rig.arrived.empty(), "the same chunks every time"
        rest = range(2, outgoing.blob.chunks)
        for n in rest:
            await bus.append(subject, bytes(outgoing.data(n)), headers=outgoing.headers(n))
        while isinstance(event := await rig.next(), PublicationMoved):
            pass
        assert seen(event) == (0, 5, 1.0)


async def test_one_question_that_nobody_answers_ends_no_fetch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come would be fetched again, and the chunks that are on their way, too."""
    monkeypatch.setattr(downlink, "LOOK_S", 0.01)
    unanswered: list[str] = []
    begun: list[Blob] = []
    comes = asyncio.Event()

    async def fetched(bus: Any, stream: str, blob: Blob, **rest: Any) -> Any:
        begun.append(blob)
        await comes.wait()
        return await blobs.get_blob(bus, stream, blob, **rest)

    async def last(stream: str, subject: str) -> Any:
        unanswered.append(subject)
        raise Unavailable("no answer within 5 s")

    monkeypatch.setattr(downlink, "get_blob", fetched)
    monkeypatch.setattr(rig.bus, "last", last)
    await rig.syncer.prepare()
    await rig.syncer.publish(0, values(1))
    async with rig.running(rig.down.publications()):
        await until(lambda: len(unanswered) >= 3, "three questions while one is fetched")
        comes.set()
        assert seen(await rig.next()) == (0, 0, 1.0)
    assert len(begun) == 1
