"""Anchors in parts: given away, read, gathered, let go of; and what is none of that."""

import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.hosts import plan
from diloco_learner.hosts.held_anchors import KEPT_MAX, HeldAnchor, Holder, OwnParts
from diloco_learner.hosts.parts import Buffer, Span, packed
from diloco_learner.hosts.whole import HostLost
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.chunks import digest_bytes
from diloco_shared.protocol.messages import Blob, PublicationManifest, Stamp


def lying(values: int, hosts: int, devices: int) -> dict[int, list[Span]]:
    """As on a mesh: an equal part on each device, and nothing behind the last value."""
    each = -(-values // (hosts * devices))
    cut = [(min(n * each, values), min((n + 1) * each, values)) for n in range(hosts * devices)]
    return {n: [(one,) for one in cut[n * devices : (n + 1) * devices]] for n in range(hosts)}


@dataclass
class Island:
    """Hosts that carry out every order as it is told. `lost`: from then on nobody answers."""

    sizes: tuple[int, ...]
    hosts: int = 2
    devices: int = 1
    piece_bytes: int = 1 << 20
    told: list[plan.Order] = field(default_factory=list)
    lost: bool = False

    def __post_init__(self) -> None:
        self.others = {n: OwnParts() for n in range(1, self.hosts)}
        self.came: dict[int, Mapping[int, Buffer]] = {}
        self.holder = Holder(self, self.spans_of, self.piece_bytes)
        self.meanwhile: Callable[[], object] = lambda: None

    def spans_of(self, fragment: int) -> dict[int, list[Span]]:
        return lying(self.sizes[fragment], self.hosts, self.devices)

    def tell(
        self, order: plan.Order, parts: Callable[[int], Sequence[memoryview]] | None = None
    ) -> int:
        if self.lost:
            raise HostLost("host 1 is gone")
        self.told.append(order)
        number = len(self.told)
        assert plan.decode(plan.encode(number, order)) == (number, order)
        for index, own in self.others.items():
            data = b"".join(parts(index)) if parts is not None else b""
            if isinstance(order, plan.Hold):
                assert len(data) <= self.piece_bytes
                spans = self.spans_of(order.fragment)[index]
                own.take(order, self.sizes[order.fragment], spans, data)
        if isinstance(order, plan.Gather):
            gave = {n: b"".join(packed(own.given(order.key))) for n, own in self.others.items()}
            self.came[number] = gave
        self.meanwhile()
        return number

    def answers(self, number: int) -> Mapping[int, Buffer]:
        if self.lost:
            raise HostLost("host 1 is gone")
        return self.came.pop(number)

    def held(self) -> set[int]:
        """Keys, the same on all hosts."""
        found = {frozenset(own.kept) for own in self.others.values()}
        assert len(found) == 1
        return set(*found)


def anchor(values: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(values).astype(np.float32)


ISLANDS = st.builds(
    Island,
    st.tuples(st.integers(1, 40)),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 64),
)


@given(ISLANDS)
def test_each_host_reads_its_part_and_all_of_them_are_the_anchor(island: Island) -> None:
    whole = anchor(island.sizes[0])
    held = island.holder.hold(0, whole)
    assert (held.shape, held.size, len(held)) == (whole.shape, whole.size, whole.size)
    assert held.dtype == np.float32
    for index, spans in island.spans_of(0).items():
        own = held if index == 0 else island.others[index].of(held.key, 0)
        for ((start, stop),) in spans:
            assert own[start:stop].tobytes() == whole[start:stop].tobytes()
            assert not own[start:stop].flags.writeable, "nobody writes to an anchor"
    again = np.asarray(held)
    assert again.tobytes() == whole.tobytes() and again.dtype == np.float32
    assert not again.flags.writeable
    kept = held.own_bytes + sum(own.bytes for own in island.others.values())
    assert kept == whole.nbytes, "each value lies with one host"
    assert island.holder.hold(0, held) is held


def test_what_is_not_here_is_missed() -> None:
    held = Island((8,)).holder.hold(0, anchor(8))
    with pytest.raises(KeyError):
        held[4:8]


def test_hosts_let_go_of_what_nobody_has_with_the_next_anchor() -> None:
    island = Island((8, 8))
    first = island.holder.hold(0, anchor(8))
    second = island.holder.hold(1, anchor(8, 1))
    also = second
    del first
    assert island.held() == {1, 2}, "a moment at which no order is told"
    third = island.holder.hold(0, anchor(8, 2))
    assert island.held() == {2, 3}
    del second
    island.holder.hold(1, anchor(8, 3))
    assert island.held() == {2, 3, 4}, "somebody still has it"
    del also, third
    last = island.holder.hold(1, anchor(8, 4))
    assert island.held() == {last.key} and last.key == 5, "no key comes twice"


def test_an_anchor_comes_in_pieces_and_steps_may_come_between_them() -> None:
    island = Island((64,), piece_bytes=16)
    island.meanwhile = lambda: island.told.append(plan.Step(0.1, False, (2, 9), "int32"))
    held = island.holder.hold(0, anchor(64))
    kinds = [type(order).__name__ for order in island.told]
    assert kinds == ["Hold", "Step"] * 8
    assert [o.at for o in island.told if isinstance(o, plan.Hold)] == list(range(0, 128, 16))
    assert np.asarray(held).tobytes() == anchor(64).tobytes()


def test_work_that_is_over_tells_no_more_of_its_anchors() -> None:
    """A thread takes in an anchor while the run is left: nothing comes behind `Leave`."""
    island = Island((64,), piece_bytes=16)
    held = island.holder.hold(0, anchor(64))
    told = len(island.told)
    between, closed = threading.Event(), threading.Event()

    def meanwhile() -> None:
        between.set()
        closing.join(0)

    found, late = list[BaseException](), time.monotonic() + 10

    def hold() -> None:
        try:
            while time.monotonic() < late:
                island.holder.hold(0, anchor(64, 1))
        except HostLost as error:
            found.append(error)

    def close() -> None:
        between.wait(10)
        island.holder.close()
        island.told.append(plan.Leave())
        closed.set()

    closing = threading.Thread(target=close)
    island.meanwhile = meanwhile
    holding = threading.Thread(target=hold)
    closing.start()
    holding.start()
    holding.join(10)
    closing.join(10)
    assert closed.is_set() and "is over" in str(found[0])
    assert len(island.told) > told and island.told[-1] == plan.Leave()
    with pytest.raises(HostLost):
        np.asarray(held)


@pytest.mark.parametrize(
    "orders",
    [
        [plan.Hold(1, 0, 0, (7,))],  # lets go what was never kept
        [plan.Hold(1, 0, 8)],  # begins in the middle
        [plan.Hold(1, 0, 0), plan.Hold(1, 0, 0, (1,)), plan.Hold(1, 0, 0, (1, 1))],
        [plan.Hold(n, 0, 0) for n in range(KEPT_MAX + 1)],
    ],
)
def test_what_process_0_never_tells_is_refused(orders: list[plan.Hold]) -> None:
    own = OwnParts()
    with pytest.raises((ValueError, KeyError)):
        for order in orders:
            own.take(order, 4, [((2, 4),)], bytes(8))


def test_another_anchor_than_was_named_is_never_given() -> None:
    own = OwnParts()
    own.take(plan.Hold(1, 0, 0), 4, [((2, 4),)], np.full(2, 1.0, np.float32).tobytes())
    own.take(plan.Hold(2, 0, 0), 4, [((2, 4),)], np.full(2, 2.0, np.float32).tobytes())
    own.take(plan.Hold(3, 1, 0), 4, [((2, 4),)], bytes(4))  # half of it
    assert own.of(1, 0)[2:4].tolist() == [1.0, 1.0]
    assert own.of(2, 0)[2:4].tolist() == [2.0, 2.0]
    for key, fragment in ((1, 1), (4, 0), (3, 1)):
        with pytest.raises(ValueError, match=f"anchor {key}, of fragment {fragment}, is not kept"):
            own.of(key, fragment)
    with pytest.raises(ValueError, match="out of turn"):
        own.take(plan.Hold(3, 1, 4), 4, [((2, 4),)], bytes(8))


# --------------------------------------------------------------------------------------------------
# The book of a learner whose hosts keep the anchors.


def published(
    version: int, name: str, values_F: Any, before_F: Any
) -> tuple[PublicationManifest, bytes, Any]:
    """(manifest, payload, the anchor that it makes) of fragment 0."""
    payload = bytes(codec.encode(name, values_F))
    anchor_F = codec.decode(name, payload, len(values_F))
    if before_F is not None:
        anchor_F = before_F + anchor_F
    blob = Blob(
        subject="dn.r",
        bytes=len(payload),
        chunk_bytes=1 << 19,
        chunks=1,
        digest=digest_bytes(payload),
    )
    manifest = PublicationManifest(
        run="r",
        epoch=0,
        term=1,
        round=version,
        fragment=0,
        version=version,
        prev_version=-1 if before_F is None else version - 1,
        codec=name,
        values=len(values_F),
        anchor_digest=digest_array(anchor_F),
        config_hash="0" * 32,
        participants=("a",),
        last_merged={"a": (0, version, version - 1)},
        stamp=Stamp(round=version, steps=0, fraction=0.0, fraction_per_step=0.0),
        blob=blob,
    )
    return manifest, payload, anchor_F


@given(ISLANDS, st.sampled_from(["bf16", "int8", "int4"]))
def test_a_delta_adds_to_gathered_parts_as_on_one_host(island: Island, name: str) -> None:
    values = island.sizes[0]
    one, many = AnchorBook((values,)), AnchorBook((values,), island.holder.hold)
    before_F = None
    for version in range(3):
        how = name if version else "fp32"
        manifest, payload, before_F = published(version, how, anchor(values, version), before_F)
        assert one.offer(manifest, payload) == many.offer(manifest, payload) is not None
        a, b = (book.take(0, 0, version) for book in (one, many))
        assert isinstance(b, HeldAnchor)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() == before_F.tobytes()
    assert one.refused == many.refused == {}


def test_a_publication_that_is_refused_is_given_to_nobody() -> None:
    island = Island((8,))
    book = AnchorBook((8,), island.holder.hold)
    manifest, payload, _ = published(0, "fp32", anchor(8), None)
    wrong = manifest.model_copy(update={"anchor_digest": "0" * 32})
    assert book.offer(wrong, payload) is None and book.refused == {"digest": 1}
    assert island.told == []


@pytest.mark.parametrize("version", [0, 1])
def test_a_host_that_is_gone_makes_no_publication_bad(version: int) -> None:
    """Neither where the anchor is given away, nor where what a delta adds to is gathered."""
    island = Island((8,))
    book = AnchorBook((8,), island.holder.hold)
    first, payload, first_F = published(0, "fp32", anchor(8), None)
    if version:
        assert book.offer(first, payload) is not None
        first, payload, _ = published(1, "bf16", anchor(8, 1), first_F)
    island.lost = True
    with pytest.raises(HostLost, match="host 1 is gone"):
        book.offer(first, payload)
    assert book.refused == {} and book.versions == (version - 1,)


def test_process_0_keeps_its_part_of_an_anchor_and_no_more() -> None:
    """Of what this process has in its memory, the others' parts are taken away."""
    values, hosts = 1 << 20, 4
    island = Island((values,), hosts=hosts)
    book = AnchorBook((values,), island.holder.hold)
    first, payload, first_F = published(0, "fp32", anchor(values), None)
    second, delta, _ = published(1, "bf16", anchor(values, 1), first_F)
    del first_F
    tracemalloc.start()
    try:
        for manifest, data in ((first, payload), (second, delta)):
            assert book.offer(manifest, data) is not None
            whole, _ = tracemalloc.get_traced_memory()
            others = sum(own.bytes for own in island.others.values())
            assert 4 * values // hosts <= whole - others < 1.2 * 4 * values // hosts
    finally:
        tracemalloc.stop()
    held: Any = book.take(0, 0, 1)
    assert held.own_bytes == 4 * values // hosts
