"""Cross-entropy of the head without its logits: (B, L, V) in fp32 never exists.

Logits are made for some tokens at a time. Their gradients are computed at once, while they are
there, so that nothing is computed again for the backward pass, and nothing of that size is kept.

On several devices the same is computed on each of them, for its part (`head_on_mesh`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco_learner.models.head_on_mesh import Meeting
from diloco_learner.models.sharding import batch_parts
from diloco_shared.budget.memory import LOGITS_BYTES

# Of a gradient of the head that a device adds up, so much is computed at a time.
BLOCK_BYTES = 128 << 20


def chunks(tokens: int, columns: int) -> int:
    """Into how many parts the tokens of a device are cut, of which it scores so many columns."""
    return max(1, min(tokens, -(-tokens * columns * 4 // LOGITS_BYTES)))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def summed(
    x_TxD: jax.Array, head: jax.Array, targets_T: jax.Array, by_rows: bool, cap: float
) -> tuple[jax.Array, jax.Array]:
    """(nats of all targets, how many there are), fp32; a target below 0 is none.

    `head`: the output matrix, (V, D) where `by_rows`, else (D, V); it multiplies in x's type.
    `cap`: logits are capped softly at this; 0: not at all.
    """
    meeting = _meeting(x_TxD, head, by_rows)

    def on_a_device(x_TxD: jax.Array, head: jax.Array, targets_T: jax.Array) -> jax.Array:
        head, rows = _met(meeting, head.astype(x_TxD.dtype), by_rows)

        def part(none: None, xt: Any) -> tuple[None, jax.Array]:
            x_CxD, targets_C = (meeting.gathered(some) for some in xt)
            _, log_z, at = _logits(meeting, x_CxD, head, targets_C, rows, cap)
            return none, jnp.sum(jnp.where(targets_C >= 0, log_z - at, 0.0))

        _, totals = _over(part, None, _parts(meeting, x_TxD, targets_T, head, rows))
        return meeting.over_tokens(jnp.sum(totals))

    given = (meeting.tokens, meeting.matrix(by_rows), meeting.tokens)
    total = _on_devices(meeting, on_a_device, given, PartitionSpec())(
        *_padded(x_TxD, targets_T, head)
    )
    return total, jnp.sum(targets_T >= 0)


def _forward(
    x_TxD: jax.Array, head: jax.Array, targets_T: jax.Array, by_rows: bool, cap: float
) -> tuple[Any, Any]:
    meeting = _meeting(x_TxD, head, by_rows)

    def on_a_device(x_TxD: jax.Array, head: jax.Array, targets_T: jax.Array) -> Any:
        given = head.dtype
        head, rows = _met(meeting, head.astype(x_TxD.dtype), by_rows)
        blocks = 1 if meeting.alone else _blocks(head)
        # What several devices found of a token's gradient is added up in fp32.
        wide = jnp.float32 if meeting.scorers else None

        def part(head_grad: jax.Array, xt: Any) -> tuple[jax.Array, Any]:
            x_CxD, targets_C = (meeting.gathered(some) for some in xt)
            logits_CxV, log_z_C, at_C = _logits(meeting, x_CxD, head, targets_C, rows, cap)
            counts_C = targets_C >= 0
            nats = jnp.sum(jnp.where(counts_C, log_z_C - at_C, 0.0))
            slope = jnp.exp(logits_CxV - log_z_C[:, None])
            column_C, _ = _column(meeting, targets_C, logits_CxV)
            # Columns of other devices are beyond the end, and nothing is taken off there.
            slope = slope.at[jnp.arange(len(targets_C)), column_C].add(-1.0, mode="drop")
            if cap:
                slope = slope * (1 - (logits_CxV / cap) ** 2)
            slope_CxV = jnp.where(counts_C[:, None], slope, 0.0).astype(x_CxD.dtype)
            x_grad = jnp.matmul(slope_CxV, head if rows else head.T, preferred_element_type=wide)
            left, right = (slope_CxV, x_CxD) if rows else (x_CxD, slope_CxV)
            found = nats, meeting.given_back(x_grad).astype(x_CxD.dtype)
            return _added(head_grad, left, right, blocks), found

        zero = jnp.zeros(head.shape, jnp.float32)
        parts = _parts(meeting, x_TxD, targets_T, head, rows)
        head_grad, (totals, x_grad) = _over(part, zero, parts)
        if not meeting.alone:
            head_grad = meeting.own(head_grad)
        head_grad = (head_grad.T if by_rows != rows else head_grad).astype(given)
        x_grad_TxD = x_grad.reshape(-1, x_TxD.shape[-1])[: len(x_TxD)]
        return meeting.over_tokens(jnp.sum(totals)), x_grad_TxD, head_grad

    matrix = meeting.matrix(by_rows)
    total, x_grad_TxD, head_grad = _on_devices(
        meeting,
        on_a_device,
        (meeting.tokens, matrix, meeting.tokens),
        (PartitionSpec(), meeting.tokens, matrix),
    )(*_padded(x_TxD, targets_T, head))
    found = total, jnp.sum(targets_T >= 0)
    return found, (x_grad_TxD[: len(targets_T)], head_grad)


def _backward(by_rows: bool, cap: float, grads: Any, slope: Any) -> tuple[Any, ...]:
    x_grad_TxD, head_grad = grads
    return (x_grad_TxD * slope[0].astype(x_grad_TxD.dtype), head_grad * slope[0], None)


summed.defvjp(_forward, _backward)


def _meeting(x_TxD: jax.Array, head: jax.Array, by_rows: bool) -> Meeting:
    tokens, width = x_TxD.shape
    return Meeting.of(tokens, width, int(head.shape[0 if by_rows else 1]))


def _on_devices(meeting: Meeting, function: Any, given: Any, found: Any) -> Any:
    """The function for all, of one for what each device has; the same one where there is one."""
    if meeting.alone:
        return function
    return jax.shard_map(function, in_specs=given, out_specs=found, check_vma=False)


def _padded(x_TxD: jax.Array, targets_T: jax.Array, head: jax.Array) -> tuple[jax.Array, ...]:
    """With as many tokens for each device; what is filled up are no targets."""
    missing = -len(targets_T) % batch_parts()
    if missing:
        x_TxD = jnp.pad(x_TxD, ((0, missing), (0, 0)))
        targets_T = jnp.pad(targets_T, (0, missing), constant_values=-1)
    return x_TxD, head, targets_T


def _met(meeting: Meeting, head: jax.Array, by_rows: bool) -> tuple[jax.Array, bool]:
    """The matrix that a device multiplies with, and whether its rows belong to tokens.

    Where there are several devices they do not. Rows that are put together lie in order, and
    columns would have to be put in order, in another copy of the whole matrix.
    """
    if meeting.alone:
        return head, by_rows
    return meeting.met(head.T if by_rows else head), False


def _blocks(head_DxV: jax.Array) -> int:
    """Into how many blocks of rows the gradient of (D, V) is cut, that a device adds up."""
    rows, columns = head_DxV.shape
    least = -(-4 * rows * columns // BLOCK_BYTES)
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


def _parts(
    meeting: Meeting, x_TxD: jax.Array, targets_T: jax.Array, head: jax.Array, by_rows: bool
) -> tuple[jax.Array, jax.Array]:
    """A device's own tokens in equal parts, filled up with some that are no targets.

    Where tokens go around, so do as many of each device: what they are widens a part as their
    logits do, and the wider of both says how many there may be.
    """
    columns = int(head.shape[0 if by_rows else 1])
    if meeting.tokens_go:
        around = jax.lax.axis_size(meeting.rows)
        columns = around * max(columns, x_TxD.shape[-1])
    count = chunks(len(targets_T), columns)
    missing = -len(targets_T) % count
    x_TxD = jnp.pad(x_TxD, ((0, missing), (0, 0)))
    targets_T = jnp.pad(targets_T, (0, missing), constant_values=-1)
    return x_TxD.reshape(count, -1, x_TxD.shape[-1]), targets_T.reshape(count, -1)


def _over(part: Any, carry: Any, parts: Any) -> tuple[Any, Any]:
    """A scan; a single part needs no loop."""
    return jax.lax.scan(part, carry, parts, unroll=len(parts[1]) == 1)


def _logits(
    meeting: Meeting,
    x_CxD: jax.Array,
    head: jax.Array,
    targets_C: jax.Array,
    by_rows: bool,
    cap: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logits, logarithm of the sum of their exponentials, the target's logit), fp32.

    Logits of the columns that this device scores, and the rest of all columns.
    """
    equation = "cd,vd->cv" if by_rows else "cd,dv->cv"
    logits_CxV = jnp.einsum(equation, x_CxD, head, preferred_element_type=jnp.float32)
    if cap:
        logits_CxV = cap * jnp.tanh(logits_CxV / cap)
    largest_C = meeting.largest(jnp.max(logits_CxV, axis=-1))
    total_C = jnp.sum(jnp.exp(logits_CxV - largest_C[:, None]), axis=-1)
    column_C, here_C = _column(meeting, targets_C, logits_CxV)
    at_CxV = jnp.take_along_axis(logits_CxV, column_C[:, None], axis=-1, mode="clip")
    at_C = jnp.where(here_C, at_CxV[:, 0], 0.0)
    total_C, at_C = meeting.over_columns(jnp.stack([total_C, at_C]))
    return logits_CxV, largest_C + jnp.log(total_C), at_C


def _column(
    meeting: Meeting, targets_C: jax.Array, logits_CxV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(the target's column on this device, or one beyond the end; whether it is on this device)."""
    columns = logits_CxV.shape[1]
    column_C = jnp.maximum(targets_C, 0) - meeting.first_column(columns)
    here_C = (column_C >= 0) & (column_C < columns)
    return jnp.where(here_C, column_C, columns), here_C
