"""Rotary positions: pairs of a head's values are turned by angles that grow with the place.

Speeds fall from 1 to 1/base over the pairs. Where contexts are longer than in the first training,
slow turns are slowed down further: all alike (`linear`), or only those whose period is long (as
Llama 3.1 does).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco_shared.spec.shapes import Shape


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
