"""The transformer: an honest loss, causal, and of the sizes its presets promise."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.models import transformer
from diloco_learner.models.transformer import SHAPES, Shape

TINY = Shape(vocabulary=50, width=16, layers=1, heads=4, kv_heads=2, head_width=4, hidden=24)


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocabulary, shape).astype(np.int32)


@pytest.fixture(scope="module")
def params() -> Any:
    return jax.jit(partial(transformer.init, TINY))(jax.random.key(1))


forward = jax.jit(partial(transformer.forward, TINY, jnp.float32))


def gradients(shape: Shape, params: Any, batch: np.ndarray) -> tuple[jax.Array, Any]:
    return jax.jit(jax.value_and_grad(partial(transformer.loss, shape, jnp.float32)))(params, batch)


def test_a_fresh_model_guesses_and_the_loss_is_the_cross_entropy_of_its_logits(
    params: Any,
) -> None:
    batch = tokens(2, 11)
    logits = forward(params, batch[:, :-1])
    assert logits.shape == (2, 10, TINY.vocabulary) and logits.dtype == jnp.float32
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    picked = [p[b, i, batch[b, i + 1]] for b in range(2) for i in range(10)]
    loss = float(gradients(TINY, params, batch)[0])
    assert loss == pytest.approx(-np.log(picked).mean(), rel=1e-5)
    # Logits have a variance of about 1, which costs half a nat more than ln V.
    assert loss == pytest.approx(math.log(TINY.vocabulary) + 0.5, abs=0.5)


@pytest.mark.parametrize("place", [1, 5, 9])
def test_a_later_token_changes_no_earlier_logits(params: Any, place: int) -> None:
    batch = tokens(2, 10)
    changed = batch.copy()
    changed[0, place] = (changed[0, place] + 1) % TINY.vocabulary
    (a, other), (b, same) = (np.asarray(forward(params, x)) for x in (batch, changed))
    np.testing.assert_allclose(a[:place], b[:place], atol=1e-5)
    assert (np.abs(a[place:] - b[place:]).max(axis=-1) > 1e-3).all()
    np.testing.assert_allclose(other, same, atol=1e-5)


@pytest.mark.whole
def test_what_is_not_to_be_predicted_is_read_and_left_out(params: Any) -> None:
    """Loss and gradients are those of the other targets alone."""
    batch = tokens(2, 11)
    masked = batch.copy()
    masked[0, 1:6] = ~masked[0, 1:6]
    masked[1, 9] = ~masked[1, 9]

    def by_hand(params: Any) -> jax.Array:
        logits = transformer.forward(TINY, jnp.float32, params, batch[:, :-1])
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1)[..., 0]
        return jnp.sum(jnp.where(masked[:, 1:] >= 0, nats, 0)) / 14

    loss, gradient = gradients(TINY, params, masked)
    wanted, wanted_gradient = jax.jit(jax.value_and_grad(by_hand))(params)
    np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


def test_a_batch_of_nothing_to_predict_moves_nothing(params: Any) -> None:
    loss, gradient = gradients(TINY, params, ~tokens(2, 11))
    assert float(loss) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_places_matter(params: Any) -> None:
    """Rotary embedding: the last token sees the same tokens in another order."""
    batch = tokens(2, 10)
    batch[1] = [*batch[0, :-1][::-1], batch[0, -1]]
    a, b = np.asarray(forward(params, batch))[:, -1]
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.whole
def test_recomputing_activations_changes_no_gradient(params: Any) -> None:
    plain, saved = (
        gradients(shape, params, tokens(2, 11)) for shape in (TINY, replace(TINY, remat="layer"))
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


def test_a_tied_model_gives_its_embedding_as_the_head(params: Any) -> None:
    tied = {name: part for name, part in params.items() if name != "output"}
    shape = replace(TINY, tied=True)
    shapes = jax.eval_shape(partial(transformer.init, shape), jax.random.key(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(tied)
    head = {"head_DxV": tied["embedding"]["tokens_VxD"].T}
    by_tied = jax.jit(partial(transformer.forward, shape, jnp.float32))(tied, tokens(2, 10))
    by_own = forward({**tied, "output": head}, tokens(2, 10))
    np.testing.assert_allclose(np.asarray(by_tied), np.asarray(by_own), atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("nano", 133_440),
        ("micro", 803_968),
        ("small", 23_863_808),
        # The paper's largest: 12 billion, of which a billion is the embedding.
        ("gemma-12b", 11_765_395_200),
    ],
)
def test_presets_have_their_sizes(preset: str, parameters: int) -> None:
    shape = SHAPES[preset]
    shapes = jax.eval_shape(lambda key: transformer.init(shape, key), jax.random.key(0))
    leaves = jax.tree.leaves(shapes)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)
