"""Between a pytree of parameters and named tensors: `layer_00/mlp/up_DxF` -> array."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from diloco_shared.protocol.messages import TensorSpec


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
