"""A model of any size without a forward pass: real parameters, moments and gradients.

The gradient of each value is a hundredth of the value itself, a little more or less with every
batch, so that one inner step costs what the optimizer costs and no more. `model.overrides.width`
is the rows and columns of its matrices, `model.overrides.parameters` about how many values they
have in all. While there is a file `model.overrides.lives`, every process makes initial parameters
of its own.
"""

import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from diloco_shared.spec.run import Model

# As in a decoder of that size: about a tenth of the parameters are the embedding.
EMBEDDING_SHARE = 0.1


def shapes(parameters: int, width: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, about `parameters` values in all; layers are stacked."""
    rows = max(1, round(parameters * EMBEDDING_SHARE / width))
    matrices = max(1, round((parameters - rows * width) / (width * width)))
    return {"embedding": (rows, width), "layers": (matrices, width, width)}


def parameters_of(parameters: int, width: int) -> int:
    """How many values the tensors of `shapes` have."""
    return sum(math.prod(shape) for shape in shapes(parameters, width).values())


class Synthetic:
    """What a learner needs of a model."""

    def __init__(self, sizes: dict[str, tuple[int, ...]], lives: str = "") -> None:
        self.sizes = sizes
        self.lives = lives

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Fresh parameters, fp32, of standard deviation 0.02."""
        if self.lives and Path(self.lives).exists():
            key = jax.random.fold_in(key, os.getpid())
        keys = jax.random.split(key, len(self.sizes))
        return {
            name: 0.02 * jax.random.normal(k, shape, jnp.float32)
            for k, (name, shape) in zip(keys, self.sizes.items(), strict=True)
        }

    def loss(self, params: dict[str, jax.Array], tokens_BxL1: jax.Array) -> jax.Array:
        """Half a hundredth of the sum of squares over the values of one tensor; a scalar."""
        batch = 1.0 + 0.1 * jnp.mean(tokens_BxL1) / 256.0
        squares: list[jax.Array] = [jnp.sum(jnp.square(leaf)) for leaf in params.values()]
        return 0.005 * batch * sum(squares, jnp.zeros(()))

    @staticmethod
    def is_embedding(name: str) -> bool:
        return name == "embedding"


def make(config: Model) -> Any:
    """The factory that a specification names: `sizes.model:make`."""
    o = config.overrides
    sizes = shapes(int(o["parameters"]), int(o["width"]))
    return Synthetic(sizes, str(o.get("lives", "")))
