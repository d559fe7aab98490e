"""Segments of a tape, as anybody may have written them who can write where they lie."""

import random
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tests.shared.checkpoints.bucket import Bucket

from diloco_shared.bus.port import Stored
from diloco_shared.checkpoints import tape_archive_io
from diloco_shared.checkpoints.checkpoints_io import digest_bytes
from diloco_shared.checkpoints.tape_archive_io import (
    FRAME_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_RECORDS,
    TapeArchive,
    TapeReader,
    of_one_segment,
)
from diloco_shared.checkpoints.vault_io import Vault, VaultError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.wire import MESSAGE_BYTES_MAX

BIG = b"\0" * MESSAGE_BYTES_MAX
# What a segment says that has records 1 to 3.
LIES: dict[str, Any] = {
    "more records than its name": [(n, b"x") for n in range(1, 5)],
    "records that are larger than a message": [(1, BIG + b"x")],
    "the same record twice": [(1, b"x"), (1, b"x")],
    "records of before": [(0, b"x")],
    "records of after": [(4, b"x")],
    "records that are none": [(1, "x")],
    "pairs that are none": [1, 2],
    "something else": {1: 2},
}


def segment_of(archive: TapeArchive, said: bytes, last: int = 3) -> int:
    """Put one there, as whoever may write there can: its bytes."""
    body = zlib.compress(said)
    key = f"{archive.prefix}{1:012d}-{last:012d}.{digest_bytes(body)}.z"
    archive.vault.write(key, body)
    return len(body)


@pytest.mark.parametrize("said", LIES.values(), ids=LIES)
def test_a_segment_that_is_not_what_it_says_is_refused(tmp_path: Path, said: Any) -> None:
    archive = TapeArchive(str(tmp_path), "r.1")
    segment_of(archive, msgpack.packb(said))
    with pytest.raises(VaultError, match="records 1 to 3 of the tape cannot be read"):
        archive.read("r", 0)


def test_a_segment_has_so_many_records_and_no_more(tmp_path: Path) -> None:
    most = SEGMENT_RECORDS
    for count, root in ((most, tmp_path / "a"), (most + 1, tmp_path / "b")):
        archive = TapeArchive(str(root), "r.1")
        said = [(n, b"x") for n in range(1, count + 1)]
        segment_of(archive, msgpack.packb(said), last=most + 9)
        if count == most:
            assert len(archive.read("r", 0)) == most
        else:
            with pytest.raises(VaultError, match="not what its name says"):
                archive.read("r", 0)


def test_a_segment_that_ends_in_the_middle_is_refused(tmp_path: Path) -> None:
    archive = TapeArchive(str(tmp_path), "r.1")
    segment_of(archive, msgpack.packb([(n, b"x") for n in (1, 2, 3)])[:-2])
    with pytest.raises(VaultError, match=r"not what its name says.*in the middle"):
        archive.read("r", 0)


def test_a_small_segment_takes_no_more_memory_than_what_is_read_of_it(tmp_path: Path) -> None:
    """A megabyte becomes a thousand."""
    archive = TapeArchive(str(tmp_path), "r.1")
    said = msgpack.packb([(n, BIG) for n in range(1, 101)])
    assert segment_of(archive, said, last=100) < len(said) / 500
    del said
    tracemalloc.start()
    try:
        found = archive.read("r", 50, limit=2)
        assert archive.of_others(1, 100) == set()
        assert TapeArchive(str(tmp_path), "r.1", 1).of_others(1, 100) == set(range(1, 101))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(s.seq, len(s.payload)) for s in found] == [(51, len(BIG)), (52, len(BIG))]
    assert most < 12 * len(BIG)


def test_an_object_that_is_too_large_for_a_segment_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = TapeArchive(str(tmp_path), "r.1")
    size = segment_of(archive, msgpack.packb([(n, b"x") for n in (1, 2, 3)]))
    monkeypatch.setattr(tape_archive_io, "SEGMENT_BYTES_MAX", size)
    assert len(archive.read("r", 0)) == 3
    monkeypatch.setattr(tape_archive_io, "SEGMENT_BYTES_MAX", size - 1)
    with pytest.raises(VaultError, match=f"has more than {size - 1} bytes"):
        archive.read("r", 0)


def test_the_largest_honest_segment_is_read(tmp_path: Path) -> None:
    archive, subject = TapeArchive(str(tmp_path), "r.1"), subjects.tape("r", 0)
    noise = random.Random(0).randbytes(MESSAGE_BYTES_MAX)
    records = [Stored(subject, noise[n:] + noise[:n], {}, 10**12 - 9 + n) for n in range(9)]
    archive.write(records)
    assert archive.read("r", 0) == records
    assert len(zlib.compress(noise)) + FRAME_BYTES < SEGMENT_BYTES_MAX / SEGMENT_RECORDS


def noisy(count: int, size: int) -> list[Stored]:
    """Records that compress no better than noise."""
    dice, subject = random.Random(0), subjects.tape("r", 0)
    return [Stored(subject, dice.randbytes(size), {}, n) for n in range(1, count + 1)]


def test_as_many_records_become_a_segment_as_it_may_have_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tape_archive_io, "WRITTEN_BYTES", 3 * (100 + FRAME_BYTES))
    records = noisy(8, 100)
    assert [of_one_segment(records[:n]) for n in range(6)] == [0, 1, 2, 3, 3, 3]
    assert of_one_segment([*noisy(1, 900), *records]) == 1
    assert of_one_segment([*noisy(1, 10), *records]) == 3
    monkeypatch.setattr(tape_archive_io, "WRITTEN_BYTES", 10**9)
    assert of_one_segment(noisy(SEGMENT_RECORDS + 1, 1)) == SEGMENT_RECORDS


def test_a_segment_is_never_packed_in_one_piece(tmp_path: Path) -> None:
    archive, records = TapeArchive(str(tmp_path), "r.1"), noisy(8, 1 << 20)
    archive.segments()  # imports what writes it
    tracemalloc.start()
    try:
        archive.write(records)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2.5 * (8 << 20), "pieces that are compressed, and joined"


def cut(archive: TapeArchive, first: int, stream: Sequence[Stored] = ()) -> list[bool]:
    """Which segments that reach beyond `first` have others than the stream."""
    there = {r.seq: digest_bytes(r.payload) for r in stream}
    later = [s for s in archive.segments() if s.last >= first]
    return [archive.cut("r", segment, first, there) for segment in later]


def test_a_segment_that_has_what_the_stream_has_stays(tmp_path: Path) -> None:
    """Another leader wrote it, and may be about to remove these records from the stream."""
    archive, records = TapeArchive(str(tmp_path), "r.1"), noisy(12, 10)
    archive.write(records[:8])
    archive.write(records[8:])
    assert cut(archive, 5, records[4:]) == [False, False]
    assert cut(archive, 5, records[4:11]) == [False, True]
    other = Stored(records[6].subject, b"of another history", {}, records[6].seq)
    assert cut(archive, 5, [*records[4:6], other, *records[7:]]) == [True]
    assert archive.read("r", 0) == records[:4]


def test_of_a_damaged_segment_only_what_the_stream_has_is_forgotten(tmp_path: Path) -> None:
    archive, records = TapeArchive(str(tmp_path), "r.1"), noisy(8, 10)
    for n in (0, 4):
        archive.vault.write(archive.write(records[n : n + 4]).key, b"damaged")
    with pytest.raises(VaultError, match="records 1 to 4 of the tape cannot be read"):
        cut(archive, 3, records[2:])
    assert cut(archive, 5, records[4:]) == [True]
    assert [s.first for s in archive.segments()] == [1]


def test_a_large_segment_is_cut_into_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As releases wrote it that bounded the number of records alone."""
    archive, records = TapeArchive(str(tmp_path), "r.1"), noisy(12, 100)
    archive.write(records[:10])
    archive.write(records[10:])
    monkeypatch.setattr(tape_archive_io, "WRITTEN_BYTES", 3 * (100 + FRAME_BYTES))
    assert cut(archive, 9) == [True, True]
    assert [(s.first, s.last) for s in archive.segments()] == [(1, 3), (4, 6), (7, 8)]
    assert archive.read("r", 0) == records[:8]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of segments, as often as one was read."""
    names, read = list[str](), Vault.read

    def counted(vault: Vault, key: str, **more: Any) -> bytes | None:
        names.append(key.rpartition("/")[2].partition(".")[0])
        return read(vault, key, **more)

    monkeypatch.setattr(Vault, "read", counted)
    return names


def in_batches(archive: TapeArchive, size: int) -> list[Stored]:
    found: list[Stored] = []
    while batch := archive.read("r", found[-1].seq if found else 0, size):
        found += batch
    return found


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_whoever_reads_batch_after_batch_has_each_segment_fetched_once(
    size: int, tmp_path: Path, opened: list[str]
) -> None:
    archive, records = TapeArchive(str(tmp_path), "r.1"), noisy(20, 10)
    for n in range(0, 20, 5):
        archive.write(records[n : n + 5])
    assert in_batches(archive, size) == records
    first, again = opened[:4], opened[4:]
    assert first == sorted({*opened})
    assert again in ([], first[3:], first[2:]), "a last batch that is short is looked for anew"
    archive.write([Stored(r.subject, r.payload, {}, r.seq + 20) for r in records[:5]])
    assert len(archive.read("r", 20, size)) == min(size, 5)


def test_a_batch_goes_on_with_what_the_archive_has_by_then(tmp_path: Path) -> None:
    """It was cut, since its hub was put back, and has others by now."""
    archive, records = TapeArchive(str(tmp_path), "r.1"), noisy(10, 10)
    others = [Stored(r.subject, b"other", {}, r.seq) for r in records]
    leader = TapeArchive(str(tmp_path), "r.1")
    for n in range(0, 10, 5):
        archive.write(records[n : n + 5])
    for after, first in ((2, 3), (5, 6), (7, 8)):
        assert archive.read("r", 0, after)[-1].seq == after
        cut(leader, first)
        leader.write(others[first - 1 :])
        assert archive.read("r", after, 3) == others[after : after + 3]
        cut(leader, 1)
        for n in range(0, 10, 5):
            archive.write(records[n : n + 5])


def test_sequences_of_other_shards_are_read_once(tmp_path: Path, opened: list[str]) -> None:
    records, archive = noisy(12, 10), TapeArchive(str(tmp_path), "r.1")
    theirs = TapeArchive(str(tmp_path), "r.1", 1)
    theirs.write(records[:4])
    theirs.write(records[4:8])
    assert archive.of_others(2, 3) == {1, 2, 3, 4} == archive.of_others(3, 4)
    assert archive.of_others(4, 9) == {1, 2, 3, 4, 5, 6, 7, 8} and len(opened) == 2
    assert archive.of_others(9, 9) == set() == set(archive._seqs)


@pytest.fixture(params=["folder", "s3", "gs"])
def root(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "a b")
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with Bucket(request.param) as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.endpoint)
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", bucket.endpoint)
        yield f"{request.param}://some-bucket/a b"
        assert all(part < 9 for part in bucket.parts[1:]), "nothing that is too large"


def test_no_object_is_read_that_is_larger_than_anybody_makes_it(root: str) -> None:
    vault = Vault(root)
    vault.write("f/x", b"some bytes")
    assert vault.read("f/x", bytes_max=10) == b"some bytes"
    assert vault.read("f/none", bytes_max=1) is None
    with pytest.raises(VaultError, match="f/x has more than 9 bytes"):
        vault.read("f/x", bytes_max=9)


class Archiving:
    """A bus whose leader archives half of what its stream has, right after somebody has looked."""

    def __init__(self, leader: TapeArchive, records: list[Stored]) -> None:
        self.leader, self.records, self.looks = leader, records, 0

    async def fetch(
        self, stream: str, subject: str, start_seq: int = 1, limit: int | None = None
    ) -> list[Stored]:
        found = [r for r in self.records if r.seq >= start_seq][:limit]
        self.looks += 1
        if self.looks == 3:
            half = len(self.records) // 2
            self.leader.write(self.records[:half])
            self.records = self.records[half:]
        return found


async def test_nothing_is_lost_that_is_archived_while_a_reader_reads_on(tmp_path: Path) -> None:
    """It was in the stream when the archive was read, and in the archive when the stream was."""
    archive, leader = (TapeArchive(str(tmp_path), "r.1") for _ in range(2))
    records = noisy(200, 10)
    leader.write(records[:100])
    bus: Any = Archiving(leader, records[100:])
    reader = TapeReader(bus, "r", archive, 200)
    assert [stored async for stored in reader.stored()] == records
    assert len(bus.records) == 50
