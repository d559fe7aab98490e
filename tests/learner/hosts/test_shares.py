"""However many processes have a payload: its bytes, its chunks and its digest are the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.hosts.fragments import WIDTHS, Fragment

from diloco_learner.hosts.shares import (
    CONTRIBUTION,
    DROPPED_MAX,
    MOMENTS,
    Composed,
    KeptPayload,
    KeptShares,
    PayloadShare,
    compose,
    kept,
    share_of,
)
from diloco_shared.protocol.chunks import CHUNK_BYTES, ChunkError, Outgoing, cut

FRAGMENTS = st.builds(
    Fragment,
    st.sampled_from(sorted(WIDTHS)),
    st.integers(1, 3000),
    st.integers(1, 4),
    st.integers(1, 3),
)


def shared(
    fragment: Fragment, carriers: set[int], chunk_bytes: int
) -> tuple[Composed, dict[int, KeptPayload]]:
    """What process 0 makes of the answers of all, and what the others keep."""
    keep, answers = dict[int, KeptPayload](), dict[int, bytes]()
    for host in range(1, fragment.hosts):
        parts = fragment.parts(host)
        if host in carriers:
            keep[host], parts = kept(fragment.lying, host, parts, chunk_bytes)
        answers[host] = b"".join(parts)
    own = 0, fragment.parts(0)
    lying, header = fragment.lying, fragment.header
    return compose("s", lying, header, own, answers, carriers, chunk_bytes), keep


def sent(
    made: Composed, keep: dict[int, KeptPayload]
) -> dict[int, tuple[bytes, dict[str, str], str]]:
    """What all of them store, by chunk; no chunk comes from two."""
    found: dict[int, tuple[bytes, dict[str, str], str]] = {}
    outgoings: list[tuple[Outgoing, tuple[int, ...]]] = [(made.outgoing, made.chunks)]
    for host, chunks in made.carried.items():
        assert keep[host].chunks == chunks
        outgoings.append((keep[host].outgoing(made.outgoing.blob), chunks))
    for outgoing, chunks in outgoings:
        for n in chunks:
            assert n not in found, "one process stores it"
            found[n] = bytes(outgoing.data(n)), outgoing.headers(n), outgoing.message_id(n)
    return found


@given(FRAGMENTS, st.sets(st.integers(1, 3)), st.integers(1, 700))
def test_what_is_stored_is_what_one_process_would_store(
    fragment: Fragment, carriers: set[int], chunk_bytes: int
) -> None:
    alone = cut("s", fragment.payload, chunk_bytes=chunk_bytes)
    made, keep = shared(fragment, carriers, chunk_bytes)
    assert made.outgoing.blob == alone.blob, "in a manifest nothing tells of hosts"
    assert sent(made, keep) == {
        n: (bytes(alone.data(n)), alone.headers(n), alone.message_id(n))
        for n in range(alone.blob.chunks)
    }


@given(FRAGMENTS, st.integers(1, 700))
def test_a_process_stores_all_chunks_that_lie_in_its_bytes(
    fragment: Fragment, chunk_bytes: int
) -> None:
    size, lying = fragment.lying.size, fragment.lying
    assert size == len(fragment.payload)
    for host in range(fragment.hosts):
        own = {n for start, stop in lying.stretches(host) for n in range(start, stop)}
        share = share_of(lying.stretches(host), size, chunk_bytes)
        rest = {n for start, stop in share.rest for n in range(start, stop)}
        chunks = [range(c * chunk_bytes, min((c + 1) * chunk_bytes, size)) for c in share.chunks]
        carried = {n for chunk in chunks for n in chunk}
        assert carried | rest == own and not carried & rest
        others = set(range(-(-size // chunk_bytes))) - set(share.chunks)
        assert all(
            not own.issuperset(range(c * chunk_bytes, min((c + 1) * chunk_bytes, size)))
            for c in others
        )


def test_of_a_large_fragment_nearly_all_is_shared_out() -> None:
    """Process 0 stores its own share, and for each border of the others two chunks at most."""
    for hosts in (2, 4):
        fragment = Fragment("bf16", 32 << 20, hosts)
        shares = [
            share_of(fragment.lying.stretches(host), fragment.lying.size, CHUNK_BYTES)
            for host in range(hosts)
        ]
        chunks = -(-fragment.lying.size // CHUNK_BYTES)
        others = sum(len(share.chunks) for share in shares[1:])
        assert chunks - others <= chunks / hosts + 2 * hosts


def test_the_last_chunk_is_whole_though_it_is_shorter() -> None:
    assert share_of([(4, 10)], 10, 4) == PayloadShare((1, 2), ())
    assert share_of([(5, 9)], 10, 4) == PayloadShare((), ((5, 9),))
    assert share_of([(3, 6), (6, 9), (2, 2)], 10, 4) == PayloadShare((1,), ((3, 4), (8, 9)))


def test_answers_of_another_length_are_refused() -> None:
    fragment = Fragment("bf16", 1000, 2)
    own = 0, fragment.parts(0)
    for carriers, what in (({1}, "answers"), (set[int](), "gives")):
        with pytest.raises(ValueError, match=f"process 1, which {what}"):
            compose("s", fragment.lying, fragment.header, own, {1: b"12"}, carriers, 64)


def test_what_is_kept_is_stored_under_its_own_payload_only() -> None:
    fragment = Fragment("bf16", 1000, 2)
    mine, _ = kept(fragment.lying, 1, fragment.parts(1), 64)
    with pytest.raises(ChunkError, match="are told of a payload"):
        mine.outgoing(cut("s", b"another").blob)
    with pytest.raises(KeyError, match="those from 0 on"):
        mine.payload[0:64]


@pytest.mark.parametrize("of", [CONTRIBUTION, MOMENTS])
def test_what_is_dropped_while_it_is_hashed_is_not_kept(of: str) -> None:
    """Its share of the moments of a large model is gigabytes, and would stay for hours."""
    fragment, shares = Fragment("bf16", 1000, 2), KeptShares()
    mine, _ = kept(fragment.lying, 1, fragment.parts(1), 64, of)
    shares.drop(7)
    shares.drop(-9)  # of something to fetch
    for number in (7, 8):
        shares.keep(number, mine)
    assert sorted(shares.kept) == [8] and shares.of(7) is None
    shares.drop(8)
    assert not shares.kept and not (set(shares.dropped) - {7})
    for number in range(100, 100 + 2 * DROPPED_MAX):
        shares.drop(number)
    assert len(shares.dropped) == DROPPED_MAX, "what is never kept takes no room for ever"


def test_what_work_that_is_over_has_made_is_not_kept() -> None:
    fragment, shares = Fragment("bf16", 1000, 2), KeptShares()
    mine, _ = kept(fragment.lying, 1, fragment.parts(1), 64)
    shares.keep(6, mine)
    shares.forget(9)
    shares.keep(8, mine)  # whoever hashed it was not done yet
    assert not shares.kept
    shares.keep(10, mine)
    assert shares.to_store(10) is mine and not shares.kept
