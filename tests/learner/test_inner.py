"""The inner step: the rate is an argument, clipping and decay are as said."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_learner.models import ModelDef
from diloco_learner.training.inner import MEASURE_TENSORS, make_step, optimizer
from diloco_shared.spec.optimizers import OPTIMIZERS
from diloco_shared.spec.run import Inner


def linear(params: Any, tokens_BxL1: jax.Array) -> jax.Array:
    """Its gradient is the mean token, whatever the parameters."""
    return jnp.mean(tokens_BxL1) * (params["matrix"].sum() + params["bias"].sum())


MODEL = ModelDef(
    init=lambda key: {"matrix": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 5.0)},
    loss=linear,
    is_embedding=lambda name: False,
)


def stepped(rate: float, batch: Any = ((1, 1),), **settings: Any) -> Any:
    inner = Inner.model_validate(settings)
    params = MODEL.init(jax.random.key(0))
    state = optimizer(inner, MODEL.is_embedding).init(params)
    new, _, loss = make_step(MODEL, inner)(params, state, np.array(batch, np.float32), rate)
    return SimpleNamespace(**{k: np.asarray(v) for k, v in new.items()}, loss=float(loss))


def test_the_first_adamw_step_is_rate_times_sign_and_decay_of_matrices_only() -> None:
    new = stepped(0.1, weight_decay=0.5)
    np.testing.assert_allclose(new.bias, 5.0 - 0.1, rtol=1e-5)
    np.testing.assert_allclose(new.matrix, 3.0 - 0.1 * (1 + 0.5 * 3.0), rtol=1e-5)
    assert new.loss == pytest.approx(4 * 3 + 2 * 5)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.4])
def test_the_rate_scales_the_whole_update(rate: float) -> None:
    one, scaled = stepped(1.0), stepped(rate)
    np.testing.assert_allclose(scaled.matrix - 3.0, rate * (one.matrix - 3.0), atol=1e-6)
    np.testing.assert_allclose(scaled.bias - 5.0, rate * (one.bias - 5.0), atol=1e-6)


def test_gradients_are_clipped_by_their_global_norm() -> None:
    for size in (10.0, 1000.0):
        new = stepped(1.0, [[size]], optimizer="sgd", clip_norm=0.5)
        moved = np.concatenate([new.matrix.ravel() - 3.0, new.bias - 5.0])
        assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-5)


def test_accumulation_is_the_mean_over_the_parts() -> None:
    batch = [[0.1], [0.2], [0.3], [0.6]]
    whole = stepped(1.0, batch, optimizer="sgd", clip_norm=100.0)
    parts = stepped(1.0, batch, optimizer="sgd", clip_norm=100.0, accumulation=2)
    np.testing.assert_allclose(parts.matrix, whole.matrix, rtol=1e-6)
    np.testing.assert_allclose(whole.matrix, 3.0 - 0.3, rtol=1e-6)
    assert parts.loss == pytest.approx(whole.loss)


# The outer optimizer's test goes through all names; these differ in how they treat a tree.
@pytest.mark.parametrize("name", ["adafactor", "lamb", "sm3"])
def test_an_optimizer_by_name_steps_against_the_gradient(name: str) -> None:
    theta = {"matrix": np.ones((4, 4), np.float32), "bias": np.ones(3, np.float32)}
    transform = optimizer(Inner(optimizer=name), MODEL.is_embedding)
    state = transform.init(theta)
    for _ in range(2):  # some only look on in their first step
        update, state = transform.update(theta, state, theta)
    assert all(float(part.sum()) < 0 for part in jax.tree.leaves(update))


def test_muon_orthogonalises_matrices_and_leaves_embeddings_to_nadam() -> None:
    rng = np.random.default_rng(0)
    theta = {
        "embedding": np.ones((6, 4), np.float32),
        "matrix": np.ones((8, 4), np.float32),
        "bias": np.ones(3, np.float32),
    }
    gradient = {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in theta.items()}
    inner = Inner(optimizer="muon", weight_decay=0.0, clip_norm=1e9)
    transform = optimizer(inner, lambda name: name == "embedding")
    update, _ = transform.update(gradient, transform.init(theta), theta)
    singular = np.linalg.svd(np.asarray(update["matrix"]), compute_uv=False)
    # Five Newton-Schulz steps leave all singular values within a factor of two; their root mean
    # square is that of a matrix whose entries are 0.2.
    assert singular.max() < 2 * singular.min()
    assert np.sqrt(np.mean(np.square(update["matrix"]))) == pytest.approx(0.2, rel=0.3)
    # Adam's first step is the sign of the gradient; looking ahead adds b1 / (1 + b1) of it.
    for name in ("embedding", "bias"):
        expected = -np.sign(gradient[name]) * (1 + inner.b1 / (1 + inner.b1))
        np.testing.assert_allclose(update[name], expected, rtol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stacked", [None, "layers"])
def test_matrices_decay_and_norms_do_not_whoever_steps_them(name: str, stacked: str | None) -> None:
    """Without a gradient there is nothing but decay: of embeddings too, which Muon leaves to NAdam,
    as it does norms and biases."""
    many = (3,) if stacked else ()
    layers = {"matrix": np.full((*many, 4, 4), 2.0), "norm": np.full((*many, 4), 2.0)}
    theta = {"layers": layers, "embedding": np.full((6, 4), 2.0), "final_norm": np.full(4, 2.0)}
    theta = jax.tree.map(lambda x: x.astype(np.float32), theta)
    inner = Inner(optimizer=name, weight_decay=0.25)
    transform = optimizer(inner, lambda leaf: leaf == "embedding", stacked)
    nothing = jax.tree.map(np.zeros_like, theta)
    update, _ = transform.update(nothing, transform.init(theta), theta)
    for leaf in (update["layers"]["norm"], update["final_norm"]):
        np.testing.assert_array_equal(leaf, 0.0)
    for leaf in (update["layers"]["matrix"], update["embedding"]):
        np.testing.assert_allclose(leaf, -0.25 * 2.0, rtol=1e-6)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "muon"])
def test_stacked_layers_are_stepped_as_layers_of_their_own_would_be(name: str) -> None:
    """Norms of all layers together are no matrix, and matrices are orthogonalised one by one; what
    is measured of a tensor is not that of all layers. Each layer has another scale here, and a
    matrix of 128 rows and columns is one of which Adafactor keeps rows and columns only."""
    rng = np.random.default_rng(0)
    scales = np.array([0.01, 1.0, 10.0], np.float32)

    def drawn(scales: Any) -> dict[str, Any]:
        shapes = {"matrix": (3, 130, 128), "norm": (3, 4)}
        values = {k: rng.standard_normal(size).astype(np.float32) for k, size in shapes.items()}
        return {k: v * scales.reshape(-1, *[1] * (v.ndim - 1)) for k, v in values.items()}

    def updated(theta: Any, gradient: Any, stacked: str | None) -> Any:
        inner = Inner(optimizer=name, weight_decay=0.3, clip_norm=1e9)
        transform = optimizer(inner, lambda _: False, stacked)
        state = transform.init(theta)
        for _ in range(2):  # some only look on in their first step
            update, state = transform.update(gradient, state, theta)
        return update

    theta, gradient, one = drawn(scales), drawn(scales[::-1]), np.ones(5, np.float32)
    together = updated(
        {"layers": theta, "one": one}, {"layers": gradient, "one": one}, stacked="layers"
    )
    for n in range(3):
        own, its = ({k: v[n] for k, v in part.items()} for part in (theta, gradient))
        alone = updated({"own": own, "one": one}, {"own": its, "one": one}, stacked=None)
        np.testing.assert_allclose(together["one"], alone["one"], rtol=1e-6)
        for kind, values in alone["own"].items():
            found = together["layers"][kind][n]
            np.testing.assert_allclose(found, values, rtol=2e-5, atol=1e-6 * np.abs(values).max())


@pytest.mark.parametrize("name", MEASURE_TENSORS)
def test_a_model_without_stacked_leaves_may_say_that_it_has_some(name: str) -> None:
    theta = {"matrix": np.ones((4, 4), np.float32)}
    transform = optimizer(Inner(optimizer=name), MODEL.is_embedding, "layers")
    update, state = transform.update(theta, transform.init(theta), theta)
    update, _ = transform.update(theta, state, theta)
    assert float(update["matrix"].sum()) < 0


@pytest.mark.parametrize("rate", [1.0, 0.03])
def test_fromage_steps_at_any_rate_as_optax_has_it(rate: float) -> None:
    """What it takes from the parameters is no multiple of the rate: at rate 1 almost a third."""
    params = MODEL.init(jax.random.key(0))
    gradient = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.3), params)
    theirs = optax.fromage(rate)
    updates, _ = theirs.update(gradient, theirs.init(params), params)
    wanted, found = (
        optax.apply_updates(params, updates),
        stepped(rate, [[0.3]], optimizer="fromage", clip_norm=100.0),
    )
    for name, leaf in wanted.items():
        np.testing.assert_allclose(getattr(found, name), leaf, rtol=1e-6)


def learned(params: Any, tokens_BxL1: jax.Array) -> jax.Array:
    """Its gradient depends on both; a token of 9 makes the loss, one of 8 only a gradient, bad."""
    tokens, total = tokens_BxL1.astype(jnp.float32), params["bias"].sum()
    steep = jnp.where((tokens == 8).any(), 1e30, 0.0) * (total - jax.lax.stop_gradient(total))
    bad = jnp.where((tokens == 9).any(), jnp.nan, 0.0)
    return (params["matrix"] ** 2).sum() * tokens.mean() + total + steep + bad


LEARNED = ModelDef(MODEL.init, learned, MODEL.is_embedding)


@pytest.mark.parametrize("optimizer_name", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("bad", [9, 8])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_goes_on(
    optimizer_name: str, accumulation: int, bad: int
) -> None:
    inner = Inner.model_validate({"optimizer": optimizer_name, "accumulation": accumulation})
    step, params = make_step(LEARNED, inner), MODEL.init(jax.random.key(0))
    state = optimizer(inner, MODEL.is_embedding).init(params)
    good, spoiled = np.array([[1, 2], [3, 4]], np.int32), np.array([[1, 2], [3, bad]], np.int32)
    params, state, first = step(params, state, good, 0.1)
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state))]
    params, state, skipped = step(params, state, spoiled, 0.1)
    assert np.isfinite(first) and np.isnan(skipped)
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state))] == before
    params, state, last = step(params, state, good, 0.1)
    after = [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]
    assert np.isfinite(last) and all(np.isfinite(leaf).all() for leaf in after)
    assert [leaf.tobytes() for leaf in after] != before


def test_a_rate_of_zero_is_no_bad_step() -> None:
    assert np.isfinite(stepped(0.0).loss)
