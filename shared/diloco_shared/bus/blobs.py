"""Sending and fetching large payloads over a bus.

    bus = await NatsBus.connect(url, name="a-data", connections=4, uplink_bytes_per_s=50e6)
    blob = await put_blob(bus, subject, payload)
    await bus.append(manifest_subject(subject), manifest_with(blob))
    ...
    payload = await get_blob(bus, stream, blob)

Over NATS the chunks take the bus's lanes (`nats/lanes.py`); elsewhere `append` and `fetch`. Either
way every chunk is stored once, and fetched until it is good, whatever happens to connections and
server in between. Nobody gives up what moves: the limit is silence (`protocol.pace`), and what came
is kept for the next attempt (`receiving`). What is put again with the progress of the first time is
taken for a repeat by the server, for two minutes, and not stored where it is there; without it, it
is a send of its own, and stored again.

Memory: the sender needs the payload and nothing beside it, the receiver one buffer of its size.

The chunks of a blob are messages on exactly `blob.subject`; the manifest, appended last by the
caller on `<subject>.m`, names the chunk set that counts. A reader therefore follows only `*.m` and
fetches the chunks of what it wants. That costs one more round trip per blob, and the server reads
the chunks from its store (mostly the page cache) instead of handing them through; it saves every
reader from receiving blobs it does not want, from reassembly across restarts, and from holding
more than one blob at a time.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError, Lanes, StreamFull, TransferProgress, Unavailable
from diloco_shared.bus.repeating import pause_after
from diloco_shared.memory.buffers_io import Buffers
from diloco_shared.memory.pages import pages
from diloco_shared.protocol.chunks import (
    CHUNK_BYTES,
    ChunkError,
    Incoming,
    Outgoing,
    Payload,
    cut,
)
from diloco_shared.protocol.messages import Blob
from diloco_shared.protocol.pace import Pace, silence_s

# Chunks that put_blob has unanswered at most, over all connections: 32 MiB, 1 Gbit/s times a
# quarter of a second. It uses fewer where fewer fill the link.
WINDOW = 64
# Chunks asked for at once by get_blob over a bus without lanes: 16 of 512 KiB are what it keeps on
# its way (8 MiB); fewer on a slow link, where much on its way would delay all else.
FETCH_CHUNKS_MAX = 16
FETCH_S = 1.0
# First and longest pause before a chunk is sent, or what is missing asked for, once more.
PAUSES_S = (0.2, 2.0)
# Between two looks at whether a transfer moves, in seconds.
LOOK_S = 0.5
# Below this, hashing is cheaper than handing it to a thread (about 1 ms).
_HASH_INLINE_BYTES = 1 << 20


# One for the process: whoever fetches next uses it.
_buffers = Buffers()
_sends = itertools.count(1)

_T = TypeVar("_T")


class BlobIncomplete(BusError):
    """Chunks of a blob are gone (purged) or never came; or what is there is not the blob."""


class GaveUp(Unavailable):
    """A blob could not be stored before its deadline; some of its chunks may be."""


class _StandsStill(TimeoutError):
    """Nothing moved for as long as anybody would wait."""


def manifest_subject(subject: str) -> str:
    """Where the manifest of the blob on `subject` goes."""
    return f"{subject}.m"


def announcement_subject(subject: str) -> str:
    """Where a manifest goes that is told before the chunks on `subject` are sent."""
    return f"{subject}.a"


async def put_blob(
    bus: Bus,
    subject: str,
    payload: Payload,
    *,
    window: int = WINDOW,
    chunk_bytes: int | None = None,
    deadline_s: float | None = None,
    patience_s: float | None = None,
    chunk_timeout_s: float = 5.0,
    progress: TransferProgress | None = None,
    announce: Callable[[Blob], Awaitable[None]] | None = None,
    only: Sequence[int] | None = None,
) -> Blob:
    """Store the chunks of `payload` on `subject`; return the Blob for the manifest.

    At most `window` chunks are unanswered at a time (at least bandwidth times round trip, and on a
    slow link as few as it takes to keep it busy). A chunk without an answer within
    `chunk_timeout_s` seconds (more on a link that is known to be slow), or refused because the
    stream is full, is sent again under the same message id: until `deadline_s` seconds have passed
    since the call, or `patience_s` seconds without one more chunk stored; then raises GaveUp.
    `None` twice repeats until cancelled. A chunk resent after the server's two-minute memory of
    message ids is stored twice, which readers do not notice. Raises Refused when the server will
    never take it. `chunk_bytes` None: CHUNK_BYTES.

    `progress` is filled in meanwhile: how far it is, and whether the stream is full. `announce` is
    awaited before the first chunk, with the Blob:
    for whoever begins to fetch while it is being sent. `only`: no other chunks are sent, since the
    server has them.
    """
    size = chunk_bytes or CHUNK_BYTES
    outgoing = await _off_loop(len(payload), lambda: cut(subject, payload, chunk_bytes=size))
    if announce is not None:
        await announce(outgoing.blob)
    await put_chunks(
        bus,
        outgoing,
        range(outgoing.blob.chunks) if only is None else only,
        window=window,
        deadline_s=deadline_s,
        patience_s=patience_s,
        chunk_timeout_s=chunk_timeout_s,
        progress=progress,
    )
    return outgoing.blob


async def put_chunks(
    bus: Bus,
    outgoing: Outgoing,
    chunks: Sequence[int],
    *,
    window: int = WINDOW,
    deadline_s: float | None = None,
    patience_s: float | None = None,
    chunk_timeout_s: float = 5.0,
    progress: TransferProgress | None = None,
) -> None:
    """Store these chunks of a payload that is cut already: what `put_blob` does then.

    Others store the rest, or have: nobody may name the payload in a manifest before all are there.
    """
    blob = outgoing.blob
    progress = TransferProgress() if progress is None else progress
    progress.number = progress.number or next(_sends)
    progress.stored = blob.chunks - len(chunks)
    sending = send_all(bus, bus.lanes, outgoing, chunks, progress, window, chunk_timeout_s)
    try:
        async with asyncio.timeout(deadline_s):
            await _while_moving(sending, lambda: progress.stored, progress, patience_s)
    except TimeoutError as error:
        still = isinstance(error, _StandsStill)
        limit = f"no more in {patience_s:g} s" if still else f"within {deadline_s:g} s"
        raise GaveUp(
            f"{blob.subject}: {progress.stored} of {blob.chunks} chunks stored {limit}"
            f"; last trouble: {progress.trouble or 'none, the link is too slow'}"
        ) from None


async def send_all(
    bus: Bus,
    lanes: Lanes | None,
    outgoing: Outgoing,
    chunks: Sequence[int],
    progress: TransferProgress,
    window: int,
    chunk_timeout_s: float,
) -> None:
    """Store these chunks, repeating what gets no answer until cancelled. Raises Refused."""
    if lanes is not None:
        await lanes.send(outgoing, chunks, progress, window=window, chunk_timeout_s=chunk_timeout_s)
    else:
        await _append(bus, outgoing, chunks, progress, Pace(window, chunk_timeout_s))


async def _while_moving(
    work: Awaitable[_T],
    count: Callable[[], int],
    progress: TransferProgress,
    patience_s: float | None,
) -> _T:
    """The result of `work`; _StandsStill once `count` has not grown for `patience_s` seconds.

    While other payloads are before it in the queue for the lanes, nobody can blame it.
    """
    if patience_s is None:
        return await work
    clock = asyncio.get_running_loop().time
    task = asyncio.ensure_future(work)
    seen, moved_at = count(), clock()
    try:
        while True:
            await asyncio.wait({task}, timeout=min(LOOK_S, patience_s / 2))
            if task.done():
                return task.result()
            if progress.queued or count() > seen:
                seen, moved_at = count(), clock()
            elif clock() - moved_at > patience_s:
                raise _StandsStill
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _append(
    bus: Bus, outgoing: Outgoing, chunks: Sequence[int], progress: TransferProgress, pace: Pace
) -> None:
    """Store chunks by `bus.append`."""
    sending = _Sending(bus, outgoing, chunks, progress, pace)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(pace.window_max, len(chunks))):
                group.create_task(sending.send_chunks())
    except ExceptionGroup as group_error:
        # Every sender that fails, fails for the same reason: the first speaks for all.
        raise group_error.exceptions[0] from None


class _Sending:
    """One blob on its way: several `send_chunks` share its indices and its pace."""

    def __init__(
        self,
        bus: Bus,
        outgoing: Outgoing,
        chunks: Sequence[int],
        progress: TransferProgress,
        pace: Pace,
    ) -> None:
        self._progress = progress
        self._bus = bus
        self._outgoing = outgoing
        self._pace = pace
        self._indices = iter(chunks)
        self._flying = 0
        self._landed = asyncio.Event()

    async def send_chunks(self) -> None:
        for index in self._indices:
            failures = 0
            while not await self._send(index):
                failures += 1
                await asyncio.sleep(pause_after(failures, PAUSES_S))

    async def _send(self, index: int) -> bool:
        """Send one chunk when the window has room for it; whether it was stored."""
        while self._flying >= self._pace.window:
            self._landed.clear()
            await self._landed.wait()
        timeout_s = self._pace.timeout_s
        self._flying += 1
        # As of now: it may be another one that answers, then this is sent once more for nothing.
        began, life = ambient.monotonic(), self._bus.life
        try:
            await self._bus.append(
                self._outgoing.blob.subject,
                bytes(self._outgoing.data(index)),
                headers=self._outgoing.headers(index),
                msg_id=self._progress.message_id(self._outgoing, index),
                timeout_s=timeout_s,
            )
        except (Unavailable, StreamFull) as error:
            self._progress.trouble = str(error)
            if isinstance(error, StreamFull):
                self._progress.no_room(str(error))
            # Only silence says something about the link; a refusal came quickly.
            if (now := ambient.monotonic()) - began >= timeout_s:
                self._pace.timed_out(began, now)
            return False
        else:
            self._pace.answered(ambient.monotonic() - began)
            self._progress.chunk(index, life)
            return True
        finally:
            self._flying -= 1
            self._landed.set()


def fresh(size: int) -> memoryview:
    """Memory for `get_blob` that is not used again: for what is kept for long."""
    return pages(size)


def receiving(bus: Bus, blob: Blob, take: Callable[[int], memoryview] | None = None) -> Incoming:
    """Room for the payload of `blob`, for `get_blob` to fill, in one attempt or several.

    Raises BlobIncomplete for a blob that cannot be.
    """
    try:
        return Incoming(blob, take or _buffers.take)
    except ChunkError as error:
        bus.traffic.count_refused("manifest", "impossible")
        raise BlobIncomplete(f"{blob.subject}: impossible manifest: {error}") from None


async def get_blob(
    bus: Bus,
    stream: str,
    blob: Blob,
    *,
    timeout_s: float | None = None,
    patience_s: float | None = None,
    into: Incoming | None = None,
    moved: Callable[[int], None] | None = None,
    take: Callable[[int], memoryview] | None = None,
) -> memoryview:
    """Fetch and verify the payload of `blob` from `stream`: `blob.bytes` bytes, not copied.

    The memory is used for another payload once nothing refers to what is returned, nor to an array
    or a slice of it (unless `take` is `fresh`); so keep no raw address of it.

    Tries again while the bus is unavailable or chunks are missing, until `patience_s` seconds have
    passed without one more good chunk (by default what `patience.silence_s` says), or `timeout_s`
    seconds since the call; then raises BlobIncomplete (which says what is missing) or Unavailable.
    `into` is what an earlier attempt left: its good chunks are not fetched again. `moved` is told
    how many chunks are here when there are more, or when others' payloads are before this one.
    What came beside the good chunks is counted in the bus's `traffic.refused`.
    """
    incoming = receiving(bus, blob, take) if into is None else into
    assert incoming.blob == blob, "another payload's memory"
    if patience_s is None:
        patience_s = silence_s(min(blob.chunk_bytes, blob.bytes))
    fetching = _Fetching(bus, stream, incoming, moved)
    before = incoming.refused.copy()
    try:
        async with asyncio.timeout(timeout_s):
            await _while_moving(fetching.run(), fetching.count, fetching.progress, patience_s)
        return incoming.finish()
    except TimeoutError:
        raise fetching.trouble from None
    except ChunkError as error:
        raise BlobIncomplete(str(error)) from None
    finally:
        for reason, count in (incoming.refused - before).items():
            bus.traffic.count_refused("chunk", reason, count)


async def get_chunks(bus: Bus, stream: str, incoming: Incoming, start_seq: int) -> None:
    """Fetch what is not lent of a payload: it is there, from that stream sequence on.

    Tries again, and gives up, as `get_blob` does; nobody can tell yet whether the whole is good.
    """
    fetching = _Fetching(bus, stream, incoming, None)
    fetching.progress.next_seq = start_seq
    patience_s = silence_s(min(incoming.blob.chunk_bytes, incoming.blob.bytes))
    try:
        await _while_moving(fetching.run(), fetching.count, fetching.progress, patience_s)
    except TimeoutError:
        raise fetching.trouble from None


class _Fetching:
    """One payload on its way here: passes over what the stream holds, until it is complete."""

    def __init__(
        self, bus: Bus, stream: str, incoming: Incoming, moved: Callable[[int], None] | None
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._incoming = incoming
        self._moved = moved
        self.progress = TransferProgress()
        self.trouble: BusError = BlobIncomplete(f"{incoming.blob.subject}: nothing received")
        self._told = 0

    def count(self) -> int:
        """Good chunks here; whoever wants to know is told."""
        received = self._incoming.received
        if self._moved is not None and (received > self._told or self.progress.queued):
            self._told = received
            self._moved(received)
        return received

    async def run(self) -> None:
        failures, life = 0, self._bus.life
        while self._incoming.awaited:
            received = self._incoming.received
            if life != self._bus.life:
                # What a killed server lost, its sender puts again: perhaps below what was read.
                life, self.progress.next_seq = self._bus.life, 1
            try:
                lanes = self._bus.lanes
                await one_pass(self._bus, lanes, self._stream, self._incoming, self.progress)
            except Unavailable as error:
                self.trouble = error
            else:
                if not self._incoming.awaited:
                    return
                self.trouble = self._missing()
            failures = 1 if self._incoming.received > received else failures + 1
            await asyncio.sleep(pause_after(failures, PAUSES_S))

    def _missing(self) -> BlobIncomplete:
        incoming = self._incoming
        fault = f" ({incoming.fault})" if incoming.fault else ""
        return BlobIncomplete(
            f"{incoming.blob.subject}: no good chunks {incoming.missing()} of "
            f"{incoming.blob.chunks} in {self._stream}{fault}"
        )


async def one_pass(
    bus: Bus, lanes: Lanes | None, stream: str, incoming: Incoming, progress: TransferProgress
) -> None:
    """Take in what `stream` holds of a payload from `progress.next_seq` on. Raises Unavailable."""
    if lanes is not None:
        await lanes.receive(stream, incoming, progress)
    else:
        await _fetch(bus, stream, incoming, progress)


async def _fetch(bus: Bus, stream: str, incoming: Incoming, progress: TransferProgress) -> None:
    """One pass over the chunks' subject by `bus.fetch`, from where the last one ended."""
    start_seq, limit, damaged = progress.next_seq, 2, incoming.refused["check"]
    while incoming.awaited:
        began = ambient.monotonic()
        most = min(limit, incoming.awaited)
        batch = await bus.fetch(stream, incoming.blob.subject, start_seq=start_seq, limit=most)
        if not batch:
            break
        slow = ambient.monotonic() - began > FETCH_S
        limit = max(1, limit // 2) if slow else min(FETCH_CHUNKS_MAX, limit * 2)
        for message in batch:
            incoming.take(message.headers, message.payload)
        start_seq = batch[-1].seq + 1
        # What was damaged on its way is read again, by the next pass.
        if incoming.refused["check"] == damaged:
            progress.next_seq = start_seq


async def _off_loop(size: int, work: Callable[[], _T]) -> _T:
    """Run `work`, which hashes `size` bytes, in a thread when the loop would feel it."""
    if size <= _HASH_INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)
