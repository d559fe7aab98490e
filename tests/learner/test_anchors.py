"""Anchors: built exactly as published, whatever the order; refused when they do not check."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diloco_learner.events import Merged
from diloco_learner.exchange.anchors import EARLY_MAX, KEPT_MAX, WAITING_MAX, AnchorBook
from diloco_learner.exchange.counters import Undecided
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.chunks import digest_bytes
from diloco_shared.protocol.messages import Blob, PublicationManifest, Stamp

SIZES_P = (5, 3)


@dataclass
class Publisher:
    """Publishes one fragment as a syncer does: master rounded into anchors, version by version."""

    fragment: int = 0
    epoch: int = 0
    seed: int = 0
    version: int = -1
    anchor_F: NDArray[np.float32] = field(init=False)
    anchors: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng([self.seed, self.fragment, self.epoch])
        self.anchor_F = self._draw()

    def _draw(self) -> NDArray[np.float32]:
        return self.random.standard_normal(SIZES_P[self.fragment]).astype(np.float32)

    def publish(self, *, keyframe: bool = False) -> tuple[PublicationManifest, bytes]:
        keyframe = keyframe or self.version < 0
        name = "fp32" if keyframe else "bf16"
        payload = codec.encode(name, self._draw())
        decoded_F = codec.decode(name, payload, SIZES_P[self.fragment])
        self.anchor_F = decoded_F if keyframe else self.anchor_F + decoded_F
        self.version += 1
        self.anchors[self.version] = self.anchor_F
        return self.manifest(name, payload, keyframe=keyframe), payload

    def again(self) -> tuple[PublicationManifest, bytes]:
        """The present anchor exactly, as a keyframe."""
        payload = codec.encode("fp32", self.anchor_F)
        return self.manifest("fp32", payload, keyframe=True, term=2), payload

    def manifest(
        self, name: str, payload: bytes, *, keyframe: bool, term: int = 1
    ) -> PublicationManifest:
        return PublicationManifest(
            run="r",
            epoch=self.epoch,
            term=term,
            round=self.version,
            fragment=self.fragment,
            version=self.version,
            prev_version=-1 if keyframe else self.version - 1,
            codec=name,
            values=SIZES_P[self.fragment],
            anchor_digest=digest_array(self.anchor_F),
            config_hash="0" * 32,
            participants=("a",),
            last_merged={"a": (0, self.version, self.version - 1)},
            stamp=Stamp(round=self.version, steps=0, fraction=0.0, fraction_per_step=0.0),
            blob=Blob(
                subject="dn.r",
                bytes=len(payload),
                chunk_bytes=1 << 19,
                chunks=1,
                digest=digest_bytes(payload),
            ),
        )


def test_deltas_build_on_a_keyframe_bit_for_bit() -> None:
    book, publisher = AnchorBook(SIZES_P), Publisher()
    for version in range(6):
        ready = book.offer(*publisher.publish(keyframe=version == 3))
        assert ready is not None
        assert (ready.epoch, ready.fragment, ready.version) == (0, 0, version)
        assert ready.last_merged == {"a": (0, version, version - 1)}
        taken = book.take(0, 0, version)
        assert taken.tobytes() == publisher.anchors[version].tobytes()
        assert not taken.flags.writeable
    assert book.versions == (5, -1)
    assert not book.refused


def test_a_delta_waits_for_what_it_adds_to() -> None:
    book, publisher = AnchorBook(SIZES_P), Publisher()
    first, second, third = (publisher.publish() for _ in range(3))
    assert book.offer(*first) is not None
    assert book.offer(*third) is None
    assert list(book.shelves[0].waiting) == [2]
    ready = book.offer(*second)
    assert ready is not None and ready.version == 2
    assert book.take(0, 0, 2).tobytes() == publisher.anchors[2].tobytes()
    assert not book.shelves[0].waiting


def test_what_a_late_publication_tells_is_not_lost_with_what_it_releases() -> None:
    book, publisher = AnchorBook(SIZES_P), Publisher()
    first, second, third = (publisher.publish() for _ in range(3))
    book.offer(*first)
    undecided = Undecided("a", 0)
    undecided.contributed(0, 1, 0, None)
    undecided.contributed(0, 2, 0, None)
    book.offer(*third)
    ready = book.offer(*second)
    assert ready is not None and ready.version == 2
    assert undecided.decide(ready) == [Merged(0, 1, None), Merged(0, 2, None)]


def test_a_keyframe_closes_a_gap_for_good() -> None:
    book, publisher = AnchorBook(SIZES_P), Publisher()
    book.offer(*publisher.publish())
    publisher.publish()  # lost
    assert book.offer(*publisher.publish()) is None
    ready = book.offer(*publisher.publish(keyframe=True))
    assert ready is not None and ready.version == 3
    assert not book.shelves[0].waiting


def test_repeats_and_older_versions_change_nothing() -> None:
    book, publisher = AnchorBook(SIZES_P), Publisher()
    old = publisher.publish()
    book.offer(*old)
    book.offer(*publisher.publish())
    assert book.offer(*publisher.again()) is None  # the same bytes under a later term
    assert book.offer(*old) is None
    assert book.versions == (1, -1) and not book.refused


def test_the_same_version_with_other_bytes_is_refused() -> None:
    """I4: every copy of (epoch, fragment, version) has the same bytes."""
    book, publisher, other = AnchorBook(SIZES_P), Publisher(), Publisher(seed=1)
    book.offer(*publisher.publish())
    assert book.offer(*other.publish()) is None
    assert book.refused == {"conflict": 1}
    assert book.take(0, 0, 0).tobytes() == publisher.anchors[0].tobytes()


@pytest.mark.parametrize("keyframe", [True, False])
def test_what_does_not_check_changes_nothing_and_is_counted(keyframe: bool) -> None:
    """I11, for a digest that does not match; the right bytes are still taken afterwards."""
    book, publisher = AnchorBook(SIZES_P), Publisher()
    book.offer(*publisher.publish())
    manifest, payload = publisher.publish(keyframe=keyframe)
    bad = payload[:-1] + bytes([payload[-1] ^ 1])
    assert book.offer(manifest, bad) is None
    assert book.refused == {"digest": 1} and "version 1" in book.last_refusal
    assert book.versions == (0, -1)
    assert book.offer(manifest, payload) is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fragment": 2}, "fragment 2 of 2"),
        ({"values": 6}, "6 values, the layout has 5"),
        ({"codec": "int3"}, "unknown codec"),
        ({"codec": "bf16"}, "values of fp32 where 5 of bf16"),
        ({"version": 5, "prev_version": 3}, "version 5 cannot add to 3"),
    ],
)
def test_malformed_publications_are_refused_with_a_reason(
    change: dict[str, object], said: str
) -> None:
    """I11."""
    book, publisher = AnchorBook(SIZES_P), Publisher()
    manifest, payload = publisher.publish()
    assert book.offer(manifest.model_copy(update=change), payload) is None
    assert book.refused == {"malformed": 1} and said in book.last_refusal
    assert book.versions == (-1, -1)


def test_a_new_epoch_voids_everything_and_its_early_deltas_wait() -> None:
    book = AnchorBook(SIZES_P)
    old, other, new = Publisher(), Publisher(fragment=1), Publisher(epoch=1)
    late = old.publish()
    book.offer(*late)
    book.offer(*other.publish())
    keyframe, delta = new.publish(), new.publish()
    assert book.offer(*delta) is None
    assert book.versions == (0, 0) and book.epoch == 0  # a delta alone proves nothing
    ready = book.offer(*keyframe)
    assert ready is not None and (ready.epoch, ready.version) == (1, 1)
    assert book.versions == (1, -1)
    assert book.offer(*old.publish()) is None
    with pytest.raises(KeyError, match="not held"):
        book.take(0, 0, 0)


def test_a_false_keyframe_begins_no_epoch() -> None:
    """I11."""
    book, old, new = AnchorBook(SIZES_P), Publisher(), Publisher(epoch=1)
    book.offer(*old.publish())
    manifest, payload = new.publish()
    assert book.offer(manifest, bytes(len(payload))) is None
    assert book.epoch == 0 and book.versions == (0, -1)


def test_what_is_kept_is_bounded() -> None:
    """I12."""
    book, publisher = AnchorBook(SIZES_P), Publisher()
    for _ in range(5):
        book.offer(*publisher.publish())
    assert KEPT_MAX == 1
    assert list(book.shelves[0].anchors) == [4], "who adopts an older one holds it"
    publisher.publish()  # lost
    for _ in range(WAITING_MAX + 3):
        assert book.offer(*publisher.publish()) is None
    assert sorted(book.shelves[0].waiting) == [6, 7, 8, 9]
    later = Publisher(epoch=7)
    later.publish()
    for _ in range(EARLY_MAX + 2):
        assert book.offer(*later.publish()) is None
    assert len(book.early) == EARLY_MAX
    assert book.refused == {"waiting": 5}


@given(st.data())
def test_any_order_with_repeats_ends_at_the_newest_anchor(data: st.DataObject) -> None:
    """I1 and I4: versions announced only grow, and every one has the published bytes."""
    publisher = Publisher()
    keys = data.draw(st.sets(st.integers(1, 8)), label="keyframes")
    sent = [publisher.publish(keyframe=v in keys) for v in range(WAITING_MAX + 1)]
    order = data.draw(st.permutations(range(len(sent))), label="order")
    repeats = data.draw(st.lists(st.sampled_from(order), max_size=4), label="repeats")
    book, announced = AnchorBook(SIZES_P), [-1]
    for i in [*order, *repeats]:
        ready = book.offer(*sent[i])
        if ready is not None:
            announced.append(ready.version)
            taken = book.take(0, 0, ready.version)
            assert taken.tobytes() == publisher.anchors[ready.version].tobytes()
    assert announced == sorted(set(announced))
    assert announced[-1] == len(sent) - 1
    assert not book.refused and not any(s.waiting for s in book.shelves)


def test_nobody_reads_old_versions_as_those_of_a_new_epoch() -> None:
    """`epoch` and `versions` are read while a worker thread enters an epoch."""
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Watched(AnchorBook):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name in ("epoch", "shelves") and hasattr(self, "early"):
                seen.append((self.epoch, self.versions))

    book, before, after = Watched(SIZES_P), Publisher(), Publisher(epoch=1)
    for _ in range(3):
        book.offer(*before.publish())
    book.offer(*after.publish())
    assert [versions for epoch, versions in seen if epoch == 1 and versions != (-1, -1)] == []
    assert (book.epoch, book.versions) == (1, (0, -1))
