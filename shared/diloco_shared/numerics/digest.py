"""Digests of arrays: blake2b, 16 bytes, in hex, over little-endian fp32 bytes."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def digest_bytes(data: bytes | memoryview) -> str:
    """Digest of raw bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_array(values_F: NDArray[np.float32]) -> str:
    """Digest of fp32 values; two arrays share it exactly if their bits are equal."""
    assert values_F.dtype == np.float32, f"fp32 expected, got {values_F.dtype}"
    return digest_bytes(np.ascontiguousarray(values_F, dtype="<f4").data.cast("B"))
