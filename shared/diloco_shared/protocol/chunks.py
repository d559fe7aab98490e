"""Large payloads as small messages: cutting them, and putting them together in place.

    payload --cut--> Outgoing (Blob, a check per chunk) ----wire----> Incoming --finish--> payload

A chunk belongs to (subject, digest of the whole payload): two attempts on one subject with
different content never mix. Chunks may come twice and in any order; a payload is complete only
when every chunk has the right length and check, and the checks together are the digest announced.

The digest of a payload is XXH3-128 over the XXH3-128 digests of its chunks in order: every byte is
hashed once on either side, and a chunk can be judged when it arrives.
"""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from diloco_shared.protocol.messages import Blob

# Larger ones gain nothing and cost the file store; with headers it stays below NATS' default 1 MB.
CHUNK_BYTES = 512 * 1024
# 2 TiB of 512 KiB chunks; bounds what a hostile Blob can make a receiver reserve.
CHUNKS_MAX = 1 << 22

HEADER_INDEX = "Diloco-Chunk"
HEADER_CHECK = "Diloco-Check"
HEADER_DIGEST = "Diloco-Digest"

Buffer = bytes | bytearray | memoryview

CHECK_BYTES = 16
_ABSENT, _UNDER_WAY, _HERE, _LENT = 0, 1, 2, 3


class ChunkError(ValueError):
    """A chunk, or a whole payload, is not what it claims to be; the text says which and why."""


def digest_bytes(data: Buffer) -> str:
    """Of raw bytes: XXH3 of 128 bits, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


class Headed:
    """A payload of a short head and a long body that lie apart in memory, read as if they were one.

    A slice is a view, unless some of the head is in it: so an array is sent behind its header
    without being copied.
    """

    def __init__(self, head: bytes, body: Buffer) -> None:
        self.head = head
        self.body = memoryview(body).cast("B")

    def __len__(self) -> int:
        return len(self.head) + len(self.body)

    def __bytes__(self) -> bytes:
        return b"".join([self.head, self.body])

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, step = part.indices(len(self))
        assert step == 1, "only whole stretches"
        size = len(self.head)
        if start >= size:
            return self.body[start - size : max(stop, start) - size]
        return memoryview(self.head[start:stop] + bytes(self.body[: max(stop - size, 0)]))


class Pieces:
    """A payload of `size` bytes of which some pieces are here, read as if all of it were.

    Each piece is known by where it begins. A slice is a view, unless it goes over several pieces.
    """

    def __init__(self, size: int, pieces: Iterable[tuple[int, Buffer]]) -> None:
        self.size = size
        views = ((start, memoryview(piece).cast("B")) for start, piece in pieces)
        self.pieces = sorted((p for p in views if len(p[1])), key=lambda piece: piece[0])
        self.starts = [start for start, _ in self.pieces]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> memoryview:
        """KeyError where not all of it is here."""
        start, stop, step = part.indices(self.size)
        assert step == 1, "only whole stretches"
        found, at = list[memoryview](), start
        for first, piece in self.pieces[max(bisect_right(self.starts, start) - 1, 0) :]:
            if at >= stop or first > at:
                break
            some = piece[at - first : stop - first]
            found.append(some)
            at += len(some)
        if at < stop:
            raise KeyError(f"of bytes {start} to {stop} of a payload, those from {at} on")
        return found[0] if len(found) == 1 else memoryview(b"".join(found))


Payload = Buffer | Headed


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A payload cut into chunks. Holds the payload, copies nothing.

    Whoever has only some of the pieces, and of the checks, sends only the chunks that they make.
    """

    blob: Blob
    payload: memoryview | Headed | Pieces
    checks: bytes

    def data(self, index: int) -> memoryview:
        """Chunk `index`, a view (a copy of the one that a head is in)."""
        start = index * self.blob.chunk_bytes
        return self.payload[start : start + self.blob.chunk_bytes]

    def headers(self, index: int) -> dict[str, str]:
        """What travels with chunk `index`."""
        check = self.checks[index * CHECK_BYTES : (index + 1) * CHECK_BYTES]
        return {
            HEADER_INDEX: str(index),
            HEADER_CHECK: check.hex(),
            HEADER_DIGEST: self.blob.digest,
        }

    def message_id(self, index: int) -> str:
        """The same for every attempt at the same chunk of the same payload."""
        return f"{self.blob.subject}/{self.blob.digest}/{index}"


def cut(subject: str, payload: Payload, *, chunk_bytes: int = CHUNK_BYTES) -> Outgoing:
    """Cut `payload` and hash it (0.1 s per GB); raises ChunkError for a bad chunk size."""
    if chunk_bytes < 1:
        raise ChunkError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
    view = payload if isinstance(payload, Headed) else memoryview(payload).cast("B")
    chunks = chunk_count(len(view), chunk_bytes)
    if chunks > CHUNKS_MAX:
        raise ChunkError(f"{len(view)} bytes make {chunks} chunks; the limit is {CHUNKS_MAX}")
    return composed(subject, view, checks_of(view, range(chunks), chunk_bytes), chunk_bytes)


def checks_of(
    payload: memoryview | Headed | Pieces, chunks: Iterable[int], chunk_bytes: int
) -> bytes:
    """The checks of these chunks, one after the other."""
    return b"".join(
        xxhash.xxh3_128_digest(payload[n * chunk_bytes : (n + 1) * chunk_bytes]) for n in chunks
    )


def scatter_checks(chunks: int, checks: Iterable[tuple[Sequence[int], Buffer]]) -> bytes:
    """The checks of a payload of so many chunks, each in its place: zeros where none is given.

    `checks`: of some chunks each, as `checks_of` makes them. Raises ChunkError where they are not
    of as many.
    """
    found = bytearray(chunks * CHECK_BYTES)
    for indices, some in checks:
        if len(some) != len(indices) * CHECK_BYTES:
            raise ChunkError(f"{len(some)} bytes are not the checks of {len(indices)} chunks")
        for n, index in enumerate(indices):
            place = index * CHECK_BYTES
            found[place : place + CHECK_BYTES] = some[n * CHECK_BYTES : (n + 1) * CHECK_BYTES]
    return bytes(found)


def composed(
    subject: str, payload: memoryview | Headed | Pieces, checks: bytes, chunk_bytes: int
) -> Outgoing:
    """The same as `cut` makes, of the checks of all chunks."""
    blob = Blob(
        subject=subject,
        bytes=len(payload),
        chunk_bytes=chunk_bytes,
        chunks=chunk_count(len(payload), chunk_bytes),
        digest=digest_bytes(checks),
    )
    return Outgoing(blob, payload, checks)


def describe(subject: str, payload: Payload, *, chunk_bytes: int = CHUNK_BYTES) -> Blob:
    """The Blob that a manifest carries for `payload`, as `cut` makes it."""
    return cut(subject, payload, chunk_bytes=chunk_bytes).blob


class Incoming:
    """One payload being received straight into the memory that `reserve(blob.bytes)` gives.

    Per message: `claim` says where its bytes go, then `settle` judges them. A chunk that is here,
    or that somebody else is receiving, cannot be claimed: nothing overwrites what was judged good.
    `refused` counts by reason what came and was not taken. Chunks that are lent come another way:
    whoever receives here does not wait for them. Not locked: callers in several threads share
    `lock`, which the filling in between does not need.
    """

    def __init__(self, blob: Blob, reserve: Callable[[int], memoryview]) -> None:
        """Raises ChunkError for a blob that cannot be, or be held."""
        if blob.chunk_bytes < 1 or blob.chunks > CHUNKS_MAX:
            raise ChunkError(
                f"{blob.chunks} chunks of {blob.chunk_bytes} bytes are out of range: "
                f"at most {CHUNKS_MAX}"
            )
        if blob.chunks != chunk_count(blob.bytes, blob.chunk_bytes):
            raise ChunkError(
                f"{blob.bytes} bytes are not {blob.chunks} chunks of {blob.chunk_bytes}"
            )
        try:
            self._view = reserve(blob.bytes)
        except (MemoryError, OverflowError, ValueError):
            raise ChunkError(f"{blob.bytes} bytes do not fit into memory") from None
        self.blob = blob
        self.lock = threading.Lock()
        self.received = 0
        self.lent = 0
        # header, index, size, check: not what it claims; attempt, repeat: harmless; digest: of all.
        self.refused: Counter[str] = Counter()
        self.fault = ""  # the last one met
        self._states = bytearray(blob.chunks)
        self._checks = bytearray(blob.chunks * CHECK_BYTES)

    @property
    def complete(self) -> bool:
        """Whether every chunk is here and good by itself."""
        return self.received == self.blob.chunks

    @property
    def awaited(self) -> int:
        """How many chunks are yet to come here."""
        return self.blob.chunks - self.received - self.lent

    def lend(self, indices: Iterable[int]) -> None:
        """These come another way, if they are neither here nor on their way already."""
        for index in indices:
            if self._states[index] == _ABSENT:
                self._states[index] = _LENT
                self.lent += 1

    def take_back(self, index: int) -> None:
        """A lent chunk does not come that way any more."""
        if self._states[index] == _LENT:
            self._states[index] = _ABSENT
            self.lent -= 1

    def take_lent(self, index: int, check: Buffer, data: Buffer) -> bool:
        """A lent chunk came that other way; whether it is good. Takes `lock` by itself.

        Until it is judged nobody here asks for it. Raises ChunkError for what is none.
        """
        place = self.place(index)
        if self._states[index] != _LENT or len(data) != len(place) or len(check) != CHECK_BYTES:
            raise ChunkError(f"{len(data)} bytes are not chunk {index} of {self.blob.subject}")
        self._checks[index * CHECK_BYTES : (index + 1) * CHECK_BYTES] = check
        place[:] = data
        good = self.check(index)
        with self.lock:
            self.lent -= 1
            self._states[index] = _UNDER_WAY
            self.settle(index, good)
        return good

    def has(self, index: int) -> bool:
        """Whether that chunk is here, and good by itself."""
        return self._states[index] == _HERE

    def check_of(self, index: int) -> bytes:
        """The check that came with a chunk that is here."""
        return bytes(self._checks[index * CHECK_BYTES : (index + 1) * CHECK_BYTES])

    def missing(self, limit: int = 8) -> list[int]:
        """Up to `limit` indices that are not here yet, lowest first."""
        absent = (index for index, state in enumerate(self._states) if state != _HERE)
        return [index for index, _ in zip(absent, range(limit), strict=False)]

    def claim(self, headers: Mapping[str, str], size: int) -> int | None:
        """The index to fill with a message of `size` bytes; None when it is not wanted.

        Not wanted are repeats, chunks of another attempt, and what is malformed (counted).
        """
        try:
            index, check = int(headers[HEADER_INDEX]), bytes.fromhex(headers[HEADER_CHECK])
            digest = headers[HEADER_DIGEST]
        except KeyError as error:
            self._refuse("header", f"header {error} is missing")
            return None
        except ValueError as error:
            self._refuse("header", f"malformed header: {error}")
            return None
        if digest != self.blob.digest:
            self.refused["attempt"] += 1
            return None
        if not 0 <= index < self.blob.chunks:
            self._refuse("index", f"chunk {index} of {self.blob.chunks}")
            return None
        want = min(self.blob.chunk_bytes, self.blob.bytes - index * self.blob.chunk_bytes)
        if size != want:
            self._refuse("size", f"chunk {index} has {size} bytes instead of {want}")
            return None
        if len(check) != CHECK_BYTES:
            self._refuse("header", f"chunk {index}: a check of {len(check)} bytes")
            return None
        if self._states[index] != _ABSENT:
            self.refused["repeat"] += 1
            return None
        self._states[index] = _UNDER_WAY
        self._checks[index * CHECK_BYTES : (index + 1) * CHECK_BYTES] = check
        return index

    def place(self, index: int) -> memoryview:
        """Where the bytes of a claimed chunk go."""
        start = index * self.blob.chunk_bytes
        return self._view[start : start + self.blob.chunk_bytes]

    def check(self, index: int) -> bool:
        """Whether the bytes in place are what the chunk's check says. Changes nothing."""
        wanted = self._checks[index * CHECK_BYTES : (index + 1) * CHECK_BYTES]
        return xxhash.xxh3_128_digest(self.place(index)) == wanted

    def settle(self, index: int, good: bool) -> None:
        """A claimed chunk is filled: `good` says what `check` said."""
        assert self._states[index] == _UNDER_WAY
        if good:
            self._states[index] = _HERE
            self.received += 1
        else:
            self._states[index] = _ABSENT
            self._refuse("check", f"chunk {index} has a wrong checksum")

    def release(self, index: int) -> None:
        """A claimed chunk will not be filled: somebody else may claim it."""
        assert self._states[index] == _UNDER_WAY
        self._states[index] = _ABSENT

    def take(self, headers: Mapping[str, str], data: Buffer) -> bool:
        """Claim, copy and settle a whole message at once; whether it was a good new chunk."""
        index = self.claim(headers, len(data))
        if index is None:
            return False
        self.place(index)[:] = data
        good = self.check(index)
        self.settle(index, good)
        return good

    def finish(self) -> memoryview:
        """The complete payload; ChunkError if it is not the one that was announced."""
        if not self.complete:
            raise ChunkError(f"{self.blob.subject} is not complete: missing {self.missing()}")
        if digest_bytes(self._checks) != self.blob.digest:
            self.refused["digest"] += 1
            raise ChunkError(
                f"{self.blob.subject}: the chunks are not the payload that was announced"
            )
        return self._view

    def _refuse(self, reason: str, fault: str) -> None:
        self.refused[reason] += 1
        self.fault = fault


def chunk_count(size: int, chunk_bytes: int) -> int:
    """How many chunks so many bytes make."""
    return -(-size // chunk_bytes)
