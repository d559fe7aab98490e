"""Each process's part of the inner state, where a newcomer finds it in what it is given.

    tensors, cut along any dimension  -->  a tensor as one row  -->  an equal part on each device

The bytes of all parts, behind the header, are those of `moments.pack`, however the tensors lie on
the devices. One tensor after the other is turned into a row, of which each process copies its part
into its own memory: a device has one tensor whole for a moment, and no leaf of all layers ever.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from diloco_learner.hosts.parts import own_parts, packed, size_of, told
from diloco_learner.hosts.shares import Lying
from diloco_learner.recovery import moments
from diloco_learner.recovery.moments import Layer
from diloco_learner.training.mesh import Placement
from diloco_learner.training.trainer import Program
from diloco_shared.memory.pages import pages

# Types of as many bytes, by which bits are moved: an addition to zeros keeps them all.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of one dimension: how it lies on the devices, with `padded` values."""

    lies: NamedSharding
    padded: int


@dataclass(frozen=True, slots=True)
class Laid:
    """The payload of an inner state. `rows`: by tensor, in the order in which they follow."""

    header: bytes
    lying: Lying
    rows: Mapping[str, Row]


def laid_out(tensors: Mapping[str, Any], placement: Placement, small: int) -> Laid:
    """Of these tensors, or their shapes. All of one with fewer than `small` bytes is process 0's:
    its parts would make no chunk."""
    header, sizes = moments.header(tensors)
    rows, counts, widths, spans = dict[str, Row](), list[int](), list[int](), list[Any]()
    for name, size in sizes.items():
        count, devices = math.prod(tensors[name].shape), placement.devices
        row = Row(placement.replicated, count)
        if size >= small:
            row = Row(placement.flat, -(-count // devices) * devices)
        rows[name] = row
        counts.append(count)
        widths.append(np.dtype(tensors[name].dtype).itemsize)
        spans.append(told(row.lies, (row.padded,)))
    return Laid(header, Lying(len(header), tuple(counts), tuple(widths), tuple(spans)), rows)


def own_share(laid: Laid, tensors: Mapping[str, Any], process: int) -> list[memoryview]:
    """The parts that this process gives of every tensor, copied to its memory.

    All processes must call it for the same tensors at the same place in the plan. Waits for the
    step that is under way: the originals are donated to the next one.
    """
    given = [spans.get(process, ()) for spans in laid.lying.spans]
    widths = [np.dtype(f"V{width}") for width in laid.lying.widths]
    own = pages(sum(size_of(s, w) for s, w in zip(given, widths, strict=True)))
    found, at = list[memoryview](), 0
    for (name, row), spans in zip(laid.rows.items(), given, strict=True):
        bits = _row(tensors[name], row)
        parts = own_parts(bits, spans)
        for part in packed(np.asarray(parts[span]) for span in spans):
            place = own[at : at + len(part)]
            moments.fill_together(place, part)
            found.append(place)
            at += len(part)
        # Before the next one is made. All devices have computed it: no process runs ahead.
        jax.block_until_ready(bits)
        del parts
        bits.delete()
    return found


def warm_rows(tensors: Mapping[str, Any], program: Program, small: int) -> None:
    """Compile what `own_share` needs: training stands still for that, and not for a compilation.

    All processes must call it at the same place in the plan.
    """
    assert program.placement is not None, "several processes have several devices"
    known = set[Any]()
    for name, row in laid_out(tensors, program.placement, small).rows.items():
        leaf = tensors[name].leaf if isinstance(tensors[name], Layer) else tensors[name]
        kind = (row, leaf.shape, leaf.dtype, leaf.sharding)
        if kind not in known:
            known.add(kind)
            jax.block_until_ready(_row(tensors[name], row)).delete()


def _row(tensor: Any, row: Row) -> jax.Array:
    leaf, layer = (tensor.leaf, tensor.layer) if isinstance(tensor, Layer) else (tensor, None)
    number = None if layer is None else np.int32(layer)
    found: jax.Array = _program(row)(leaf, number)
    return found


# Of every padded size and sharding: as many as a model has tensors of different sizes.
@cache
def _program(row: Row) -> Any:
    def flat(leaf: jax.Array, layer: Any) -> jax.Array:
        own = leaf if layer is None else lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
        if own.dtype == jnp.bool_:
            own = own.astype(jnp.uint8)
        kind = _BITS[own.dtype.itemsize]
        bits = lax.bitcast_convert_type(own, kind).reshape(-1)
        # What joins devices of several hosts does not know every narrow type.
        wide = bits.astype(jnp.uint32) if own.dtype.itemsize < 4 else bits
        spread = jnp.pad(wide, (0, row.padded - bits.size))
        cut: jax.Array = lax.with_sharding_constraint(spread, row.lies)
        return cut.astype(kind)

    return jax.jit(flat, out_shardings=row.lies)
