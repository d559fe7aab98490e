"""What goes out: complete, under its own name, in time or not at all."""

import asyncio
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from learner.contexts import uplink
from waiting import until

from diloco_learner.events import Checkpoint, Contribute, GiveState, KeepPart, PartSettled, Tell
from diloco_learner.exchange import uplink_io
from diloco_learner.exchange.encoding import Encoded
from diloco_learner.exchange.uplink_io import Uplink
from diloco_learner.recovery.moments import Handed, pack, pieces
from diloco_learner.training.train import ToSend
from diloco_shared import ambient
from diloco_shared.bus.blobs import get_blob
from diloco_shared.bus.port import TransferProgress
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import cut
from diloco_shared.protocol.messages import ContributionManifest, Donate, StateManifest
from diloco_shared.protocol.wire import decode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.virtual

DELTA_F = np.arange(4, dtype=np.float32)
SENT = Encoded("fp32", 4, (jnp.asarray(DELTA_F),))


def contribute(seconds: float = 30.0) -> Contribute:
    return Contribute(
        epoch=0,
        term=1,
        round=5,
        fragment=2,
        base=3,
        step_from=10,
        step_to=14,
        tokens_from=160,
        tokens_to=224,
        cursor=None,
        deadline=ambient.monotonic() + seconds,
    )


@pytest.fixture
def up(broker: MemoryBroker, spec: RunSpec, tmp_path: Path) -> Uplink:
    return uplink(broker, spec, tmp_path, (9, 9, 4))


async def uploaded(syncer: Any) -> list[ContributionManifest]:
    stored = await syncer.bus.fetch(subjects.up_stream("r"), "up.r.*.*.*.*.*.m")
    return [decode(s.payload, ContributionManifest) for s in stored]


async def test_a_contribution_is_a_blob_and_then_its_manifest(up: Uplink, syncer: Any) -> None:
    await syncer.prepare()
    await up.send(ToSend(contribute(), SENT))
    (m,) = await uploaded(syncer)
    assert m.blob.subject == "up.r.a.0.2.5.1"
    assert (m.learner, m.incarnation, m.round, m.fragment, m.base) == ("a", 1, 5, 2, 3)
    assert (m.step_from, m.step_to, m.tokens_from, m.tokens_to) == (10, 14, 160, 224)
    assert (m.values, m.config_hash) == (4, syncer.hash)
    payload = await get_blob(syncer.bus, subjects.up_stream("r"), m.blob, timeout_s=5)
    assert payload == codec.encode("fp32", DELTA_F)


async def test_lost_messages_and_answers_leave_one_manifest(
    up: Uplink, syncer: Any, broker: MemoryBroker
) -> None:
    """I2 begins here: a repeat is the same message."""
    await syncer.prepare()
    fates: list[Fate] = ["lose_request", "lose_answer", "deliver", "lose_answer", "lose_request"]

    def fault(client: str, operation: str, subject: str) -> Fate:
        return fates.pop(0) if client == "a" and operation == "append" and fates else "deliver"

    broker.fault = fault
    await up.send(ToSend(contribute(), SENT))
    assert len(await uploaded(syncer)) == 1
    assert not fates


async def test_what_an_older_life_has_sent_is_no_repeat_of_what_a_newer_one_sends(
    up: Uplink, syncer: Any
) -> None:
    """Else the life that was asked would be waited for, and nothing of it ever came."""
    await syncer.prepare()
    for life in (1, 2, 2):
        up.incarnation = life
        await up.send(ToSend(contribute(), SENT))
    assert [m.incarnation for m in await uploaded(syncer)] == [1, 2]


async def test_nobody_has_a_contribution_left_out_by_saying_its_ids_first(
    up: Uplink, syncer: Any, broker: MemoryBroker
) -> None:
    """All that they are made of can be known: who may write on UP at all could say them (I11)."""
    await syncer.prepare()
    thief = MemoryBus(broker, "thief")
    where = subjects.contribution("r", "a", 0, 2, 5, 1)
    digest = cut(where, codec.encode("fp32", DELTA_F)).blob.digest
    guessed = [f"{where}.m/1", f"{where}.m", *(f"{n}/{where}/{digest}/0" for n in range(100))]
    for n, name in enumerate([*guessed, f"{where}/{digest}/0"]):
        said: dict[str, Any] = {"headers": {"Nats-Msg-Id": name}} if n % 2 else {"msg_id": name}
        await thief.append(f"up.r.thief.{n}", b"", **said)
    await up.send(ToSend(contribute(), SENT))
    (m,) = await uploaded(syncer)
    assert await get_blob(syncer.bus, subjects.up_stream("r"), m.blob, timeout_s=5)


@pytest.mark.parametrize("full", [False, True])
async def test_a_part_of_a_checkpoint_is_settled_whether_it_is_kept_or_not(
    up: Uplink, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Else no other would ever be made."""
    kept: list[Any] = []
    put: list[Any] = []
    told: list[tuple[str, str]] = []

    def write(
        spec: RunSpec, root: str, learner: str, life: int, effect: KeepPart, data: Any
    ) -> None:
        if full:
            raise OSError("No space left on device")
        kept.append((learner, life, effect.number, bytes(data)))

    async def tell(kind: str, text: str, data: dict[str, Any]) -> None:
        told.append((kind, text))

    monkeypatch.setattr(uplink_io, "write_part", write)
    monkeypatch.setattr(up, "put", put.append)
    monkeypatch.setattr(up, "tell", tell)
    part = KeepPart(number=3, epoch=0, step=14, versions=(1, 1, 1))
    await up.send(ToSend(part, Handed(b"moments")))
    assert put == [PartSettled(3)]
    assert kept == ([] if full else [("a", 1, 3, b"moments")])
    why = "no part of a in checkpoint 3: No space left on device"
    assert told == ([("checkpoint-failed", why)] if full else [])


async def test_what_is_too_late_is_not_sent(up: Uplink, syncer: Any) -> None:
    await syncer.prepare()
    await up.send(ToSend(contribute(seconds=-1.0), SENT))
    assert await uploaded(syncer) == []


async def test_an_upload_that_cannot_be_is_given_up_and_told(
    up: Uplink, syncer: Any, broker: MemoryBroker
) -> None:
    """I11: and nothing is raised, since training goes on."""
    await syncer.prepare()

    def fault(client: str, operation: str, subject: str) -> Fate:
        return "lose_request" if subject.startswith("up.") else "deliver"

    broker.fault = fault
    await up.send(ToSend(contribute(seconds=0.5), SENT))
    broker.fault = None
    assert await uploaded(syncer) == []
    (event,) = await syncer.events("upload-abandoned")
    assert event.source == "a"


async def test_events_outlive_a_short_absence_of_the_bus(
    up: Uplink, syncer: Any, broker: MemoryBroker
) -> None:
    await syncer.prepare()
    fates: list[Fate] = ["lose_request", "lose_answer"]

    def fault(client: str, operation: str, subject: str) -> Fate:
        return fates.pop(0) if operation == "append" and fates else "deliver"

    broker.fault = fault
    await up.send(ToSend(Tell("some-kind", "it happened", {"steps": 32})))
    (event,) = await syncer.events("some-kind")
    assert (event.text, event.data) == ("it happened", {"steps": 32})


async def test_what_is_told_soon_is_told_before_leaving(up: Uplink, syncer: Any) -> None:
    await syncer.prepare()
    up.tell_soon("one", "first", {})
    await up.send(ToSend(Tell("two", "second")))
    await up.told()
    assert len(await syncer.events("one")) == len(await syncer.events("two")) == 1


async def test_what_is_told_soon_is_told_though_whoever_waited_for_it_is_gone(
    up: Uplink, syncer: Any, broker: MemoryBroker
) -> None:
    """Told to stop while it leaves, a process waits for it once more."""
    await syncer.prepare()
    broker.fault = lambda client, operation, subject: "lose_request"
    up.tell_soon("one", "why it ends", {})
    waiting = asyncio.create_task(up.told())
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.wait({waiting})
    broker.fault = None
    await up.told()
    assert len(await syncer.events("one")) == 1


async def test_a_checkpoint_that_fails_is_told(up: Uplink, syncer: Any) -> None:
    """A full disk stops no training."""
    await syncer.prepare()

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    up.checkpoints.save = full  # type: ignore[method-assign]
    await up.send(ToSend(Checkpoint(0, 8, (0, 0, 0), final=True), pieces({"mu": DELTA_F})))
    (event,) = await syncer.events("checkpoint-failed")
    assert "no space left" in event.text
    # Every interval tries again: told when it begins.
    up.checkpoints.room.failed = "no space left on device"
    await up.send(ToSend(Checkpoint(0, 9, (0, 0, 0), final=True), pieces({"mu": DELTA_F})))
    assert len(await syncer.events("checkpoint-failed")) == 1


async def test_one_that_is_not_even_tried_is_let_go(
    up: Uplink, syncer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else hosts that write theirs would take it for one that is on its way, for ever."""
    gone: list[Any] = []

    async def hangs(*_: Any, **__: Any) -> None:
        raise OSError("an earlier one still hangs there")

    monkeypatch.setattr(up, "own_disk", hangs)
    monkeypatch.setattr(up.checkpoints, "let_go", gone.append)
    await syncer.prepare()
    for step in (9, 10, 11):
        await up.send(ToSend(Checkpoint(0, step, (0, 0, 0), final=False), step))
    assert gone == [9, 10, 11]
    (event,) = await syncer.events("checkpoint-failed")
    assert event.text == "step 9: an earlier one still hangs there", "and is told once"


async def test_checkpoints_of_later_lives_are_newer(up: Uplink, syncer: Any) -> None:
    await syncer.prepare()
    await up.send(ToSend(Checkpoint(0, 8, (0, 0, 0), final=True), pieces({"mu": DELTA_F})))
    assert up.checkpoints.newest == 1_000_000_008
    handed = Handed(pack({"mu": DELTA_F}))
    await up.send(ToSend(Checkpoint(0, 9, (0, 0, 0), final=False), handed))
    assert up.checkpoints.newest == 1_000_000_009 and handed.gone


async def test_initial_parameters_that_are_there_are_not_sent_again(
    up: Uplink, syncer: Any
) -> None:
    """Asked again, it goes on with the first fragment that is missing."""
    await syncer.prepare()
    stream, payload = subjects.up_stream("r"), codec.encode("fp32", DELTA_F)
    for p in (0, 1):
        await up.initial((), p, payload, TransferProgress())
    where = [subjects.initial("r", "a", 1, p) for p in (0, 1)]
    before = (await syncer.bus.stream_info(stream)).last_seq
    sent = up.data.traffic.bytes_out
    for p in (0, 1):
        await up.initial((), p, payload, TransferProgress())
    assert (await syncer.bus.stream_info(stream)).last_seq == before
    assert up.data.traffic.bytes_out == sent
    # The syncer has taken one off that was not whole.
    for name in (where[1] + ".m", where[1]):
        await syncer.bus.purge(stream, name)
    stored = TransferProgress()
    await up.initial((), 1, payload, stored)
    assert stored.stored == 1
    assert await syncer.bus.last(stream, where[1] + ".m") is not None


async def test_what_goes_beside_the_chunks_of_a_fragment_holds_up_no_other(
    up: Uplink, syncer: Any, broker: MemoryBroker
) -> None:
    """Over a long link every answer is a round trip, in which the link would carry nothing."""
    await syncer.prepare()
    where = [subjects.initial("r", "a", 1, p) for p in range(3)]
    away = {where[0] + ".m"}

    def fault(client: str, operation: str, subject: str) -> Fate:
        return "lose_request" if client == "a" and subject in away else "deliver"

    broker.fault = fault
    payload, stored = codec.encode("fp32", DELTA_F), [TransferProgress() for _ in where]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for p in range(3):
            tasks.create_task(up.initial((), p, payload, stored[p]))
        stream = subjects.up_stream("r")
        others = set(where[1:])
        while others:
            there = {name for name in others if await syncer.bus.last(stream, name + ".m")}
            others -= there
            await asyncio.sleep(0)
        assert await syncer.bus.last(stream, where[0] + ".m") is None
        away.clear()
    manifests = [await syncer.bus.last(stream, name + ".m") for name in where]
    chunks = [await syncer.bus.last(stream, name) for name in where]
    assert None not in manifests
    assert [c.seq for c in chunks] == sorted(c.seq for c in chunks), "in the order of the calls"


def donate(nonce: str = "n", life: int = 0, newcomer: str = "b", epoch: int = 0) -> Donate:
    return Donate(
        donor="a",
        donor_incarnation=1,
        newcomer=newcomer,
        newcomer_incarnation=life,
        nonce=nonce,
        epoch=epoch,
        versions=(0, 0, 0),
    )


async def test_a_state_is_announced_before_its_first_chunk(up: Uplink, syncer: Any) -> None:
    await syncer.prepare()
    give = GiveState(donate(), (0, 0, 0), 7)
    handed = Handed(pack({"mu": np.ones(3, np.float32)}))
    await asyncio.create_task(up.send(ToSend(give, handed)))
    await asyncio.sleep(0)
    assert not up.giving, "what is sent is not kept"
    stored = await syncer.bus.fetch(subjects.state_stream("r"), "state.r.a.b.>")
    where = subjects.state("r", "a", "b", "n")
    assert [s.subject for s in stored] == [f"{where}.a", where, f"{where}.m"]
    assert decode(stored[0].payload, StateManifest) == decode(stored[2].payload, StateManifest)


@pytest.mark.parametrize("how", ["another nonce", "a newer life", "a newer life in a beat"])
async def test_a_life_that_is_over_is_given_nothing_more(
    up: Uplink, syncer: Any, broker: MemoryBroker, how: str
) -> None:
    """What it was sent would be in the way of what its next life asks for."""
    await syncer.prepare()
    broker.fault = lambda client, operation, subject: (
        "lose_request" if subject.startswith("state.") else "deliver"
    )
    handed = Handed(pack({"mu": np.ones(3, np.float32)}))
    assert handed.share()
    asked = donate("one", life=1), donate("other", newcomer="c")
    old, other = (
        asyncio.create_task(up.send(ToSend(GiveState(one, (0, 0, 0), 7), handed))) for one in asked
    )
    await until(lambda: len(up.giving) == 2)
    # What was asked before is no reason, nor is a repeat.
    up.asked(donate("none", life=0))
    up.asked(asked[0])
    up.outlived({"b": 1, "c": 0})
    await asyncio.sleep(0)
    assert not old.cancelling()
    match how:
        case "another nonce":
            up.asked(donate("two", life=1))
        case "a newer life":
            up.asked(donate("two", life=2))
        case _:
            up.outlived({"b": 2})
    await asyncio.wait({old})
    assert old.cancelled() and [*up.giving.values()] == [asked[1]]
    assert not handed.gone, "the other is still sent"
    up.stop_giving()
    await asyncio.wait({other})
    assert handed.gone and not up.giving


async def test_a_contribution_that_no_merge_takes_is_sent_no_further(
    up: Uplink, syncer: Any, broker: MemoryBroker
) -> None:
    """And one that is still to be sent is not begun. Whoever waits for it is not cancelled."""
    await syncer.prepare()
    broker.fault = lambda client, operation, subject: (
        "lose_request" if subject.startswith("up.") else "deliver"
    )
    sending = asyncio.create_task(up.send(ToSend(contribute(300.0), SENT)))
    await until(lambda: up.contributing)
    up.stop_contributing()
    async with asyncio.timeout(5.0):
        await sending
    assert not up.contributing
    broker.fault = None
    await up.send(ToSend(contribute(300.0), SENT))
    assert await uploaded(syncer) == [] == await syncer.events("upload-abandoned")
