"""Causal attention with grouped heads, a window where the layer has one, and capped logits.

Where there is cuDNN, its fused kernel does it without a matrix of L x L. Elsewhere, and for capped
logits, which it does not know, XLA's own operations do: they keep that matrix, in fp32.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from diloco_shared.spec.shapes import Shape

# The widest head whose gradients cuDNN computes on every data-center GPU since 2020.
CUDNN_HEAD_MAX = 128


def implementation(backend: str, dtype: Any, head_width: int) -> Literal["xla", "cudnn"]:
    """What computes attention: cuDNN takes two-byte floats, and heads in steps of eight."""
    able = backend == "gpu" and jnp.dtype(dtype).itemsize == 2
    return "cudnn" if able and head_width % 8 == 0 and head_width <= CUDNN_HEAD_MAX else "xla"


def attend(
    shape: Shape, q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array, whole: Any
) -> jax.Array:
    """Mixed values (B, L, H, K). `whole`: no window; True, False, or a traced bool."""
    if not isinstance(whole, bool):
        # Only the chosen one is computed; both are compiled, once for all layers.
        chosen: jax.Array = jax.lax.cond(
            whole,
            partial(_attend, shape, 0),
            partial(_attend, shape, shape.window),
            q_BxLxHxK,
            k_BxLxGxK,
            v_BxLxGxK,
        )
        return chosen
    return _attend(shape, 0 if whole else shape.window, q_BxLxHxK, k_BxLxGxK, v_BxLxGxK)


def _attend(
    shape: Shape, window: int, q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array
) -> jax.Array:
    length, width = q_BxLxHxK.shape[1], q_BxLxHxK.shape[3]
    if shape.attention_cap:
        places_L = jnp.arange(length)
        return mixed(shape, q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, seen(places_L, places_L, window))
    return jax.nn.dot_product_attention(
        q_BxLxHxK,
        k_BxLxGxK,
        v_BxLxGxK,
        scale=(shape.query_scale or width) ** -0.5,
        is_causal=True,
        local_window_size=(window - 1, 0) if 0 < window < length else None,
        implementation=implementation(jax.default_backend(), q_BxLxHxK.dtype, width),
    )


def mixed(
    shape: Shape,
    q_BxLxHxK: jax.Array,
    k_BxMxGxK: jax.Array,
    v_BxMxGxK: jax.Array,
    seen_LxM: jax.Array,
) -> jax.Array:
    """Values mixed by capped or plain attention over what each token may see: (B, L, H, K)."""
    batch, length, heads, width = q_BxLxHxK.shape
    groups = shape.kv_heads
    q = q_BxLxHxK.reshape(batch, length, groups, heads // groups, width)
    logits = jnp.einsum("blgrk,bmgk->bgrlm", q, k_BxMxGxK, preferred_element_type=jnp.float32)
    logits = logits * (shape.query_scale or width) ** -0.5
    if shape.attention_cap:
        logits = shape.attention_cap * jnp.tanh(logits / shape.attention_cap)
    weights = jax.nn.softmax(jnp.where(seen_LxM, logits, -jnp.inf), axis=-1)
    values = jnp.einsum("bgrlm,bmgk->blgrk", weights.astype(v_BxMxGxK.dtype), v_BxMxGxK)
    return values.reshape(batch, length, heads, width)


def seen(places_L: jax.Array, places_M: jax.Array, window: int) -> jax.Array:
    """(L, M): whether a token at one place may see one at the other. `window`: 0 for none."""
    back_LxM = places_L[:, None] - places_M
    return (back_LxM >= 0) & ((back_LxM < window) if window else True)
