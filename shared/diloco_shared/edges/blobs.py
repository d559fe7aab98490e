"""Sending and fetching large payloads over a bus.

    bus = await NatsBus.connect(url, name="a-data", connections=4, uplink_bytes_per_s=50e6)
    blob = await put_blob(bus, subject, payload, deadline_s=60)
    await bus.append(manifest_subject(subject), manifest_with(blob))
    ...
    payload = await get_blob(bus, stream, blob, timeout_s=60)

Over NATS the chunks take the bus's lanes (`lanes.py`); elsewhere `append` and `fetch`. Either way
every chunk is stored once, and fetched until it is good, whatever happens to connections and server
in between. A subject carries one content: what was purged and is put again under the same subject
within two minutes is taken for a repeat by the server, and not stored.

Memory: the sender needs the payload and nothing beside it, the receiver one buffer of its size.

The chunks of a blob are messages on exactly `blob.subject`; the manifest, appended last by the
caller on `<subject>.m`, names the chunk set that counts. A reader therefore follows only `*.m` and
fetches the chunks of what it wants. That costs one more round trip per blob, and the server reads
the chunks from its store (mostly the page cache) instead of handing them through; it saves every
reader from receiving blobs it does not want, from reassembly across restarts, and from holding
more than one blob at a time.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from diloco_shared.edges.buffers import Buffers
from diloco_shared.edges.bus import Bus, BusError, Progress, StreamFull, Unavailable
from diloco_shared.protocol.chunks import (
    CHUNK_BYTES,
    Buffer,
    ChunkError,
    Incoming,
    Outgoing,
    cut,
)
from diloco_shared.protocol.messages import Blob
from diloco_shared.protocol.pace import Pace

# Chunks that put_blob has unanswered at most, over all connections: 32 MiB, 1 Gbit/s times a
# quarter of a second. It uses fewer where fewer fill the link.
WINDOW = 64
# Chunks asked for at once by get_blob over a bus without lanes: 16 of 512 KiB are what it keeps on
# its way (8 MiB); fewer on a slow link, where much on its way would delay all else.
FETCH_CHUNKS_MAX = 16
FETCH_S = 1.0
BACKOFF_S = (0.2, 0.4, 0.8, 1.6, 2.0)
# Below this, hashing is cheaper than handing it to a thread (about 1 ms).
_HASH_INLINE_BYTES = 1 << 20


# One for the process: whoever fetches next uses it.
_buffers = Buffers()

_T = TypeVar("_T")


class BlobIncomplete(BusError):
    """Chunks of a blob are gone (purged) or never came; or what is there is not the blob."""


class GaveUp(Unavailable):
    """A blob could not be stored before its deadline; some of its chunks may be."""


def manifest_subject(subject: str) -> str:
    """Where the manifest of the blob on `subject` goes."""
    return f"{subject}.m"


async def put_blob(
    bus: Bus,
    subject: str,
    payload: Buffer,
    *,
    window: int = WINDOW,
    chunk_bytes: int = CHUNK_BYTES,
    deadline_s: float | None = None,
    chunk_timeout_s: float = 5.0,
) -> Blob:
    """Store the chunks of `payload` on `subject`; return the Blob for the manifest.

    At most `window` chunks are unanswered at a time (at least bandwidth times round trip, and on a
    slow link as few as it takes to keep it busy). A chunk without an answer within
    `chunk_timeout_s` seconds (more on a link that is known to be slow), or refused because the
    stream is full, is sent again under the same message id until `deadline_s` seconds have passed
    since the call; then raises GaveUp. `None` repeats until cancelled. A chunk resent after the
    server's two-minute memory of message ids is stored twice, which readers do not notice. Raises
    Refused when the server will never take it.
    """
    outgoing = await _off_loop(len(payload), lambda: cut(subject, payload, chunk_bytes=chunk_bytes))
    blob = outgoing.blob
    progress = Progress()
    try:
        async with asyncio.timeout(deadline_s):
            if bus.lanes is not None:
                await bus.lanes.send(
                    outgoing, progress, window=window, chunk_timeout_s=chunk_timeout_s
                )
            else:
                await _append(bus, outgoing, progress, Pace(window, chunk_timeout_s))
    except TimeoutError:
        raise GaveUp(
            f"{subject}: {progress.stored} of {blob.chunks} chunks stored within {deadline_s:g} s"
            f"; last trouble: {progress.trouble or 'none, the link is too slow'}"
        ) from None
    return blob


async def _append(bus: Bus, outgoing: Outgoing, progress: Progress, pace: Pace) -> None:
    """Store every chunk by `bus.append`."""
    sending = _Sending(bus, outgoing, progress, pace)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(pace.window_max, outgoing.blob.chunks)):
                group.create_task(sending.send_chunks())
    except ExceptionGroup as group_error:
        # Every sender that fails, fails for the same reason: the first speaks for all.
        raise group_error.exceptions[0] from None


class _Sending:
    """One blob on its way: several `send_chunks` share its indices and its pace."""

    def __init__(self, bus: Bus, outgoing: Outgoing, progress: Progress, pace: Pace) -> None:
        self._progress = progress
        self._bus = bus
        self._outgoing = outgoing
        self._pace = pace
        self._indices = iter(range(outgoing.blob.chunks))
        self._flying = 0
        self._landed = asyncio.Event()

    async def send_chunks(self) -> None:
        for index in self._indices:
            tries = 0
            while not await self._send(index):
                await asyncio.sleep(BACKOFF_S[min(tries, len(BACKOFF_S) - 1)])
                tries += 1
            self._progress.stored += 1

    async def _send(self, index: int) -> bool:
        """Send one chunk when the window has room for it; whether it was stored."""
        while self._flying >= self._pace.window:
            self._landed.clear()
            await self._landed.wait()
        timeout_s = self._pace.timeout_s
        self._flying += 1
        began = time.monotonic()
        try:
            await self._bus.append(
                self._outgoing.blob.subject,
                bytes(self._outgoing.data(index)),
                headers=self._outgoing.headers(index),
                msg_id=self._outgoing.message_id(index),
                timeout_s=timeout_s,
            )
        except (Unavailable, StreamFull) as error:
            self._progress.trouble = str(error)
            # Only silence says something about the link; a refusal came quickly.
            if (now := time.monotonic()) - began >= timeout_s:
                self._pace.timed_out(began, now)
            return False
        else:
            self._pace.answered(time.monotonic() - began)
            return True
        finally:
            self._flying -= 1
            self._landed.set()


async def get_blob(bus: Bus, stream: str, blob: Blob, *, timeout_s: float) -> memoryview:
    """Fetch and verify the payload of `blob` from `stream`: `blob.bytes` bytes, not copied.

    The memory is used for another payload once nothing refers to what is returned, nor to an array
    or a slice of it; so keep no raw address of it.

    Tries again while the bus is unavailable or chunks are missing, until `timeout_s` seconds have
    passed; then raises BlobIncomplete (which says what is missing) or Unavailable. What came
    beside the good chunks is counted in the bus's `traffic.refused`.
    """
    try:
        incoming = Incoming(blob, _buffers.take)
    except ChunkError as error:
        bus.traffic.count_refused("manifest", "impossible")
        raise BlobIncomplete(f"{blob.subject}: impossible manifest: {error}") from None
    trouble: BusError = BlobIncomplete(f"{blob.subject}: nothing received in {timeout_s:g} s")
    progress, tries = Progress(), -1
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                received = incoming.received
                try:
                    if bus.lanes is not None:
                        await bus.lanes.receive(stream, incoming, progress)
                    else:
                        await _fetch(bus, stream, incoming)
                except Unavailable as error:
                    trouble = error
                else:
                    if incoming.complete:
                        return incoming.finish()
                    fault = f" ({incoming.fault})" if incoming.fault else ""
                    trouble = BlobIncomplete(
                        f"{blob.subject}: no good chunks {incoming.missing()} of "
                        f"{blob.chunks} in {stream}{fault}"
                    )
                tries = 0 if incoming.received > received else tries + 1
                await asyncio.sleep(BACKOFF_S[min(tries, len(BACKOFF_S) - 1)])
    except TimeoutError:
        raise trouble from None
    except ChunkError as error:
        raise BlobIncomplete(str(error)) from None
    finally:
        for reason, count in incoming.refused.items():
            bus.traffic.count_refused("chunk", reason, count)


async def _fetch(bus: Bus, stream: str, incoming: Incoming) -> None:
    """One pass over the chunks' subject by `bus.fetch`."""
    start_seq, limit = 1, 2
    while not incoming.complete:
        began = time.monotonic()
        batch = await bus.fetch(stream, incoming.blob.subject, start_seq=start_seq, limit=limit)
        if not batch:
            break
        slow = time.monotonic() - began > FETCH_S
        limit = max(1, limit // 2) if slow else min(FETCH_CHUNKS_MAX, limit * 2)
        for message in batch:
            incoming.take(message.headers, message.payload)
        start_seq = batch[-1].seq + 1


async def _off_loop(size: int, work: Callable[[], _T]) -> _T:
    """Run `work`, which hashes `size` bytes, in a thread when the loop would feel it."""
    if size <= _HASH_INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)
