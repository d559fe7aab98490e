"""Chunks and manifests that are not what they claim to be (I11): refused with a reason, counted,
and in nobody's way."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from live.gate import connected, goes_through
from syncer.contexts import context
from waiting import until

from diloco_shared.bus import blobs
from diloco_shared.bus.blobs import BlobIncomplete, get_blob, put_blob
from diloco_shared.bus.port import Bus, Refused, StreamSpec
from diloco_shared.hub.nats_server import MAX_PAYLOAD_BYTES, NatsServer
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import (
    HEADER_CHECK,
    HEADER_DIGEST,
    HEADER_INDEX,
    Incoming,
    Outgoing,
    cut,
)
from diloco_shared.protocol.messages import Blob, ContributionManifest
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_syncer.events import ContributionSeen, Event, Malformed
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.messages.inbox_io import Inbox

pytestmark = pytest.mark.live

MIB = 1 << 20
SPEC = StreamSpec("S", ("s.>",), 64 * MIB)
CHUNK = 64 * 1024
PAYLOAD = random.Random(1).randbytes(24 * CHUNK + 5)
OTHER = random.Random(2).randbytes(24 * CHUNK + 5)

# What is done to chunk `i` before it is sent, and the kind that it is refused as.
Damage = Callable[[Outgoing, int], tuple[dict[str, str], bytes]]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (lambda o, i: (o.headers(i), bytes(o.data(i)[:-1])), "size"),
    "extended": (lambda o, i: (o.headers(i), bytes(o.data(i)) + b"x"), "size"),
    "empty": (lambda o, i: (o.headers(i), b""), "size"),
    "corrupt": (lambda o, i: (o.headers(i), flipped(o.data(i))), "check"),
    "another's place": (lambda o, i: (o.headers(i), bytes(o.data(i ^ 1))), "check"),
    "beyond the end": (
        lambda o, i: (o.headers(i) | {HEADER_INDEX: str(o.blob.chunks)}, bytes(o.data(i))),
        "index",
    ),
    "before the start": (
        lambda o, i: (o.headers(i) | {HEADER_INDEX: "-1"}, bytes(o.data(i))),
        "index",
    ),
    "no number": (
        lambda o, i: (o.headers(i) | {HEADER_INDEX: "one"}, bytes(o.data(i))),
        "header",
    ),
    "no checksum": (
        lambda o, i: ({k: v for k, v in o.headers(i).items() if k != HEADER_CHECK}, b"x"),
        "header",
    ),
    "no headers": (lambda o, i: ({}, bytes(o.data(i))), "header"),
    "another attempt": (lambda o, i: (o.headers(i) | {HEADER_DIGEST: "0" * 32}, b"x"), "attempt"),
}


def flipped(data: memoryview) -> bytes:
    return bytes([data[0] ^ 1]) + bytes(data[1:])


async def send(bus: Bus, subject: str, headers: dict[str, str], data: bytes) -> None:
    """Without a message id: the server takes whatever comes."""
    await bus.append(subject, data, headers=headers)


async def refusals(bus: Bus, blob: Blob) -> Incoming:
    """What a receiver counts that sees every message of the blob's subject once."""
    incoming = Incoming(blob, lambda size: memoryview(bytearray(size)))
    for message in await bus.fetch("S", blob.subject):
        incoming.take(message.headers, message.payload)
    return incoming


@pytest.mark.parametrize("kind", DAMAGES)
async def test_a_damaged_chunk_beside_the_good_one(nats_server: NatsServer, kind: str) -> None:
    damage, counted = DAMAGES[kind]
    outgoing = cut("s.blob", PAYLOAD, chunk_bytes=CHUNK)
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        # Alone it is nothing, and the kind is counted.
        await send(bus, "s.blob", *damage(outgoing, 3))
        with pytest.raises(BlobIncomplete):
            await get_blob(bus, "S", outgoing.blob, timeout_s=0.4)
        assert bus.traffic.refused.keys() == {("chunk", counted)}
        # In front of the good ones, in the middle, and behind, it changes nothing.
        blob = await put_blob(bus, "s.blob", PAYLOAD, chunk_bytes=CHUNK)
        await send(bus, "s.blob", *damage(outgoing, 3))
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        seen = await refusals(bus, blob)
        # The bytes of a repeat are not looked at, so that only the first damage shows there.
        times = 1 if counted == "check" else 2
        del seen.refused["repeat"]
        assert (seen.complete, seen.refused) == (True, {counted: times})
        await goes_through(bus, "S", "s.next", OTHER)


@pytest.mark.parametrize("connections", [1, 4])
async def test_doubled_and_in_any_order(nats_server: NatsServer, connections: int) -> None:
    """Every chunk two or three times, two attempts mixed, damaged ones in between."""
    draw = random.Random(connections)
    first, second = (
        cut("s.blob", PAYLOAD, chunk_bytes=CHUNK),
        cut("s.blob", OTHER, chunk_bytes=CHUNK),
    )
    good = [(o.headers(i), bytes(o.data(i))) for o in (first, second) for i in range(25)]
    bad = [
        damage(draw.choice((first, second)), draw.randrange(20)) for damage, _ in DAMAGES.values()
    ]
    messages = good * 2 + draw.sample(good, 20) + bad * 2
    draw.shuffle(messages)
    async with connected(nats_server.url, connections) as bus:
        await bus.ensure_stream(SPEC)
        for headers, data in messages:
            await send(bus, "s.blob", headers, data)
        for outgoing, payload in ((first, PAYLOAD), (second, OTHER)):
            assert await get_blob(bus, "S", outgoing.blob, timeout_s=20) == payload
        await goes_through(bus, "S", "s.next", OTHER)


async def test_a_reader_that_waits_takes_the_good_chunk_when_it_comes(
    nats_server: NatsServer,
) -> None:
    outgoing = cut("s.blob", PAYLOAD, chunk_bytes=CHUNK)
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        await bus.ensure_stream(SPEC)
        for index in range(25):
            damage = DAMAGES["corrupt" if index == 7 else "truncated"][0]
            headers, data = outgoing.headers(index), bytes(outgoing.data(index))
            await send(other, "s.blob", *(damage(outgoing, 7) if index == 7 else (headers, data)))
        getting = asyncio.create_task(get_blob(bus, "S", outgoing.blob, timeout_s=20))
        received = bus.traffic.bytes_in
        await until(lambda: bus.traffic.bytes_in >= received + len(PAYLOAD) - CHUNK)
        assert not getting.done()
        await send(other, "s.blob", outgoing.headers(7), bytes(outgoing.data(7)))
        assert await getting == PAYLOAD


async def test_what_the_server_would_not_take_is_refused_before(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        huge = bytes(2 * MAX_PAYLOAD_BYTES)
        with pytest.raises(Refused, match="exceed the server's limit"):
            await put_blob(bus, "s.huge", huge, chunk_bytes=len(huge))
        impossible = Blob(subject="s.x", bytes=10, chunk_bytes=3, chunks=2, digest="0" * 32)
        with pytest.raises(BlobIncomplete, match="impossible manifest"):
            await get_blob(bus, "S", impossible, timeout_s=5)
        assert (await bus.stream_info("S")).messages == 0
        await goes_through(bus, "S", "s.next", OTHER)


# --- at the syncer's door ------------------------------------------------------------------------

RUN = RunSpec.model_validate({"name": "r", "budget": {"steps": 8}})
VALUES = 4096
DELTA = codec.encode("fp32", np.arange(VALUES, dtype=np.float32))


def manifest(blob: Blob, round_: int, **changed: object) -> ContributionManifest:
    """A contribution of learner a to that round of term 3."""
    fields: dict[str, object] = {
        "run": "r", "learner": "a", "incarnation": 0, "epoch": 0, "term": 3, "round": round_,
        "fragment": 0, "base": 0, "step_from": 0, "step_to": 4, "tokens_from": 0, "tokens_to": 4,
        "cursor": None, "codec": "fp32", "values": VALUES, "config_hash": config_hash(RUN),
        "blob": blob,
    }  # fmt: skip
    return ContributionManifest.model_validate(fields | changed)


# What is changed, and what it is counted as.
MANIFESTS: dict[str, tuple[dict[str, object], str]] = {
    "of another run": ({"run": "other"}, "run"),
    "of another term": ({"term": 2}, "term"),
    "of another learner": ({"learner": "b"}, "place"),
    "of another size": ({"values": VALUES + 1}, "size"),
    "of another codec": ({"codec": "bf16"}, "size"),
    "of an unknown codec": ({"codec": "zip"}, "codec"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
async def test_the_syncer_refuses_a_manifest(nats_server: NatsServer, kind: str) -> None:
    changed, counted = MANIFESTS[kind]
    events, refusals = await seen_by_syncer(nats_server, changed)
    assert refusals == {("manifest", counted): 1}
    assert sum(isinstance(event, Malformed) for event in events) == 1
    (taken,) = [event for event in events if isinstance(event, ContributionSeen)]
    assert taken.manifest.round == 2


async def test_the_syncer_refuses_damaged_chunks_and_bytes_that_are_no_manifest(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "silence_s", lambda _: 0.5)
    events, refusals = await seen_by_syncer(nats_server, {}, damaged=True, junk=b"\xc1 no message")
    assert refusals[("manifest", "wire")] == 1 and refusals[("chunk", "check")] >= 1
    refused = [event for event in events if isinstance(event, Malformed)]
    assert sorted(event.source for event in refused) == ["a", "up.r.a.0.0.0.3.m"]
    (taken,) = [event for event in events if isinstance(event, ContributionSeen)]
    assert taken.manifest.round == 2


async def seen_by_syncer(
    server: NatsServer,
    changed: dict[str, object],
    *,
    damaged: bool = False,
    junk: bytes = b"",
) -> tuple[list[Event], Counter[tuple[str, str]]]:
    """Round 1 is answered with what is wrong, round 2 rightly; the syncer's events up to then, and
    what it counted."""
    events: list[Event] = []
    stream = subjects.up_stream("r")
    async with connected(server.url) as learner, connected(server.url) as syncer:
        await learner.ensure_stream(StreamSpec(stream, ("up.r.>",), 64 * MIB))
        payloads = Payloads(lambda: 2 * len(DELTA))
        inbox = Inbox(context(RUN, syncer), payloads, events.append, lambda _: True)
        following = asyncio.create_task(inbox.contributions(1))
        try:
            if junk:
                await learner.append("up.r.a.0.0.0.3.m", junk)
            for round_ in (1, 2):
                subject = subjects.contribution("r", "a", 0, 0, round_, 3)
                if damaged and round_ == 1:
                    outgoing = cut(subject, DELTA)
                    blob = outgoing.blob
                    await send(learner, subject, *DAMAGES["corrupt"][0](outgoing, 0))
                else:
                    blob = await put_blob(learner, subject, DELTA)
                said = manifest(blob, round_, **(changed if round_ == 1 else {}))
                await learner.append(f"{subject}.m", encode(said))
            await until(
                lambda: (
                    any(isinstance(event, ContributionSeen) for event in events)
                    and sum(isinstance(event, Malformed) for event in events) == 1 + bool(junk)
                )
            )
            # Only what was taken is held.
            assert list(payloads.held) == [subjects.contribution("r", "a", 0, 0, 2, 3)]
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    return events, syncer.traffic.refused
