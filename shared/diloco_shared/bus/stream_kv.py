"""Key-value buckets on streams: compare-and-set, per-key lifetimes and a watch that polls.

A bucket is the stream `KV_<bucket>` with one message per subject `$KV.<bucket>.<key>`, as every
NATS client understands it. nats-py's own KV cannot set a lifetime on `put` or `update`. The
in-memory bus uses the same code, so that both buses agree.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from diloco_shared.bus.port import Conflict, KeyEntry, Stored, StreamInfo, Unavailable
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.protocol import subjects

# Deletion markers stay this long: watchers read them at once, and polls do not need them.
MARKER_S = 60
POLL_S = 2.0
# Buckets of whose keys none expires, and in which sites write beside each other: there no header of
# a message may remove other keys.
LASTING = (subjects.INCARNATIONS, subjects.SHARDS)
# The same goes for members, where sites have credentials of their own. Their keys expire without a
# marker there, since the server writes markers only where headers may remove keys: the poll of a
# watch finds within POLL_S that one is gone.
UNMARKED = (*LASTING, subjects.MEMBERS)
# Of a key that sites write: a record of them has a few hundred bytes.
VALUE_BYTES_MAX = 64 << 10
# Changes waiting for a slow watcher; the pump pauses beyond, and the stream keeps the newest.
_WATCH_LIMIT = 1024
# A creation meets a marker, replaces it, and may meet another: each time somebody made progress.
_CREATE_TRIES = 5


class RawStreams(Protocol):
    """What buckets need of streams; messages come with the server's own headers."""

    async def ensure(self, config: dict[str, Any]) -> None: ...

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: dict[str, str] | None = None,
        expect_last: int | None = None,
    ) -> int:
        """Store a message; its sequence in the stream. See `Bus.append`."""

    async def last_raw(self, stream: str, subject: str) -> Stored | None: ...

    async def fetch_raw(self, stream: str, subject: str, *, start_seq: int = 1) -> list[Stored]: ...

    def read_raw(
        self, stream: str, subject: str, *, start_seq: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Stored]]: ...

    async def stream_info(self, stream: str) -> StreamInfo: ...

    @property
    def life(self) -> str: ...


def ttl_header(ttl_s: float | None) -> dict[str, str]:
    """The server counts whole seconds, at least one: rounded up."""
    return {} if ttl_s is None else {"Nats-TTL": f"{max(1, math.ceil(ttl_s))}s"}


class _Another(Conflict):
    """Of a key that says something else than was expected: what is `found` there."""

    def __init__(self, text: str, found: Stored | None) -> None:
        super().__init__(text)
        self.found = found


class StreamKv(RawStreams):
    """A client's bucket calls, on its own streams. See `bus.Bus` for what each promises."""

    @property
    def named(self) -> bool:
        return False

    async def ensure_bucket(self, bucket: str, *, replicas: int = 1) -> None:
        """As `bus.Bus.ensure_bucket`: a stream that keeps the newest message of every key."""
        unmarked = UNMARKED if self.named else LASTING
        expiring = bucket not in unmarked
        await self.ensure(
            {
                "name": bucket_stream(bucket),
                "subjects": [_subject(bucket, ">")],
                "retention": "limits",
                "storage": "file",
                "discard": "new",
                "max_bytes": -1,
                "max_msgs": -1,
                "max_msgs_per_subject": 1,
                "max_msg_size": VALUE_BYTES_MAX if self.named and bucket in UNMARKED else -1,
                "max_consumers": -1,
                "max_age": 0,
                "num_replicas": replicas,
                "deny_delete": True,
                "allow_direct": True,
                "allow_rollup_hdrs": expiring,  # markers take it
                "allow_msg_ttl": True,
                "subject_delete_marker_ttl": MARKER_S * 1_000_000_000 if expiring else 0,
                "duplicate_window": 120 * 1_000_000_000,
            }
        )

    async def kv_get(self, bucket: str, key: str) -> KeyEntry | None:
        message = await self.last_raw(bucket_stream(bucket), _subject(bucket, key))
        return None if message is None or _is_marker(message) else _entry(bucket, message)

    async def kv_create(
        self, bucket: str, key: str, value: bytes, *, ttl_s: float | None = None
    ) -> int:
        """As `bus.Bus.kv_create`; it replaces the marker of a key that was deleted or expired."""
        expected = 0
        for _ in range(_CREATE_TRIES):
            try:
                return await self._kv_write(bucket, key, value, ttl_s, expected)
            except _Another as other:
                if other.found is not None and not _is_marker(other.found):
                    raise
                expected = 0 if other.found is None else other.found.seq
        raise Conflict(f"key {key} of bucket {bucket} is being created and deleted by others")

    async def kv_put(
        self, bucket: str, key: str, value: bytes, *, ttl_s: float | None = None
    ) -> int:
        return await self._kv_write(bucket, key, value, ttl_s, None)

    async def kv_update(
        self, bucket: str, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
    ) -> int:
        return await self._kv_write(bucket, key, value, ttl_s, revision)

    async def kv_delete(self, bucket: str, key: str, *, revision: int | None = None) -> int:
        headers, place = {"KV-Operation": "DEL", **ttl_header(MARKER_S)}, self._written(bucket, key)
        return await self.append(place, b"", headers=headers, expect_last=revision)

    async def kv_all(self, bucket: str, key: str = ">") -> dict[str, KeyEntry]:
        found = await self.fetch_raw(bucket_stream(bucket), _subject(bucket, key))
        entries = [_entry(bucket, message) for message in found]
        return {entry.key: entry for entry in entries if entry.value is not None}

    async def _kv_write(
        self, bucket: str, key: str, value: bytes, ttl_s: float | None, expected: int | None
    ) -> int:
        try:
            return await self.append(
                self._written(bucket, key), value, headers=ttl_header(ttl_s), expect_last=expected
            )
        except Conflict as conflict:
            found = await self.last_raw(bucket_stream(bucket), _subject(bucket, key))
            if expected != (0 if found is None else found.seq):
                raise _Another(str(conflict), found) from None
            # A hub of several nodes takes one write of a key at a time. While most of its nodes are
            # away, the first one waits for them, perhaps this process's own: nobody else wrote.
            text = f"key {key} of bucket {bucket}: an earlier write of it is on its way"
            raise Unavailable(text) from None

    def _written(self, bucket: str, key: str) -> str:
        return f"{subjects.HUB_KEYS}.{bucket}.{key}" if self.named else _subject(bucket, key)

    @asynccontextmanager
    async def kv_watch(self, bucket: str, key: str = ">") -> AsyncIterator[AsyncIterator[KeyEntry]]:
        watch = Watch(self, bucket, key)
        pump = asyncio.create_task(watch.pump(), name=f"watch {bucket} {key}")
        try:
            yield watch
        finally:
            pump.cancel()
            await asyncio.wait({pump})  # which hides no cancellation of ours


class Watch:
    """Changes of a bucket in order of revision, read from its stream and checked by polling.

    Reading brings every change at once. Polling every POLL_S seconds finds what reading missed:
    first by the stream's sizes alone, then, if those changed, by what is new, and by all keys where
    one is missing. It also finds that the stream is a copy from a backup, or a new one, whose
    numbers are lower; and that the server was started anew, since then it may be such a copy. All
    is told again then.
    """

    def __init__(self, bus: StreamKv, bucket: str, key: str) -> None:
        self._bus = bus
        self._bucket = bucket
        self._key = key
        self._seen: dict[str, KeyEntry] = {}
        self._waiting: deque[KeyEntry] = deque()
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._sizes: StreamInfo | None = None
        # Keys of all that the stream held by these sizes; None where that is not known.
        self._held: set[str] | None = None
        self._life = bus.life  # of the server that was looked at last
        self._unsure = False  # until all is told again: of what else others know of the bucket
        self._ended = False
        self._fault: Exception | None = None

    def __aiter__(self) -> AsyncIterator[KeyEntry]:
        return self

    async def __anext__(self) -> KeyEntry:
        while not self._waiting:
            if self._fault is not None:
                raise self._fault
            if self._ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        entry = self._waiting.popleft()
        if len(self._waiting) < _WATCH_LIMIT:
            self._room.set()
        return entry

    async def pump(self) -> None:
        """Read and poll until cancelled or the connection is closed.

        A fault (not of the bus, which is survived) ends the iteration by being raised there.
        """
        poller = asyncio.create_task(self._poll_for_ever(), name=f"poll {self._bucket}")
        poller.add_done_callback(self._failed)
        try:
            async with self._bus.read_raw(
                bucket_stream(self._bucket), _subject(self._bucket, self._key), start_seq=1
            ) as messages:
                async for message in messages:
                    await self._room.wait()
                    self._offer(_entry(self._bucket, message))
        except Exception as error:
            self._fault = error
        finally:
            self._ended = True
            self._ready.set()
            poller.cancel()
            await asyncio.wait({poller})

    def _failed(self, poller: "asyncio.Task[None]") -> None:
        """Polling ends by a fault alone: without it, whoever falls silent is missed by nobody."""
        fault = None if poller.cancelled() else poller.exception()
        if isinstance(fault, Exception):
            self._fault = self._fault or fault
            self._ready.set()

    def _offer(self, entry: KeyEntry) -> None:
        last = self._seen.get(entry.key)
        if last is not None and last.revision >= entry.revision:
            return
        anew = self._unsure if last is None else last.revision < 0
        self._remember(entry)
        # Of a key never seen alive too: whoever asked for all keys before may know it from there.
        if entry.value is not None or last is None or last.value is not None:
            self._waiting.append(replace(entry, anew=anew))
            self._ready.set()
            if len(self._waiting) >= _WATCH_LIMIT:
                self._room.clear()

    def _remember(self, entry: KeyEntry) -> None:
        """Keys and revisions only; a key that is gone is forgotten once its marker is, too."""
        value = None if entry.value is None else b""
        self._seen[entry.key] = KeyEntry(entry.key, value, entry.revision)

    def _begin_anew(self) -> None:
        """Whatever is found now is newer than what was seen, whatever its revision."""
        self._unsure = True
        self._seen = {k: replace(entry, revision=-1) for k, entry in self._seen.items()}

    async def _poll_for_ever(self) -> None:
        await asyncio.sleep(POLL_S)  # the reader begins with what is there
        await again_and_again(self._poll, f"poll of {self._bucket}", POLL_S)

    async def _poll(self) -> None:
        life = self._bus.life
        sizes = await self._bus.stream_info(bucket_stream(self._bucket))
        if sizes == self._sizes and life == self._life:
            return
        lower = self._sizes is not None and sizes.last_seq < self._sizes.last_seq
        # Or the bucket is as it was in the backup, and what its keys speak of is not.
        if lower or life != self._life:
            self._begin_anew()
        elif await self._poll_new(sizes):
            return
        self._held = None
        found = await self._bus.kv_all(self._bucket, self._key)
        for entry in sorted(found.values(), key=lambda entry: entry.revision):
            await self._room.wait()
            self._offer(entry)
        for gone in [e for k, e in self._seen.items() if k not in found and e.value is not None]:
            # Written after the poll looked: the reader brings it.
            if gone.revision > sizes.last_seq:
                continue
            now = await self._bus.kv_get(self._bucket, gone.key)
            if now is None and self._seen.get(gone.key) == gone:
                await self._room.wait()
                self._offer(KeyEntry(gone.key, None, gone.revision + 1))
        # Only now: if it failed on the way, the next poll begins anew as well.
        self._life, self._unsure = life, False
        newest = max((entry.revision for entry in found.values()), default=0)
        # No marker is among them, and nothing was written since the sizes were told.
        whole = self._key == ">" and len(found) == sizes.messages and newest <= sizes.last_seq
        self._looked(sizes, set(found) if whole else None)

    async def _poll_new(self, sizes: StreamInfo) -> bool:
        """Offer what was written since the last poll; False if all keys must be looked at.

        A key that ended without a word leaves fewer messages than there would be with it.
        """
        if self._sizes is None or self._held is None:
            return False
        stream, every = bucket_stream(self._bucket), _subject(self._bucket, self._key)
        messages = await self._bus.fetch_raw(stream, every, start_seq=self._sizes.last_seq + 1)
        entries = [_entry(self._bucket, message) for message in messages]
        held = self._held | {e.key for e in entries if e.revision <= sizes.last_seq}
        if len(held) != sizes.messages or any(e.key not in held for e in entries):
            return False
        for entry in entries:
            await self._room.wait()
            self._offer(entry)
        self._looked(sizes, held)
        return True

    def _looked(self, sizes: StreamInfo, held: set[str] | None) -> None:
        """A poll is done. What ended is forgotten once its marker is."""
        for key, entry in [*self._seen.items()]:
            if entry.value is None and entry.revision < sizes.first_seq:
                del self._seen[key]
        self._sizes, self._held = sizes, held


def bucket_stream(bucket: str) -> str:
    """The stream that holds a bucket's keys."""
    return f"KV_{bucket}"


def _subject(bucket: str, key: str) -> str:
    return f"{subjects.KEYS}.{bucket}.{key}"


def _is_marker(message: Stored) -> bool:
    headers = message.headers
    return headers.get("KV-Operation", "PUT") != "PUT" or "Nats-Marker-Reason" in headers


def _entry(bucket: str, message: Stored) -> KeyEntry:
    key = message.subject.removeprefix(_subject(bucket, ""))
    return KeyEntry(key, None if _is_marker(message) else message.payload, message.seq)
