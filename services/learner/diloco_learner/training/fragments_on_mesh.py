"""`fragment_ops` where leaves are cut over several devices: the same values, and the same bytes.

    leaves, cut by their own dimensions  <-->  a fragment, whole  <-->  an equal part on each device

A fragment's values follow each other as on one device, however its leaves are cut. To read it, each
device writes the values that it holds where they belong, zeros elsewhere, and all are added: as
integers, so that every bit stays, the sign of a zero too. Of the sum each device keeps an equal
part, of whole blocks of the codec. So blocks never straddle devices, and a contribution is encoded,
with its residual, part by part. To adopt, parts are gathered, and each device takes what it holds.
A device thus has one fragment whole for a moment, and no leaf ever.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from diloco_learner.exchange.encoding import Parts, encode
from diloco_learner.models import arrived, from_named, to_named
from diloco_learner.training.fragment_ops import (
    Bit,
    FragmentOps,
    FragmentView,
    PieceRun,
    mixed,
)
from diloco_learner.training.mesh import Placement
from diloco_learner.training.programs import Ahead
from diloco_shared.numerics.arrays import pseudogradient
from diloco_shared.spec.codecs import BLOCK
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.mesh import AXES

# By dimension of a tensor: the axes that it is cut by, none for most.
Cut = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class MeshView:
    """What is static of a fragment on a mesh. `cuts`: of the leaf at each slot; `padded`: values
    with those that fill up the devices' equal parts."""

    view: FragmentView
    cuts: tuple[Cut, ...]
    padded: int


class MeshFragmentOps(FragmentOps):
    """The programs of every fragment; arrays of shape (F,) are parts of whole blocks here, spread
    over the devices and filled up with zeros."""

    def __init__(
        self, layout: Layout, shapes: Any, codec: str, stacked: str | None, placement: Placement
    ) -> None:
        super().__init__(layout, shapes, codec, stacked)
        self.placement = placement
        unit = BLOCK * placement.devices
        named = to_named(shapes)
        self.views = [
            MeshView(
                cut,
                tuple(_cut_of(placement.parameters[n], named[n].ndim) for n in names),
                -(-cut.size // unit) * unit,
            )
            for names, cut in zip(self.names, self.cuts, strict=True)
        ]
        mesh, turn = placement.mesh, placement.turn
        self._read = Ahead(partial(_read, mesh), lambda how, *_: how, static=True, turn=turn)
        self._adopt = Ahead(
            partial(_adopt, mesh), lambda how, *_: how, static=True, donate=(1,), turn=turn
        )
        self._encode = Ahead(
            partial(_encode, mesh),
            lambda how, *args: (how, args[-1] is None),
            static=True,
            turn=turn,
        )

    def read(self, p: int, params: Any) -> jax.Array:
        """Fragment p as fp32, filled up with zeros to whole blocks on each device."""
        values_F: jax.Array = self._read(self.views[p], self._leaves(p, params), self.starts[p])
        return values_F

    def values(self, p: int, params: Any) -> NDArray[np.float32]:
        """Fragment p as fp32 of shape (F,) on the host, without what it was filled up with."""
        return np.asarray(self.read(p, params))[: self.cuts[p].size]

    def zeros(self, p: int) -> jax.Array:
        """A residual of fragment p that owes nothing, as long as what `read` gives."""
        return jnp.zeros(self.views[p].padded, jnp.float32, device=self.placement.flat)

    def adopt(self, p: int, params: Any, anchor_F: Any, alpha: float) -> Any:
        named = to_named(params)
        leaves = tuple(named[name] for name in self.names[p])
        spread_F = self._spread(p, anchor_F)
        new = self._adopt(self.views[p], leaves, self.starts[p], spread_F, np.float32(alpha))
        return from_named(params, named | dict(zip(self.names[p], new, strict=True)))

    def encode(
        self, p: int, params: Any, anchor_F: Any, residual_F: Any
    ) -> tuple[Parts, jax.Array | None]:
        """As `FragmentOps.encode`. `anchor_F`: on the host; `residual_F`: as `zeros`, or None."""
        how, spread_F = (self.views[p], self.codec), self._spread(p, anchor_F)
        found: tuple[Parts, jax.Array | None] = self._encode(
            how, self._leaves(p, params), self.starts[p], spread_F, residual_F
        )
        return found

    def compile(self, *, residuals: bool) -> None:
        mesh, flat = self.placement.mesh, self.placement.flat
        for view, starts in zip(self.views, self.starts, strict=True):
            leaves = tuple(
                jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, _spec(cut)))
                for (shape, dtype), cut in zip(view.view.leaves, view.cuts, strict=True)
            )
            values_F = jax.ShapeDtypeStruct((view.padded,), np.float32, sharding=flat)
            self._adopt.compile(view, leaves, starts, values_F, np.float32(0))
            residual_F = values_F if residuals else None
            self._encode.compile((view, self.codec), leaves, starts, values_F, residual_F)

    def _spread(self, p: int, anchor_F: NDArray[np.float32]) -> jax.Array:
        """An anchor of the host on the devices: each gets its own part, copied."""
        padded, size = self.views[p].padded, len(anchor_F)

        def part(index: tuple[slice, ...] | None) -> NDArray[np.float32]:
            assert index is not None
            start, stop, _ = index[0].indices(padded)
            values = np.zeros(stop - start, np.float32)
            values[: max(min(stop, size) - start, 0)] = anchor_F[start : min(stop, size)]
            return values

        return arrived(jax.make_array_from_callback((padded,), self.placement.flat, part))


# --------------------------------------------------------------------------------------------------
# The programs. What is mapped over the devices sees the part of each leaf that its own device has.


def _read(mesh: Any, how: MeshView, leaves: Any, where: Any) -> jax.Array:
    flat = PartitionSpec(AXES)
    values_F: jax.Array = _mapped(mesh, partial(_gathered, how), how, (), flat)(leaves, where)
    return values_F


def _adopt(
    mesh: Any, how: MeshView, leaves: Any, where: Any, anchor_F: jax.Array, alpha: jax.Array
) -> tuple[jax.Array, ...]:
    more = (PartitionSpec(AXES), PartitionSpec())
    results = tuple(_spec(cut) for cut in how.cuts)
    taken = _mapped(mesh, partial(_taken, how), how, more, results)
    new: tuple[jax.Array, ...] = taken(leaves, where, anchor_F, alpha)
    return new


def _encode(
    mesh: Any,
    how: tuple[MeshView, str],
    leaves: Any,
    where: Any,
    anchor_F: jax.Array,
    residual_F: Any,
) -> tuple[Parts, jax.Array | None]:
    view, codec = how
    flat = PartitionSpec(AXES)

    def body(leaves: Any, where: Any, anchor: jax.Array, residual: Any) -> Any:
        delta: jax.Array = pseudogradient(anchor, _gathered(view, leaves, where))
        if residual is None:
            return encode(codec, delta)[0], None
        return encode(codec, delta + residual)

    found: tuple[Parts, jax.Array | None] = _mapped(mesh, body, view, (flat, flat), flat)(
        leaves, where, anchor_F, residual_F
    )
    return found


def _mapped(mesh: Any, body: Any, how: MeshView, more: Any, results: Any) -> Any:
    arguments = (tuple(_spec(cut) for cut in how.cuts), PartitionSpec(), *more)
    return jax.shard_map(body, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)


def _gathered(how: MeshView, leaves: Any, where: Any) -> jax.Array:
    """This device's equal part of the fragment's values."""
    bits = [
        _placed(bit, how.cuts, leaves, at).reshape(-1)
        for bit, at in zip(how.view.bits, where, strict=True)
    ]
    filler = jnp.zeros(how.padded - how.view.size, jnp.int32)
    own = lax.psum_scatter(jnp.concatenate([*bits, filler]), AXES, tiled=True)
    return lax.bitcast_convert_type(own, jnp.float32)


def _taken(
    how: MeshView, leaves: Any, where: Any, anchor_part: jax.Array, alpha: jax.Array
) -> tuple[jax.Array, ...]:
    """This device's leaves with the fragment mixed into them."""
    anchor_F = lax.all_gather(anchor_part, AXES, tiled=True)
    leaves, offset = list(leaves), 0
    for bit, at in zip(how.view.bits, where, strict=True):
        new = anchor_F[offset : offset + bit.size]
        offset += bit.size
        _mix(bit, how.cuts, leaves, at, new, alpha)
    return tuple(leaves)


def _placed(bit: Bit | PieceRun, cuts: tuple[Cut, ...], leaves: Any, at: jax.Array) -> jax.Array:
    """The bits of a piece, or of a run of them: what this device has of it, and zeros."""
    if isinstance(bit, PieceRun):
        layers_K, rows, first = at[0], [], 0
        for slot, count in bit.parts:
            own = jnp.take(leaves[slot], layers_K[first : first + count], axis=0, mode="clip")
            rows.append(_whole(own, cuts[slot]).reshape(count, bit.piece))
            first += count
        return jnp.take(jnp.concatenate(rows), at[1], axis=0, mode="clip")
    own, cut = _tensor(bit, cuts, leaves, at)
    if bit.whole:
        return _whole(own, cut)
    if not cut[0]:
        return _whole(lax.dynamic_slice_in_dim(own, at[1], bit.rows), cut)
    place = at[1] + jnp.arange(bit.rows) - lax.axis_index(cut[0]) * len(own)
    here = ((place >= 0) & (place < len(own))).reshape(-1, *[1] * (own.ndim - 1))
    some = jnp.where(here, jnp.take(own, place, axis=0, mode="clip"), 0)
    # Rows are in their places already; of devices that hold the same ones, one tells them.
    return _whole(some, ((), *cut[1:]), told_by=cut)


def _mix(
    bit: Bit | PieceRun,
    cuts: tuple[Cut, ...],
    leaves: list[Any],
    at: jax.Array,
    new: jax.Array,
    alpha: jax.Array,
) -> None:
    """Mix a piece, or a run of them, of shape (F,), into what this device has of it."""
    if isinstance(bit, PieceRun):
        first = 0
        for slot, count in bit.parts:
            leaf, cut = leaves[slot], cuts[slot]
            which, order = at[0][first : first + count], at[2][first : first + count]
            # What this device has of every piece, before those of this leaf are picked: no second
            # copy of the whole run is made.
            some = _own(new.reshape(-1, *_whole_shape(leaf, cut)[1:]), cut)
            own = jnp.take(some, order, axis=0, mode="clip")
            old = jnp.take(leaf, which, axis=0, mode="clip")
            both = mixed(old, own, alpha)
            leaves[slot] = leaf.at[which].set(both, mode="clip", unique_indices=True)
            first += count
        return
    old, cut = _tensor(bit, cuts, leaves, at)
    piece = new.reshape(bit.shape)
    if bit.whole:
        tensor = mixed(old, _own(piece, cut), alpha)
    elif not cut[0]:
        some = lax.dynamic_slice_in_dim(old, at[1], bit.rows)
        both = mixed(some, _own(piece, cut), alpha)
        tensor = lax.dynamic_update_slice_in_dim(old, both, at[1], 0)
    else:
        place = lax.axis_index(cut[0]) * len(old) + jnp.arange(len(old)) - at[1]
        here = ((place >= 0) & (place < bit.rows)).reshape(-1, *[1] * (old.ndim - 1))
        own = jnp.take(_own(piece, ((), *cut[1:])), place, axis=0, mode="clip")
        tensor = jnp.where(here, mixed(old, own, alpha), old)
    leaf = leaves[bit.slot]
    leaves[bit.slot] = (
        lax.dynamic_update_index_in_dim(leaf, tensor, at[0], 0) if bit.stacked else tensor
    )


def _tensor(bit: Bit, cuts: tuple[Cut, ...], leaves: Any, at: jax.Array) -> tuple[jax.Array, Cut]:
    """What this device has of the tensor that a piece is of, and how the tensor is cut."""
    leaf, cut = leaves[bit.slot], cuts[bit.slot]
    if not bit.stacked:
        return leaf, cut
    return lax.dynamic_index_in_dim(leaf, at[0], keepdims=False), cut[1:]


def _whole(own: jax.Array, cut: Cut, told_by: Cut | None = None) -> jax.Array:
    """The bits of an array of which this device has `own`, zeros where others have it.

    Of those who have the same, the first one tells it, and the others zeros.
    """
    bits = lax.bitcast_convert_type(own.astype(jnp.float32), jnp.int32)
    others = [a for a in AXES if not any(a in axes for axes in told_by or cut)]
    first = jnp.all(jnp.array([lax.axis_index(axis) == 0 for axis in others] or [True]))
    bits = jnp.where(first, bits, 0)
    if not any(cut):
        return bits
    empty = jnp.zeros(_whole_shape(own, cut), jnp.int32)
    return lax.dynamic_update_slice(empty, bits, _corner(own.shape, cut))


def _own(whole: jax.Array, cut: Cut) -> jax.Array:
    """This device's part of an array that it has whole."""
    shape = tuple(n // _parts(axes) for n, axes in zip(whole.shape, cut, strict=True))
    return lax.dynamic_slice(whole, _corner(shape, cut), shape) if any(cut) else whole


def _whole_shape(own: jax.Array, cut: Cut) -> tuple[int, ...]:
    return tuple(n * _parts(axes) for n, axes in zip(own.shape, cut, strict=True))


def _corner(shape: tuple[int, ...], cut: Cut) -> tuple[Any, ...]:
    """Where this device's part, of that shape, begins."""
    return tuple(
        lax.axis_index(axes) * n if axes else 0 for n, axes in zip(shape, cut, strict=True)
    )


def _parts(axes: tuple[str, ...]) -> int:
    return int(lax.axis_size(axes)) if axes else 1


def _cut_of(spec: PartitionSpec, rank: int) -> Cut:
    dims = [*spec, *[None] * (rank - len(spec))]
    return tuple((d,) if isinstance(d, str) else tuple(d or ()) for d in dims)


def _spec(cut: Cut) -> PartitionSpec:
    return PartitionSpec(*[axes or None for axes in cut])
