"""On which axis of a mesh of devices the dimensions of a tensor lie, and those of an activation.

A model names axes: "data", "fsdp", "expert", "tensor", or several for one dimension, or none, None.
A name is a wish. Where its devices do not divide the dimension evenly, the dimension stays whole,
and what is computed is the same. After Megatron-LM (arXiv 1909.08053) for `tensor`, ZeRO-3 (arXiv
1910.02054) for `fsdp`, and GShard (arXiv 2006.16668) for `expert`.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

# One dimension's axes, and those of all dimensions; dimensions that are left out stay whole.
Axes = str | tuple[str, ...] | None
Wish = Sequence[Axes]

# Sequences are spread over these.
BATCH = ("data", "fsdp", "expert")
# What belongs to no expert is cut by both: along `expert`, too, each device has its own sequences.
STATE = ("fsdp", "expert")
# Tensors of fewer values are held whole by every device: to gather them costs more than they take.
SMALL = 1024

# Of a layer; its leaves hold all layers along a first dimension, which is never cut.
_OF_A_LAYER: dict[str, Wish] = {
    "query_DxHK": (STATE, "tensor"),
    "key_DxGK": (STATE, "tensor"),
    "value_DxGK": (STATE, "tensor"),
    "query_bias_HK": ("tensor",),
    "key_bias_GK": ("tensor",),
    "value_bias_GK": ("tensor",),
    "out_HKxD": ("tensor", STATE),
    "gate_DxF": (STATE, "tensor"),
    "up_DxF": (STATE, "tensor"),
    "down_FxD": ("tensor", STATE),
    "router_DxE": (STATE,),
    "gate_ExDxF": ("expert", "fsdp", "tensor"),
    "up_ExDxF": ("expert", "fsdp", "tensor"),
    "down_ExFxD": ("expert", "tensor", "fsdp"),
}
_OTHERS: dict[str, Wish] = {"tokens_VxD": ("tensor", STATE), "head_DxV": (STATE, "tensor")}


def transformer_sharding(name: str, shape: tuple[int, ...]) -> Wish:
    """Of a leaf of the built-in models; norms are small and stay whole."""
    last = name.rpartition("/")[2]
    if last in _OF_A_LAYER:
        return (None, *_OF_A_LAYER[last])
    return _OTHERS.get(last, ())


def divided(
    name: str, shape: tuple[int, ...], wish: Wish | None, sizes: Mapping[str, int], first: int = 0
) -> PartitionSpec:
    """How a tensor is cut: as wished; without a wish, its largest divisible dimension on fsdp.

    `sizes`: devices by axis. `first`: the first dimension that may be cut. Where the wish for fsdp
    cannot be met, another dimension takes it. Raises ValueError for a wish that makes no sense.
    """
    dims: list[Axes] = [None] * len(shape)
    if wish is not None:
        _check(name, shape, wish, sizes, first)
        dims = [fitting(n, wished, sizes) for n, wished in _pairs(shape, wish)]
    wishes_fsdp = wish is None or "fsdp" in _named(wish)
    if wishes_fsdp and "fsdp" not in _named(dims) and math.prod(shape[first:]) >= SMALL:
        free = [d for d in range(first, len(shape)) if dims[d] is None]
        able = [d for d in free if sizes["fsdp"] > 1 and shape[d] % sizes["fsdp"] == 0]
        if able:
            dims[max(able, key=lambda d: shape[d])] = "fsdp"
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def fitting(size: int, wished: Axes, sizes: Mapping[str, int]) -> Axes:
    """Of the axes wished for a dimension of `size`, those that cut it, and evenly."""
    kept: list[str] = []
    for axis in (wished,) if isinstance(wished, str) else wished or ():
        there = sizes.get(axis, 1)
        if there > 1 and size % (math.prod(sizes[a] for a in kept) * there) == 0:
            kept.append(axis)
    return None if not kept else kept[0] if len(kept) == 1 else tuple(kept)


def spread(x: jax.Array, *wish: Axes) -> jax.Array:
    """An activation, told how it lies on the devices; as it is where there is no mesh.

    For use in `loss`, of models of one's own too: `x = spread(x, BATCH, None, "tensor")`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    dims = [fitting(n, wished, dict(mesh.shape)) for n, wished in _pairs(x.shape, wish)]
    told: jax.Array = jax.lax.with_sharding_constraint(x, PartitionSpec(*dims))
    return told


def batch_parts() -> int:
    """Over how many groups of devices the sequences of a batch are spread; 1 without a mesh."""
    return math.prod(map(parts_along, BATCH))


def state_parts() -> int:
    """Into how many parts parameters are cut; 1 without a mesh."""
    return math.prod(map(parts_along, ("fsdp", "expert", "tensor")))


def parts_along(axis: str) -> int:
    """How many devices lie along this axis; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(axis, 1)


def names_of(axes: Axes) -> tuple[str, ...]:
    """Those of one dimension, one by one."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _pairs(shape: tuple[int, ...], wish: Wish) -> list[tuple[int, Axes]]:
    return [(n, wish[d] if d < len(wish) else None) for d, n in enumerate(shape)]


def _named(wish: Wish) -> list[str]:
    """Every axis, as often as it is named."""
    return [a for axes in wish for a in names_of(axes)]


def _check(
    name: str, shape: tuple[int, ...], wish: Wish, sizes: Mapping[str, int], first: int
) -> None:
    what = f"the model's sharding({name!r}, {shape}) gave {tuple(wish)!r}"
    named = _named(wish)
    if unknown := [axis for axis in named if axis not in sizes]:
        raise ValueError(f"{what}: there is no axis {unknown[0]!r}; take {', '.join(sizes)}")
    if len(wish) > len(shape):
        raise ValueError(f"{what}: the tensor has {len(shape)} dimensions")
    if len(set(named)) < len(named):
        raise ValueError(f"{what}: an axis may cut one dimension of a tensor")
    if "data" in named:
        raise ValueError(f"{what}: 'data' is for sequences; along it parameters are whole")
    if _named(wish[:first]):
        raise ValueError(f"{what}: the first dimension holds the layers and stays whole")
