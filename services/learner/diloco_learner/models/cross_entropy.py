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
from jax.sharding import PartitionSpec

from diloco_learner.models.sharding import BATCH, STATE, batch_parts, fitting, spread
from diloco_shared.budget.memory import LOGITS_BYTES

# Of a gradient of the head that a device adds up, so much is computed at a time.
BLOCK_BYTES = 128 << 20


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
    head, by_rows = _by_columns(head, by_rows)
    narrow = _gathered(head.astype(x_TxD.dtype), by_rows)

    def part(none: None, xt: Any) -> tuple[None, jax.Array]:
        _, log_z, at = _logits(xt[0], narrow, xt[1], by_rows, cap)
        return none, jnp.sum(jnp.where(xt[1] >= 0, log_z - at, 0.0))

    _, totals = _over(part, None, _parts(x_TxD, targets_T, _vocabulary(head, by_rows)))
    return jnp.sum(totals), jnp.sum(targets_T >= 0)


def _forward(
    x_TxD: jax.Array, head: jax.Array, targets_T: jax.Array, by_rows: bool, cap: float
) -> tuple[Any, Any]:
    given, in_rows = head.dtype, by_rows
    head, by_rows = _by_columns(head, by_rows)
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
        left, right = (slope_CxV, x_CxD) if by_rows else (x_CxD, slope_CxV)
        return _added(head_grad, left, right, blocks), (nats, x_grad)

    parts = _parts(x_TxD, targets_T, _vocabulary(head, by_rows))
    zero = jnp.zeros(head.shape, jnp.float32)
    places = _places(len(targets_T))
    blocks = _blocks(head) if places > 1 else 1
    if places > 1:
        # Each device adds up what its own tokens give, and then keeps of all what is its to keep.
        zero = spread(jnp.zeros((places, *head.shape), jnp.float32), BATCH, None, "tensor")
    head_grad, (totals, x_grad) = _over(part, zero, parts)
    if places > 1:
        head_grad = _own_rows(head_grad)
    x_grad_TxD = _together(x_grad, len(x_TxD))
    found = jnp.sum(totals), jnp.sum(targets_T >= 0)
    head_grad = (head_grad.T if in_rows != by_rows else head_grad).astype(given)
    return found, (x_grad_TxD, head_grad)


def _backward(by_rows: bool, cap: float, grads: Any, slope: Any) -> tuple[Any, ...]:
    x_grad_TxD, head_grad = grads
    return (x_grad_TxD * slope[0].astype(x_grad_TxD.dtype), head_grad * slope[0], None)


summed.defvjp(_forward, _backward)


def _by_columns(head: jax.Array, by_rows: bool) -> tuple[jax.Array, bool]:
    """The same matrix, (D, V) where there are several devices, of which each has some rows then.

    Rows that are put together lie in order. Columns would have to be put in order, in another copy
    of the whole matrix.
    """
    turn = by_rows and batch_parts() > 1
    return (spread(head.T, STATE, "tensor"), False) if turn else (head, by_rows)


def _gathered(head: jax.Array, by_rows: bool) -> jax.Array:
    """Whole on each device, but for the axis `tensor`."""
    return spread(head, "tensor") if by_rows else spread(head, None, "tensor")


def _blocks(head: jax.Array) -> int:
    """Into how many blocks of rows the gradient of (D, V) is cut, that a device adds up whole."""
    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    rows, columns = head.shape
    parts = mesh.get("tensor", 1) if fitting(columns, "tensor", mesh) else 1
    least = -(-4 * rows * columns // (parts * BLOCK_BYTES))
    return next(n for n in range(min(max(1, least), rows), rows + 1) if rows % n == 0)


def _added(total_AxB: jax.Array, a: jax.Array, b: jax.Array, blocks: int) -> jax.Array:
    """`total` and the product of (C, A) and (C, B), fp32: a block of rows after another.

    So what is to be added is there a block at a time, and not as another whole matrix.
    """
    product = partial(jnp.einsum, "ca,cb->ab", preferred_element_type=jnp.float32)
    if blocks == 1:
        return total_AxB + product(a, b)
    rows = a.shape[1] // blocks

    def add(n: Any, total_AxB: jax.Array) -> jax.Array:
        more = product(jax.lax.dynamic_slice_in_dim(a, n * rows, rows, 1), b)
        there = jax.lax.dynamic_slice_in_dim(total_AxB, n * rows, rows, 0)
        return jax.lax.dynamic_update_slice_in_dim(total_AxB, there + more, n * rows, 0)

    added: jax.Array = jax.lax.fori_loop(0, blocks, add, total_AxB)
    return added


def _own_rows(grads_PxDxV: jax.Array) -> jax.Array:
    """The sum over all devices (D, V), of which each has the rows that are its to keep.

    It is said as that one instruction. A compiler that is told only how the sum is to lie may make
    the whole of it on every device, and do so when the gradients of all layers are there too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    _, rows, columns = grads_PxDxV.shape
    kept, column = fitting(rows, STATE, sizes), fitting(columns, "tensor", sizes)
    scattered = (kept,) if isinstance(kept, str) else kept or ()
    others = tuple(axis for axis in BATCH if axis not in scattered and sizes[axis] > 1)

    def added(own_1xDxV: jax.Array) -> jax.Array:
        own = own_1xDxV[0]
        if scattered:
            own = jax.lax.psum_scatter(own, scattered, scatter_dimension=0, tiled=True)
        return jax.lax.psum(own, others) if others else own

    given, mine = PartitionSpec(BATCH, None, column), PartitionSpec(kept, column)
    return jax.shard_map(added, in_specs=given, out_specs=mine, check_vma=False)(grads_PxDxV)


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
