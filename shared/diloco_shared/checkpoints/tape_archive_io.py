"""What a tape holds no longer: immutable segments beside the run's checkpoints, and one reader.

    <root>/<run's folder>/tape/shard-<s>/<first>-<last>.<digest>.z

A segment is complete or absent: zlib over msgpack of [sequence, message] pairs, sequences those of
the stream, the digest that of the compressed bytes. Records leave the stream only after the segment
that has them is durable; so stream and archive together have all of them, some of them twice. From
the stream's oldest record on only the stream counts: on a hub that was put back from a backup, the
archive may have records of what came after that. Kept with a run's checkpoints when the run is
deleted, until somebody removes the folder.

Not for an event loop: the methods of `TapeArchive` wait for the vault.
"""

import asyncio
import re
import zlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import msgpack
import structlog

from diloco_shared.bus.port import Bus, Stored
from diloco_shared.checkpoints.checkpoints_io import digest_bytes
from diloco_shared.checkpoints.vault_io import Vault, VaultError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import TAPE
from diloco_shared.protocol.messages import TapeRecord
from diloco_shared.protocol.wire import MESSAGE_BYTES_MAX, WireError, decode_tape
from diloco_shared.spec.run import RunSpec

log = structlog.get_logger()

# Records of a segment, at most.
SEGMENT_RECORDS = 1024
# Bytes of the records that are written as one segment, at most, unless it is one alone: a thousand
# rounds of a few learners, some dozens of hundreds. Whoever archives has them all in memory, and
# once more compressed.
WRITTEN_BYTES = 8 << 20
# What stands around a record: its sequence, and three lengths.
FRAME_BYTES = 16
# Of a segment whose every record is as large as a message can be; compressed it is no larger. Who
# may write where it lies must not have whoever reads it run out of memory. There are segments of
# more than WRITTEN_BYTES: up to release 0.2 only their number was bounded.
SEGMENT_BYTES_MAX = (SEGMENT_RECORDS + 1) * (MESSAGE_BYTES_MAX + FRAME_BYTES)
# Records that whoever reads a whole tape has in memory at a time, of 1 MiB at most.
BATCH_RECORDS = 64
# Compressed bytes that are read at a time, and what becomes of them at most at a time.
_TAKEN_BYTES, _GIVEN_BYTES = 64 << 10, MESSAGE_BYTES_MAX

# Has a thread do it, as `asyncio.to_thread` does.
Ask = Callable[[Callable[[], list[Stored]]], Awaitable[list[Stored]]]

_SEGMENT = re.compile(r"(\d{12})-(\d{12})\.([0-9a-f]{32})\.z")


class SegmentDamaged(VaultError):
    """A segment is gone, or not what was written; its place answers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Records `first` to `last` of one shard, both included."""

    first: int
    last: int
    key: str
    digest: str


class TapeArchive:
    """Of one shard of one run. Raises VaultError where nothing can be read or written.

    Whoever reads it in batches, one after the other, has each segment fetched once.
    """

    def __init__(self, root: str, folder: str, shard: int = 0) -> None:
        self.vault = Vault(root)
        self.shard = shard
        self.all = f"{folder}/{TAPE}/"
        self.prefix = f"{self.all}shard-{shard}/"
        # Where the last batch ended, by run and record: a thread that goes on there takes it away.
        self._walks: dict[tuple[str, int], _Walk] = {}
        self._seqs: dict[str, frozenset[int]] = {}  # of segments of other shards, by their keys

    def write(self, records: Sequence[Stored]) -> Segment:
        """A segment of these, oldest first; durable when this returns. A repeat changes nothing."""
        body = _compressed(records)
        digest = digest_bytes(body)
        first, last = records[0].seq, records[-1].seq
        key = f"{self.prefix}{first:012d}-{last:012d}.{digest}.z"
        self.vault.write(key, body)
        return Segment(first, last, key, digest)

    def segments(self) -> list[Segment]:
        """Oldest first."""
        return sorted(self._segments(self.prefix), key=lambda s: (s.first, s.last))

    def _segments(self, prefix: str) -> Iterable[Segment]:
        for key in self.vault.keys(prefix):
            match = _SEGMENT.fullmatch(key.rpartition("/")[2])
            if match:
                yield Segment(int(match[1]), int(match[2]), key, match[3])

    def cut(self, run: str, segment: Segment, first: int, there: Mapping[int, str]) -> bool:
        """Forget a segment's records from sequence `first` on, unless they are the stream's own;
        whether it had others.

        `there`: `digest_bytes` of the stream's from `first` to the segment's last. A segment that
        has the same ones stays: whoever wrote it may be about to remove them from the stream. One
        that has others is of a history that was lost. Whoever dies meanwhile leaves some of its
        records twice.
        """
        if self._same(run, segment, first, there):
            return False
        if segment.first < first:
            self._write_all(r for r in self.stored(run, segment) if r.seq < first)
        self.vault.write(segment.key, None)
        return True

    def _same(self, run: str, segment: Segment, first: int, there: Mapping[int, str]) -> bool:
        """Whether a segment has nothing else than the stream, from `first` on."""
        try:
            return all(
                r.seq < first or there.get(r.seq) == digest_bytes(r.payload)
                for r in self.stored(run, segment)
            )
        except SegmentDamaged:
            if segment.first < first:
                raise
            return False  # nobody can read it, and the stream has all of it

    def _write_all(self, records: Iterable[Stored]) -> None:
        """As many segments as these need."""
        waiting: list[Stored] = []
        for record in records:
            waiting.append(record)
            if (count := of_one_segment(waiting)) < len(waiting):
                self.write(waiting[:count])
                del waiting[:count]
        if waiting:
            self.write(waiting)

    def stored(self, run: str, segment: Segment) -> Iterator[Stored]:
        """The records of a segment, as they were in the stream, one by one."""
        subject = subjects.tape(run, self.shard)
        return (Stored(subject, body, {}, seq) for seq, body in self._records(segment))

    def of_others(self, first: int, last: int) -> set[int]:
        """Sequences of this range that the archives of other shards of the run have."""
        found: dict[str, frozenset[int]] = {}
        for segment in self._segments(self.all):
            others = not segment.key.startswith(self.prefix)
            if others and segment.last >= first and segment.first <= last:
                known = self._seqs.get(segment.key)
                found[segment.key] = known or frozenset(seq for seq, _ in self._records(segment))
        self._seqs = found
        return set[int]().union(*found.values())

    def read(self, run: str, after: int, limit: int | None = None) -> list[Stored]:
        """The first `limit` records with sequence > `after`, as they were in the stream."""
        walk = self._walks.pop((run, after), None)
        found = [] if walk is None or limit is None else self._further(walk, limit)
        if walk is None or limit is None or len(found) < limit:
            walk = _Walk(self, run, after)
            found = walk.take(limit)
        if len(found) == limit:
            self._walks = {(run, walk.at): walk}
        return found

    def _further(self, walk: "_Walk", limit: int) -> list[Stored]:
        """What comes next where a batch ended; fewer where that may not be all by now."""
        try:
            if any(self.vault.pieces(walk.key, 0, 1)):
                return walk.take(limit)
        except VaultError as error:
            log.info("the archive is listed again", reason=str(error))  # it may have been cut
        return []

    def reads_on(self, run: str, after: int) -> bool:
        """Whether a batch ended at this record."""
        return (run, after) in self._walks

    def let_go(self) -> None:
        """Nobody reads on where the last batch ended: forget what that takes of the memory."""
        self._walks = {}

    def _records(self, segment: Segment) -> Iterator[tuple[int, bytes]]:
        """In order of their sequences, each once the one before is taken."""
        body = self.vault.read(segment.key, bytes_max=SEGMENT_BYTES_MAX)
        why = "gone" if body is None else "damaged"
        if body is not None and digest_bytes(body) == segment.digest:
            try:
                yield from unpacked(body, segment.first, segment.last)
                return
            except (ValueError, msgpack.UnpackException, zlib.error) as error:
                why = f"not what its name says ({error})"
        raise SegmentDamaged(
            f"{self.vault.root}/{segment.key} is {why}: "
            f"records {segment.first} to {segment.last} of the tape cannot be read"
        )


class _Walk:
    """Through an archive's records, each sequence once, as far as somebody has come.

    Takes memory for one segment as it was written, and for a few records.
    """

    def __init__(self, archive: TapeArchive, run: str, after: int) -> None:
        self.at = after
        self.key = ""  # of the segment that is read
        self._records = self._all(archive, run, after)

    def take(self, limit: int | None) -> list[Stored]:
        """The next ones. After an exception nothing more comes."""
        found = list(islice(self._records, limit))
        self.at = found[-1].seq if found else self.at
        return found

    def _all(self, archive: TapeArchive, run: str, after: int) -> Iterator[Stored]:
        for segment in archive.segments():
            if segment.last <= after:
                continue
            self.key = segment.key
            for record in archive.stored(run, segment):
                if record.seq > after:
                    after = record.seq
                    yield record


def of_one_segment(records: Sequence[Stored]) -> int:
    """How many of these, from the first on, become one segment."""
    size = 0
    for count, record in enumerate(records[:SEGMENT_RECORDS]):
        size += len(record.payload) + FRAME_BYTES
        if count and size > WRITTEN_BYTES:
            return count
    return min(len(records), SEGMENT_RECORDS)


def _compressed(records: Sequence[Stored]) -> bytes:
    """What is written of them; packed, all of them are never in memory a second time."""
    deflater, packer = zlib.compressobj(), msgpack.Packer()
    pieces = [deflater.compress(packer.pack_array_header(len(records)))]
    pieces += [deflater.compress(packer.pack((r.seq, r.payload))) for r in records]
    return b"".join((*pieces, deflater.flush()))


def unpacked(body: bytes, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """The records of a segment, one by one: all of it is never in memory.

    ValueError, or an error of zlib's or msgpack's, for what is none: more records than its name
    says, larger ones than a message can be, or fewer.
    """
    unpacker = msgpack.Unpacker(
        use_list=False,
        max_buffer_size=2 * (_GIVEN_BYTES + FRAME_BYTES),
        max_bin_len=MESSAGE_BYTES_MAX,
        max_array_len=SEGMENT_RECORDS,
        max_str_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    count, before = None, first - 1
    for piece in _inflated(body):
        unpacker.feed(piece)
        try:
            if count is None:
                count = unpacker.read_array_header()
                if count > SEGMENT_RECORDS:
                    raise ValueError(f"{count} records")
            while count:
                seq, payload = _record(unpacker.unpack())
                if not before < seq <= last:
                    raise ValueError(f"record {seq} after {before}")
                before, count = seq, count - 1
                yield seq, payload
        except msgpack.OutOfData:
            continue
        return
    raise ValueError("it ends in the middle")


def _record(pair: Any) -> tuple[int, bytes]:
    """ValueError for what is none."""
    if not isinstance(pair, tuple) or [type(part) for part in pair] != [int, bytes]:
        raise ValueError(f"a record that is {str(pair)[:40]}")
    return pair[0], pair[1]


def _inflated(body: bytes) -> Iterator[bytes]:
    """Piece by piece: a few bytes may become a thousand times as many."""
    inflater = zlib.decompressobj()
    for at in range(0, len(body), _TAKEN_BYTES):
        taken, piece = body[at : at + _TAKEN_BYTES], b""
        while taken or len(piece) == _GIVEN_BYTES:
            if piece := inflater.decompress(taken, _GIVEN_BYTES):
                yield piece
            taken = inflater.unconsumed_tail
        if inflater.eof:
            return


def archives_of(spec: RunSpec, checkpoint_root: str) -> list[TapeArchive]:
    """Of every shard, beside the run's checkpoints; `checkpoint_root`: unless the run says."""
    root = spec.keeping.run_checkpoint_root or checkpoint_root
    return [TapeArchive(root, spec.folder, s) for s in range(spec.algorithm.shards)]


async def has_left(bus: Bus, stream: str) -> bool:
    """Whether anything has left the tape: what is not there may be archived.

    Not its beginning alone: all that one shard had may be gone, while another's record is first.
    """
    info = await bus.stream_info(stream)
    return info.messages < info.last_seq


async def read_tape(
    bus: Bus,
    run: str,
    archives: Sequence[TapeArchive],
    *,
    after: int = 0,
    limit: int | None = None,
    ask: Ask = asyncio.to_thread,
) -> list[Stored]:
    """The first `limit` records of these shards with sequence > `after`, wherever they lie.

    The archive is looked at only where the stream does not begin with what is wanted, and by
    `ask`: it may be far away. Raises BusError, or VaultError when what left the stream cannot be
    read.
    """
    stream = subjects.tape_stream(run)
    wanted = [subjects.tape(run, a.shard) for a in archives]
    every = wanted[0] if len(wanted) == 1 else f"tape.{run}.*"
    asked = partial(bus.fetch, stream, every, start_seq=after + 1, limit=limit)
    # Whoever reads on in an archive finds the next ones there: the stream's begin after it.
    reads_on = len(archives) == 1 and archives[0].reads_on(run, after)
    stored = [] if reads_on else await asked()
    if stored and stored[0].seq == after + 1 and len(wanted) == 1:
        archives[0].let_go()
        return stored
    found = {s.seq: s for s in stored if s.subject in wanted}
    for archive, subject in zip(archives, wanted, strict=True):
        oldest = await bus.fetch(stream, subject, limit=1)
        if oldest[0].seq > after + 1 if oldest else await has_left(bus, stream):
            older = await ask(partial(archive.read, run, after, limit))
            found |= {s.seq: s for s in older if not oldest or s.seq < oldest[0].seq}
    if reads_on and (limit is None or len(found) < limit):
        archives[0].let_go()
        # What leaves the stream meanwhile is in neither: the stream first, and then the archive.
        return await read_tape(bus, run, archives, after=after, limit=limit, ask=ask)
    return [found[seq] for seq in sorted(found)][:limit]


class TapeReader:
    """One shard's tape up to the record `end`, of which a batch is in memory at a time.

    It may be read as often as somebody wants: what stands there then is the same.
    """

    def __init__(self, bus: Bus, run: str, archive: TapeArchive, end: int) -> None:
        self.bus, self.run, self.archive, self.end = bus, run, archive, end

    async def stored(self, after: int = 0) -> AsyncIterator[Stored]:
        """Those with sequence > `after`. Raises BusError and VaultError."""
        while after < self.end:
            batch = await read_tape(
                self.bus, self.run, [self.archive], after=after, limit=BATCH_RECORDS
            )
            for stored in batch:
                if (after := stored.seq) <= self.end:
                    yield stored
            if not batch:
                return

    async def after(self, seq: int = 0) -> AsyncIterator[tuple[int, TapeRecord]]:
        """Sequence and record. Raises WireError, too, where one cannot be read."""
        async for stored in self.stored(seq):
            try:
                record = decode_tape(stored.payload)
            except WireError as error:
                text = f"record {stored.seq} of the tape cannot be read: {error}"
                raise WireError(text) from None
            yield stored.seq, record
