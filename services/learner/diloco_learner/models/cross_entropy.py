"""Cross-entropy of the head without its logits: (B, L, V) in fp32 never exists.

Logits are made for some tokens at a time. Their gradients are computed at once, while they are
there, so that nothing is computed again for the backward pass, and nothing of that size is kept.

Where tokens are spread over several devices, each part is made of some tokens of every device: no
token leaves its own. The head is gathered once, and its gradients are added up once, after all
parts: a device has both whole meanwhile, as it has one layer after the other.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from diloco_learner.models.sharding import BATCH, STATE, Wish, batch_parts, spread
from diloco_shared.budget.memory import LOGITS_BYTES


def chunks(tokens: int, vocabulary: int) -> int:
    """Into how many parts the tokens of a device are cut."""
    return max(1, min(tokens, -(-tokens * vocabulary * 4 // LOGITS_BYTES)))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def summed(
    x_TxD: jax.Array, head: jax.Array, targets_T: jax.Array, by_rows: bool, cap: float
) -> tuple[jax.Array, jax.Array]:
    """(nats of all targets, how many there are), fp32; a target below 0 is none.

    `head`: the output matrix, (V, D) where `by_rows`, else (D, V); it multiplies in x's type.
    `cap`: logits are capped softly at this; 0: not at all.
    """
    narrow = _gathered(head.astype(x_TxD.dtype), by_rows)

    def part(none: None, xt: Any) -> tuple[None, jax.Array]:
        _, log_z, at = _logits(xt[0], narrow, xt[1], by_rows, cap)
        return none, jnp.sum(jnp.where(xt[1] >= 0, log_z - at, 0.0))

    _, totals = _over(part, None, _parts(x_TxD, targets_T, _vocabulary(head, by_rows)))
    return jnp.sum(totals), jnp.sum(targets_T >= 0)


def _forward(
    x_TxD: jax.Array, head: jax.Array, targets_T: jax.Array, by_rows: bool, cap: float
) -> tuple[Any, Any]:
    narrow = _gathered(head.astype(x_TxD.dtype), by_rows)

    def part(head_grad: jax.Array, xt: Any) -> tuple[jax.Array, Any]:
        x_CxD, targets_C = xt
        logits_CxV, log_z_C, at_C = _logits(x_CxD, narrow, targets_C, by_rows, cap)
        counts_C = targets_C >= 0
        nats = jnp.sum(jnp.where(counts_C, log_z_C - at_C, 0.0))
        slope = jnp.exp(logits_CxV - log_z_C[:, None])
        slope = slope.at[jnp.arange(len(targets_C)), jnp.maximum(targets_C, 0)].add(-1.0)
        if cap:
            slope = slope * (1 - (logits_CxV / cap) ** 2)
        slope_CxV = jnp.where(counts_C[:, None], slope, 0.0).astype(x_CxD.dtype)
        x_grad = slope_CxV @ (narrow if by_rows else narrow.T)
        pair = (slope_CxV, x_CxD) if by_rows else (x_CxD, slope_CxV)
        head_grad += jnp.einsum("ca,cb->ab", *pair, preferred_element_type=jnp.float32)
        return head_grad, (nats, x_grad)

    parts = _parts(x_TxD, targets_T, _vocabulary(head, by_rows))
    zero = jnp.zeros(head.shape, jnp.float32)
    places = _places(len(targets_T))
    if places > 1:
        # Each device adds up its own tokens' part, of which it then keeps what is its to keep.
        cut: Wish = ("tensor", None) if by_rows else (None, "tensor")
        zero = spread(jnp.zeros((places, *head.shape), jnp.float32), BATCH, *cut)
    head_grad, (totals, x_grad) = _over(part, zero, parts)
    if places > 1:
        kept: Wish = ("tensor", STATE) if by_rows else (STATE, "tensor")
        head_grad = spread(jnp.sum(head_grad, axis=0), *kept)
    x_grad_TxD = _together(x_grad, len(x_TxD))
    found = jnp.sum(totals), jnp.sum(targets_T >= 0)
    return found, (x_grad_TxD, head_grad.astype(head.dtype))


def _backward(by_rows: bool, cap: float, grads: Any, slope: Any) -> tuple[Any, ...]:
    x_grad_TxD, head_grad = grads
    return (x_grad_TxD * slope[0].astype(x_grad_TxD.dtype), head_grad * slope[0], None)


summed.defvjp(_forward, _backward)


def _gathered(head: jax.Array, by_rows: bool) -> jax.Array:
    """Whole on each device, but for the axis `tensor`."""
    return spread(head, "tensor") if by_rows else spread(head, None, "tensor")


def _vocabulary(head: jax.Array, by_rows: bool) -> int:
    return int(head.shape[0 if by_rows else 1])


def _parts(x_TxD: jax.Array, targets_T: jax.Array, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """Equal parts, filled up with tokens that are no targets; of each, those of every device."""
    places = _places(len(targets_T))
    own = len(targets_T) // places  # tokens of a device, or all
    count = chunks(own, vocabulary)
    missing = -own % count

    def parts(tokens: jax.Array, filler: int) -> jax.Array:
        rest = tokens.shape[1:]
        by_place = tokens.reshape(places, own, *rest)
        padding = ((0, 0), (0, missing), *((0, 0) for _ in rest))
        filled = jnp.pad(by_place, padding, constant_values=filler)
        by_part = filled.reshape(places, count, -1, *rest).swapaxes(0, 1)
        return spread(by_part, None, BATCH) if places > 1 else by_part[:, 0]

    return parts(x_TxD, 0), parts(targets_T, -1)


def _together(parts: jax.Array, tokens: int) -> jax.Array:
    """What `_parts` took apart: (T, D), without what was filled up."""
    places, width = _places(tokens), parts.shape[-1]
    by_place = parts.reshape(len(parts), places, -1, width).swapaxes(0, 1)
    own = by_place.reshape(places, -1, width)[:, : tokens // places]
    return spread(own.reshape(-1, width), BATCH)


def _places(tokens: int) -> int:
    """Over how many devices these tokens are spread."""
    parts = batch_parts()
    return parts if tokens % parts == 0 else 1


def _over(part: Any, carry: Any, parts: Any) -> tuple[Any, Any]:
    """A scan; a single part needs no loop. Every device's tokens are mapped over."""
    part = jax.vmap(part) if parts[1].ndim == 3 else part
    return jax.lax.scan(part, carry, parts, unroll=len(parts[1]) == 1)


def _logits(
    x_CxD: jax.Array, head: jax.Array, targets_C: jax.Array, by_rows: bool, cap: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logits, logarithm of the sum of their exponentials, the target's logit), fp32."""
    equation = "cd,vd->cv" if by_rows else "cd,dv->cv"
    logits_CxV = jnp.einsum(equation, x_CxD, head, preferred_element_type=jnp.float32)
    if cap:
        logits_CxV = cap * jnp.tanh(logits_CxV / cap)
    log_z_C = jax.nn.logsumexp(logits_CxV, axis=-1)
    at_CxV = jnp.take_along_axis(logits_CxV, jnp.maximum(targets_C, 0)[:, None], axis=-1)
    return logits_CxV, log_z_C, at_CxV[:, 0]
