"""A mixture of experts: what a token gets, which tokens go past, and what uneven use costs."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.models import to_named, transformer
from diloco_learner.models.experts import mixture, routes
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import Shape

TINY = Shape(
    vocabulary=50,
    width=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_width=4,
    hidden=12,
    experts=6,
    experts_per_token=2,
)
TIGHT = replace(TINY, expert_capacity=0.75)


@pytest.fixture(scope="module")
def params() -> Any:
    return jax.jit(partial(transformer.init, TINY))(jax.random.key(1))


@pytest.fixture(scope="module")
def layer(params: Any) -> dict[str, jax.Array]:
    """One layer's experts."""
    return {name: leaf[0] for name, leaf in params["layers"]["mlp"].items()}


def inputs(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (3, 10, TINY.width))


def silu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def by_hand(layer: Any, x_BxLxD: Any, room: int) -> np.ndarray:
    """Token by token, in their order."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in layer.items()}
    out = np.zeros(x_BxLxD.shape)
    for b, x_LxD in enumerate(np.asarray(x_BxLxD, np.float64)):
        taken = np.zeros(TINY.experts, int)
        for n, x in enumerate(x_LxD):
            share = np.exp(x @ p["router_DxE"])
            share /= share.sum()
            chosen = np.argsort(-share)[: TINY.experts_per_token]
            for e in chosen:
                taken[e] += 1
                if taken[e] > room:
                    continue
                gate, up = x @ p["gate_ExDxF"][e], x @ p["up_ExDxF"][e]
                made = (gate / (1 + np.exp(-gate)) * up) @ p["down_ExFxD"][e]
                out[b, n] += share[e] / share[chosen].sum() * made
    return out


@pytest.mark.parametrize(("shape", "room"), [(TINY, 10), (TIGHT, 3)])
def test_a_token_gets_its_experts_by_their_shares_as_far_as_there_is_room(
    layer: Any, shape: Shape, room: int
) -> None:
    assert shape.room(10) == room
    x = inputs()
    out, _ = jax.jit(partial(mixture, shape, gated=silu))(layer, x)
    wanted = by_hand(layer, x, room)
    np.testing.assert_allclose(np.asarray(out), wanted, atol=1e-5)
    past = np.abs(wanted - by_hand(layer, x, 10)).max(axis=-1) > 1e-6
    assert past.any() == (room < 10) and not past.all()


def test_gradients_are_those_of_every_expert_computed_for_every_token(layer: Any) -> None:
    """What is moved by gathers both ways, against plain sums."""
    x, slope = inputs(), inputs(1)

    def dense(layer: Any, x: Any) -> jax.Array:
        every = jax.nn.softmax(x @ layer["router_DxE"])
        shares, chosen = jax.lax.top_k(every, TINY.experts_per_token)
        shares = shares / shares.sum(axis=-1, keepdims=True)
        weights = jnp.sum(jax.nn.one_hot(chosen, TINY.experts) * shares[..., None], axis=-2)
        up = jnp.einsum("bld,edf->blef", x, layer["up_ExDxF"])
        gate = jnp.einsum("bld,edf->blef", x, layer["gate_ExDxF"])
        made = jnp.einsum("blef,efd->bled", silu(gate, up), layer["down_ExFxD"])
        return jnp.sum(jnp.einsum("bled,ble->bld", made, weights) * slope)

    def ours(layer: Any, x: Any) -> jax.Array:
        return jnp.sum(mixture(TINY, layer, x, silu)[0] * slope)

    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(layer, x)
    wanted = jax.jit(jax.grad(dense, argnums=(0, 1)))(layer, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


def test_uneven_use_costs_more_than_even_use() -> None:
    """As many as a token takes where all are used alike; all experts where two are used alone."""
    x = jnp.ones((2, 12, 6)) * jnp.eye(6)[jnp.arange(12) % 6]  # a token of each kind in turn
    shape = replace(TINY, width=6)
    # A kind of tokens goes to one expert and the next one, each with half of the share.
    even = 60.0 * (jnp.eye(6) + jnp.roll(jnp.eye(6), 1, axis=1))
    uneven = jnp.zeros((6, 6)).at[:, :2].set(60.0)
    assert float(routes(shape, even, x).balance) == pytest.approx(2, rel=1e-5)
    assert float(routes(shape, uneven, x).balance) == pytest.approx(6, rel=1e-5)


def test_a_later_token_changes_no_earlier_logits(params: Any) -> None:
    """Nor does it push one out of an expert."""
    forward = jax.jit(partial(transformer.forward, TIGHT, jnp.float32))
    batch = np.random.default_rng(3).integers(0, 50, (2, 12)).astype(np.int32)
    changed = batch.copy()
    changed[:, 6:] = (changed[:, 6:] + 7) % 50
    a, b = np.asarray(forward(params, batch)), np.asarray(forward(params, changed))
    np.testing.assert_allclose(a[:, :6], b[:, :6], atol=1e-5)
    assert np.abs(a[:, 6:] - b[:, 6:]).max() > 1e-2


def spec(optimizer: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "r",
            "model": {"preset": "nano-moe", "overrides": {"layers": 1}, "context_tokens": 32},
            "inner": {"optimizer": optimizer, "batch_sequences": 4, "warmup_steps": 0},
            "algorithm": {"fragments": 4},
            "budget": {"steps": 10},
        }
    )


@pytest.mark.whole
def test_training_minimises_more_than_the_loss_and_tells_the_loss() -> None:
    program = Program.build(spec("adamw"))
    trainer, batch = Trainer(program), np.random.default_rng(4).integers(0, 256, (4, 33))
    assert program.model.objective is not None
    whole, nats = jax.jit(program.model.objective)(trainer.params, batch)
    assert 0.02 <= float(whole - nats) < 0.04  # 0.01 of two or a little more
    losses = [float(trainer.step(batch.astype(np.int32), 0.01)) for _ in range(30)]
    assert losses[0] == pytest.approx(float(nats), rel=1e-5) and losses[-1] < 0.5 * losses[0]


def test_muon_steps_every_experts_matrix_along_its_own_momentum() -> None:
    program = Program.build(spec("muon"))
    state = to_named(jax.eval_shape(program.init_state, program.shapes))
    # Of what it steps it keeps one moment, of the rest two.
    kept = {name: [n for n in state if n.endswith(name)] for name in ("down_ExFxD", "router_DxE")}
    assert {name: len(found) for name, found in kept.items()} == {"down_ExFxD": 1, "router_DxE": 1}
    assert len([n for n in state if n.endswith("tokens_VxD")]) == 2
