"""What comes in for a leader: fetched if a round wants it, refused if it lies (I11)."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from syncer.contexts import context

from diloco_shared.bus.blobs import manifest_subject, put_blob
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import ContributionManifest, Join, Progress
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import ContributionSeen, Event, JoinSeen, Malformed, ProgressSeen
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.messages import inbox_io
from diloco_syncer.messages.inbox_io import Inbox

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 4, "shards": 2, "sync_every_steps": 8},
        "budget": {"steps": 8},
    }
)
VALUES = np.array([3.0, 4.0, 0.0], np.float32)


class Rig:
    """An inbox of the first shard, which owns fragments 0 and 2; and what it has told."""

    def __init__(self, wanted: Callable[[ContributionManifest], bool] = lambda _: True) -> None:
        self.bus = MemoryBus(MemoryBroker(), "s")
        self.seen: asyncio.Queue[Event] = asyncio.Queue()
        self.payloads = Payloads(lambda: 1 << 20)
        self.manifests: list[tuple[int, str]] = []
        self.inbox = Inbox(
            context(SPEC, self.bus),
            self.payloads,
            self.seen.put_nowait,
            wanted,
            saw=lambda seq, subject: self.manifests.append((seq, subject)),
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        await self.bus.ensure_stream(StreamSpec(subjects.up_stream("r"), ("up.r.>",), 1 << 20))
        task = asyncio.create_task(self.inbox.contributions(1))
        yield
        task.cancel()

    async def send(self, sender: str, place: int, scale: float = 1.0, **changed: Any) -> str:
        """A contribution of three values with its manifest; the subject of its bytes."""
        subject = subjects.contribution("r", sender, 0, place, 1, 1)
        payload = codec.encode("fp32", np.float32(scale) * VALUES)
        blob = await put_blob(self.bus, subject, payload)
        fields = {
            "run": "r",
            "learner": sender,
            "incarnation": 0,
            "epoch": 0,
            "term": 1,
            "round": 1,
            "fragment": place,
            "base": 0,
            "step_from": 0,
            "step_to": 8,
            "tokens_from": 0,
            "tokens_to": 8,
            "cursor": None,
            "codec": "fp32",
            "values": 3,
            "config_hash": config_hash(SPEC),
            "blob": blob,
        }
        manifest = ContributionManifest(**{**fields, **changed})
        await self.bus.append(manifest_subject(subject), encode(manifest))
        return subject


async def test_a_contribution_that_a_round_wants_is_fetched_and_looked_at() -> None:
    rig = Rig()
    async with rig.reading():
        subject = await rig.send("a", 2)
        event = await rig.seen.get()
    assert isinstance(event, ContributionSeen)
    assert (event.manifest.learner, event.finite, event.norm) == ("a", True, pytest.approx(5.0))
    assert list(rig.payloads.held) == [subject]
    assert rig.inbox.bytes_in == codec.bytes_of("fp32", 3)
    assert rig.inbox.under_way == set()


async def test_what_is_judged_is_what_is_merged_i11() -> None:
    """A second manifest of the same place comes while the first waits to be judged."""
    rig = Rig()
    async with rig.reading():
        subject = await rig.send("a", 2)
        first = await rig.seen.get()
        await rig.send("a", 2, scale=1e4)
        await rig.send("b", 2)
        after = await rig.seen.get()
    assert isinstance(first, ContributionSeen) and first.norm == pytest.approx(5.0)
    assert isinstance(after, ContributionSeen) and after.manifest.learner == "b"
    assert codec.decode("fp32", rig.payloads.held[subject], 3).tolist() == VALUES.tolist()


async def test_one_that_no_round_wants_is_told_and_not_fetched() -> None:
    rig = Rig(wanted=lambda _: False)
    async with rig.reading():
        await rig.send("a", 2)
        event = await rig.seen.get()
    assert isinstance(event, ContributionSeen) and event.manifest.learner == "a"
    assert not rig.payloads.held and rig.inbox.bytes_in == 0
    assert math.isnan(event.norm), "a round that asks for it meanwhile could not merge it"


async def test_what_another_shard_owns_is_left_to_it() -> None:
    rig = Rig()
    async with rig.reading():
        await rig.send("a", 1)
        await rig.send("b", 0)
        event = await rig.seen.get()
    assert isinstance(event, ContributionSeen) and event.manifest.learner == "b"
    assert rig.seen.empty() and len(rig.payloads.held) == 1


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"run": "q"}, "run"),
        ({"term": 2}, "term"),
        ({"learner": "b"}, "place"),
        ({"fragment": 0}, "place"),
        ({"values": 4}, "size"),
        ({"codec": "zip"}, "codec"),
    ],
)
async def test_a_manifest_that_lies_is_refused_and_counted_i11(
    changed: dict[str, Any], kind: str
) -> None:
    rig = Rig()
    async with rig.reading():
        subject = await rig.send("a", 2, **changed)
        event = await rig.seen.get()
        assert isinstance(event, Malformed) and event.kind == "malformed"
        assert event.answer == subject
        assert dict(rig.bus.traffic.refused) == {("manifest", kind): 1}
        await rig.send("c", 2)
        good = await rig.seen.get()
    assert isinstance(good, ContributionSeen) and good.manifest.learner == "c"


async def test_a_contribution_that_there_is_no_room_for_says_what_it_would_have_answered() -> None:
    rig = Rig()
    rig.payloads.limit = lambda: codec.bytes_of("fp32", 3) - 1
    async with rig.reading():
        subject = await rig.send("a", 2)
        event = await rig.seen.get()
    assert isinstance(event, Malformed)
    assert (event.kind, event.source, event.answer) == ("no-room", "a", subject)
    assert not rig.payloads.held and rig.inbox.under_way == set()


@pytest.mark.virtual
async def test_a_contribution_is_fetched_once_the_bus_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = away(monkeypatch, times=2)
    rig = Rig()
    async with rig.reading():
        await rig.send("a", 2)
        event = await rig.seen.get()
    assert isinstance(event, ContributionSeen) and event.norm == pytest.approx(5.0)
    assert len(tried) == 3


@pytest.mark.virtual
async def test_what_no_round_waits_for_any_more_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = away(monkeypatch, times=100)
    rig = Rig(wanted=lambda _: len(tried) < 2)
    async with rig.reading():
        await rig.send("a", 2)
        event = await rig.seen.get()
    assert isinstance(event, ContributionSeen) and math.isnan(event.norm)
    assert len(tried) == 2 and not rig.payloads.held


def away(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """The bus does not answer so often whoever fetches a payload; the attempts."""
    get, tried = inbox_io.get_blob, list[str]()

    async def fetched(bus: Any, stream: str, blob: Any, **more: Any) -> memoryview:
        tried.append(blob.subject)
        if len(tried) <= times:
            raise Unavailable("away")
        return await get(bus, stream, blob, **more)

    monkeypatch.setattr(inbox_io, "get_blob", fetched)
    return tried


async def test_nobody_speaks_for_another_learner_i11() -> None:
    rig = Rig()
    zeros = (0,) * SPEC.algorithm.fragments
    told = Progress(
        learner="a",
        incarnation=0,
        epoch=0,
        state="stepping",
        step=1,
        tokens=1,
        c_steps=zeros,
        c_tokens=zeros,
        adopted=zeros,
        adopted_at=zeros,
        loss=1.0,
        step_s=1.0,
        wait_s=0.0,
        run_id=SPEC.id,
    )
    listening = asyncio.create_task(rig.inbox.progress())
    await asyncio.sleep(0)
    await rig.bus.publish(subjects.progress("r", "b"), encode(told))
    await rig.bus.publish(subjects.progress("r", "a"), encode(told))
    first, second = await rig.seen.get(), await rig.seen.get()
    listening.cancel()
    assert isinstance(first, Malformed)
    assert (first.kind, first.source) == ("wire", subjects.progress("r", "b"))
    assert isinstance(second, ProgressSeen) and second.progress.learner == "a"


async def test_nobody_joins_for_another_learner_i11() -> None:
    """What joins in another's name, in a life to come, would lock that one out of the run."""
    rig = Rig()
    told = Join(learner="a", incarnation=10**9, nonce="x", config={})
    listening = asyncio.create_task(rig.inbox.joins())
    await asyncio.sleep(0.01)
    await rig.bus.publish(subjects.join("r", "b"), encode(told))
    forged = await rig.seen.get()
    # Learners of release 0.2 say no name in their subject: who has credentials cannot speak there.
    for subject in (subjects.join("r", "a"), subjects.unsigned_join("r")):
        await rig.bus.publish(subject, encode(told))
        seen = await rig.seen.get()
        assert isinstance(seen, JoinSeen) and seen.join == told
    listening.cancel()
    assert isinstance(forged, Malformed)
    assert (forged.kind, forged.source) == ("wire", subjects.join("r", "b"))
