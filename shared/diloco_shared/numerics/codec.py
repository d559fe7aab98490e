"""Wire formats of fragments: fp32 values to bytes and back.

| codec | bytes per value | error bound |
|---|---|---|
| fp32 | 4 | none |
| bf16 | 2 | abs(x - Q(x)) <= 2^-8 * abs(x) for normal x; round to nearest, ties to even |

Little-endian always. Decoding gives the same bits everywhere, whole or part by part. Values that
are not finite survive (the gate refuses them); bf16 rounds values above its largest finite one to
infinity.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Codec:
    """One wire format."""

    name: str
    dtype: np.dtype
    encode: Callable[[Values], bytes]
    decode: Callable[[bytes, int, int], Values]  # (data, start, stop)


def _cast(name: str, dtype: np.dtype) -> Codec:
    def encode(values_F: Values) -> bytes:
        with np.errstate(over="ignore"):
            return values_F.astype(dtype).tobytes()

    def decode(data: bytes, start: int, stop: int) -> Values:
        part = np.frombuffer(data, dtype, count=stop - start, offset=start * dtype.itemsize)
        return part.astype(np.float32)

    return Codec(name, dtype, encode, decode)


CODECS = {
    "fp32": _cast("fp32", np.dtype("<f4")),
    "bf16": _cast("bf16", np.dtype(ml_dtypes.bfloat16)),
}


def find(name: str) -> Codec:
    """The codec of that name; ValueError naming the known ones."""
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(
            f"unknown codec {name[:40]!r}: this side knows {', '.join(CODECS)}"
        ) from None


def bytes_of(name: str, values: int) -> int:
    """Size of `values` encoded values in bytes."""
    return find(name).dtype.itemsize * values


def encode(name: str, values_F: Values) -> bytes:
    """fp32 values of shape (F,) to bytes."""
    assert values_F.dtype == np.float32 and values_F.ndim == 1
    return find(name).encode(values_F)


def decode(name: str, data: bytes, values: int) -> Values:
    """Bytes to fp32 values of shape (values,); ValueError when the size does not fit."""
    check_size(name, data, values)
    return find(name).decode(data, 0, values)


def decode_part(name: str, data: bytes, start: int, stop: int) -> Values:
    """Values [start, stop) of bytes whose size was checked: the same bits as of the whole."""
    assert 0 <= start <= stop
    return find(name).decode(data, start, stop)


def check_size(name: str, data: bytes, values: int) -> None:
    """ValueError unless `data` has the size of that many values."""
    expected = bytes_of(name, values)
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes of {name} for {values} values, not {expected}")
