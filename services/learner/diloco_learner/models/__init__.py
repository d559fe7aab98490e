"""Models: anything with `init` and `loss` over a pytree of parameters."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from diloco_learner.models import transformer
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import shape_of


@dataclass(frozen=True, slots=True)
class ModelDef:
    """What the learner needs of a model.

    `init(key) -> params`, a pytree of fp32 arrays. `loss(params, tokens_BxL1) -> scalar`, mean
    nats per token of predicting tokens 1..L from tokens 0..L-1. `is_embedding(name)` says which
    tensors are merged by the mean (paper section 3.5).
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, jax.Array], jax.Array]
    is_embedding: Callable[[str], bool]


def build(config: Model) -> ModelDef:
    """The configured model; ValueError says what is wrong with the configuration."""
    if config.factory is not None:
        return _own(config.factory, config)
    shape = shape_of(config)
    # bf16 multiplications only where there is hardware for them.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return ModelDef(
        partial(transformer.init, shape),
        partial(transformer.loss, shape, dtype),
        lambda name: name.startswith("embedding/"),
    )


def _own(path: str, config: Model) -> ModelDef:
    module_name, _, factory_name = path.partition(":")
    if not module_name or not factory_name:
        raise ValueError(f"model.factory {path!r} must read module:factory")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model.factory {path!r} cannot be loaded: {error}") from error
    own = factory(config)
    for needed in ("init", "loss"):
        if not callable(getattr(own, needed, None)):
            raise ValueError(f"model.factory {path!r} gave an object without {needed}()")
    is_embedding = getattr(own, "is_embedding", lambda name: "embed" in name.lower())
    return ModelDef(own.init, own.loss, is_embedding)


# --------------------------------------------------------------------------------------------------
# Between a pytree of parameters and named tensors: `layer_00/mlp/up_DxF` -> array.


def _name(path: tuple[Any, ...]) -> str:
    parts = []
    for key in path:
        part = getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
        parts.append(str(part))
    return "/".join(parts)


def to_named(tree: Any) -> dict[str, Any]:
    """Leaves by path, in the tree's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): leaf for path, leaf in leaves}


def from_named(tree: Any, named: Mapping[str, Any]) -> Any:
    """A tree like `tree` with the leaves of `named`; KeyError when one is missing."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(structure, [named[_name(path)] for path, _ in leaves])


def tensor_specs(tree: Any, is_embedding: Callable[[str], bool]) -> tuple[TensorSpec, ...]:
    """Names, shapes and merge rule of every tensor."""
    return tuple(
        TensorSpec(name=name, shape=tuple(leaf.shape), embedding=is_embedding(name))
        for name, leaf in to_named(tree).items()
    )
