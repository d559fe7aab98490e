"""Causal attention with grouped heads, a window where the layer has one, and capped logits.

On NVIDIA's cards since 2020, cuDNN's fused kernel does it without a matrix of L x L. Elsewhere, and
for capped logits, which it does not know, XLA's own operations do: they keep that matrix, in fp32.

Several documents in one sequence may be kept apart: then a token attends to its own document only.
Of each token the number of its document is known, (B, L), and two numbers are compared where
logits are masked. XLA does that within the loop that masks them. cuDNN takes a mask only as a bias
of shape (B, 1, L, L) in two-byte floats, which all heads share and each layer makes for itself; it
skips no document, so that time is not saved.

Places are told by turning pairs of a head's values by angles that grow with the place. Speeds fall
from 1 to 1/base over the pairs. Where contexts are longer than in the first training, slow turns
are slowed down further: all alike (`linear`), or only those whose period is long (as Llama 3.1
does).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco_learner.models.sharding import BATCH, parts_along, spread
from diloco_shared.spec.shapes import Shape, fusable

# Of the oldest cards that it computes attention on: Ampere's.
CUDNN_CAPABILITY = (8, 0)


def implementation(devices: Sequence[Any], dtype: Any, shape: Shape) -> Literal["xla", "cudnn"]:
    """What computes attention on these devices of jax: cuDNN where all of them have it, for
    two-byte floats."""
    able = all(map(has_cudnn, devices)) and jnp.dtype(dtype).itemsize == 2
    return "cudnn" if able and fusable(shape) else "xla"


def has_cudnn(device: Any) -> bool:
    """Whether cuDNN computes attention on this device of jax, to whom AMD's cards are "gpu" too."""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    try:
        major, minor = map(int, device.compute_capability.split("."))
    except (AttributeError, ValueError):  # a driver that tells none, or in another form
        return False
    return (major, minor) >= CUDNN_CAPABILITY


def documents(tokens_BxL: jax.Array, separator: int) -> jax.Array:
    """Which document of its sequence each token belongs to, counted from 0: int32 (B, L).

    A separator opens a document. It ends the one before as a target, which that document predicts;
    read, it is what the next one's first token is predicted from. So it has both parts: that of the
    token behind a document, and that of the token before one, with which documents begin in Llama 3
    (arXiv 2407.21783) and MaxText, where they are kept apart too. Where the separator is left to
    the document before (Levanter, nanotron), a first token is either predicted from a foreign
    document or, as in nanotron, not at all; and a model asked for a new document is given just this
    token.
    """
    read_BxL = jnp.where(tokens_BxL < 0, ~tokens_BxL, tokens_BxL)
    return jnp.cumsum(read_BxL == separator, axis=1, dtype=jnp.int32)


def attend(
    shape: Shape,
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxK: jax.Array,
    whole: Any,
    document_BxL: jax.Array | None = None,
) -> jax.Array:
    """Mixed values (B, L, H, K). `whole`: no window; True, False, or a traced bool.

    `document_BxL`: as of `documents`; None where a token attends to all before it.
    """
    if not isinstance(whole, bool):
        # Only the chosen one is computed; both are compiled, once for all layers.
        chosen: jax.Array = jax.lax.cond(
            whole,
            partial(_attend, shape, 0),
            partial(_attend, shape, shape.window),
            q_BxLxHxK,
            k_BxLxGxK,
            v_BxLxGxK,
            document_BxL,
        )
        return chosen
    window = 0 if whole else shape.window
    return _attend(shape, window, q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, document_BxL)


def _attend(
    shape: Shape,
    window: int,
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxK: jax.Array,
    document_BxL: jax.Array | None,
) -> jax.Array:
    length, width = q_BxLxHxK.shape[1], q_BxLxHxK.shape[3]
    window = window if window < length else 0
    apart_Bx1xLxL = None if document_BxL is None else _apart(document_BxL, window)
    how = implementation(jax.local_devices(), q_BxLxHxK.dtype, shape)
    # cuDNN's gradients with a bias are of even lengths.
    if how == "xla" or (apart_Bx1xLxL is not None and length % 2):
        places_L = jnp.arange(length)
        visible = seen(places_L, places_L, window)
        if apart_Bx1xLxL is not None:
            visible = visible & apart_Bx1xLxL[:, None]
        return mixed(shape, q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, visible)
    q_BxLxHxK, k_BxLxGxK, v_BxLxGxK = lying_alike(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK)
    mixed_BxLxHxK = jax.nn.dot_product_attention(
        q_BxLxHxK,
        k_BxLxGxK,
        v_BxLxGxK,
        mask=apart_Bx1xLxL,
        scale=(shape.query_scale or width) ** -0.5,
        is_causal=True,
        # A mask has the window in it.
        local_window_size=(window - 1, 0) if window and apart_Bx1xLxL is None else None,
        implementation="cudnn",
    )
    return spread(mixed_BxLxHxK, BATCH, None, "tensor")


def lying_alike(
    q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three, spread over the devices of a mesh in one way, as cuDNN's kernel asks for.

    Where `tensor` divides the heads of queries and not those of keys, each key is there several
    times, as often as it takes: so each device has the keys of its own queries and no others, which
    is less than all of them. A key's copies are neighbours, and so are the queries that share it:
    each query meets the key that it would have met. Where `tensor` does not divide the heads of
    queries, all three are whole along it.
    """
    heads, groups, parts = q_BxLxHxK.shape[2], k_BxLxGxK.shape[2], parts_along("tensor")
    times = parts // math.gcd(parts, groups) if heads % parts == 0 else 1
    if times > 1:
        k_BxLxGxK, v_BxLxGxK = (jnp.repeat(x, times, axis=2) for x in (k_BxLxGxK, v_BxLxGxK))
    q, k, v = (spread(x, BATCH, None, "tensor") for x in (q_BxLxHxK, k_BxLxGxK, v_BxLxGxK))
    return q, k, v


def _apart(document_BxL: jax.Array, window: int) -> jax.Array:
    """(B, 1, L, L): whether two tokens are of one document, and within the window if there is one.

    The window is here since jax tests cuDNN's own with a causal mask alone, never beside a bias.
    """
    same_BxLxL = document_BxL[:, :, None] == document_BxL[:, None, :]
    if window:
        places_L = jnp.arange(document_BxL.shape[1])
        same_BxLxL &= seen(places_L, places_L, window)
    return same_BxLxL[:, None]


def mixed(
    shape: Shape,
    q_BxLxHxK: jax.Array,
    k_BxMxGxK: jax.Array,
    v_BxMxGxK: jax.Array,
    seen_LxM: jax.Array,
) -> jax.Array:
    """Values mixed by capped or plain attention over what each token may see: (B, L, H, K).

    `seen_LxM`: of all sequences, or (B, 1, 1, L, M) of each.
    """
    batch, length, heads, width = q_BxLxHxK.shape
    groups = shape.kv_heads
    q = q_BxLxHxK.reshape(batch, length, groups, heads // groups, width)
    logits = jnp.einsum("blgrk,bmgk->bgrlm", q, k_BxMxGxK, preferred_element_type=jnp.float32)
    logits = logits * (shape.query_scale or width) ** -0.5
    if shape.attention_cap:
        logits = shape.attention_cap * jnp.tanh(logits / shape.attention_cap)
    weights = _weights(logits, seen_LxM)
    values = jnp.einsum("bgrlm,bmgk->blgrk", weights.astype(v_BxMxGxK.dtype), v_BxMxGxK)
    return values.reshape(batch, length, heads, width)


@jax.custom_vjp
def _weights(logits: jax.Array, seen: jax.Array) -> jax.Array:
    """How much of each place a token takes: softmax over what it may see, (..., L, M) in fp32.

    Of all this, the backward pass needs nothing but the weights.
    """
    return jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)


def _weights_forward(logits: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights = _weights(logits, seen)
    return weights, weights


def _weights_backward(weights: jax.Array, grads: jax.Array) -> tuple[jax.Array, None]:
    """What may not be seen has no weight, and so no gradient."""
    common = jnp.sum(weights * grads, axis=-1, keepdims=True)
    return weights * (grads - common), None


_weights.defvjp(_weights_forward, _weights_backward)


def seen(places_L: jax.Array, places_M: jax.Array, window: int) -> jax.Array:
    """(L, M): whether a token at one place may see one at the other. `window`: 0 for none."""
    back_LxM = places_L[:, None] - places_M
    return (back_LxM >= 0) & ((back_LxM < window) if window else True)


# --------------------------------------------------------------------------------------------------
# Rotary positions.


def rotary_frequencies(shape: Shape, *, local: bool) -> NDArray[np.float32]:
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


def rotary_tables(shape: Shape, length: int, start: Any = 0) -> Any:
    """(cosines, sines) for layers that attend to all, and the same for those with a window.

    Each is fp32 of shape (L, 1, K / 2), of `length` places from `start` on.
    """
    places_L = start + jnp.arange(length, dtype=jnp.float32)

    def of(*, local: bool) -> tuple[jax.Array, jax.Array]:
        angle_LxK2 = places_L[:, None] * rotary_frequencies(shape, local=local)
        return jnp.cos(angle_LxK2)[:, None], jnp.sin(angle_LxK2)[:, None]

    whole = of(local=False)
    return whole, of(local=True) if shape.window and shape.local_rope_base else whole


def rotated(x_BxLxHxK: jax.Array, rotary: Any, whole: Any) -> jax.Array:
    """Queries or keys, their pairs turned by the angles of their places; in the type they have.

    `rotary`: of `rotary_tables`. `whole`: whether the layer attends to all; True, False, or a
    traced bool.
    """
    if isinstance(whole, bool):
        cos, sin = rotary[0 if whole else 1]
    elif rotary[0] is rotary[1]:
        cos, sin = rotary[0]
    else:
        cos, sin = jax.tree.map(lambda a, b: jnp.where(whole, a, b), *rotary)
    a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    both = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return both.astype(x_BxLxHxK.dtype)
