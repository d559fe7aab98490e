"""Arrays as bytes and back: named ones as blobs (safetensors), digests, and fragments.

Whoever writes or reads blob by blob holds little beside the arrays: no blob is larger than the
largest of them, but for those that share one because they are small.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from diloco_shared.spec.fragmentation import CUT_ABOVE_MEANS as CUT_ABOVE_MEANS
from diloco_shared.spec.fragmentation import Layout as Layout
from diloco_shared.spec.fragmentation import Piece as Piece

Arrays = dict[str, NDArray[Any]]

# Bytes per blob, but for a single array that is larger: of many small arrays, few objects.
BLOB_BYTES = 4 << 20


def pack(arrays: Mapping[str, NDArray[Any]], blob_bytes: int = BLOB_BYTES) -> Iterator[bytes]:
    """Blobs that hold every array once, in order of names; each is made when it is asked for."""
    batch: Arrays = {}
    size = 0
    for name, array in sorted(arrays.items()):
        if batch and size + array.nbytes > blob_bytes:
            yield save(batch)
            batch, size = {}, 0
        batch[name] = np.ascontiguousarray(array) if array.ndim else np.array(array)
        size += array.nbytes
    if batch:
        yield save(batch)


def unpack(blob: bytes) -> Arrays:
    """The arrays of one blob; ValueError when it is none."""
    try:
        arrays: Arrays = load(blob)
    except SafetensorError as error:
        raise ValueError(f"not a blob of arrays: {error}") from None
    return arrays


# --------------------------------------------------------------------------------------------------
# Digests of arrays: XXH3 of 128 bits, in hex, over little-endian fp32 bytes.
#
# Against accidents, not against forgers: who may write at all is the bus's to decide. It costs a
# tenth of a CPU second per GB, a tenth of what a cryptographic one does.


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest of raw bytes."""
    return xxhash.xxh3_128_hexdigest(data)


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


def unflatten(layout: Layout, fragment: int, values_F: Any) -> list[tuple[Piece, Any]]:
    """The pieces of one fragment with their values in the pieces' shapes; numpy or jax."""
    return [
        (p, values_F[p.offset : p.offset + p.size].reshape(p.piece_shape))
        for p in layout.fragments[fragment]
    ]


# --------------------------------------------------------------------------------------------------
# Pseudo-gradients: how far local training moved from the published fragment (paper section 2).
#
#     delta = anchor_base - theta        (shape (F,), fp32)
#
# Positive against the direction of training, so that the outer optimizer can take it as a gradient.


def pseudogradient(anchor_F: Any, theta_F: Any) -> Any:
    """anchor - theta, for numpy or jax arrays."""
    return anchor_F - theta_F
