"""The inner optimizer and the train step (paper section 2).

The learning rate is an argument of the step, not part of the optimizer: schedules are functions
of the run's progress, which only the caller knows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from diloco_learner.model import ModelDef
from diloco_shared.config import Inner

# (params, opt_state, tokens_BxL1, rate) -> (params, opt_state, loss)
Step = Callable[[Any, Any, jax.Array, float], tuple[Any, Any, jax.Array]]


def optimizer(inner: Inner) -> optax.GradientTransformation:
    """Clipping, then the optimizer at rate 1; the step scales its update by the rate.

    AdamW decays matrices only: norms and biases have no scale to lose. The others come with
    their own defaults.
    """
    if inner.optimizer == "adamw":
        chosen = optax.adamw(
            1.0,
            b1=inner.b1,
            b2=inner.b2,
            weight_decay=inner.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )
    else:
        chosen = getattr(optax, inner.optimizer)(1.0)
    return optax.chain(optax.clip_by_global_norm(inner.clip_norm), chosen)


def make_step(model: ModelDef, inner: Inner) -> Step:
    """The jitted inner step. Parameters and optimizer state are donated: use what it returns.

    Tokens have shape (accumulation * B, L + 1); gradients are averaged over the parts.
    """
    transform = optimizer(inner)

    def gradients(params: Any, tokens_BxL1: jax.Array) -> tuple[jax.Array, Any]:
        if inner.accumulation == 1:
            return jax.value_and_grad(model.loss)(params, tokens_BxL1)
        parts = tokens_BxL1.reshape(inner.accumulation, -1, tokens_BxL1.shape[-1])

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(model.loss)(params, part)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zero, parts)
        loss, grads = jax.tree.map(lambda x: x / inner.accumulation, total)
        return loss, grads

    def step(
        params: Any, opt_state: Any, tokens_BxL1: jax.Array, rate: float
    ) -> tuple[Any, Any, jax.Array]:
        loss, grads = gradients(params, tokens_BxL1)
        updates, opt_state = transform.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return params, opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))
