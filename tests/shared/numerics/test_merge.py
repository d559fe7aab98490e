"""Radial-directional averaging: the anchors of the paper's section 3.5, and reproducibility."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from shared.numerics import plain

from diloco_shared.numerics import codec
from diloco_shared.numerics import merge as merging
from diloco_shared.numerics.merge import Delta, Nesterov, Publishing, merge_and_step, publish
from diloco_shared.numerics.merge_kernels import MergeState
from diloco_shared.numerics.outer import Outer
from diloco_shared.numerics.sums import RANGE, STRIDE
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.fragmentation import Layout, Piece

Rule = Literal["rda", "mean"]
f32 = np.float32

quick = examples(60)

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 64)
weights = st.lists(st.floats(2.0**-10, 2.0**30), min_size=1, max_size=6)


def pieces(*shapes: int, embedding: bool = False) -> tuple[Piece, ...]:
    """One fragment of vectors."""
    tensors = [
        TensorSpec(name=f"t{n}", shape=(size,), embedding=embedding)
        for n, size in enumerate(shapes)
    ]
    return Layout.build(tensors, 1).fragments[0]


def merge(
    deltas: Sequence[np.ndarray],
    weights: Sequence[float],
    parts: Sequence[Piece],
    rule: Rule,
    threads: int = 1,
) -> np.ndarray:
    return merging.merge(encoded(deltas, weights), parts, rule, threads=threads)


def encoded(
    deltas: Sequence[np.ndarray], weights: Sequence[float], name: str = "fp32"
) -> list[Delta]:
    return [Delta(w, name, codec.encode(name, d)) for d, w in zip(deltas, weights, strict=True)]


def rda(deltas: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    return merge(deltas, weights, pieces(len(deltas[0])), "rda")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@quick
@given(seeds, sizes, weights)
def test_identical_deltas_give_that_delta(seed: int, size: int, weights: list[float]) -> None:
    delta = normal(seed, size)
    merged = rda([delta] * len(weights), weights)
    np.testing.assert_allclose(merged, delta, rtol=1e-6, atol=1e-7)


@quick
@given(seeds, sizes, st.floats(2.0**-10, 2.0**30), st.sampled_from(["rda", "mean"]))
def test_a_single_contributor_is_taken_as_it_is(
    seed: int, size: int, weight: float, rule: Rule
) -> None:
    delta = np.append(normal(seed, size), f32(-0.0))
    merged = merge([delta], [weight], pieces(size + 1), rule)
    assert merged.tobytes() == delta.tobytes()


@quick
@given(seeds, sizes, weights, st.integers(-20, 20))
def test_the_scale_of_weights_is_irrelevant(
    seed: int, size: int, weights: list[float], power: int
) -> None:
    deltas = list(normal(seed, len(weights), size))
    scaled = [w * 2.0**power for w in weights]
    assert rda(deltas, weights).tobytes() == rda(deltas, scaled).tobytes()


@quick
@given(st.integers(1, 8), st.floats(2.0**-10, 2.0**10))
def test_orthogonal_deltas_of_one_norm_keep_that_norm(learners: int, radius: float) -> None:
    """The mean would shrink it by sqrt(M): why one outer rate serves all M."""
    deltas = list(np.eye(learners, 12, dtype=np.float32) * np.float32(radius))
    merged = rda(deltas, [1.0] * learners)
    assert np.linalg.norm(merged) == pytest.approx(radius, rel=1e-6)
    mean = merge(deltas, [1.0] * learners, pieces(12), "mean")
    assert np.linalg.norm(mean) == pytest.approx(radius / np.sqrt(learners), rel=1e-6)


@quick
@given(seeds, sizes, weights, st.data())
def test_no_weight_no_influence(
    seed: int, size: int, weights: list[float], data: st.DataObject
) -> None:
    deltas = list(normal(seed, len(weights), size))
    place = data.draw(st.integers(0, len(weights)))
    noise = np.full(size, np.nan, np.float32)
    merged = rda(
        [*deltas[:place], noise, *deltas[place:]], [*weights[:place], 0.0, *weights[place:]]
    )
    assert merged.tobytes() == rda(deltas, weights).tobytes()


@quick
@given(seeds, st.integers(2, 64), weights)
def test_the_merged_norm_is_the_weighted_mean_norm(
    seed: int, size: int, weights: list[float]
) -> None:
    deltas = [d * np.float32(m + 1) for m, d in enumerate(normal(seed, len(weights), size))]
    norms = [np.linalg.norm(d.astype(np.float64)) for d in deltas]
    expected = np.average(norms, weights=weights)
    assert np.linalg.norm(rda(deltas, weights)) == pytest.approx(expected, rel=1e-5)


def test_opposed_deltas_fall_back_to_the_mean() -> None:
    delta = normal(0, 16)
    np.testing.assert_array_equal(rda([delta, -delta], [1.0, 1.0]), np.zeros(16, np.float32))
    # Directions cancel, lengths do not: a quarter of the difference remains.
    merged = rda([3 * delta, -delta], [1.0, 1.0])
    np.testing.assert_allclose(merged, delta, rtol=1e-6)


def test_a_zero_delta_has_no_direction_but_counts_in_the_norm() -> None:
    zero, one = np.zeros(4, np.float32), np.array([2.0, 0, 0, 0], np.float32)
    np.testing.assert_array_equal(rda([zero, zero], [1.0, 1.0]), zero)
    # phi(0) = 0: the direction is the other's, the radius the mean of 0 and 2.
    np.testing.assert_allclose(rda([zero, one], [1.0, 1.0]), one / 2)


def test_a_vector_worked_out_by_hand() -> None:
    a, b = np.array([3.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32)
    # Weights 1 and 3: radius (3 + 3) / 4 = 1.5, direction (1/4, 3/4) of length sqrt(10) / 4.
    expected = 1.5 * np.array([1.0, 3.0]) / np.sqrt(10.0)
    np.testing.assert_allclose(rda([a, b], [1.0, 3.0]), expected, rtol=1e-6)


def test_embeddings_are_merged_by_the_weighted_mean() -> None:
    a, b = np.array([3.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32)
    merged = merge([a, b], [1.0, 3.0], pieces(2, embedding=True), "rda")
    np.testing.assert_allclose(merged, [0.75, 0.75])


def test_the_radius_is_each_tensors_own() -> None:
    """Two tensors in one fragment: merged together is merged apart."""
    deltas = list(normal(4, 3, 10))
    both = merge(deltas, [1.0, 2.0, 3.0], pieces(6, 4), "rda")
    apart = [rda([d[part] for d in deltas], [1.0, 2.0, 3.0]) for part in np.s_[:6, 6:]]
    assert both.tobytes() == np.concatenate(apart).tobytes()


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_tiny_and_huge_deltas_stay_finite(rule: Rule) -> None:
    tiny = np.full(3, 1e-44, np.float32)
    huge = np.full(3, 1e38, np.float32)
    for deltas in ([tiny, tiny], [huge, huge], [tiny, huge]):
        merged = merge(deltas, [1.0, 1.0], pieces(3), rule)
        assert merged.tobytes() == plain.merge(deltas, [1.0, 1.0], pieces(3), rule).tobytes()
        assert np.isfinite(merged).all() and (merged > 0).all()


# --- the kernels against plain numpy, bit for bit -----------------------------------------------

# Pieces within a stride, of many strides and ranges, at odd places; an embedding between them.
LAYOUT = Layout.build(
    [
        TensorSpec(name="long", shape=(RANGE + 3 * STRIDE + 7,), embedding=False),
        TensorSpec(name="embedding", shape=(STRIDE, 3), embedding=True),
        TensorSpec(name="matrix", shape=(331, 3), embedding=False),
        TensorSpec(name="bias", shape=(9,), embedding=False),
        TensorSpec(name="scalar", shape=(), embedding=False),
        TensorSpec(name="still", shape=(5,), embedding=False),
    ],
    1,
)
PIECES, SIZE = LAYOUT.fragments[0], LAYOUT.sizes[0]


def inputs(seed: int, learners: int) -> tuple[list[np.ndarray], list[float]]:
    """Pseudo-gradients of several scales; nobody moved the piece `still`, some cancel out."""
    rng = np.random.default_rng(seed)
    deltas = [rng.standard_normal(SIZE, f32) * f32(10.0**-m) for m in range(learners)]
    for p in PIECES:
        where = slice(p.offset, p.offset + p.size)
        for m, delta in enumerate(deltas):
            if p.name == "still" or (p.name == "bias" and m > 1):
                delta[where] = 0
            elif p.name == "bias":
                delta[where] = (-1) ** m
    weights = [1.0, 1.0, *(rng.uniform(0.1, 9.0, learners) + 2.0).tolist()][:learners]
    return deltas, weights


@pytest.mark.parametrize("rule", ["rda", "mean"])
@pytest.mark.parametrize("learners", [1, 2, 5, 8])
def test_merging_equals_plain_numpy_to_the_bit(rule: Rule, learners: int) -> None:
    deltas, weights = inputs(learners, learners)
    expected = plain.merge(deltas, weights, PIECES, rule)
    for threads in (1, 2, 7):
        merged = merge(deltas, weights, PIECES, rule, threads)
        assert merged.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", codec.NAMES)
@pytest.mark.parametrize("keyframe", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_one_pass_equals_merge_step_and_publication_one_by_one(
    name: str, keyframe: bool, momentum: float
) -> None:
    deltas, weights = inputs(3, 3)
    rng = np.random.default_rng(7)
    master, trace, anchor, previous = rng.standard_normal((4, SIZE)).astype(f32)
    sent = encoded(deltas, weights, name)
    sent[1] = Delta(weights[1], name, sent[1].payload, behind=True)
    read = [codec.decode(name, d.payload, SIZE) for d in sent]
    read[1] = read[1] + (anchor - previous)
    delta = plain.merge(read, weights, PIECES, "rda")
    stepped, moved = plain.step(master, trace if momentum else None, delta, 0.7, momentum)
    payload, published = plain.publish(stepped, anchor, name, keyframe=keyframe)
    publishing = Publishing(name, keyframe)
    for threads in (1, 3):
        out = merge_and_step(
            sent,
            PIECES,
            "rda",
            Nesterov(0.7, momentum),
            publishing,
            MergeState(master, trace if momentum else np.empty(0, f32), anchor),
            previous_F=previous,
            threads=threads,
        )
        assert out.master_F.tobytes() == stepped.tobytes()
        assert out.momentum_F.tobytes() == (b"" if moved is None else moved.tobytes())
        assert out.payload.tobytes() == payload
        assert out.anchor_F.tobytes() == published.tobytes()
        apart = publish(stepped, anchor, publishing, threads=threads)
        assert apart.payload.tobytes() == payload
        assert apart.anchor_F.tobytes() == published.tobytes()


@quick
@given(seeds, st.integers(2, 64), st.integers(2, 6), st.floats(0, 1))
def test_lengths_settle_into_those_of_plain_averages(
    seed: int, size: int, learners: int, settled: float
) -> None:
    """Exactly so where contributions have one length."""
    deltas = list(normal(seed, learners, size))
    deltas = [d * f32(3 / np.linalg.norm(d.astype(np.float64))) for d in deltas]
    weights, zero = [1.0 + m for m in range(learners)], np.zeros(size, f32)
    out = merge_and_step(
        encoded(deltas, weights),
        pieces(size),
        "rda",
        Nesterov(1.0, 0.0, settled),
        Publishing("fp32", True),
        MergeState(zero, np.empty(0, f32), zero),
    )
    mean = merge(deltas, weights, pieces(size), "mean")
    expected = (1 - settled) * rda(deltas, weights) + settled * mean
    np.testing.assert_allclose(-out.master_F, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", ["long", "short"])
def test_the_step_is_that_of_optax_to_the_bit(preset: str) -> None:
    outer = Outer(Algorithm.model_validate({"preset": preset, "outer_rate": 0.3}))
    nesterov = outer.nesterov(0.0)
    assert nesterov is not None
    rng = np.random.default_rng(3)
    master, delta = rng.standard_normal((2, 5000)).astype(f32)
    anchor, leaves = master, outer.init(master)
    parts = pieces(5000)
    for _ in range(3):
        trace = leaves[0] if leaves else np.empty(0, f32)
        ours = merge_and_step(
            encoded([delta], [1.0]),
            parts,
            "rda",
            nesterov,
            Publishing("bf16", False),
            MergeState(master, trace, anchor),
        )
        master, leaves = outer.apply(master, leaves, delta)
        assert ours.master_F.tobytes() == master.tobytes()
        assert ours.momentum_F.tobytes() == b"".join(leaf.tobytes() for leaf in leaves)
        delta = -delta * f32(0.7)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int4"])
def test_norms_known_beforehand_change_nothing(name: str) -> None:
    deltas, weights = inputs(5, 5)
    sent = encoded(deltas, weights, name)
    known = [
        Delta(d.weight, name, d.payload, norms_P=merging.norms(name, d.payload, PIECES, 2))
        for d in sent
    ]
    expected = merging.merge(sent, PIECES, "rda")
    for some in (known, [known[0], *sent[1:4], known[4]]):
        assert merging.merge(some, PIECES, "rda").tobytes() == expected.tobytes()


@quick
@given(st.integers(1, 3 * STRIDE), st.integers(0, 2**32 - 1))
def test_norms_are_the_documented_sums(size: int, seed: int) -> None:
    values = normal(seed, size)
    parts = pieces(size, max(1, size // 3))
    both = np.concatenate([values, values[: parts[1].size]])
    found = merging.norms("fp32", codec.encode("fp32", both), parts)
    expected = [plain.norm(both[p.offset : p.offset + p.size], p.offset) for p in parts]
    np.testing.assert_array_equal(found, expected)
    exact = [np.linalg.norm(both[p.offset : p.offset + p.size].astype(float)) for p in parts]
    np.testing.assert_allclose(found, exact, rtol=1e-13)


@examples(40)
@given(st.lists(st.lists(st.integers(-1000, 1000), min_size=8, max_size=8), min_size=3, max_size=3))
def test_what_is_behind_is_measured_against_the_newer_anchor(rows: list[list[int]]) -> None:
    """Whole numbers: every difference of them is exact."""
    previous, now, theta = np.array(rows, f32)
    late = Delta(1.0, "fp32", codec.encode("fp32", previous - theta), behind=True)
    merged = merging.merge([late], pieces(8), "rda", anchor_F=now, previous_F=previous)
    np.testing.assert_array_equal(merged, now - theta)


def test_payloads_may_be_views_at_odd_addresses() -> None:
    deltas, weights = inputs(2, 2)
    whole = encoded(deltas, weights, "bf16")
    buffer = bytearray(len(whole[0].payload) + 1)
    buffer[1:] = whole[0].payload
    odd = [Delta(weights[0], "bf16", memoryview(buffer)[1:]), whole[1]]
    merged = merging.merge(odd, PIECES, "rda")
    assert merged.tobytes() == merging.merge(whole, PIECES, "rda").tobytes()


def test_payloads_that_do_not_fit_are_refused() -> None:
    short = Delta(1.0, "fp32", codec.encode("fp32", np.zeros(3, f32)))
    with pytest.raises(ValueError, match="header of 3 values of fp32 where 4"):
        merging.merge([short], pieces(4), "rda")
    with pytest.raises(ValueError, match="header of 3 values"):
        merging.norms("fp32", short.payload, pieces(4))
