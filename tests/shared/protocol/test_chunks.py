"""Reassembly: whatever comes, only the true payload comes out (I11), within its buffer (I12)."""

import random
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diloco_shared.protocol.chunks import (
    CHUNKS_MAX,
    HEADER_CHECK,
    HEADER_DIGEST,
    HEADER_INDEX,
    ChunkError,
    Headed,
    Incoming,
    Pieces,
    cut,
)
from diloco_shared.protocol.messages import Blob


def receive(blob: Blob) -> Incoming:
    return Incoming(blob, lambda size: memoryview(bytearray(size)))


payloads = st.binary(max_size=200)
sizes = st.integers(1, 64)


def test_the_digest_is_that_of_the_chunks_digests() -> None:
    checks = xxhash.xxh3_128_digest(b"abc") + xxhash.xxh3_128_digest(b"de")
    outgoing = cut("s", b"abcde", chunk_bytes=3)
    assert outgoing.blob.digest == xxhash.xxh3_128_hexdigest(checks)
    assert outgoing.headers(1) == {
        HEADER_INDEX: "1",
        HEADER_CHECK: xxhash.xxh3_128_hexdigest(b"de"),
        HEADER_DIGEST: outgoing.blob.digest,
    }
    # The published test vector of XXH3-128 for no bytes and seed 0.
    assert cut("s", b"").blob.digest == "99aa06d3014798d86001c324468d497f"


@given(payloads, sizes)
def test_the_cut_covers_the_payload_once(payload: bytes, chunk_bytes: int) -> None:
    outgoing = cut("s", bytearray(payload), chunk_bytes=chunk_bytes)
    chunks = [bytes(outgoing.data(index)) for index in range(outgoing.blob.chunks)]
    assert b"".join(chunks) == payload
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    assert len({outgoing.message_id(index) for index in range(len(chunks))}) == len(chunks)


@given(payloads, sizes, st.randoms(use_true_random=False))
def test_any_order_with_repeats_gives_the_payload(
    payload: bytes, chunk_bytes: int, order: random.Random
) -> None:
    outgoing = cut("s", payload, chunk_bytes=chunk_bytes)
    indices = [*range(outgoing.blob.chunks)] * 2
    order.shuffle(indices)
    incoming = receive(outgoing.blob)
    news = [incoming.take(outgoing.headers(i), outgoing.data(i)) for i in indices]
    assert sum(news) == outgoing.blob.chunks
    assert (incoming.complete, incoming.fault) == (True, "")
    assert incoming.finish() == payload


def test_what_is_missing_is_named_in_order() -> None:
    payload = bytes(100)
    outgoing = cut("s", payload, chunk_bytes=10)
    incoming = receive(outgoing.blob)
    for index in (7, 0, 2):
        incoming.take(outgoing.headers(index), outgoing.data(index))
    assert incoming.missing(4) == [1, 3, 4, 5]
    assert incoming.missing() == [1, 3, 4, 5, 6, 8, 9]
    with pytest.raises(ChunkError, match=r"missing \[1, 3, 4, 5, 6, 8, 9\]"):
        incoming.finish()


@pytest.mark.parametrize(
    ("change", "size", "reason"),
    [
        ({HEADER_INDEX: "0"}, 9, "chunk 0 has 9 bytes instead of 10"),
        ({HEADER_INDEX: "2"}, 10, "chunk 2 has 10 bytes instead of 5"),
        ({HEADER_INDEX: "3"}, 5, "chunk 3 of 3"),
        ({HEADER_INDEX: "-1"}, 5, "chunk -1 of 3"),
        ({HEADER_INDEX: "x"}, 5, "malformed header"),
        ({HEADER_CHECK: "xyz"}, 10, "malformed header"),
        ({HEADER_CHECK: "00"}, 10, "a check of 1 bytes"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(
    change: dict[str, str], size: int, reason: str
) -> None:
    outgoing = cut("s", bytes(25), chunk_bytes=10)
    incoming = receive(outgoing.blob)
    assert incoming.claim(outgoing.headers(0) | change, size) is None
    assert reason in incoming.fault
    assert incoming.refused.total() == 1
    assert next(iter(incoming.refused)) in ("header", "index", "size")


@pytest.mark.parametrize("absent", [HEADER_INDEX, HEADER_CHECK, HEADER_DIGEST])
def test_a_chunk_without_a_header_is_refused(absent: str) -> None:
    outgoing = cut("s", bytes(25), chunk_bytes=10)
    incoming = receive(outgoing.blob)
    headers = outgoing.headers(0)
    del headers[absent]
    assert incoming.claim(headers, 10) is None
    assert incoming.refused == {"header": 1}


def test_a_chunk_of_another_attempt_is_no_fault() -> None:
    other = cut("s", bytes(range(25)), chunk_bytes=10)
    incoming = receive(cut("s", bytes(25), chunk_bytes=10).blob)
    assert not incoming.take(other.headers(0), other.data(0))
    assert (incoming.refused, incoming.fault) == ({"attempt": 1}, "")


def test_a_flipped_bit_is_refused_and_a_resend_repairs_it() -> None:
    outgoing = cut("s", b"hello", chunk_bytes=10)
    incoming = receive(outgoing.blob)
    assert not incoming.take(outgoing.headers(0), b"hellp")
    assert incoming.refused == {"check": 1}
    assert incoming.take(outgoing.headers(0), b"hello")
    assert incoming.finish() == b"hello"


def test_nothing_overwrites_what_is_judged_good_or_being_received() -> None:
    outgoing = cut("s", b"hello", chunk_bytes=10)
    incoming = receive(outgoing.blob)
    index = incoming.claim(outgoing.headers(0), 5)
    assert index == 0
    assert incoming.claim(outgoing.headers(0), 5) is None
    incoming.release(index)
    assert incoming.take(outgoing.headers(0), b"hello")
    assert incoming.claim(outgoing.headers(0), 5) is None
    assert (incoming.refused, incoming.fault) == ({"repeat": 2}, "")


def test_good_checksums_of_another_payload_fail_the_digest() -> None:
    blob, lie = cut("s", b"truth").blob, cut("s", b"liars")
    incoming = receive(blob)
    assert incoming.take(lie.headers(0) | {HEADER_DIGEST: blob.digest}, b"liars")
    with pytest.raises(ChunkError, match="not the payload that was announced"):
        incoming.finish()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunks": 4}, "are not 4 chunks"),
        ({"chunk_bytes": 0}, "out of range"),
        ({"chunks": CHUNKS_MAX + 1}, "out of range"),
        ({"bytes": 2**62, "chunk_bytes": 2**42, "chunks": 2**20}, "do not fit into memory"),
    ],
)
def test_an_impossible_manifest_is_refused(change: dict[str, int], reason: str) -> None:
    blob = cut("s", bytes(25), chunk_bytes=10).blob.model_copy(update=change)
    with pytest.raises(ChunkError, match=reason):
        receive(blob)


def test_a_chunk_size_below_one_is_refused() -> None:
    with pytest.raises(ChunkError, match="at least 1, not 0"):
        cut("s", b"x", chunk_bytes=0)


class HostileSenders(RuleBasedStateMachine):
    """Chunks of several payloads, mangled, repeated and broken off, into one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = [cut("s", random.Random(n).randbytes(40), chunk_bytes=8) for n in range(2)]
        self.incoming = receive(self.sent[0].blob)
        self.open: set[int] = set()

    @rule(n=st.integers(0, 1), index=st.integers(0, 4), mangle=st.sampled_from(["", "flip", "cut"]))
    def whole(self, n: int, index: int, mangle: str) -> None:
        data = bytes(self.sent[n].data(index))
        if mangle:
            data = bytes([data[0] ^ 1]) + data[1:] if mangle == "flip" else data[:-1]
        taken = self.incoming.take(self.sent[n].headers(index), data)
        assert not taken or (n == 0 and not mangle)

    @rule(index=st.integers(0, 4))
    def begin(self, index: int) -> None:
        claimed = self.incoming.claim(self.sent[0].headers(index), 8)
        if claimed is not None:
            self.incoming.place(claimed)[:4] = b"half"
            self.open.add(claimed)

    @rule()
    def break_off(self) -> None:
        for index in self.open:
            self.incoming.release(index)
        self.open.clear()

    @invariant()
    def only_the_truth(self) -> None:
        here = set(range(5)) - set(self.incoming.missing())
        assert len(here) == self.incoming.received
        assert not here & self.open
        assert all(self.incoming.place(i) == self.sent[0].data(i) for i in here)
        if self.incoming.complete:
            assert self.incoming.finish() == self.sent[0].payload


TestHostileSenders = HostileSenders.TestCase


def test_a_head_and_a_body_are_cut_as_if_they_were_one() -> None:
    body = bytes(range(250))
    for head in (b"", b"h", b"header"):
        headed, whole = Headed(head, body), head + body
        assert bytes(headed) == whole and len(headed) == len(whole)
        for chunk_bytes in (1, 3, 6, 7, 100, 1000):
            ours = cut("s", headed, chunk_bytes=chunk_bytes)
            theirs = cut("s", whole, chunk_bytes=chunk_bytes)
            assert (ours.blob, ours.checks) == (theirs.blob, theirs.checks)
            chunks = range(ours.blob.chunks)
            assert [bytes(ours.data(n)) for n in chunks] == [bytes(theirs.data(n)) for n in chunks]


def test_lent_chunks_come_another_way_and_nobody_waits_for_them_here() -> None:
    outgoing = cut("s", bytes(range(10)), chunk_bytes=4)
    incoming = receive(outgoing.blob)
    assert incoming.take(outgoing.headers(0), outgoing.data(0))
    incoming.lend([0, 1, 2])
    assert (incoming.awaited, incoming.lent, incoming.complete) == (0, 2, False)
    assert not incoming.take(outgoing.headers(1), outgoing.data(1)), "somebody else brings it"
    check = outgoing.checks[16:32]
    with pytest.raises(ChunkError, match="3 bytes are not chunk 1"):
        incoming.take_lent(1, check, b"123")
    assert not incoming.take_lent(1, check, b"damaged!"[:4])
    assert incoming.refused["check"] == 1 and incoming.awaited == 1
    with pytest.raises(ChunkError, match="not chunk 1"):
        incoming.take_lent(1, check, outgoing.data(1))
    assert incoming.take(outgoing.headers(1), outgoing.data(1))
    incoming.take_back(2)
    incoming.take_back(2)
    assert (incoming.awaited, incoming.lent) == (1, 0)
    incoming.lend([2])
    assert incoming.take_lent(2, outgoing.checks[32:], outgoing.data(2))
    assert incoming.has(2) and incoming.check_of(2) == outgoing.checks[32:]
    assert incoming.finish() == bytes(range(10))


@given(payloads, sizes, st.data())
def test_pieces_are_read_as_if_all_of_a_payload_were_here(
    payload: bytes, size: int, data: st.DataObject
) -> None:
    edges = sorted({0, len(payload), *data.draw(st.lists(st.integers(0, len(payload))))})
    cuts = list(pairwise(edges))
    pieces = Pieces(len(payload), [(a, payload[a:b]) for a, b in data.draw(st.permutations(cuts))])
    start = data.draw(st.integers(0, len(payload)))
    assert len(pieces) == len(payload)
    assert pieces[start : start + size] == payload[start : start + size]
    if len(cuts) > 1:
        first, *_ = cuts
        some = Pieces(len(payload), [(a, payload[a:b]) for a, b in cuts[1:]])
        with pytest.raises(KeyError):
            some[: first[1] + 1]
