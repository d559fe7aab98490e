"""Radial-directional averaging: the anchors of the paper's section 3.5, and reproducibility."""

import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_shared.numerics import sums
from diloco_shared.numerics.fragments import Layout, Piece
from diloco_shared.numerics.merge import merge
from diloco_shared.protocol.messages import TensorSpec

quick = settings(derandomize=True, max_examples=60, deadline=None)

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
    seed: int, size: int, weight: float, rule: str
) -> None:
    delta = normal(seed, size)
    merged = merge([delta], [weight], pieces(size), rule)  # type: ignore[arg-type]
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
def test_tiny_and_huge_deltas_stay_finite(rule: str) -> None:
    tiny = np.full(3, 1e-44, np.float32)
    huge = np.full(3, 1e38, np.float32)
    for deltas in ([tiny, tiny], [huge, huge], [tiny, huge]):
        merged = merge(deltas, [1.0, 1.0], pieces(3), rule)  # type: ignore[arg-type]
        assert np.isfinite(merged).all() and (merged > 0).all()


class Reads:
    """A delta that counts how often each value is read, and by how many at once."""

    def __init__(self, delta: np.ndarray) -> None:
        self.delta, self.times, self.widest = delta, np.zeros(len(delta), int), 0

    def __getitem__(self, where: slice, /) -> np.ndarray:
        self.times[where] += 1
        self.widest = max(self.widest, where.stop - where.start)
        return self.delta[where]


@pytest.mark.parametrize(("rule", "most"), [("rda", 2), ("mean", 1)])
def test_deltas_are_read_block_by_block(
    monkeypatch: pytest.MonkeyPatch, rule: str, most: int
) -> None:
    """What decodes on demand need never be held decoded; the bits do not depend on blocks."""
    parts, weights = pieces(3 * sums.WIDTH + 5, 10), [1.0, 0.0, 2.0]
    deltas = list(normal(9, 3, 3 * sums.WIDTH + 15))
    whole = merge(deltas, weights, parts, rule)  # type: ignore[arg-type]
    monkeypatch.setattr(sums, "BLOCK", sums.WIDTH)
    reads = [Reads(delta) for delta in deltas]
    merged = merge(reads, weights, parts, rule)  # type: ignore[arg-type]
    assert merged.tobytes() == whole.tobytes()
    assert [set(r.times) for r in reads] == [{most}, {0}, {most}]
    assert max(r.widest for r in reads) == sums.WIDTH


PROGRAM = """
import numpy as np
from diloco_shared.numerics.digest import digest_array
from diloco_shared.numerics.fragments import Layout
from diloco_shared.numerics.merge import merge
from diloco_shared.protocol.messages import (TensorSpec)
shapes = [(300, 70), (1000,), (64, 64)]
tensors = [TensorSpec(name=f"t{n}", shape=s, embedding=n == 2) for n, s in enumerate(shapes)]
layout = Layout.build(tensors, 1)
deltas = list(np.random.default_rng(7).standard_normal((3, layout.sizes[0]), np.float32))
print(digest_array(merge(deltas, [1.5, 2.25, 0.1], layout.fragments[0], "rda")))
"""


def test_threads_do_not_change_the_bits() -> None:
    digests = set()
    for threads in ("1", "4"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1 and len(digests.pop()) == 32
