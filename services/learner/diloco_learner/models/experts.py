"""A mixture of experts: in place of a layer's MLP there are E of them, and a token takes k.

A router gives every expert a share of a token, by a softmax over all (fp32). The k experts with the
largest shares take the token, and their shares are divided by their sum. That is what Mixtral
(arXiv 2401.04088) computes, and Qwen 3 with `norm_topk_prob` (arXiv 2505.09388).

Shapes must be known when a program is compiled, and how many tokens choose an expert is not. So
each expert has room for C tokens of every sequence (`Shape.room`), and what it has no room for goes
past it, as in GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961). With room for all tokens of
a sequence nothing ever goes past. Tokens take their places in order, so that a later token never
pushes an earlier one out: the model stays causal. A sequence is never cut by a mesh, so that the
same tokens go past an expert on one device as on many.

Tokens are moved to their places by gathers, forward and backward: each value is copied once, and
nothing is added in an order that a device may choose. On a mesh, the places of all sequences are
handed to the devices that have the experts, and back: two exchanges on the axis `expert`.

Sizes: B batch, L length, D model, E experts, k taken by a token, C places, F hidden.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diloco_learner.models.sharding import BATCH, spread
from diloco_shared.spec.shapes import Shape

# The tensors that hold a matrix of each expert.
EXPERTS = ("down_ExFxD", "gate_ExDxF", "up_ExDxF")
# Sequences, while their places lie with the experts.
_GROUPS = ("data", "fsdp")


class ExpertRoutes(NamedTuple):
    """Which tokens of a sequence go where; choices are counted token by token."""

    shares_BxLxk: jax.Array  # fp32: of each expert that a token takes
    # Of each choice its place, from 0 to E C - 1; E C where the expert has no room.
    place_BxLk: jax.Array
    choice_BxEC: jax.Array  # of each place its choice; L k where it is empty
    balance: jax.Array  # fp32: how unevenly experts are used


def routes(shape: Shape, router_DxE: jax.Array, x_BxLxD: jax.Array) -> ExpertRoutes:
    """Where every token goes.

    `balance` is E x the sum over experts of (chosen by a token on average) x (mean share), over all
    tokens (Switch, equation 4; summed over a token's choices, as Mixtral does). It is k where all
    experts are used alike, and more where they are not.
    """
    e, k, (batch, length, _) = shape.experts, shape.experts_per_token, x_BxLxD.shape
    logits_BxLxE = x_BxLxD.astype(jnp.float32) @ router_DxE.astype(jnp.float32)
    every_BxLxE = jax.nn.softmax(logits_BxLxE, axis=-1)
    shares_BxLxk, chosen_BxLxk = jax.lax.top_k(every_BxLxE, k)
    shares_BxLxk = shares_BxLxk / jnp.sum(shares_BxLxk, axis=-1, keepdims=True)
    took_BxLkxE = jax.nn.one_hot(chosen_BxLxk.reshape(batch, -1), e, dtype=jnp.int32)
    often_E = k * jnp.mean(took_BxLkxE.astype(jnp.float32), axis=(0, 1))
    balance = e * jnp.sum(often_E * jnp.mean(every_BxLxE, axis=(0, 1)))
    room = shape.room(length)
    # How many choices of the same expert came before each.
    turn_BxLk = jnp.sum((jnp.cumsum(took_BxLkxE, axis=1) - 1) * took_BxLkxE, axis=-1)
    place_BxLk = chosen_BxLxk.reshape(batch, -1) * room + turn_BxLk
    place_BxLk = jnp.where(turn_BxLk < room, place_BxLk, e * room)
    return ExpertRoutes(shares_BxLxk, place_BxLk, _inverse(place_BxLk, e * room), balance)


def _inverse(place_BxN: jax.Array, places: int) -> jax.Array:
    """Of each place who has it; N where nobody does."""
    count = place_BxN.shape[1]

    def of_one(place_N: jax.Array) -> jax.Array:
        empty = jnp.full(places, count, jnp.int32)
        return empty.at[place_N].set(jnp.arange(count, dtype=jnp.int32), mode="drop")

    found: jax.Array = jax.vmap(of_one)(place_BxN)
    return found


@jax.custom_vjp
def moved(x_BxNxD: jax.Array, from_BxM: jax.Array, to_BxNxk: jax.Array) -> jax.Array:
    """(B, M, D): at each place what stood at `from`, zeros where that is beyond the end.

    `to`: at which places each row stands afterwards; M where at fewer than k. Gradients so are
    gathered as well.
    """
    return _taken(x_BxNxD, from_BxM)


def _taken(x_BxNxD: jax.Array, from_BxM: jax.Array) -> jax.Array:
    rows = partial(jnp.take, axis=0, mode="fill", fill_value=0)
    found: jax.Array = jax.vmap(rows)(x_BxNxD, from_BxM)
    return found


def _moved(x: jax.Array, from_BxM: jax.Array, to_BxNxk: jax.Array) -> tuple[jax.Array, Any]:
    return _taken(x, from_BxM), to_BxNxk


def _back(to_BxNxk: jax.Array, slope_BxMxD: jax.Array) -> tuple[jax.Array, None, None]:
    batch, rows, k = to_BxNxk.shape
    each = _taken(slope_BxMxD, to_BxNxk.reshape(batch, -1))
    return jnp.sum(each.reshape(batch, rows, k, -1), axis=2), None, None


moved.defvjp(_moved, _back)


def mixture(
    shape: Shape, layer: dict[str, jax.Array], x_BxLxD: jax.Array, gated: Any
) -> tuple[jax.Array, jax.Array]:
    """(what the experts make of the tokens (B, L, D), how unevenly they are used).

    `gated(gate, up)`: what of `up` the gate lets through.
    """
    batch, length, _ = x_BxLxD.shape
    e, k = shape.experts, shape.experts_per_token
    found = routes(shape, layer["router_DxE"], x_BxLxD)
    place_BxLxk = found.place_BxLk.reshape(batch, length, k)
    # An empty place is that of token L, which there is not.
    given_BxECxD = moved(x_BxLxD, found.choice_BxEC // k, place_BxLxk)
    given_BxExCxD = _at_experts(given_BxECxD.reshape(batch, e, -1, shape.width))

    # Where a whole layer is computed again, nothing in it is once more.
    whole = shape.remat == "layer"
    same = layer["up_ExDxF"].dtype == x_BxLxD.dtype
    # In another type matrices are not kept for the way back: they are turned into that once more.
    product = _product if whole or same else jax.checkpoint(_product)

    def wide(name: str) -> jax.Array:
        y_BxExCxF = product(given_BxExCxD, layer[name])
        return spread(y_BxExCxF, _GROUPS, "expert", None, "tensor")

    gate_BxExCxF, up_BxExCxF = wide("gate_ExDxF"), wide("up_ExDxF")
    made = _made if whole else jax.checkpoint(_made, static_argnums=0)
    made_BxExCxD = spread(
        made(gated, gate_BxExCxF, up_BxExCxF, layer["down_ExFxD"]), _GROUPS, "expert"
    )
    made_BxECxD = spread(made_BxExCxD, BATCH).reshape(batch, -1, shape.width)
    each_BxLkxD = moved(made_BxECxD, found.place_BxLk, found.choice_BxEC[..., None])
    each_BxLxkxD = each_BxLkxD.reshape(batch, length, k, shape.width)
    shares = found.shares_BxLxk.astype(x_BxLxD.dtype)
    return jnp.einsum("blkd,blk->bld", each_BxLxkxD, shares), found.balance


def _product(x_BxExCxD: jax.Array, matrices_ExDxF: jax.Array) -> jax.Array:
    """Each expert's places, multiplied by its matrix: (B, E, C, F), in the type of x."""
    x = x_BxExCxD
    found: jax.Array = jnp.einsum("becd,edf->becf", x, matrices_ExDxF.astype(x.dtype))
    return found


def _made(
    gated: Any, gate_BxExCxF: jax.Array, up_BxExCxF: jax.Array, down_ExFxD: jax.Array
) -> jax.Array:
    """(B, E, C, D), of what the gates let through."""
    return _product(gated(gate_BxExCxF, up_BxExCxF), down_ExFxD)


def _at_experts(x_BxExCxD: jax.Array) -> jax.Array:
    """Handed to the devices that have the experts."""
    return spread(spread(x_BxExCxD, BATCH), _GROUPS, "expert")
