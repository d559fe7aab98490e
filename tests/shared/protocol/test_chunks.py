"""Reassembly: whatever comes, only the true payload comes out (I11), within limits (I12)."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diloco_shared.protocol.chunks import (
    CHUNKS_MAX,
    HEADER_CRC,
    HEADER_DIGEST,
    HEADER_INDEX,
    Assembler,
    Chunk,
    ChunkError,
    describe,
    digest_of,
    parse_chunk,
    split,
)

payloads = st.binary(max_size=200)
sizes = st.integers(1, 64)


def test_digest_is_blake2b_of_sixteen_bytes() -> None:
    assert digest_of(b"") == "cae66941d9efbd404e4d88758ea67670"


@given(payloads, sizes)
def test_split_covers_the_payload_once(payload: bytes, chunk_bytes: int) -> None:
    blob = describe("s", payload, chunk_bytes=chunk_bytes)
    chunks = [*split(blob, payload)]
    assert b"".join(chunk.data for chunk in chunks) == payload
    assert [chunk.index for chunk in chunks] == [*range(blob.chunks)]
    assert all(len(chunk.data) == chunk_bytes for chunk in chunks[:-1])


@given(payloads, sizes)
def test_headers_round_trip(payload: bytes, chunk_bytes: int) -> None:
    for chunk in split(describe("s", payload, chunk_bytes=chunk_bytes), payload):
        assert parse_chunk(chunk.headers, bytes(chunk.data)) == chunk


@given(payloads, sizes, st.randoms(use_true_random=False), st.booleans())
def test_any_order_with_repeats_gives_the_payload(
    payload: bytes, chunk_bytes: int, order: random.Random, early: bool
) -> None:
    blob = describe("s", payload, chunk_bytes=chunk_bytes)
    chunks = [*split(blob, payload)] * 2
    order.shuffle(chunks)
    assembler = Assembler(bytes_max=1000)
    if early:
        assert assembler.add_blob(blob) == ""
    for chunk in chunks:
        assert assembler.add_chunk("s", chunk) == ""
    assert assembler.complete(blob) == early
    assert assembler.add_blob(blob) == ""
    assert assembler.complete(blob)
    assert assembler.take(blob) == payload
    assert (assembler.bytes, len(assembler), assembler.refused) == (0, 0, 0)


@given(st.binary(min_size=1, max_size=200), sizes, st.data())
def test_without_one_chunk_nothing_comes_out(
    payload: bytes, chunk_bytes: int, data: st.DataObject
) -> None:
    blob = describe("s", payload, chunk_bytes=chunk_bytes)
    lost = data.draw(st.integers(0, blob.chunks - 1))
    assembler = Assembler(bytes_max=1000)
    assembler.add_blob(blob)
    for chunk in split(blob, payload):
        if chunk.index != lost:
            assembler.add_chunk("s", chunk)
    assert not assembler.complete(blob)
    assert assembler.missing(blob) == [lost]
    with pytest.raises(ChunkError, match="not complete"):
        assembler.take(blob)


@pytest.mark.parametrize(
    ("index", "data", "reason"),
    [
        (0, b"012345678", "has 9 bytes instead of 10"),
        (0, b"01234567890", "has 11 bytes instead of 10"),
        (2, b"0123456789", "has 10 bytes instead of 5"),
        (3, b"01234", "chunk 3 of 3"),
        (-1, b"01234", "out of range"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(index: int, data: bytes, reason: str) -> None:
    blob = describe("s", bytes(25), chunk_bytes=10)
    honest = next(split(describe("x", data, chunk_bytes=100), data))
    chunk = Chunk(blob.digest, index, honest.crc, data)
    assembler = Assembler(bytes_max=1000)
    assembler.add_blob(blob)
    assert reason in assembler.add_chunk("s", chunk)
    assert (assembler.refused, assembler.bytes) == (1, 0)


def test_a_chunk_that_came_early_and_does_not_fit_is_thrown_away() -> None:
    payload = bytes(25)
    blob = describe("s", payload, chunk_bytes=10)
    wrong = next(split(describe("x", b"abc", chunk_bytes=10), b"abc"))
    assembler = Assembler(bytes_max=1000)
    assert assembler.add_chunk("s", Chunk(blob.digest, 0, wrong.crc, b"abc")) == ""
    assembler.add_blob(blob)
    assert (assembler.refused, assembler.bytes) == (1, 0)
    for chunk in split(blob, payload):
        assembler.add_chunk("s", chunk)
    assert assembler.take(blob) == payload


def test_a_flipped_bit_is_refused() -> None:
    blob = describe("s", b"hello", chunk_bytes=10)
    chunk = next(split(blob, b"hello"))
    assembler = Assembler(bytes_max=1000)
    reason = assembler.add_chunk("s", Chunk(chunk.digest, 0, chunk.crc, b"hellp"))
    assert "wrong checksum" in reason
    assert assembler.bytes == 0


def test_good_checksums_of_another_payload_fail_the_digest() -> None:
    blob = describe("s", b"truth", chunk_bytes=10)
    lie = next(split(describe("s", b"liars", chunk_bytes=10), b"liars"))
    assembler = Assembler(bytes_max=1000)
    assembler.add_blob(blob)
    assembler.add_chunk("s", Chunk(blob.digest, 0, lie.crc, b"liars"))
    with pytest.raises(ChunkError, match="not the payload that was announced"):
        assembler.take(blob)
    assert (len(assembler), assembler.bytes, assembler.refused) == (0, 0, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunks": 4}, "are not 4 chunks"),
        ({"chunk_bytes": 0}, "out of range"),
        ({"chunks": CHUNKS_MAX + 1}, "out of range"),
        ({"bytes": 1001, "chunks": 101}, "exceed the limit of 1000"),
    ],
)
def test_an_impossible_manifest_is_refused(change: dict[str, int], reason: str) -> None:
    blob = describe("s", bytes(25), chunk_bytes=10).model_copy(update=change)
    assembler = Assembler(bytes_max=1000)
    assert reason in assembler.add_blob(blob)
    assert (len(assembler), assembler.refused) == (0, 1)


def test_a_second_manifest_cannot_change_the_first() -> None:
    blob = describe("s", bytes(25), chunk_bytes=10)
    assembler = Assembler(bytes_max=1000)
    assembler.add_blob(blob)
    other = describe("s", bytes(25), chunk_bytes=5)
    assert "contradicts" in assembler.add_blob(other)
    assert assembler.add_blob(blob) == ""


def test_beyond_the_bytes_the_oldest_payload_is_dropped() -> None:
    assembler = Assembler(bytes_max=100)
    blobs = [describe(f"s{n}", bytes([n]) * 60, chunk_bytes=30) for n in range(2)]
    for n, blob in enumerate(blobs):
        assembler.add_blob(blob)
        for chunk in split(blob, bytes([n]) * 60):
            assembler.add_chunk(blob.subject, chunk)
    assert (assembler.dropped, assembler.bytes) == (1, 60)
    assert not assembler.complete(blobs[0])
    assert assembler.take(blobs[1]) == bytes([1]) * 60


def test_beyond_the_number_the_oldest_payload_is_dropped() -> None:
    assembler = Assembler(bytes_max=100, open_max=2)
    for n in range(3):
        assembler.add_blob(describe(f"s{n}", bytes(60), chunk_bytes=30))
    assert (len(assembler), assembler.dropped) == (2, 1)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "header 'Diloco-Chunk' is missing"),
        ({HEADER_INDEX: "0", HEADER_CRC: "0"}, "header 'Diloco-Digest' is missing"),
        ({HEADER_INDEX: "x", HEADER_CRC: "0", HEADER_DIGEST: "d"}, "malformed header"),
        ({HEADER_INDEX: "0", HEADER_CRC: "xyz", HEADER_DIGEST: "d"}, "malformed header"),
        ({HEADER_INDEX: "-1", HEADER_CRC: "0", HEADER_DIGEST: "d"}, "out of range"),
        ({HEADER_INDEX: str(CHUNKS_MAX), HEADER_CRC: "0", HEADER_DIGEST: "d"}, "out of range"),
    ],
)
def test_bad_headers_are_refused(headers: dict[str, str], reason: str) -> None:
    with pytest.raises(ChunkError, match=reason):
        parse_chunk(headers, b"")


class HostileSenders(RuleBasedStateMachine):
    """Chunks of several payloads, mangled and repeated, into a small assembler."""

    BYTES_MAX = 90

    def __init__(self) -> None:
        super().__init__()
        self.assembler = Assembler(bytes_max=self.BYTES_MAX, open_max=3)
        self.payloads = [random.Random(n).randbytes(10 * n) for n in range(6)]
        self.blobs = [describe(f"s{n}", p, chunk_bytes=8) for n, p in enumerate(self.payloads)]

    @rule(n=st.integers(0, 5), index=st.integers(0, 7), mangle=st.sampled_from(["", "flip", "cut"]))
    def chunk(self, n: int, index: int, mangle: str) -> None:
        chunks = [*split(self.blobs[n], self.payloads[n])]
        if not chunks:
            return
        chunk = chunks[index % len(chunks)]
        data = bytes(chunk.data)
        if mangle:
            data = bytes([data[0] ^ 1]) + data[1:] if mangle == "flip" else data[:-1]
            bad = Chunk(chunk.digest, chunk.index, chunk.crc, data)
            assert self.assembler.add_chunk(self.blobs[n].subject, bad)
        else:
            self.assembler.add_chunk(self.blobs[n].subject, chunk)

    @rule(n=st.integers(0, 5))
    def manifest(self, n: int) -> None:
        self.assembler.add_blob(self.blobs[n])

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        if self.assembler.complete(self.blobs[n]):
            assert self.assembler.take(self.blobs[n]) == self.payloads[n]

    @invariant()
    def bounded(self) -> None:
        # I12: whatever was sent.
        assert 0 <= self.assembler.bytes <= self.BYTES_MAX
        assert len(self.assembler) <= 3


TestHostileSenders = HostileSenders.TestCase
