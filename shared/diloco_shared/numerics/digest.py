"""Digests of arrays: XXH3 of 128 bits, in hex, over little-endian fp32 bytes.

Against accidents, not against forgers: who may write at all is the bus's to decide. It costs a
tenth of a CPU second per GB, a tenth of what a cryptographic one does.
"""

import numpy as np
import xxhash
from numpy.typing import NDArray


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest of raw bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_array(values_F: NDArray[np.float32]) -> str:
    """Digest of fp32 values; two arrays share it exactly if their bits are equal."""
    assert values_F.dtype == np.float32, f"fp32 expected, got {values_F.dtype}"
    return digest_bytes(np.ascontiguousarray(values_F, dtype="<f4").data.cast("B"))
