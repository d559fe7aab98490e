"""Many named arrays as blobs of bounded size (safetensors), and back.

Whoever writes or reads blob by blob holds little beside the arrays: no blob is larger than the
largest of them, but for those that share one because they are small.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

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
