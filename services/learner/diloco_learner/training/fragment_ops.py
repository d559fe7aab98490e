"""What is done to one fragment of the parameters on the device: read, adopted, encoded.

Only the leaves that a fragment has pieces of enter its programs: the others are neither copied nor
waited for. In which layer a piece lies, and where its rows begin, are arguments, so that fragments
cut alike share their programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from diloco_learner.exchange.encoding import Parts, encode
from diloco_learner.models import LeafPlace, from_named, places, to_named
from diloco_learner.training.programs import Ahead
from diloco_shared.numerics.arrays import pseudogradient
from diloco_shared.spec.fragmentation import Layout, Piece


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
class PieceRun:
    """Pieces that follow each other, as large as each other: whole tensors of stacked leaves.

    `parts`: how many there are of the leaf at each slot. Which layers these are, and in which order
    they follow, are arguments: one program for them all, where a piece each would be dear to
    compile.
    """

    parts: tuple[tuple[int, int], ...]
    piece: int  # values of each

    @property
    def size(self) -> int:
        """Values of all."""
        return self.piece * sum(count for _, count in self.parts)


@dataclass(frozen=True, slots=True)
class FragmentView:
    """All that a program must know of a fragment before it runs."""

    leaves: tuple[tuple[tuple[int, ...], str], ...]  # shape and type by slot
    bits: tuple[Bit | PieceRun, ...]

    @property
    def size(self) -> int:
        """Values."""
        return sum(bit.size for bit in self.bits)


# Where the pieces of a view are. Of a Bit: [layer, row]. Of a PieceRun: layers by slot, the place
# in that order of each that follows, and the other way round; shape (3, K).
Where = tuple[NDArray[np.int32], ...]


def viewed(
    pieces: Sequence[Piece], where: Mapping[str, LeafPlace], leaves: Mapping[str, Any]
) -> tuple[tuple[str, ...], FragmentView, Where]:
    """(the leaves' names by slot, what is static, where the pieces are) of one fragment."""
    names = tuple(dict.fromkeys(where[piece.name].leaf for piece in pieces))
    slots = {name: n for n, name in enumerate(names)}
    bits: list[Bit | PieceRun] = []
    found: list[NDArray[np.int32]] = []

    def joins(piece: Piece) -> int:
        """Who shares this number with its neighbour is in one run with it."""
        return piece.size if piece.whole and where[piece.name].layer is not None else -1

    for kind, group in groupby(pieces, joins):
        some = list(group)
        if kind > 0 and len(some) > 1:
            run, at = _run(some, where, slots)
            bits.append(run)
            found.append(at)
            continue
        for p in some:
            place = where[p.name]
            stacked = place.layer is not None
            slot, rows = slots[place.leaf], p.stop - p.start
            bits.append(Bit(slot, rows, p.whole, stacked, p.piece_shape, p.size))
            found.append(np.array([place.layer or 0, p.start], np.int32))
    shapes = tuple((tuple(leaves[n].shape), str(leaves[n].dtype)) for n in names)
    return names, FragmentView(shapes, tuple(bits)), tuple(found)


def _run(
    pieces: Sequence[Piece], where: Mapping[str, LeafPlace], slots: Mapping[str, int]
) -> tuple[PieceRun, NDArray[np.int32]]:
    of = np.array([slots[where[p.name].leaf] for p in pieces])
    order = np.argsort(of, kind="stable")  # by slot, else as they follow
    layers = np.array([where[pieces[n].name].layer for n in order])
    counted, counts = np.unique(of, return_counts=True)
    parts = tuple((int(slot), int(count)) for slot, count in zip(counted, counts, strict=True))
    at = np.stack([layers, np.argsort(order), order]).astype(np.int32)
    return PieceRun(parts, pieces[0].size), at


class FragmentOps:
    """The programs of every fragment. `shapes`: the tree of the parameters' shapes."""

    def __init__(self, layout: Layout, shapes: Any, codec: str, stacked: str | None = None) -> None:
        self.codec = codec
        named = to_named(shapes)
        where = places(named, stacked)
        views = [viewed(pieces, where, named) for pieces in layout.fragments]
        self.names = [names for names, _, _ in views]
        self.cuts = [cut for _, cut, _ in views]
        self.starts = [starts for _, _, starts in views]
        self._read = Ahead(_read, lambda cut, *_: cut, static=True)
        self._adopt = Ahead(_adopt, lambda cut, *_: cut, static=True, donate=(1,))
        self._encode = Ahead(_encode, lambda how, *args: (how, args[-1] is None), static=True)

    def read(self, p: int, params: Any) -> jax.Array:
        """Fragment p as fp32 of shape (F,)."""
        values_F: jax.Array = self._read(self.cuts[p], self._leaves(p, params), self.starts[p])
        return values_F

    def values(self, p: int, params: Any) -> NDArray[np.float32]:
        """The same on the host."""
        return np.asarray(self.read(p, params))

    def zeros(self, p: int) -> jax.Array:
        """A residual of fragment p that owes nothing."""
        return jnp.zeros(self.cuts[p].size, jnp.float32)

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


def _part(bit: Bit | PieceRun, leaves: Any, at: jax.Array) -> jax.Array:
    if isinstance(bit, PieceRun):
        layers_K, place_K = at[0], at[1]
        rows, first = [], 0
        for slot, count in bit.parts:
            flat = leaves[slot].reshape(-1, bit.piece)
            rows.append(jnp.take(flat, layers_K[first : first + count], axis=0, mode="clip"))
            first += count
        return jnp.take(jnp.concatenate(rows), place_K, axis=0, mode="clip")
    leaf: jax.Array = leaves[bit.slot]
    if bit.stacked:
        return lax.dynamic_slice(leaf, _corner(leaf, at), (1, *bit.shape)).reshape(bit.shape)
    return leaf if bit.whole else lax.dynamic_slice_in_dim(leaf, at[1], bit.rows)


def _replace(bit: Bit | PieceRun, leaves: list[Any], part: jax.Array, at: jax.Array) -> None:
    """Put a part, as `_part` gives it, where it was."""
    if isinstance(bit, PieceRun):
        layers_K, rows, first = at[0], jnp.take(part, at[2], axis=0, mode="clip"), 0
        for slot, count in bit.parts:
            shape = leaves[slot].shape
            which, some = layers_K[first : first + count], rows[first : first + count]
            flat = leaves[slot].reshape(-1, bit.piece)
            new = flat.at[which].set(some, mode="clip", unique_indices=True)
            leaves[slot] = new.reshape(shape)
            first += count
        return
    leaf = leaves[bit.slot]
    if bit.stacked:
        leaves[bit.slot] = lax.dynamic_update_slice(leaf, part[None], _corner(leaf, at))
    else:
        leaves[bit.slot] = (
            part if bit.whole else lax.dynamic_update_slice_in_dim(leaf, part, at[1], 0)
        )


def _corner(leaf: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
    """Where a piece begins in a leaf that holds all layers."""
    zero = jnp.zeros((), at.dtype)
    return (at[0], at[1], *[zero] * (leaf.ndim - 2))


def _read(cut: FragmentView, leaves: Any, where: Any) -> jax.Array:
    parts = [_part(bit, leaves, at) for bit, at in zip(cut.bits, where, strict=True)]
    return jnp.concatenate([part.reshape(-1).astype(jnp.float32) for part in parts])


def _adopt(
    cut: FragmentView, leaves: Any, where: Any, anchor_F: jax.Array, alpha: jax.Array
) -> tuple[jax.Array, ...]:
    leaves, offset = list(leaves), 0
    for bit, at in zip(cut.bits, where, strict=True):
        part = _part(bit, leaves, at)
        new = anchor_F[offset : offset + bit.size].reshape(part.shape)
        offset += bit.size
        _replace(bit, leaves, mixed(part, new, alpha), at)
    return tuple(leaves)


def mixed(part: jax.Array, new: jax.Array, alpha: jax.Array) -> jax.Array:
    """alpha * part + (1 - alpha) * new. Chosen and no product by 0, and all of `new` where `part`
    is not finite: what overflowed must be gone."""
    whole = (alpha == 0) | ~jnp.isfinite(part)
    return jnp.where(whole, new, alpha * part + (1 - alpha) * new).astype(part.dtype)


def _encode(
    how: tuple[FragmentView, str],
    leaves: Any,
    where: Any,
    anchor_F: jax.Array,
    residual_F: Any,
) -> tuple[Parts, jax.Array | None]:
    cut, codec = how
    delta_F: jax.Array = pseudogradient(anchor_F, _read(cut, leaves, where))
    if residual_F is None:
        return encode(codec, delta_F)[0], None
    return encode(codec, delta_F + residual_F)
