"""The store: staged purely, published exactly, restored to the bit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.numerics.merge import Delta, merge
from diloco_shared.protocol.chunks import digest_bytes
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.fragmentation import Layout
from diloco_syncer.merging.anchor_files_io import FileShelf
from diloco_syncer.merging.store import Contribution, FragmentStore, StagedMerge
from diloco_syncer.rounds.norms import inspect

f32 = np.float32
LAYOUT = Layout.build(
    [
        TensorSpec(name="embedding", shape=(6, 4), embedding=True),
        TensorSpec(name="matrix", shape=(5, 4), embedding=False),
        TensorSpec(name="norm", shape=(3,), embedding=False),
    ],
    2,
)
# One outer step of rate 1 without momentum: easy to follow by hand.
PLAIN = {"fragments": 2, "preset": "short", "codec_up": "fp32", "codec_down": "fp32"}


def normal(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(f32)


def store_of(**settings: Any) -> FragmentStore:
    algorithm = Algorithm.model_validate({"fragments": 2, **settings})
    return FragmentStore.init(
        LAYOUT, algorithm, [normal(p, size) for p, size in enumerate(LAYOUT.sizes)]
    )


def contribution(
    store: FragmentStore, p: int, seed: int, *, base: int | None = None, learner: str = ""
) -> Contribution:
    name = store.algorithm.codec_up
    payload = codec.encode(name, normal(100 + seed, LAYOUT.sizes[p]) * f32(0.01))
    base = store.version(p) if base is None else base
    return Contribution(learner or f"l{seed}", 1.0 + seed, base, payload, name)


def advance(store: FragmentStore, p: int, seed: int, *, keyframe: bool = False) -> StagedMerge:
    staged = store.stage(p, [contribution(store, p, seed + k) for k in range(3)], keyframe=keyframe)
    store.install(p, staged)
    return staged


def state(store: FragmentStore) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in store.state_arrays().items()}


def test_staging_changes_nothing_and_repeats_to_the_bit() -> None:
    store = store_of()
    advance(store, 0, 0)
    before = state(store)
    contributions = [contribution(store, 0, seed) for seed in (1, 2, 3)]
    first = store.stage(0, contributions, keyframe=False)
    second = store.stage(0, contributions, keyframe=False)
    assert state(store) == before and store.version(0) == 1
    assert (first.payload, first.anchor_digest, first.master_digest) == (
        second.payload,
        second.anchor_digest,
        second.master_digest,
    )


def test_contributions_may_arrive_in_any_order() -> None:
    store = store_of()
    contributions = [contribution(store, 1, seed) for seed in (1, 2, 3, 4)]
    assert (
        store.stage(1, contributions, keyframe=False).master_digest
        == store.stage(1, contributions[::-1], keyframe=False).master_digest
    )


def test_installing_advances_one_fragment_by_one_version() -> None:
    store = store_of()
    staged = store.stage(0, [contribution(store, 0, 0)], keyframe=False)
    other, anchor = store.anchor(1).tobytes(), store.anchor(0)
    store.install(0, staged)
    assert (store.version(0), store.version(1)) == (1, 0)
    assert store.anchor(1).tobytes() == other
    assert store.fragments[0].previous is anchor
    assert store.state_arrays()["0.previous"] is anchor and "1.previous" not in store.state_arrays()
    with pytest.raises(AssertionError):
        store.install(0, staged)


def test_a_keyframe_publishes_the_master_itself() -> None:
    store = store_of(keyframe_codec="fp32")
    staged = advance(store, 0, 0, keyframe=True)
    assert staged.payload == codec.encode("fp32", staged.fragment.master)
    assert staged.anchor_digest == staged.master_digest
    assert staged.payload_digest == digest_bytes(staged.payload)


def test_a_bf16_keyframe_is_the_rounded_master() -> None:
    store = store_of(keyframe_codec="bf16")
    staged = advance(store, 0, 0, keyframe=True)
    assert staged.payload == codec.encode("bf16", staged.fragment.master)
    decoded = codec.decode("bf16", staged.payload, LAYOUT.sizes[0])
    assert staged.anchor_digest == digest_array(decoded) != staged.master_digest


def test_learners_reconstruct_the_anchor_from_deltas_to_the_bit() -> None:
    store = store_of()
    theirs = store.anchor(0)
    for n in range(6):
        staged = advance(store, 0, n)
        theirs = theirs + codec.decode("bf16", staged.payload, LAYOUT.sizes[0])
        assert digest_array(theirs) == staged.anchor_digest == store.anchor_digest(0)
    assert codec.decode("fp32", bytes(store.current_keyframe(0)), LAYOUT.sizes[0]).tobytes() == (
        theirs.tobytes()
    )


def test_the_error_of_quantisation_is_carried_into_the_next_delta() -> None:
    """Each publication rounds master - anchor, so errors do not add up."""
    store = store_of()
    naive = store.anchor(0)
    for n in range(30):
        f = store.fragments[0]
        staged = advance(store, 0, n)
        published = codec.decode("bf16", staged.payload, LAYOUT.sizes[0])
        exact = staged.fragment.master - f.anchor
        # The rounding of this delta alone, and of the fp32 additions on either side.
        slack = 4 * np.spacing(np.abs(staged.fragment.master))
        bound = 2.0**-8 * np.abs(exact) + slack
        assert (np.abs(staged.fragment.master - staged.fragment.anchor) <= bound).all()
        np.testing.assert_array_equal(f.anchor + published, staged.fragment.anchor)
        own = codec.encode("bf16", staged.fragment.master - f.master)
        naive = naive + codec.decode("bf16", own, LAYOUT.sizes[0])
    master, anchor = store.fragments[0].master, store.anchor(0)
    assert np.linalg.norm(master - anchor) < np.linalg.norm(master - naive) / 2


def test_a_base_one_behind_is_measured_against_the_present_anchor() -> None:
    store = store_of(**PLAIN)
    old = store.anchor(0)
    advance(store, 0, 0)
    late = contribution(store, 0, 5, base=0)
    theta = old - codec.decode("fp32", late.payload, LAYOUT.sizes[0])
    staged = store.stage(0, [late], keyframe=True)
    # Rate 1, no momentum, one contributor: the outer step leads to where it trained to.
    np.testing.assert_allclose(staged.fragment.master, theta, rtol=1e-5, atol=1e-6)


def test_a_base_two_behind_or_ahead_is_refused() -> None:
    store = store_of()
    for n in range(2):
        advance(store, 0, n)
    for base in (0, 3):
        with pytest.raises(ValueError, match=f"base {base} of late where the head is 2"):
            late = contribution(store, 0, 5, base=base, learner="late")
            store.stage(0, [late], keyframe=False)


def test_decoding_on_demand_gives_the_bits_of_decoding_first() -> None:
    store = store_of(merge="rda")
    advance(store, 0, 0)
    late, timely = contribution(store, 0, 1, base=0), contribution(store, 0, 2)
    f, size = store.fragments[0], LAYOUT.sizes[0]
    assert f.previous is not None
    decoded = [codec.decode(c.codec, c.payload, size) for c in (late, timely)]
    deltas = [decoded[0] + (f.anchor - f.previous), decoded[1]]
    whole = [
        Delta(c.weight, "fp32", codec.encode("fp32", d))
        for c, d in zip((late, timely), deltas, strict=True)
    ]
    merged = merge(whole, LAYOUT.fragments[0], "rda")
    master, _ = store.outer.apply(f.master, list(f.outer), merged)
    staged = store.stage(0, [late, timely], keyframe=False)
    assert staged.fragment.master.tobytes() == master.tobytes()


def test_norms_that_came_along_change_no_bit() -> None:
    store = store_of(merge="rda")
    advance(store, 0, 0)
    plain = [contribution(store, 0, 1, base=0), *(contribution(store, 0, s) for s in (2, 3))]
    known = []
    for c in plain:
        found = inspect(c.payload, c.codec, LAYOUT.sizes[0], LAYOUT.fragments[0])
        known.append(dataclasses.replace(c, norms_P=found.norms_P))
    unfit = dataclasses.replace(plain[1], norms_P=np.ones(1))
    digests = {
        store.stage(0, some, keyframe=False).master_digest
        for some in (plain, known, [plain[0], unfit, known[2]])
    }
    assert len(digests) == 1


def test_a_payload_of_another_size_is_refused() -> None:
    store = store_of()
    with pytest.raises(ValueError, match="4 bytes: shorter than a header"):
        store.stage(0, [Contribution("a", 1.0, 0, b"abcd", "bf16")], keyframe=False)


def test_initial_fragments_must_have_the_layouts_sizes() -> None:
    with pytest.raises(ValueError, match=f"where {LAYOUT.sizes[0]} belong"):
        FragmentStore.init(
            LAYOUT,
            Algorithm.model_validate({"fragments": 2}),
            [np.zeros(3, f32), np.zeros(LAYOUT.sizes[1], f32)],
        )


def test_a_snapshot_laid_out_otherwise_is_refused() -> None:
    store = store_of()
    other = {**store.meta(), "layout": "0" * 32}
    unnamed = {k: v for k, v in store.meta().items() if k != "layout"}
    for meta, named in ((other, "0" * 32), (unnamed, r"\(unnamed\)")):
        with pytest.raises(ValueError, match=f"stored layout {named} is not this program's"):
            FragmentStore.restore(meta, store.state_arrays(), store.algorithm)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_restored_store_goes_on_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    store = store_of(outer_optimizer=optimizer)
    for n in range(3):
        advance(store, 0, n)
    save_file(store.state_arrays(), tmp_path / "arrays")
    again = FragmentStore.restore(store.meta(), load_file(tmp_path / "arrays"), store.algorithm)
    assert state(again) == state(store)
    assert again.layout == store.layout
    assert [again.version(p) for p in range(2)] == [3, 0]
    for p in (0, 1, 0):
        assert advance(again, p, 9).payload_digest == advance(store, p, 9).payload_digest
    assert state(again) == state(store)


def test_momentum_is_kept_where_the_outer_step_has_settled() -> None:
    store = store_of(outer_settle_from=0.5, codec_up="fp32")
    advance(store, 0, 0)
    master_F, trace_F = (store.state_arrays()[name] for name in ("0.master", "0.outer.0"))
    sent = contribution(store, 0, 5)
    store.install(0, store.stage(0, [sent], keyframe=False, fraction=1.0))
    delta_F = codec.decode("fp32", sent.payload, LAYOUT.sizes[0])
    after = store.state_arrays()
    assert np.linalg.norm(trace_F) > 0
    np.testing.assert_array_equal(after["0.outer.0"], delta_F)
    np.testing.assert_array_equal(after["0.master"], master_F - delta_F)


def test_a_shelf_changes_no_bit(tmp_path: Path) -> None:
    """Also of a round with a contribution measured against the version before."""
    shelf = FileShelf(tmp_path)
    plain = store_of(codec_up="int4", codec_down="int4")
    shelved = FragmentStore.init(
        LAYOUT, plain.algorithm, [plain.anchor(p) for p in range(2)], shelf
    )
    for seed in range(4):
        behind = plain.version(0) - 1
        staged = []
        for store in (plain, shelved):
            contributions = [contribution(store, 0, seed + k) for k in range(2)]
            if behind >= 0:
                contributions.append(contribution(store, 0, 50 + seed, base=behind))
            staged.append(store.stage(0, contributions, keyframe=seed == 2))
            store.install(0, staged[-1])
        assert staged[0].master_digest == staged[1].master_digest
        assert staged[0].payload_digest == staged[1].payload_digest
    assert state(plain) == state(shelved)
    assert not np.shares_memory(shelved.fragments[0].previous, plain.fragments[0].previous)


def test_initial_payloads_are_the_arrays_and_a_keyframe_is_a_view() -> None:
    values = normal(1, LAYOUT.sizes[0])
    payload = codec.encode("fp32", values)
    view = codec.view(payload, values.size)
    assert view.tobytes() == values.tobytes()
    assert np.shares_memory(view, np.frombuffer(payload, np.uint8))
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="values"):
        codec.view(payload, values.size + 1)
    store = FragmentStore.init(LAYOUT, store_of().algorithm, [view, normal(2, LAYOUT.sizes[1])])
    keyframe = store.current_keyframe(0)
    assert np.shares_memory(np.frombuffer(keyframe.body, np.uint8), view)
    assert bytes(keyframe) == payload and len(keyframe) == len(payload)
