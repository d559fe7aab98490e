"""Arrays as bytes and back: named ones as blobs (safetensors), digests, and fragments.

A blob is written piece by piece, and its arrays are read as views of it: nothing here holds them a
second time, and no step keeps other threads waiting for longer than a piece takes to copy.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diloco_shared.protocol.chunks import digest_bytes
from diloco_shared.spec.fragmentation import Layout

Arrays = dict[str, NDArray[Any]]
Buffer = bytes | bytearray | memoryview

# Bytes per blob, but for a single array that is larger: of many small arrays, few objects.
BLOB_BYTES = 4 << 20
# Bytes of a piece: to copy or to hash one takes some milliseconds, in which no other thread runs.
PIECE_BYTES = 4 << 20

# Types by the format's name for them, in the order in which it lays arrays out; names decide then.
DTYPES = {
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RANK = {name: rank for rank, name in enumerate(DTYPES)}
# Of the header's length, and what the header is padded to: every array begins where its type may.
HEAD_ALIGN = 8
# Bytes of a header at most, as the format's own reader has it: its length may be anybody's word.
HEAD_BYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class SafetensorsBlob:
    """Named arrays as one object, to the byte as `safetensors.numpy.save` makes it.

    [length of the header, u64][header, JSON][data of every array, one after the other]
    """

    head: bytes
    arrays: tuple[NDArray[Any], ...]  # as they follow it

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> "SafetensorsBlob":
        """Of references: nothing is copied. A type that the format does not have is a KeyError."""
        names = sorted(arrays, key=lambda n: (RANK[NAMES[arrays[n].dtype]], n))
        entries, at = {}, 0
        for name in names:
            array = arrays[name]
            entries[name] = {
                "dtype": NAMES[array.dtype],
                "shape": array.shape,
                "data_offsets": (at, at := at + array.nbytes),
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % HEAD_ALIGN)
        head = len(text).to_bytes(HEAD_ALIGN, "little") + text
        return cls(head, tuple(arrays[name] for name in names))

    def __len__(self) -> int:
        return len(self.head) + sum(array.nbytes for array in self.arrays)

    def pieces(self) -> Iterator[Buffer]:
        """All bytes in order, as often as it is asked for."""
        yield self.head
        for array in self.arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for at in range(0, len(data), PIECE_BYTES):
                yield data[at : at + PIECE_BYTES]


def pack(
    arrays: Mapping[str, NDArray[Any]], blob_bytes: int = BLOB_BYTES
) -> Iterator[SafetensorsBlob]:
    """Blobs that hold every array once, in order of names; each is made when it is asked for."""
    batch: Arrays = {}
    size = 0
    for name, array in sorted(arrays.items()):
        if batch and size + array.nbytes > blob_bytes:
            yield SafetensorsBlob.of(batch)
            batch, size = {}, 0
        batch[name] = array
        size += array.nbytes
    if batch:
        yield SafetensorsBlob.of(batch)


class Extent(NamedTuple):
    """Where an array lies in a blob: its bytes [first, end)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first: int
    end: int


def head_bytes(start: Buffer) -> int:
    """Bytes before the first array, of a blob that begins so; ValueError when it is none."""
    if len(start) < HEAD_ALIGN:
        raise ValueError(f"not a blob of arrays: {len(start)} bytes")
    size = int.from_bytes(start[:HEAD_ALIGN], "little")
    if size > HEAD_BYTES_MAX:
        raise ValueError(f"not a blob of arrays: a header of {size} bytes")
    return HEAD_ALIGN + size


def places(start: Buffer, size: int) -> dict[str, Extent]:
    """The arrays of a blob of `size` bytes that begins so, in order; ValueError when it is none."""
    first = head_bytes(start)
    if first > len(start):
        raise ValueError(f"not a blob of arrays: a header of {first} bytes in {len(start)}")
    try:
        entries = json.loads(bytes(start[HEAD_ALIGN:first]))
        found = {n: _place(e, first) for n, e in entries.items() if n != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"not a blob of arrays: a header that cannot be read: {error!r}"[:300]
        ) from None
    in_order = dict(sorted(found.items(), key=lambda item: item[1].first))
    at = first
    for name, place in in_order.items():
        if place.first != at or place.end - at != place.dtype.itemsize * math.prod(place.shape):
            raise ValueError(f"not a blob of arrays: {name} does not lie where its header says")
        at = place.end
    if at != size:
        raise ValueError(f"not a blob of arrays: {size} bytes, its header says {at}")
    return in_order


def _place(entry: Any, start: int) -> Extent:
    """KeyError, TypeError or ValueError for rubbish."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("sizes must be whole numbers")
    return Extent(DTYPES[entry["dtype"]], shape, start + begin, start + end)


def unpack(blob: Buffer) -> Arrays:
    """The arrays of one blob, as views of it; ValueError when it is none."""
    whole = memoryview(blob).cast("B")
    return {
        name: np.frombuffer(whole[p.first : p.end], p.dtype).reshape(p.shape)
        for name, p in places(whole, len(whole)).items()
    }


# --------------------------------------------------------------------------------------------------
# Digests of arrays: XXH3 of 128 bits, in hex, over little-endian fp32 bytes.
#
# Against accidents, not against forgers: who may write at all is the bus's to decide. It costs a
# tenth of a CPU second per GB, a tenth of what a cryptographic one does.


def digest_array(values_F: NDArray[np.float32]) -> str:
    """Digest of fp32 values; two arrays share it exactly if their bits are equal."""
    assert values_F.dtype == np.float32, f"fp32 expected, got {values_F.dtype}"
    return digest_bytes(np.ascontiguousarray(values_F, dtype="<f4").data.cast("B"))


# --------------------------------------------------------------------------------------------------
# Values of a fragment out of tensors and back; who is in which fragment: `spec/fragmentation.py`.


def flatten(layout: Layout, fragment: int, tensors: Mapping[str, Any], xp: Any = np) -> Any:
    """Values of one fragment as fp32 of shape (F,). `xp`: numpy, or jax.numpy inside jit."""
    parts = [
        (tensors[p.name] if p.whole else tensors[p.name][p.start : p.stop])
        .reshape(-1)
        .astype(xp.float32)
        for p in layout.fragments[fragment]
    ]
    return xp.concatenate(parts)


# --------------------------------------------------------------------------------------------------
# Pseudo-gradients: how far local training moved from the published fragment (paper section 2).
#
#     delta = anchor_base - theta        (shape (F,), fp32)
#
# Positive against the direction of training, so that the outer optimizer can take it as a gradient.


def pseudogradient(anchor_F: Any, theta_F: Any) -> Any:
    """anchor - theta, for numpy or jax arrays."""
    return anchor_F - theta_F
