"""Pseudo-gradients: against the direction of training."""

import jax.numpy as jnp
import numpy as np

from diloco_shared.numerics.arrays import pseudogradient


def test_it_points_against_training_like_a_gradient() -> None:
    anchor, theta = np.array([1.0, 2.0], np.float32), np.array([1.5, 1.0], np.float32)
    delta = pseudogradient(anchor, theta)
    np.testing.assert_array_equal(delta, [-0.5, 1.0])
    # One outer step of rate 1 leads to where training led.
    np.testing.assert_array_equal(anchor - delta, theta)


def test_jax_and_numpy_agree() -> None:
    rng = np.random.default_rng(0)
    anchor, theta = rng.standard_normal((2, 100)).astype(np.float32)
    by_jax = np.asarray(pseudogradient(jnp.asarray(anchor), jnp.asarray(theta)))
    assert by_jax.tobytes() == pseudogradient(anchor, theta).tobytes()
