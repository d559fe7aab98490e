"""Many named arrays as a few blobs of bounded size (safetensors), and back."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

Arrays = dict[str, NDArray[Any]]

# Bytes per blob, but for a single array that is larger: bounds what is held beside the arrays.
BLOB_BYTES = 256 << 20


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
