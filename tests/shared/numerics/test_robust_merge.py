"""Robust merges: what learners that lie can do to a merge, and what they cannot."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from shared.numerics import plain

from diloco_shared.numerics import codec
from diloco_shared.numerics.merge import (
    EMPTY,
    Delta,
    Nesterov,
    Publishing,
    merge,
    merge_and_step,
    norms,
)
from diloco_shared.numerics.merge_kernels import MergeState
from diloco_shared.numerics.sums import RANGE, STRIDE
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.fragmentation import Layout, Piece
from diloco_shared.spec.merge_rules import WEIGHT_MOST, Clipped, Median, Trimmed, bounded

f32 = np.float32
quick = examples(40)
seeds = st.integers(0, 2**32 - 1)
# Of five values, by learner.
SIGNS = (-1, -1, 1, 1, 1)
TRIMMING = {"trimmed": Trimmed(), "median": Median()}

TENSORS = [
    TensorSpec(name="embedding", shape=(STRIDE + 5,), embedding=True),
    TensorSpec(name="matrix", shape=(RANGE + 3,), embedding=False),
    TensorSpec(name="bias", shape=(7,), embedding=False),
]
PIECES = Layout.build(TENSORS, 1).fragments[0]
SIZE = sum(p.size for p in PIECES)
# Few values, of a tensor and of an embedding, where examples are many.
FEW = [
    TensorSpec(name="t", shape=(9,), embedding=False),
    TensorSpec(name="u", shape=(4,), embedding=True),
]
SMALL = Layout.build(FEW, 1).fragments[0]
# The last tensor has one value, of which a direction is no more than the sign: signs often cancel.
ALONE = TensorSpec(name="v", shape=(1,), embedding=False)
SMALLER = Layout.build([*FEW, ALONE], 1).fragments[0]
SCALAR = Layout.build([ALONE], 1).fragments[0]


def encoded(deltas: Sequence[np.ndarray], weights: Sequence[float]) -> list[Delta]:
    return [Delta(w, "fp32", codec.encode("fp32", d)) for d, w in zip(deltas, weights, strict=True)]


def normal(seed: int, learners: int, size: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((learners, size)).astype(f32))


@pytest.mark.parametrize("rule", TRIMMING)
@pytest.mark.parametrize("learners", [3, 4, 5, 7, 8, 11, 13])
def test_leaving_out_equals_plain_numpy_to_the_bit(rule: str, learners: int) -> None:
    deltas = normal(learners, learners, SIZE)
    # Many equal values, of different weights: their order must decide nothing.
    deltas = [np.round(d, 1) for d in deltas]
    weights = [1.0 + m % 3 for m in range(learners)]
    left_out = TRIMMING[rule].left_out(learners)
    expected = plain.trimmed(deltas, bounded(weights), left_out)
    sent = encoded(deltas, weights)
    for threads in (1, 2, 7):
        assert merge(sent, PIECES, rule, threads=threads).tobytes() == expected.tobytes()
    assert merge(sent[::-1], PIECES, rule).tobytes() == expected.tobytes(), "whoever comes first"


@pytest.mark.parametrize("rule", TRIMMING)
def test_one_pass_equals_leaving_out_and_the_step_one_by_one(rule: str) -> None:
    deltas, weights = normal(3, 5, SIZE), [1.0, 2.0, 1.0, 1.0, 9.0]
    master, trace, anchor, previous = normal(7, 4, SIZE)
    sent = encoded(deltas, weights)
    sent[1] = Delta(2.0, "fp32", sent[1].payload, behind=True)
    read = [d + (anchor - previous) if m == 1 else d for m, d in enumerate(deltas)]
    delta = plain.trimmed(read, bounded(weights), TRIMMING[rule].left_out(5))
    stepped, moved = plain.step(master, trace, delta, 0.7, 0.8)
    payload, published = plain.publish(stepped, anchor, "bf16", keyframe=False)
    out = merge_and_step(
        sent,
        PIECES,
        rule,
        Nesterov(0.7, 0.8, settled=0.5),
        Publishing("bf16", False),
        MergeState(master, trace, anchor),
        previous_F=previous,
        threads=3,
    )
    assert moved is not None
    assert out.master_F.tobytes() == stepped.tobytes()
    assert out.momentum_F.tobytes() == moved.tobytes()
    assert (out.payload.tobytes(), out.anchor_F.tobytes()) == (payload, published.tobytes())


@pytest.mark.parametrize("rule", TRIMMING)
@pytest.mark.parametrize("learners", [1, 2])
def test_where_nothing_can_be_left_out_it_is_the_weighted_mean(rule: str, learners: int) -> None:
    sent = encoded(normal(1, learners, SIZE), [3.0, 1.0][:learners])
    assert merge(sent, PIECES, rule).tobytes() == merge(sent, PIECES, "mean").tobytes()


@quick
@given(
    seeds,
    st.sampled_from([("trimmed", 1), ("median", 1), ("median", 2)]),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=26, max_size=26),
    st.floats(1e-6, 1e30),
)
def test_liars_that_are_few_enough_stay_within_the_range_of_the_honest(
    seed: int, case: tuple[str, int], lies: list[float], weight: float
) -> None:
    rule, liars = case
    honest = normal(seed, 5 - liars, 13)
    told = list(np.array(lies, f32).reshape(2, 13)[:liars])
    sent = encoded([*told, *honest], [weight] * liars + [1.0] * len(honest))
    merged = merge(sent, SMALL, rule)
    assert (merged >= np.min(honest, axis=0)).all()
    assert (merged <= np.max(honest, axis=0)).all()


@quick
@given(seeds, st.permutations(range(5)), st.sampled_from(["trimmed", "median", "clipped"]))
def test_the_order_of_learners_does_not_matter(seed: int, order: list[int], rule: str) -> None:
    sent = encoded(normal(seed, 5, 13), [1.0, 1.0, 2.0, 0.5, 7.0])
    merged = merge(sent, SMALL, rule)
    again = merge([sent[m] for m in order], SMALL, rule)
    np.testing.assert_allclose(again, merged, rtol=1e-5, atol=1e-6)
    if rule in TRIMMING:
        assert again.tobytes() == merged.tobytes()


def moved(sent: Sequence[Delta], pieces: Sequence[Piece], rule: str, settled: float) -> np.ndarray:
    """By how much a merge moves the parameters, when the run's end has begun so far."""
    zeros = np.zeros(sum(p.size for p in pieces), f32)
    outer, state = Nesterov(1.0, 0.0, settled), MergeState(zeros, EMPTY, zeros)
    return -merge_and_step(sent, pieces, rule, outer, Publishing("fp32", True), state).master_F


@quick
@given(
    seeds,
    st.floats(0, 1e37),
    st.one_of(st.just(2.0), st.floats(1e-6, 1e30)),
    st.floats(0, 1),
)
def test_a_clipped_merge_is_never_longer_than_the_median_contribution(
    seed: int, length: float, weight: float, settled: float
) -> None:
    deltas = normal(seed, 5, 14)
    # With twice the weight of the others, the two below zero are as heavy as the three above it.
    deltas = [
        np.append(d[:13], f32(sign) * abs(d[13])) for d, sign in zip(deltas, SIGNS, strict=True)
    ]
    deltas[0] = deltas[0] * f32(length)
    sent = encoded(deltas, [weight, 1.0, 1.0, 1.0, 1.0])
    merged = moved(sent, SMALLER, "clipped", settled)
    for piece in SMALLER:
        cut = slice(piece.offset, piece.offset + piece.size)
        lengths = sorted(float(np.linalg.norm(d[cut].astype(np.float64))) for d in deltas)
        assert np.isfinite(merged[cut]).all()
        assert np.linalg.norm(merged[cut]) <= lengths[2] * (1 + 1e-5)


@pytest.mark.parametrize("settled", [0.0, 1.0])
def test_where_directions_cancel_all_are_clipped_and_the_mean_is_left(settled: float) -> None:
    """A tensor of one value moves on, by no more than what is usual, whoever answers last."""
    honest = [f32([x]) for x in (1e-3, 1e-3, -2e-3)]
    for liar in (-1e-3, -1.5e-3, -1.0, -1e6):
        sent = encoded([*honest, f32([liar])], [1.0] * 4)
        usual = float(np.median([1e-3, 1e-3, 2e-3, -liar]))
        mean = (2e-3 - min(2e-3, usual) - min(-liar, usual)) / 4
        assert moved(sent, SCALAR, "clipped", settled) == pytest.approx([mean], rel=1e-5)
    # Of one length, nothing is clipped: the mean.
    sent = encoded([f32([1.0]), f32([-1.0])], [1.0, 1.0])
    assert merge(sent, SCALAR, "clipped").tobytes() == merge(sent, SCALAR, "mean").tobytes()
    frozen = encoded([np.zeros(14, f32)] * 3, [1.0] * 3)
    assert not moved(frozen, SMALLER, "clipped", settled).any()


def test_directions_that_cancel_in_one_tensor_are_clipped_to_the_bit() -> None:
    """Whether norms are known beforehand or not, by any number of threads."""
    one, two = normal(13, 2, SIZE)
    deltas = [one, one * f32(0.5), two, one * f32(-3.0), one * f32(-1024.0)]
    weights = [1.0, 1.0, 1e-9, 1.0, 1.0]
    matrix = PIECES[1]
    cut = slice(matrix.offset, matrix.offset + matrix.size)
    sent = encoded(deltas, weights)
    shares = [f32(w / sum(weights)) for w in weights]
    lengths = [plain.norm(d[cut], matrix.offset) for d in deltas]
    usual = float(np.median(lengths))
    factors = [float(s) * min(n, usual) / n for s, n in zip(shares, lengths, strict=True)]
    expected = plain.combine([d[cut] for d in deltas], factors)
    known = [
        Delta(d.weight, d.codec, d.payload, norms_P=norms(d.codec, d.payload, PIECES)) for d in sent
    ]
    for threads in (1, 2, 7):
        for some in (sent, known):
            merged = merge(some, PIECES, "clipped", threads=threads)
            assert merged[cut].tobytes() == expected.tobytes()


def test_equal_lengths_clipped_are_the_radial_average() -> None:
    deltas = [d / np.linalg.norm(d) for d in normal(5, 4, 9)]
    sent, tensor = encoded(deltas, [1.0, 1.0, 1.0, 2.0]), SMALL[:1]
    np.testing.assert_allclose(merge(sent, tensor, "clipped"), merge(sent, tensor, "rda"), 1e-5)


@pytest.mark.parametrize("rule", ["clipped", "trimmed", "median"])
def test_a_lie_about_counters_weighs_no_more_than_twice_the_median(rule: str) -> None:
    deltas = normal(11, 5, 13)
    lied = merge(encoded(deltas, [1e12, 1.0, 1.0, 1.0, 1.0]), SMALL, rule)
    twice = merge(encoded(deltas, [WEIGHT_MOST, 1.0, 1.0, 1.0, 1.0]), SMALL, rule)
    assert lied.tobytes() == twice.tobytes()


def test_as_many_are_left_out_as_the_documents_say() -> None:
    for learners in range(1, 40):
        fifth, most = Trimmed().left_out(learners), Median().left_out(learners)
        assert fifth == (0 if learners < 3 else max(1, learners // 5))
        assert 0 < learners - 2 * most <= 2
    # Under `clipped` nothing is left out, and embeddings are clipped too.
    assert Clipped().left_out(9) == 0 and Clipped().embeddings is not None


def test_a_network_sorts_whatever_comes() -> None:
    """By the principle of zeros and ones: what sorts all of those sorts everything."""
    for learners in (3, 5, 6, 9):
        rows = np.array(list(itertools.product([0.0, 1.0], repeat=learners)), f32)
        size = len(rows)
        piece = Layout.build([TensorSpec(name="t", shape=(size,), embedding=False)], 1).fragments[0]
        sent = encoded(list(rows.T.copy()), [1.0] * learners)
        low, high = (learners - 1) // 2, learners // 2
        expected = np.sort(rows, axis=1)[:, [low, high]].mean(axis=1)
        np.testing.assert_array_equal(merge(sent, piece, "median"), expected)
