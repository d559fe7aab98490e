"""Large payloads over either bus."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from diloco_shared.bus import blobs
from diloco_shared.bus.blobs import (
    BlobIncomplete,
    GaveUp,
    get_blob,
    manifest_subject,
    put_blob,
    receiving,
)
from diloco_shared.bus.port import Bus, StreamSpec, TransferProgress
from diloco_shared.protocol.chunks import Incoming, cut
from diloco_shared.protocol.messages import Blob
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.virtual

Open = Callable[[], AbstractAsyncContextManager[tuple[Bus, Bus]]]
SPEC = StreamSpec("UP", ("up.>",), 64 << 20)


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 3 << 20])
async def test_a_blob_comes_back(open_buses: Open, size: int) -> None:
    payload = random.Random(size).randbytes(size)
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        chunk_bytes = 1000 if size < 2000 else 256 * 1024
        blob = await put_blob(one, "up.a", payload, chunk_bytes=chunk_bytes)
        assert blob.chunks == -(-size // chunk_bytes)
        await one.append(manifest_subject("up.a"), b"manifest")
        assert await get_blob(two, "UP", blob, timeout_s=10) == payload
        assert len(await two.fetch("UP", "up.a")) == blob.chunks


async def test_what_goes_on_is_stored_once_and_what_is_sent_anew_again(open_buses: Open) -> None:
    """Under ids of before it would be left out, also where others have said those meanwhile."""
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        payload, progress = bytes(100_000), TransferProgress()
        for again, messages in ((progress, 100), (progress, 100), (None, 200)):
            await put_blob(one, "up.a", payload, chunk_bytes=1000, window=8, progress=again)
            assert (await one.stream_info("UP")).messages == messages


async def test_two_attempts_of_other_content_do_not_mix(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        old, new = b"old" * 1000, b"new" * 1000
        before = cut("up.a", old, chunk_bytes=500)
        for index in (0, 3):
            await one.append("up.a", bytes(before.data(index)), headers=before.headers(index))
        blob = await put_blob(one, "up.a", new, chunk_bytes=500)
        assert await get_blob(two, "UP", blob, timeout_s=10) == new
        with pytest.raises(BlobIncomplete, match=r"no good chunks \[1, 2, 4, 5\] of 6"):
            await get_blob(two, "UP", before.blob, timeout_s=0.3)


async def test_corrupt_chunks_are_named_and_repaired_by_a_resend(open_buses: Open) -> None:
    payload = bytes(range(256)) * 8
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        outgoing = cut("up.a", payload, chunk_bytes=512)
        blob = outgoing.blob
        for index in range(blob.chunks):
            data = bytes(outgoing.data(index))
            data = b"\x01" + data[1:] if index == 2 else data
            await one.append("up.a", data, headers=outgoing.headers(index))
        await one.append("up.a", b"no headers")
        with pytest.raises(BlobIncomplete, match=r"\[2\] of 4.*header 'Diloco-Chunk' is missing"):
            await get_blob(two, "UP", blob, timeout_s=0.3)
        await put_blob(one, "up.a", payload, chunk_bytes=512)
        assert await get_blob(two, "UP", blob, timeout_s=10) == payload


@pytest.mark.parametrize("chunks", [{0}, {1, 3}, {4}])
async def test_what_was_damaged_on_its_way_is_read_again(
    open_buses: Open, monkeypatch: pytest.MonkeyPatch, chunks: set[int]
) -> None:
    check, damaged = Incoming.check, set(chunks)

    def once_wrong(incoming: Incoming, index: int) -> bool:
        if index in damaged:
            damaged.remove(index)
            return False
        return check(incoming, index)

    monkeypatch.setattr(Incoming, "check", once_wrong)
    payload = random.Random(1).randbytes(5000)
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        blob = await put_blob(one, "up.a", payload, chunk_bytes=1000)
        assert await get_blob(two, "UP", blob, timeout_s=10) == payload
        assert not damaged and two.traffic.refused["chunk", "check"] == len(chunks)


async def test_getting_waits_for_late_chunks(open_buses: Open) -> None:
    payload = bytes(5000)
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        blob = cut("up.a", payload, chunk_bytes=1000).blob
        getting = asyncio.ensure_future(get_blob(two, "UP", blob, timeout_s=20))
        await asyncio.sleep(0)
        await put_blob(one, "up.a", payload, chunk_bytes=1000)
        assert await getting == payload


async def test_a_full_stream_is_waited_for(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(StreamSpec("UP", ("up.>",), 100_000))
        await one.append("up.old", bytes(60_000))
        put = partial(put_blob, one, "up.a", bytes(80_000), chunk_bytes=10_000)
        progress = TransferProgress()
        with pytest.raises(GaveUp, match=r"3 of 8 chunks stored.*maximum bytes exceeded"):
            await put(deadline_s=0.5, progress=progress)
        putting = asyncio.ensure_future(put(deadline_s=20, progress=progress))
        await asyncio.sleep(0)
        assert await two.purge("UP", "up.old") == 1
        blob = await putting
        assert await get_blob(two, "UP", blob, timeout_s=10) == bytes(80_000)


async def test_an_impossible_manifest_is_refused(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        blob = cut("up.a", bytes(1000), chunk_bytes=100).blob.model_copy(update={"chunks": 11})
        with pytest.raises(BlobIncomplete, match="impossible manifest"):
            await get_blob(one, "UP", blob, timeout_s=1)


async def test_lost_requests_and_answers_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "PAUSES_S", (0.0, 0.0))
    fates = random.Random(7)
    broker = MemoryBroker(
        fault=lambda _, operation, __: (
            fates.choice(["deliver", "lose_request", "lose_answer"])
            if operation == "append"
            else "deliver"
        )
    )
    bus = MemoryBus(broker, "one")
    await bus.ensure_stream(SPEC)
    payload = fates.randbytes(20_000)
    blob = await put_blob(bus, "up.a", payload, chunk_bytes=1000)
    assert await get_blob(bus, "UP", blob, timeout_s=10) == payload
    assert (await bus.stream_info("UP")).messages == 20


async def test_what_moves_is_not_given_up_however_long_it_takes() -> None:
    """At every look there is more: patience begins again."""
    counts = iter(range(50))
    done = asyncio.get_running_loop().create_future()

    def count() -> int:
        found = next(counts, 50)
        if found == 49:
            done.set_result("all")
        return found

    assert await blobs._while_moving(done, count, TransferProgress(), patience_s=0.002) == "all"


async def test_what_waits_for_its_turn_is_not_given_up() -> None:
    done = asyncio.get_running_loop().create_future()
    progress, looks = TransferProgress(queued=True), []

    def count() -> int:
        looks.append(1)
        if len(looks) == 20:
            done.set_result("all")
        return 0

    assert await blobs._while_moving(done, count, progress, patience_s=0.002) == "all"


async def test_silence_ends_putting_and_getting(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(StreamSpec("UP", ("up.>",), 100_000))
        await one.append("up.old", bytes(60_000))
        with pytest.raises(GaveUp, match=r"of 8 chunks stored no more in 0.2 s"):
            await put_blob(one, "up.a", bytes(80_000), chunk_bytes=10_000, patience_s=0.2)
        blob = cut("up.a", bytes(80_000), chunk_bytes=10_000).blob
        with pytest.raises(BlobIncomplete, match=r"no good chunks|nothing received"):
            await get_blob(two, "UP", blob, patience_s=0.2)


async def test_what_came_is_not_fetched_again_by_the_next_attempt(open_buses: Open) -> None:
    payload = random.Random(3).randbytes(5000)
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        outgoing = cut("up.a", payload, chunk_bytes=1000)
        for index in (0, 1, 3):
            await one.append("up.a", bytes(outgoing.data(index)), headers=outgoing.headers(index))
        into, here = receiving(two, outgoing.blob), asyncio.Event()

        def moved(count: int) -> None:
            if count == 3:
                here.set()

        first = asyncio.ensure_future(get_blob(two, "UP", outgoing.blob, into=into, moved=moved))
        await here.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await one.purge("UP", "up.a")
        for index in (2, 4):
            await one.append("up.a", bytes(outgoing.data(index)), headers=outgoing.headers(index))
        assert await get_blob(two, "UP", outgoing.blob, into=into, timeout_s=20) == payload


async def test_an_announced_payload_is_fetched_while_it_is_sent(open_buses: Open) -> None:
    """The receiver has its first chunks before the sender has sent the last."""
    payload = random.Random(4).randbytes(20_000)
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        getting: list[asyncio.Task[memoryview]] = []

        async def announce(blob: Blob) -> None:
            assert not await two.fetch("UP", "up.a"), "before the first chunk"
            getting.append(asyncio.create_task(get_blob(two, "UP", blob, timeout_s=20)))

        await put_blob(one, "up.a", payload, chunk_bytes=1000, announce=announce)
        assert await getting[0] == payload
