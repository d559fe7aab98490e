"""Large payloads as small messages: splitting, and an idempotent, bounded reassembler.

    payload --split--> chunks (index, crc) + Blob ----wire----> Assembler --take--> payload

A chunk belongs to (subject, digest of the whole payload): two attempts on one subject with
different content never mix. Chunks may come twice, in any order, before or after the manifest's
Blob; a payload is complete only when the Blob is there, every chunk has the right length and
checksum, and the digest of the whole is right.
"""

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diloco_shared.protocol.messages import Blob

# Larger ones gain nothing and cost the file store; with headers it stays below NATS' default 1 MB.
CHUNK_BYTES = 512 * 1024
# 2 TiB of 512 KiB chunks; bounds what a hostile Blob can make a receiver reserve.
CHUNKS_MAX = 1 << 22

HEADER_INDEX = "Diloco-Chunk"
HEADER_CRC = "Diloco-Crc"
HEADER_DIGEST = "Diloco-Digest"

Buffer = bytes | bytearray | memoryview


class ChunkError(ValueError):
    """A chunk, or a whole payload, is not what it claims to be; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One part of a payload; `data` is a view into the payload where it was split."""

    digest: str
    index: int
    crc: int
    data: Buffer

    @property
    def headers(self) -> dict[str, str]:
        return {
            HEADER_INDEX: str(self.index),
            HEADER_CRC: f"{self.crc:08x}",
            HEADER_DIGEST: self.digest,
        }


def digest_of(payload: Buffer) -> str:
    """BLAKE2b of 16 bytes, in hex."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def describe(subject: str, payload: Buffer, *, chunk_bytes: int = CHUNK_BYTES) -> Blob:
    """The Blob that a manifest carries for `payload`; raises ChunkError for a bad chunk size."""
    if chunk_bytes < 1:
        raise ChunkError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
    chunks = _count(len(payload), chunk_bytes)
    if chunks > CHUNKS_MAX:
        raise ChunkError(f"{len(payload)} bytes make {chunks} chunks; the limit is {CHUNKS_MAX}")
    return Blob(
        subject=subject,
        bytes=len(payload),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        digest=digest_of(payload),
    )


def cut(blob: Blob, payload: Buffer, index: int) -> Chunk:
    """Chunk `index` of `payload`, without copying it."""
    start = index * blob.chunk_bytes
    data = memoryview(payload)[start : start + blob.chunk_bytes]
    return Chunk(blob.digest, index, zlib.crc32(data), data)


def split(blob: Blob, payload: Buffer) -> Iterator[Chunk]:
    """All chunks of `payload` in order."""
    return (cut(blob, payload, index) for index in range(blob.chunks))


def parse_chunk(headers: Mapping[str, str], data: bytes) -> Chunk:
    """A chunk from a message; raises ChunkError when headers are missing or malformed."""
    try:
        index, crc = int(headers[HEADER_INDEX]), int(headers[HEADER_CRC], 16)
        digest = headers[HEADER_DIGEST]
    except KeyError as error:
        raise ChunkError(f"header {error} is missing") from None
    except ValueError as error:
        raise ChunkError(f"malformed header: {error}") from None
    if not 0 <= index < CHUNKS_MAX:
        raise ChunkError(f"chunk index {index} is out of range")
    return Chunk(digest, index, crc, data)


def _count(size: int, chunk_bytes: int) -> int:
    return -(-size // chunk_bytes)


def _fault_of_blob(blob: Blob) -> str:
    if blob.chunk_bytes < 1 or blob.chunks > CHUNKS_MAX:
        return f"{blob.chunks} chunks of {blob.chunk_bytes} bytes are out of range"
    if blob.chunks != _count(blob.bytes, blob.chunk_bytes):
        return f"{blob.bytes} bytes are not {blob.chunks} chunks of {blob.chunk_bytes}"
    return ""


def _fault_of_chunk(blob: Blob, index: int, size: int) -> str:
    if index >= blob.chunks:
        return f"chunk {index} of {blob.chunks}"
    want = min(blob.chunk_bytes, blob.bytes - index * blob.chunk_bytes)
    if size != want:
        return f"chunk {index} has {size} bytes instead of {want}"
    return ""


@dataclass(slots=True)
class _Open:
    """One payload under way."""

    parts: dict[int, Buffer] = field(default_factory=dict)
    bytes: int = 0
    blob: Blob | None = None

    def drop(self, index: int) -> None:
        self.bytes -= len(self.parts.pop(index))


class Assembler:
    """Puts payloads together, several at a time, within fixed limits.

    Limits: `bytes_max` bytes held over all unfinished payloads, and `open_max` of them. When one
    is exceeded the payload begun first is dropped and counted: its sender repeats, or its round is
    over. `refused` and `dropped` count what was not accepted.
    """

    def __init__(self, *, bytes_max: int, open_max: int = 64) -> None:
        self.bytes_max = bytes_max
        self.open_max = open_max
        self.bytes = 0
        self.refused = 0
        self.dropped = 0
        # Insertion order is age.
        self._open: dict[tuple[str, str], _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add_chunk(self, subject: str, chunk: Chunk) -> str:
        """Take one chunk; returns "" or why it was refused. A repeat changes nothing."""
        size = len(chunk.data)
        if zlib.crc32(chunk.data) != chunk.crc:
            return self._refuse(f"chunk {chunk.index} of {subject} has a wrong checksum")
        if size > self.bytes_max:
            return self._refuse(f"chunk {chunk.index} of {subject} exceeds {self.bytes_max} bytes")
        if not 0 <= chunk.index < CHUNKS_MAX:
            return self._refuse(f"chunk index {chunk.index} of {subject} is out of range")
        key = (subject, chunk.digest)
        entry = self._open.get(key)
        if entry is not None and chunk.index in entry.parts:
            return ""
        if entry is not None and entry.blob is not None:
            fault = _fault_of_chunk(entry.blob, chunk.index, size)
            if fault:
                return self._refuse(f"{subject}: {fault}")
        entry = self._open.setdefault(key, _Open())
        entry.parts[chunk.index] = chunk.data
        entry.bytes += size
        self.bytes += size
        self._keep_limits()
        return "" if key in self._open else f"{subject} exceeds what may be held unfinished"

    def add_blob(self, blob: Blob) -> str:
        """Take what a manifest says; returns "" or why it was refused.

        Chunks that came earlier and do not fit it are thrown away.
        """
        fault = _fault_of_blob(blob)
        if not fault and blob.bytes > self.bytes_max:
            fault = f"{blob.bytes} bytes exceed the limit of {self.bytes_max}"
        if fault:
            return self._refuse(f"{blob.subject}: {fault}")
        entry = self._open.setdefault((blob.subject, blob.digest), _Open())
        if entry.blob is not None and entry.blob != blob:
            return self._refuse(f"{blob.subject}: a second manifest contradicts the first")
        entry.blob = blob
        for index in [*entry.parts]:
            if _fault_of_chunk(blob, index, len(entry.parts[index])):
                self.bytes -= len(entry.parts[index])
                self.refused += 1
                entry.drop(index)
        self._keep_limits()
        return ""

    def complete(self, blob: Blob) -> bool:
        """Whether `take` will find everything."""
        entry = self._open.get((blob.subject, blob.digest))
        return entry is not None and entry.blob == blob and len(entry.parts) == blob.chunks

    def missing(self, blob: Blob, limit: int = 8) -> list[int]:
        """Up to `limit` indices that are not there yet, lowest first."""
        entry = self._open.get((blob.subject, blob.digest), _Open())
        absent = (index for index in range(blob.chunks) if index not in entry.parts)
        return [index for index, _ in zip(absent, range(limit), strict=False)]

    def take(self, blob: Blob) -> bytes:
        """Remove and return a complete payload; raises ChunkError if its digest is wrong."""
        if not self.complete(blob):
            raise ChunkError(f"{blob.subject} is not complete: missing {self.missing(blob)}")
        entry = self._open[blob.subject, blob.digest]
        payload = b"".join(entry.parts[index] for index in range(blob.chunks))
        self.forget(blob)
        if digest_of(payload) != blob.digest:
            self.refused += 1
            raise ChunkError(f"{blob.subject}: the chunks are not the payload that was announced")
        return payload

    def forget(self, blob: Blob) -> None:
        """Give up on a payload, complete or not."""
        entry = self._open.pop((blob.subject, blob.digest), None)
        if entry is not None:
            self.bytes -= entry.bytes

    def _refuse(self, reason: str) -> str:
        self.refused += 1
        return reason

    def _keep_limits(self) -> None:
        while self._open and (self.bytes > self.bytes_max or len(self._open) > self.open_max):
            oldest = next(iter(self._open))
            self.bytes -= self._open.pop(oldest).bytes
            self.dropped += 1
        assert 0 <= self.bytes <= self.bytes_max
