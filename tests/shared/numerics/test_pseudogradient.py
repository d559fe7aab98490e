"""Pseudo-gradients: against the direction of training, and against a newer anchor."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_shared.numerics.pseudogradient import pseudogradient, rebase

# Small whole numbers: every difference of them is exact.
whole = st.lists(st.integers(-1000, 1000), min_size=8, max_size=8).map(
    lambda xs: np.array(xs, np.float32)
)


def test_it_points_against_training_like_a_gradient() -> None:
    anchor, theta = np.array([1.0, 2.0], np.float32), np.array([1.5, 1.0], np.float32)
    delta = pseudogradient(anchor, theta)
    np.testing.assert_array_equal(delta, [-0.5, 1.0])
    # One outer step of rate 1 leads to where training led.
    np.testing.assert_array_equal(anchor - delta, theta)


@settings(derandomize=True, max_examples=40)
@given(whole, whole, whole)
def test_rebasing_measures_the_same_parameters_against_the_newer_anchor(
    base: np.ndarray, now: np.ndarray, theta: np.ndarray
) -> None:
    rebased = rebase(pseudogradient(base, theta), base, now)
    np.testing.assert_array_equal(rebased, pseudogradient(now, theta))


def test_jax_and_numpy_agree() -> None:
    rng = np.random.default_rng(0)
    anchor, theta = rng.standard_normal((2, 100)).astype(np.float32)
    by_jax = np.asarray(pseudogradient(jnp.asarray(anchor), jnp.asarray(theta)))
    assert by_jax.tobytes() == pseudogradient(anchor, theta).tobytes()
