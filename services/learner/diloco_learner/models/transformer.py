"""A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, gated MLP.

Plain jax: parameters are a nested dict, shapes stand in names (B batch, L length, D model, H query
heads, G key-value heads, K head dimension, F hidden, V vocabulary).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from diloco_shared.spec.shapes import SHAPES as SHAPES
from diloco_shared.spec.shapes import Shape as Shape

Params = dict[str, Any]


_EPSILON = 1e-6


def init(shape: Shape, key: jax.Array) -> Params:
    """fp32 parameters: normal(1/sqrt(fan in)); outputs of a block scaled by 1/sqrt(2 N)."""
    s, keys = shape, iter(jax.random.split(key, 2 + 7 * shape.layers))

    def normal(*dims: int, fan_in: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), dims, jnp.float32) * (scale / math.sqrt(fan_in))

    out_scale = 1 / math.sqrt(2 * s.layers)
    params: Params = {
        "embedding": {"tokens_VxD": normal(s.vocabulary, s.width, fan_in=s.width)},
        "final_norm": {"scale_D": jnp.ones(s.width)},
    }
    for n in range(s.layers):
        params[f"layer_{n:02d}"] = {
            "attention": {
                "norm_D": jnp.ones(s.width),
                "query_DxHK": normal(s.width, s.heads * s.head_width, fan_in=s.width),
                "key_DxGK": normal(s.width, s.kv_heads * s.head_width, fan_in=s.width),
                "value_DxGK": normal(s.width, s.kv_heads * s.head_width, fan_in=s.width),
                "out_HKxD": normal(
                    s.heads * s.head_width,
                    s.width,
                    fan_in=s.heads * s.head_width,
                    scale=out_scale,
                ),
            },
            "mlp": {
                "norm_D": jnp.ones(s.width),
                "gate_DxF": normal(s.width, s.hidden, fan_in=s.width),
                "up_DxF": normal(s.width, s.hidden, fan_in=s.width),
                "down_FxD": normal(s.hidden, s.width, fan_in=s.hidden, scale=out_scale),
            },
        }
    if not s.tied:
        params["output"] = {"head_DxV": normal(s.width, s.vocabulary, fan_in=s.width)}
    return params


def loss(shape: Shape, dtype: Any, params: Params, tokens_BxL1: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token of predicting each next token; fp32 scalar."""
    inputs_BxL, targets_BxL = tokens_BxL1[:, :-1], tokens_BxL1[:, 1:]
    logits_BxLxV = forward(shape, dtype, params, inputs_BxL)
    log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    at_BxL = jnp.take_along_axis(logits_BxLxV, targets_BxL[..., None], axis=-1)[..., 0]
    return jnp.mean(log_z_BxL - at_BxL)


def forward(shape: Shape, dtype: Any, params: Params, tokens_BxL: jax.Array) -> jax.Array:
    """fp32 logits of shape (B, L, V); matrices multiply in `dtype`."""
    embedding_VxD = params["embedding"]["tokens_VxD"]
    x_BxLxD = embedding_VxD[tokens_BxL].astype(dtype) * math.sqrt(shape.width)
    turns = _rope(shape, tokens_BxL.shape[1])

    def block(x: jax.Array, layer: Params) -> jax.Array:
        x = x + _attention(shape, layer["attention"], x, turns)
        return x + _mlp(layer["mlp"], x)

    if shape.remat:
        block = jax.checkpoint(block)
    for n in range(shape.layers):
        x_BxLxD = block(x_BxLxD, params[f"layer_{n:02d}"])
    x_BxLxD = _rms_norm(x_BxLxD, params["final_norm"]["scale_D"])
    head_DxV = embedding_VxD.T if shape.tied else params["output"]["head_DxV"]
    logits: jax.Array = (x_BxLxD @ head_DxV.astype(x_BxLxD.dtype)).astype(jnp.float32)
    return logits


def _rms_norm(x: jax.Array, scale_D: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    power = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(power + _EPSILON) * scale_D).astype(x.dtype)


def _rope(shape: Shape, length: int) -> tuple[jax.Array, jax.Array]:
    half = shape.head_width // 2
    speed = shape.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_LxK2 = jnp.arange(length, dtype=jnp.float32)[:, None] * speed
    return jnp.cos(angle_LxK2)[:, None], jnp.sin(angle_LxK2)[:, None]


def _turn(x_BxLxHxK: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = turns
    a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x_BxLxHxK.dtype)


def _attention(
    shape: Shape, layer: Params, x_BxLxD: jax.Array, turns: tuple[jax.Array, jax.Array]
) -> jax.Array:
    s = shape
    batch, length, _ = x_BxLxD.shape
    h = _rms_norm(x_BxLxD, layer["norm_D"])

    def heads(name: str, count: int) -> jax.Array:
        flat: jax.Array = h @ layer[name].astype(h.dtype)
        return flat.reshape(batch, length, count, s.head_width)

    q_BxLxHxK = _turn(heads("query_DxHK", s.heads), turns)
    k_BxLxGxK = _turn(heads("key_DxGK", s.kv_heads), turns)
    v_BxLxGxK = heads("value_DxGK", s.kv_heads)
    mixed = jax.nn.dot_product_attention(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, is_causal=True)
    flat = mixed.reshape(batch, length, s.heads * s.head_width)
    out: jax.Array = flat @ layer["out_HKxD"].astype(h.dtype)
    return out


def _mlp(layer: Params, x_BxLxD: jax.Array) -> jax.Array:
    h = _rms_norm(x_BxLxD, layer["norm_D"])
    gate_BxLxF = jax.nn.silu(h @ layer["gate_DxF"].astype(h.dtype))
    up_BxLxF = h @ layer["up_DxF"].astype(h.dtype)
    down: jax.Array = (gate_BxLxF * up_BxLxF) @ layer["down_FxD"].astype(h.dtype)
    return down
