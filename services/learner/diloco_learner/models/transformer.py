"""A decoder-only transformer, of every shape that `diloco_shared.spec.shapes` knows.

Plain jax: parameters are a nested dict, shapes stand in names (B batch, L length, D model, H query
heads, G key-value heads, K head dimension, F hidden, V vocabulary, N layers, E experts, T tokens of
a batch). The tensors of all layers are stacked along a first axis, and one layer's program runs
over them: 48 layers take as long to compile as one.

The sign of a token says whether it is to be predicted: the bitwise complement (~token, negative) of
a token is read like the token, and left out of the loss.
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from diloco_learner.models.attention import attend, documents, rotary_tables, rotated
from diloco_learner.models.cross_entropy import summed
from diloco_learner.models.experts import mixture
from diloco_learner.models.sharding import BATCH, STATE, spread, state_parts
from diloco_shared.spec.shapes import SHAPES as SHAPES
from diloco_shared.spec.shapes import Shape as Shape
from diloco_shared.spec.shapes import layer_tensors

Params = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

# Layers are unrolled up to this many. A loop copies what the way back needs into arrays of all
# layers: on a processor a twentieth of the step's time, and six layers compile as fast without it.
# Not where devices share the parameters: a loop gathers one layer's at a time, and without it the
# compiler gathers and adds up those of all layers at once.
UNROLLED_MAX = 8
# Embeddings that are not scaled begin as small as Llama's.
UNSCALED_DEVIATION = 0.02


def init(shape: Shape, key: jax.Array) -> Params:
    """fp32 parameters: normal(1/sqrt(fan in)); outputs of a block scaled by 1/sqrt(2 N)."""
    s = shape
    # Of each layer in this order, so that a seed gives the same values however they lie in memory.
    matrices = ["query_DxHK", "key_DxGK", "value_DxGK", "out_HKxD"]
    if s.experts:
        matrices += ["gate_ExDxF", "up_ExDxF", "down_ExFxD", "router_DxE"]
    else:
        matrices += ["gate_DxF", "up_DxF", "down_FxD"]
    place = {name: n for n, name in enumerate(matrices)}
    last = 1 + len(matrices) * s.layers
    keys = jax.random.split(key, last + 1)

    def tensor(name: str, dims: tuple[int, ...]) -> jax.Array:
        if name in place:
            scale = (1 / math.sqrt(2 * s.layers)) if name.startswith(("out", "down")) else 1.0
            of_layers = keys[1 + place[name] : last : len(matrices)]
            normal: Any = jax.vmap(lambda k: jax.random.normal(k, dims, jnp.float32))
            return jnp.asarray(normal(of_layers)) * (scale / math.sqrt(dims[-2]))
        return jnp.full((s.layers, *dims), _plain(shape, name), jnp.float32)

    layers: Params = {}
    for path, dims in layer_tensors(s).items():
        part, name = path.split("/")
        layers.setdefault(part, {})[name] = tensor(name, dims)
    deviation = 1 / math.sqrt(s.width) if s.embed_scale else UNSCALED_DEVIATION
    embedding_VxD = jax.random.normal(keys[0], (s.vocabulary, s.width), jnp.float32) * deviation
    params: Params = {
        "embedding": {"tokens_VxD": embedding_VxD},
        "final_norm": {"scale_D": jnp.full(s.width, _plain(shape, "norm_D"), jnp.float32)},
        "layers": layers,
    }
    if not s.tied:
        head_DxV = jax.random.normal(keys[last], (s.width, s.vocabulary), jnp.float32)
        params["output"] = {"head_DxV": head_DxV / math.sqrt(s.width)}
    return params


def _plain(shape: Shape, name: str) -> float:
    """What a norm begins with: scaling by one. A bias begins at zero."""
    return 1.0 if "norm" in name and not shape.norm_offset else 0.0


def loss(
    shape: Shape,
    dtype: Any,
    params: Params,
    tokens_BxL1: jax.Array,
    separator: int | None = None,
) -> jax.Array:
    """Mean cross-entropy in nats per token of predicting each next token; fp32 scalar.

    Tokens below 0 are not to be predicted. Logits are made for a few thousand tokens at a time.
    `separator`: the token between documents, each of which then sees itself alone (`documents`);
    None: a token sees all before it.
    """
    return objective(shape, dtype, params, tokens_BxL1, separator)[1]


def objective(
    shape: Shape,
    dtype: Any,
    params: Params,
    tokens_BxL1: jax.Array,
    separator: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(what training minimises, the loss), fp32 scalars: see `loss`.

    The first adds, for a mixture of experts, `expert_balance` times how unevenly they are used:
    the mean over layers (`experts.routes`).
    """
    x_BxLxD, balance = _read(shape, dtype, params, tokens_BxL1[:, :-1], separator)
    head, by_rows = _head(shape, params)
    total, count = summed(
        x_BxLxD.reshape(-1, shape.width),
        head,
        tokens_BxL1[:, 1:].reshape(-1),
        by_rows,
        shape.logit_cap,
    )
    nats = total / jnp.maximum(count, 1)
    return nats if balance is None else nats + shape.expert_balance * balance, nats


def forward(
    shape: Shape,
    dtype: Any,
    params: Params,
    tokens_BxL: jax.Array,
    separator: int | None = None,
) -> jax.Array:
    """fp32 logits of shape (B, L, V); matrices multiply in `dtype`. `separator`: see `loss`."""
    return logits(shape, params, hidden(shape, dtype, params, tokens_BxL, separator))


def logits(shape: Shape, params: Params, x: jax.Array) -> jax.Array:
    """fp32 logits (..., V) of what the head sees (..., D)."""
    head, by_rows = _head(shape, params)
    head_DxV = (head.T if by_rows else head).astype(x.dtype)
    plain: jax.Array = (x @ head_DxV).astype(jnp.float32)
    cap = shape.logit_cap
    return cap * jnp.tanh(plain / cap) if cap else plain


def _head(shape: Shape, params: Params) -> tuple[jax.Array, bool]:
    """(the output matrix, whether a row of it belongs to one token)."""
    if shape.tied:
        return params["embedding"]["tokens_VxD"], True
    return params["output"]["head_DxV"], False


def hidden(
    shape: Shape,
    dtype: Any,
    params: Params,
    tokens_BxL: jax.Array,
    separator: int | None = None,
) -> jax.Array:
    """What the head sees: (B, L, D) in `dtype`, after the last norm. `separator`: see `loss`."""
    return _read(shape, dtype, params, tokens_BxL, separator)[0]


def _read(
    shape: Shape, dtype: Any, params: Params, tokens_BxL: jax.Array, separator: int | None
) -> tuple[jax.Array, jax.Array | None]:
    """(`hidden`, how unevenly experts are used, if there are some)."""
    x_BxLxD = embedded(shape, dtype, params, tokens_BxL)
    document_BxL = None if separator is None else documents(tokens_BxL, separator)
    x_BxLxD, balance = _layers(shape, params["layers"], x_BxLxD, document_BxL)
    return norm(shape, x_BxLxD, params["final_norm"]["scale_D"]), balance


def embedded(shape: Shape, dtype: Any, params: Params, tokens_BxL: jax.Array) -> jax.Array:
    """What the first layer sees: (B, L, D) in `dtype`."""
    tokens_BxL = jnp.where(tokens_BxL < 0, ~tokens_BxL, tokens_BxL)
    x_BxLxD = params["embedding"]["tokens_VxD"][tokens_BxL].astype(dtype)
    # Each device looks up its columns for all, and hands them to whose tokens they are.
    x_BxLxD = spread(x_BxLxD, "data", None, STATE)
    factor = jnp.asarray(math.sqrt(shape.width) if shape.embed_scale else 1.0, dtype)
    return spread(jnp.asarray(x_BxLxD * factor), BATCH)


def _layers(
    shape: Shape, layers: Params, x_BxLxD: jax.Array, document_BxL: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    windows = {shape.attends_to_all(n) for n in range(shape.layers)}
    # Places are counted through the sequence, not through each document: rotary positions are
    # relative, so that a document's logits are the same wherever it begins.
    block = partial(_block, shape, rotary_tables(shape, x_BxLxD.shape[1]), document_BxL)
    if len(windows) == 1:
        # What is the same in all layers is part of the program.
        (same,) = windows
        inner = partial(_scanned, _remat(shape, lambda x, layer, _: block(x, layer, same)))
    else:
        inner = partial(_scanned, _remat(shape, block))
    whole_N = jnp.array([shape.attends_to_all(n) for n in range(shape.layers)])
    unroll = shape.layers if shape.layers <= UNROLLED_MAX and state_parts() == 1 else 1
    x_BxLxD, balance_N = jax.lax.scan(inner, x_BxLxD, (layers, whole_N), unroll=unroll)
    return x_BxLxD, None if balance_N is None else jnp.mean(balance_N)


def _scanned(block: Any, x_BxLxD: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array | None]:
    found: tuple[jax.Array, jax.Array | None] = block(x_BxLxD, *layer)
    return found


def _again(function: F) -> F:
    """The backward pass computes it again from its arguments, which it has anyway.

    That takes a few operations a value, where keeping what lies between would cost as much memory
    again. A product at its end is not computed twice: only what it was made of is wanted. Where
    layers are unrolled the compiler would find both computations alike, and keep the first one's;
    so it is kept from that. The first argument is static.
    """
    return cast(F, jax.checkpoint(function, static_argnums=0))


def _again_in_kept_layers(function: F) -> F:
    """The same for what has matrices among its arguments, unless its whole layer is computed again.

    Then devices that share the matrices would hand them round once more.
    """
    again = _again(function)

    @wraps(function)
    def chosen(shape: Shape, *given: Any) -> Any:
        return (function if shape.remat == "layer" else again)(shape, *given)

    return cast(F, chosen)


def _remat(shape: Shape, block: Any) -> Any:
    match shape.remat:
        case "layer":
            return jax.checkpoint(block)
        case "products":
            kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(block, policy=kept)
        case _:
            return block


def _block(
    shape: Shape,
    rotary: Any,
    document_BxL: jax.Array | None,
    x_BxLxD: jax.Array,
    layer: Params,
    whole: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """One layer. `whole`: it attends to all tokens; True, False, or a traced bool.

    With what its MLP gives beside (`mlp`).
    """
    q, k, v = projected(shape, layer["attention"], x_BxLxD, rotary, whole)
    mixed_BxLxHxK = attend(shape, q, k, v, whole, document_BxL)
    x_BxLxD = spread(x_BxLxD + joined(shape, layer["attention"], mixed_BxLxHxK), BATCH)
    more_BxLxD, balance = mlp(shape, layer["mlp"], x_BxLxD)
    return spread(x_BxLxD + more_BxLxD, BATCH), balance


@_again
def norm(shape: Shape, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square norm over the last axis, computed in fp32."""
    wide = x.astype(jnp.float32)
    power = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scale = 1 + scale if shape.norm_offset else scale
    return (wide * jax.lax.rsqrt(power + shape.norm_epsilon) * scale).astype(x.dtype)


# Sizes of what a layer's heads are made with.
_HEADS = {"query": "HK", "key": "GK", "value": "GK"}


@_again_in_kept_layers
def _of_normed(
    shape: Shape, x_BxLxD: jax.Array, scale_D: jax.Array, matrices: Params
) -> dict[str, jax.Array]:
    """Products (T, ...) of the norm of x with these matrices; the norm itself is not kept."""
    h_TxD = rows(norm(shape, x_BxLxD, scale_D))
    return {name: h_TxD @ matrix.astype(h_TxD.dtype) for name, matrix in matrices.items()}


def projected(
    shape: Shape, layer: Params, x_BxLxD: jax.Array, rotary: Any, whole: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries (B, L, H, K), keys and values (B, L, G, K); the first two turned to their places."""
    s = shape
    batch, length, _ = x_BxLxD.shape
    matrices = {n: layer[f"{n}_Dx{sizes}"] for n, sizes in _HEADS.items()}
    flat_TxHK = _of_normed(s, x_BxLxD, layer["norm_D"], matrices)

    def heads(name: str, count: int) -> jax.Array:
        flat, sizes = flat_TxHK[name], _HEADS[name]
        if s.qkv_bias:
            flat = flat + layer[f"{name}_bias_{sizes}"].astype(flat.dtype)
        split = flat.reshape(batch, length, count, s.head_width)
        split = spread(split, BATCH, None, "tensor")
        normed = s.qk_norm and name != "value"
        return norm(s, split, layer[f"{name}_norm_K"]) if normed else split

    q_BxLxHxK = rotated(heads("query", s.heads), rotary, whole)
    k_BxLxGxK = rotated(heads("key", s.kv_heads), rotary, whole)
    return q_BxLxHxK, k_BxLxGxK, heads("value", s.kv_heads)


def joined(shape: Shape, layer: Params, mixed_BxLxHxK: jax.Array) -> jax.Array:
    """What attention adds: (B, L, D)."""
    batch, length, heads, width = mixed_BxLxHxK.shape
    flat = mixed_BxLxHxK.reshape(batch * length, heads * width)
    matrix = layer["out_HKxD"]
    # In another type the matrix is not kept for the way back: it is turned into that once more.
    product = _product if matrix.dtype == flat.dtype else _again_in_kept_layers(_product)
    out = product(shape, flat, matrix).reshape(batch, length, -1)
    return norm(shape, out, layer["post_norm_D"]) if shape.post_norms else out


def _product(shape: Shape, x_TxN: jax.Array, matrix_NxD: jax.Array) -> jax.Array:
    return x_TxN @ matrix_NxD.astype(x_TxN.dtype)


def mlp(shape: Shape, layer: Params, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """(what the MLP or a layer's experts add: (B, L, D); how unevenly experts are used)."""
    if shape.experts:
        h_BxLxD = norm(shape, x_BxLxD, layer["norm_D"])
        down, balance = mixture(shape, layer, h_BxLxD, partial(gated, shape))
    else:
        down, balance = _dense(shape, layer, x_BxLxD), None
    return (norm(shape, down, layer["post_norm_D"]) if shape.post_norms else down), balance


def _dense(shape: Shape, layer: Params, x_BxLxD: jax.Array) -> jax.Array:
    batch, length, _ = x_BxLxD.shape
    matrices = {n: layer[f"{n}_DxF"] for n in ("gate", "up")}
    wide_TxF = _of_normed(shape, x_BxLxD, layer["norm_D"], matrices)

    def split(name: str) -> jax.Array:
        return spread(wide_TxF[name].reshape(batch, length, -1), BATCH, None, "tensor")

    return _down(shape, split("gate"), split("up"), layer["down_FxD"])


def rows(x_BxLxD: jax.Array) -> jax.Array:
    """All tokens of a batch along one axis: (T, D).

    With two of them, the compiler for processors turns gradients around before it computes those of
    a matrix, which takes half as long again. Made once for all matrices that read it, since each
    copy would be kept for the way back.
    """
    return x_BxLxD.reshape(-1, x_BxLxD.shape[-1])


@_again
def gated(shape: Shape, gate_BxLxF: jax.Array, up_BxLxF: jax.Array) -> jax.Array:
    """What of `up` the gate lets through."""
    if shape.activation == "gelu":
        return jax.nn.gelu(gate_BxLxF, approximate=True) * up_BxLxF
    return jax.nn.silu(gate_BxLxF) * up_BxLxF


@_again_in_kept_layers
def _down(
    shape: Shape, gate_BxLxF: jax.Array, up_BxLxF: jax.Array, matrix_FxD: jax.Array
) -> jax.Array:
    """The product with what the gate lets through, which is not kept."""
    batch, length, _ = gate_BxLxF.shape
    let_TxF = rows(gated(shape, gate_BxLxF, up_BxLxF))
    return (let_TxF @ matrix_FxD.astype(let_TxF.dtype)).reshape(batch, length, -1)
