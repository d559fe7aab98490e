"""What is done to one fragment of the parameters on the device: read, adopted, encoded.

Only the leaves that a fragment has pieces of enter its programs: the others are neither copied nor
waited for. In which layer a piece lies, and where its rows begin, are arguments, so that fragments
cut alike share their programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from diloco_learner.exchange.encoding import Parts, encode
from diloco_learner.models import from_named, places, to_named
from diloco_learner.training.programs import Ahead
from diloco_shared.numerics.arrays import Layout, pseudogradient


@dataclass(frozen=True, slots=True)
class Bit:
    """A piece of a fragment: `rows` of a tensor of the leaf at `slot`.

    Which layer's tensor, where the leaf is `stacked`, and from which row, are arguments.
    """

    slot: int
    rows: int
    whole: bool  # all rows of its tensor
    stacked: bool
    shape: tuple[int, ...]  # of the piece
    size: int


@dataclass(frozen=True, slots=True)
class FragmentView:
    """All that a program must know of a fragment before it runs."""

    leaves: tuple[tuple[tuple[int, ...], str], ...]  # shape and type by slot
    bits: tuple[Bit, ...]

    @property
    def size(self) -> int:
        """Values."""
        return sum(bit.size for bit in self.bits)


class FragmentOps:
    """The programs of every fragment. `shapes`: the tree of the parameters' shapes."""

    def __init__(self, layout: Layout, shapes: Any, codec: str, stacked: str | None = None) -> None:
        self.codec = codec
        named = to_named(shapes)
        where = places(named, stacked)
        # Names of the leaves by slot, what is static, and where the pieces begin: by fragment.
        self.names: list[tuple[str, ...]] = []
        self.cuts: list[FragmentView] = []
        self.starts: list[NDArray[np.int32]] = []  # a layer and a row of each piece
        for pieces in layout.fragments:
            at = [where[piece.name] for piece in pieces]
            names = tuple(dict.fromkeys(place.leaf for place in at))
            self.names.append(names)
            begins = [(a.layer or 0, p.start) for a, p in zip(at, pieces, strict=True)]
            self.starts.append(np.array(begins, np.int32))
            bits = (
                Bit(
                    names.index(a.leaf),
                    p.stop - p.start,
                    p.whole,
                    a.layer is not None,
                    p.piece_shape,
                    p.size,
                )
                for a, p in zip(at, pieces, strict=True)
            )
            leaves = tuple((tuple(named[n].shape), str(named[n].dtype)) for n in names)
            self.cuts.append(FragmentView(leaves, tuple(bits)))
        self._read = Ahead(_read, lambda cut, *_: cut, static=True)
        self._adopt = Ahead(_adopt, lambda cut, *_: cut, static=True, donate=(1,))
        self._encode = Ahead(_encode, lambda how, *args: (how, args[-1] is None), static=True)

    def read(self, p: int, params: Any) -> jax.Array:
        """Fragment p as fp32 of shape (F,)."""
        values_F: jax.Array = self._read(self.cuts[p], self._leaves(p, params), self.starts[p])
        return values_F

    def adopt(self, p: int, params: Any, anchor_F: Any, alpha: float) -> Any:
        """theta <- alpha * theta + (1 - alpha) * anchor. The leaves it touches are donated."""
        named = to_named(params)
        leaves = tuple(named[name] for name in self.names[p])
        new = self._adopt(self.cuts[p], leaves, self.starts[p], anchor_F, np.float32(alpha))
        return from_named(params, named | dict(zip(self.names[p], new, strict=True)))

    def encode(
        self, p: int, params: Any, anchor_F: Any, residual_F: Any
    ) -> tuple[Parts, jax.Array | None]:
        """(what follows the header of anchor - theta + residual, what encoding withheld)."""
        how = (self.cuts[p], self.codec)
        found: tuple[Parts, jax.Array | None] = self._encode(
            how, self._leaves(p, params), self.starts[p], anchor_F, residual_F
        )
        return found

    def compile(self, *, residuals: bool) -> None:
        """What adopts and encodes, for every fragment, without an array of any of them."""
        for cut, starts in zip(self.cuts, self.starts, strict=True):
            leaves = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in cut.leaves)
            values_F = jax.ShapeDtypeStruct((cut.size,), np.float32)
            self._adopt.compile(cut, leaves, starts, values_F, np.float32(0))
            residual_F = values_F if residuals else None
            self._encode.compile((cut, self.codec), leaves, starts, values_F, residual_F)

    def _leaves(self, p: int, params: Any) -> tuple[Any, ...]:
        named: Mapping[str, Any] = to_named(params)
        return tuple(named[name] for name in self.names[p])


def _part(bit: Bit, leaves: Any, start_2: jax.Array) -> jax.Array:
    leaf: jax.Array = leaves[bit.slot]
    if bit.stacked:
        return lax.dynamic_slice(leaf, _corner(leaf, start_2), (1, *bit.shape)).reshape(bit.shape)
    return leaf if bit.whole else lax.dynamic_slice_in_dim(leaf, start_2[1], bit.rows)


def _with_part(bit: Bit, leaf: jax.Array, part: jax.Array, start_2: jax.Array) -> jax.Array:
    if bit.stacked:
        return lax.dynamic_update_slice(leaf, part[None], _corner(leaf, start_2))
    return part if bit.whole else lax.dynamic_update_slice_in_dim(leaf, part, start_2[1], 0)


def _corner(leaf: jax.Array, start_2: jax.Array) -> tuple[jax.Array, ...]:
    """Where a piece begins in a leaf that holds all layers."""
    zero = jnp.zeros((), start_2.dtype)
    return (start_2[0], start_2[1], *[zero] * (leaf.ndim - 2))


def _read(cut: FragmentView, leaves: Any, starts_Nx2: jax.Array) -> jax.Array:
    parts = [_part(bit, leaves, starts_Nx2[n]) for n, bit in enumerate(cut.bits)]
    return jnp.concatenate([part.reshape(-1).astype(jnp.float32) for part in parts])


def _adopt(
    cut: FragmentView, leaves: Any, starts_Nx2: jax.Array, anchor_F: jax.Array, alpha: jax.Array
) -> tuple[jax.Array, ...]:
    leaves, offset = list(leaves), 0
    for n, bit in enumerate(cut.bits):
        new = anchor_F[offset : offset + bit.size].reshape(bit.shape)
        offset += bit.size
        part = _part(bit, leaves, starts_Nx2[n])
        # Not a product by 0: what overflowed must be gone.
        mixed = jnp.where(alpha == 0, new, alpha * part + (1 - alpha) * new).astype(part.dtype)
        leaves[bit.slot] = _with_part(bit, leaves[bit.slot], mixed, starts_Nx2[n])
    return tuple(leaves)


def _encode(
    how: tuple[FragmentView, str],
    leaves: Any,
    starts_Nx2: jax.Array,
    anchor_F: jax.Array,
    residual_F: Any,
) -> tuple[Parts, jax.Array | None]:
    cut, codec = how
    delta_F: jax.Array = pseudogradient(anchor_F, _read(cut, leaves, starts_Nx2))
    if residual_F is None:
        return encode(codec, delta_F)[0], None
    return encode(codec, delta_F + residual_F)
