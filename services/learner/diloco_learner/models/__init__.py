"""Models: anything with `init` and `loss` over a pytree of parameters."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from diloco_learner.models import transformer
from diloco_learner.models.experts import EXPERTS
from diloco_learner.models.sharding import Wish, transformer_sharding
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import layer_name, shape_of


@dataclass(frozen=True, slots=True)
class ModelDef:
    """What the learner needs of a model.

    `init(key) -> params`, a pytree of fp32 arrays. `loss(params, tokens_BxL1) -> scalar`, mean
    nats per token of predicting tokens 1..L from tokens 0..L-1. `is_embedding(name)` says which
    tensors are merged by the mean (paper section 3.5). `stacked`: the part of the tree, if any,
    whose leaves hold the tensors of all layers along their first axis. `masked_tokens`: the loss
    takes a token below 0 for its complement (~token), and leaves it out of the mean.
    `sharding(name, shape)`: the axes of a mesh that each dimension of a leaf is cut by
    (`models.sharding`); None where the model says nothing of it. `objective(params, tokens_BxL1)
    -> (minimised, loss)`, where training minimises more than the loss, as how unevenly experts are
    used; None: the loss. `matrices`: tensors that hold a matrix of each expert, by the last part of
    their names.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, jax.Array], jax.Array]
    is_embedding: Callable[[str], bool]
    stacked: str | None = None
    masked_tokens: bool = False
    sharding: Callable[[str, tuple[int, ...]], Wish] | None = None
    objective: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    matrices: tuple[str, ...] = ()


def build(config: Model, separator: int | None = None) -> ModelDef:
    """The configured model; ValueError says what is wrong with the configuration.

    `separator`: the token between documents that its loss keeps apart; None: it does not.
    """
    if config.factory is not None:
        if separator is not None:
            raise ValueError(
                "data.documents = 'apart' is for the built-in models: what a token of the model of "
                f"model.factory ({config.factory}) attends to is decided by that model. Let its "
                "loss keep documents apart, and leave data.documents out"
            )
        return _own(config.factory, config)
    shape = shape_of(config)
    # bf16 multiplications only where there is hardware for them.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return ModelDef(
        partial(transformer.init, shape),
        partial(transformer.loss, shape, dtype, separator=separator),
        lambda name: name.startswith("embedding/"),
        stacked="layers",
        masked_tokens=True,
        sharding=transformer_sharding,
        objective=partial(transformer.objective, shape, dtype, separator=separator)
        if shape.experts
        else None,
        matrices=EXPERTS if shape.experts else (),
    )


def _own(path: str, config: Model) -> ModelDef:
    module_name, _, factory_name = path.partition(":")
    if not module_name or not factory_name:
        raise ValueError(f"model.factory {path!r} must read module:factory")
    importlib.invalidate_caches()  # a file may be there by now that was not a moment ago
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model.factory {path!r} cannot be loaded: {error}") from error
    own = factory(config)
    for needed in ("init", "loss"):
        if not callable(getattr(own, needed, None)):
            raise ValueError(f"model.factory {path!r} gave an object without {needed}()")
    is_embedding = getattr(own, "is_embedding", lambda name: "embed" in name.lower())
    return ModelDef(
        own.init,
        own.loss,
        is_embedding,
        getattr(own, "stacked", None),
        getattr(own, "masked_tokens", False) is True,
        getattr(own, "sharding", None),
    )


def forget(config: Model) -> None:
    """Read a model of one's own anew next time: it was wrong, and its file may be mended.

    Its module, or all modules of its package; what else it imports stays as it is.
    """
    if config.factory is None:
        return
    top = config.factory.partition(":")[0].partition(".")[0]
    if top.startswith("diloco_"):
        return  # of this project's own, which this very process runs on
    for name in [*sys.modules]:
        if name == top or name.startswith(f"{top}."):
            del sys.modules[name]


# --------------------------------------------------------------------------------------------------
# Between a pytree and its named leaves: `layers/mlp/up_DxF` -> array.


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


# How each leaf lies on several devices; None: there is one.
Lying = Mapping[str, NamedSharding] | None

# --------------------------------------------------------------------------------------------------
# Tensors: what is merged, fragmented and stored. A leaf is one, or holds one of each layer, as
# `layers/mlp/up_DxF` does: its tensors are `layer_00/mlp/up_DxF`, `layer_01/mlp/up_DxF` and so on.


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """Where a tensor lies: a whole leaf, or a layer of one."""

    leaf: str
    layer: int | None = None


def places(leaves: Mapping[str, Any], stacked: str | None) -> dict[str, LeafPlace]:
    """Every tensor's place, in order of the leaves.

    `leaves`: arrays or their shapes, of the parameters or of what has the same tree within it, as
    an optimizer's state. Its leaves that hold no layers are tensors as they are.
    """
    layers = _layers(leaves, stacked)
    found: dict[str, LeafPlace] = {}
    for name, leaf in leaves.items():
        path = name.split("/")
        if layers is None or stacked not in path or tuple(leaf.shape[:1]) != (layers,):
            found[name] = LeafPlace(name)
            continue
        at = path.index(stacked)
        for n in range(layers):
            found["/".join([*path[:at], layer_name(n), *path[at + 1 :]])] = LeafPlace(name, n)
    return found


def _layers(leaves: Mapping[str, Any], stacked: str | None) -> int | None:
    """How many there are: the first axis that the stacked leaves share."""
    if stacked is None:
        return None
    sizes = Counter(
        leaf.shape[0] for name, leaf in leaves.items() if stacked in name.split("/") and leaf.shape
    )
    return sizes.most_common(1)[0][0] if sizes else None


@partial(jax.jit, donate_argnums=0)
def with_layer(leaf: jax.Array, layer: Any, values: Any) -> jax.Array:
    """`leaf` with one layer replaced. The leaf is donated."""
    new: jax.Array = jax.lax.dynamic_update_index_in_dim(leaf, values, layer, 0)
    return new


def filled(
    shapes: Any, stacked: str | None, read: Callable[[str], Any], lying: Lying = None
) -> Any:
    """A tree of arrays like `shapes`, of the tensors that `read(name)` gives, one after another.

    `lying`: how each leaf lies on several devices. Raises ValueError for a tensor of another shape.
    """
    named = to_named(shapes)
    leaves: dict[str, Any] = {}
    for name, place in places(named, stacked).items():
        shape, values = named[place.leaf], read(name)
        wanted = tuple(shape.shape if place.layer is None else shape.shape[1:])
        if tuple(values.shape) != wanted:
            text = f"{name} has shape {tuple(values.shape)} there, and {wanted} in the run's model"
            raise ValueError(f"the weights to begin from are another model's: {text}")
        if place.leaf not in leaves and place.layer is not None:
            leaves[place.leaf] = zeros(shape, None if lying is None else lying[place.leaf])
        # One layer's values at a time wait for their turn.
        leaves[place.leaf] = put(leaves, place, values, shape.dtype, lying)
    return from_named(shapes, leaves)


def zeros(shape: Any, lies: Sharding | None = None) -> jax.Array:
    """Of that shape and type; each device makes its own part."""
    return jnp.zeros(shape.shape, shape.dtype, device=lies)


def put(
    leaves: Mapping[str, Any], place: LeafPlace, values: Any, dtype: Any, lying: Lying = None
) -> jax.Array:
    """The leaf at that place with these values, of numpy; it is there once this returns.

    A leaf that holds all layers is donated. The values are copied: on a CPU jax would otherwise go
    on using their memory, which is to be freed.
    """
    if lying is None and place.layer is None:
        new = jnp.array(values, dtype)
    elif lying is None:
        new = with_layer(leaves[place.leaf], place.layer, values)
    elif place.layer is None:
        new = scattered(values, dtype, lying[place.leaf])
    else:
        lies = lying[place.leaf]
        one = NamedSharding(lies.mesh, PartitionSpec(*lies.spec[1:]))
        new = with_layer(leaves[place.leaf], place.layer, scattered(values, dtype, one))
        # It lies so already, unless the compiler has seen a reason for something else.
        new = jax.device_put(new, lies)
    jax.block_until_ready(new)
    return new


def scattered(values: Any, dtype: Any, lies: Sharding) -> jax.Array:
    """Values of numpy on several devices: each gets a copy of its own part, and no more."""
    return arrived(
        jax.make_array_from_callback(values.shape, lies, lambda part: np.array(values[part], dtype))
    )


def arrived(array: jax.Array) -> jax.Array:
    """The same, once it is there: on the processors of several processes. Elsewhere at once.

    A processor begins at once with a program whose arguments are all there. One that waits for an
    argument (copies of 100 KiB and more are made by another thread) is overtaken by the next. But
    processes that compute together must come to their programs in one order. Other devices keep
    the order in which programs are handed to them.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        array.block_until_ready()
    return array


def tensor_specs(
    tree: Any, is_embedding: Callable[[str], bool], stacked: str | None = None
) -> tuple[TensorSpec, ...]:
    """Names, shapes and merge rule of every tensor, in order of their names if there are layers."""
    named = to_named(tree)
    found = places(named, stacked)
    names = list(found) if stacked is None else sorted(found)

    def shape(place: LeafPlace) -> tuple[int, ...]:
        whole = tuple(named[place.leaf].shape)
        return whole if place.layer is None else whole[1:]

    return tuple(
        TensorSpec(name=name, shape=shape(found[name]), embedding=is_embedding(name))
        for name in names
    )
