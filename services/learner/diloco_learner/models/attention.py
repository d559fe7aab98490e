"""Causal attention with grouped heads, a window where the layer has one, and capped logits.

Where there is cuDNN, its fused kernel does it without a matrix of L x L. Elsewhere, and for capped
logits, which it does not know, XLA's own operations do: they keep that matrix, in fp32.

Places are told by turning pairs of a head's values by angles that grow with the place. Speeds fall
from 1 to 1/base over the pairs. Where contexts are longer than in the first training, slow turns
are slowed down further: all alike (`linear`), or only those whose period is long (as Llama 3.1
does).
"""

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

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


# --------------------------------------------------------------------------------------------------
# Rotary positions.


def speeds(shape: Shape, *, local: bool) -> NDArray[np.float32]:
    """Radians per token of each pair, shape (K/2,)."""
    base = (shape.local_rope_base if local else 0.0) or shape.rope_base
    half = shape.head_width // 2
    speed = (1.0 / base ** (np.arange(half, dtype=np.float64) / half)).astype(np.float32)
    if local and shape.local_rope_base:
        return speed
    match shape.rope_scaling:
        case "linear":
            return speed / np.float32(shape.rope_factor)
        case "llama3":
            return _slowed(shape, speed)
        case _:
            return speed


def _slowed(shape: Shape, speed: NDArray[np.float32]) -> NDArray[np.float32]:
    """Periods above original / low are stretched, those below original / high are kept."""
    period = 2 * math.pi / speed
    share = (shape.rope_original / period - shape.rope_low) / (shape.rope_high - shape.rope_low)
    kept = np.clip(share, 0.0, 1.0).astype(np.float32)
    return kept * speed + (1 - kept) * speed / np.float32(shape.rope_factor)


def turns(shape: Shape, length: int, start: Any = 0) -> Any:
    """Cosines and sines for layers that attend to all, and for those with a window.

    Of `length` places from `start` on.
    """
    places_L = start + jnp.arange(length, dtype=jnp.float32)

    def of(*, local: bool) -> tuple[jax.Array, jax.Array]:
        angle_LxK2 = places_L[:, None] * speeds(shape, local=local)
        return jnp.cos(angle_LxK2)[:, None], jnp.sin(angle_LxK2)[:, None]

    whole = of(local=False)
    return whole, of(local=True) if shape.window and shape.local_rope_base else whole


def turn(x_BxLxHxK: jax.Array, turned: Any, whole: Any) -> jax.Array:
    """Heads at their places. `whole`: True, False, or a traced bool."""
    if isinstance(whole, bool):
        cos, sin = turned[0 if whole else 1]
    elif turned[0] is turned[1]:
        cos, sin = turned[0]
    else:
        cos, sin = jax.tree.map(lambda a, b: jnp.where(whole, a, b), *turned)
    a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    both = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return both.astype(x_BxLxHxK.dtype)
