"""What is done to one fragment of the parameters on the device: read, adopted, encoded.

Only the tensors that a fragment has pieces of enter its programs: the others are neither copied
nor waited for. Where rows begin is an argument, so that fragments cut alike share their programs.
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
from diloco_learner.models import from_named, to_named
from diloco_learner.training.programs import Ahead
from diloco_shared.numerics.arrays import Layout, pseudogradient


@dataclass(frozen=True, slots=True)
class Bit:
    """A piece of a fragment: `rows` of the tensor at `slot`, from a row that is an argument."""

    slot: int
    rows: int
    whole: bool
    shape: tuple[int, ...]  # of the piece
    size: int


@dataclass(frozen=True, slots=True)
class FragmentView:
    """All that a program must know of a fragment before it runs."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]  # shape and type by slot
    bits: tuple[Bit, ...]

    @property
    def size(self) -> int:
        """Values."""
        return sum(bit.size for bit in self.bits)


class FragmentOps:
    """The programs of every fragment. `shapes`: the tree of the parameters' shapes."""

    def __init__(self, layout: Layout, shapes: Any, codec: str) -> None:
        self.codec = codec
        named = to_named(shapes)
        # Names of the tensors by slot, what is static, and where the rows begin: by fragment.
        self.names: list[tuple[str, ...]] = []
        self.cuts: list[FragmentView] = []
        self.starts: list[NDArray[np.int32]] = []
        for pieces in layout.fragments:
            names = tuple(dict.fromkeys(piece.name for piece in pieces))
            self.names.append(names)
            self.starts.append(np.array([piece.start for piece in pieces], np.int32))
            bits = (
                Bit(names.index(p.name), p.stop - p.start, p.whole, p.piece_shape, p.size)
                for p in pieces
            )
            tensors = tuple((tuple(named[n].shape), str(named[n].dtype)) for n in names)
            self.cuts.append(FragmentView(tensors, tuple(bits)))
        self._read = Ahead(_read, lambda cut, *_: cut, static=True)
        self._adopt = Ahead(_adopt, lambda cut, *_: cut, static=True, donate=(1,))
        self._encode = Ahead(_encode, lambda how, *args: (how, args[-1] is None), static=True)

    def read(self, p: int, params: Any) -> jax.Array:
        """Fragment p as fp32 of shape (F,)."""
        values_F: jax.Array = self._read(self.cuts[p], self._tensors(p, params), self.starts[p])
        return values_F

    def adopt(self, p: int, params: Any, anchor_F: Any, alpha: float) -> Any:
        """theta <- alpha * theta + (1 - alpha) * anchor. The tensors it touches are donated."""
        named = to_named(params)
        tensors = tuple(named[name] for name in self.names[p])
        new = self._adopt(self.cuts[p], tensors, self.starts[p], anchor_F, np.float32(alpha))
        return from_named(params, named | dict(zip(self.names[p], new, strict=True)))

    def encode(
        self, p: int, params: Any, anchor_F: Any, residual_F: Any
    ) -> tuple[Parts, jax.Array | None]:
        """(what follows the header of anchor - theta + residual, what encoding withheld)."""
        how = (self.cuts[p], self.codec)
        found: tuple[Parts, jax.Array | None] = self._encode(
            how, self._tensors(p, params), self.starts[p], anchor_F, residual_F
        )
        return found

    def compile(self, *, residuals: bool) -> None:
        """What adopts and encodes, for every fragment, without an array of any of them."""
        for cut, starts in zip(self.cuts, self.starts, strict=True):
            tensors = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in cut.tensors)
            values_F = jax.ShapeDtypeStruct((cut.size,), np.float32)
            self._adopt.compile(cut, tensors, starts, values_F, np.float32(0))
            residual_F = values_F if residuals else None
            self._encode.compile((cut, self.codec), tensors, starts, values_F, residual_F)

    def _tensors(self, p: int, params: Any) -> tuple[Any, ...]:
        named: Mapping[str, Any] = to_named(params)
        return tuple(named[name] for name in self.names[p])


def _part(bit: Bit, tensors: Any, start: jax.Array) -> jax.Array:
    tensor: jax.Array = tensors[bit.slot]
    return tensor if bit.whole else lax.dynamic_slice_in_dim(tensor, start, bit.rows)


def _read(cut: FragmentView, tensors: Any, starts_N: jax.Array) -> jax.Array:
    parts = [_part(bit, tensors, starts_N[n]) for n, bit in enumerate(cut.bits)]
    return jnp.concatenate([part.reshape(-1).astype(jnp.float32) for part in parts])


def _adopt(
    cut: FragmentView, tensors: Any, starts_N: jax.Array, anchor_F: jax.Array, alpha: jax.Array
) -> tuple[jax.Array, ...]:
    tensors, offset = list(tensors), 0
    for n, bit in enumerate(cut.bits):
        new = anchor_F[offset : offset + bit.size].reshape(bit.shape)
        offset += bit.size
        part = _part(bit, tensors, starts_N[n])
        # Not a product by 0: what overflowed must be gone.
        mixed = jnp.where(alpha == 0, new, alpha * part + (1 - alpha) * new).astype(part.dtype)
        tensors[bit.slot] = (
            mixed
            if bit.whole
            else lax.dynamic_update_slice_in_dim(tensors[bit.slot], mixed, starts_N[n], 0)
        )
    return tuple(tensors)


def _encode(
    how: tuple[FragmentView, str],
    tensors: Any,
    starts_N: jax.Array,
    anchor_F: jax.Array,
    residual_F: Any,
) -> tuple[Parts, jax.Array | None]:
    cut, codec = how
    delta_F: jax.Array = pseudogradient(anchor_F, _read(cut, tensors, starts_N))
    if residual_F is None:
        return encode(codec, delta_F)[0], None
    return encode(codec, delta_F + residual_F)
