"""Wire formats of fragments: fp32 values to bytes and back.

| codec | bits per value | error of x in a block whose largest magnitude is A |
|---|---|---|
| fp32 | 32 | none |
| bf16 | 16 | 2^-8 * abs(x) for normal x; to nearest, ties to even |
| int8 | 8.0625 | s (1/2 + 2^-16), s <= A / 127 * (1 + 2^-7): at most A * 0.004 |
| int4 | 4.0625 | s (1/2 + 2^-16), s <= A / 7 * (1 + 2^-7): at most A * 0.072 |
| e3m0 | 4.0625 | abs(x) / 3, or s 2^-7 if that is more; s <= A * (1 + 2^-8) |
| e2m1 | 4.0625 | abs(x) / 3, or s / 4 if that is more; s <= A / 6 * (1 + 2^-7): at most A * 0.168 |

Blocks are 256 values; s, the scale, is A / 127, A / 7, A or A / 6 rounded to the nearest bf16 (ties
to even; not above the largest whose products are finite), so the largest value clips by at most
2^-8 of itself. int8 and int4 round to the nearest quantum, ties to even; e3m0 and codecs with
levels (`spec/codecs.py`), as e2m1 is, to the nearest value, ties to the larger magnitude. A block
whose scale would be below 2^-125 (e3m0: 2^-119, e2m1: 2^-124) is all zeros, so that no product and
no midpoint between two is subnormal.

Every value that was kept by bf16 or a block codec leaves a remainder x - decode(encode(x)) that
fp32 holds exactly (as long as it is not subnormal): error feedback loses nothing.

Decoding gives the same bits everywhere, whole or part by part. Values that are not finite survive,
so that the gate refuses them: fp32 and bf16 keep them, elsewhere their whole block becomes NaN.
bf16 rounds values above its largest finite one to infinity. layout.py pins the bytes.
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.codec import kernels
from diloco_shared.numerics.codec.layout import HEADER, check, count, header
from diloco_shared.spec.codecs import BF16, BLOCK, FP32, NAMES, bytes_of, find

__all__ = [
    "NAMES",
    "bytes_of",
    "check",
    "count",
    "decode",
    "decode_part",
    "encode",
    "find",
    "frame",
    "header",
    "kernels",
    "view",
]

Values = NDArray[np.float32]

_BF16 = np.dtype(ml_dtypes.bfloat16)


def encode(name: str, values_F: Values) -> bytes:
    """fp32 values of shape (F,) to bytes."""
    assert values_F.dtype == np.float32 and values_F.ndim == 1
    number, start = find(name), header(name, values_F.size)
    values_F = np.ascontiguousarray(values_F)
    if number == FP32:
        return b"".join([start, values_F.view(np.uint8).data])
    if number == BF16:
        with np.errstate(all="ignore"):
            return b"".join([start, values_F.astype(_BF16).view(np.uint8).data])
    data = np.empty(bytes_of(name, values_F.size), np.uint8)
    data[: HEADER.size] = np.frombuffer(start, np.uint8)
    kernels.encode(number, values_F, 0, values_F.size, data, np.empty(2 * BLOCK, np.float32))
    return data.tobytes()


def frame(values_F: Values) -> tuple[bytes, memoryview]:
    """What `encode` makes of them as fp32, in two parts: the header, and a view of the values."""
    assert values_F.dtype == np.float32 and values_F.ndim == 1
    values_F = np.ascontiguousarray(values_F)
    return header("fp32", values_F.size), values_F.view(np.uint8).data


def view(data: bytes, values: int) -> Values:
    """The same as `decode` of fp32, in the memory of `data`: not to be written to.

    ValueError when header or size do not fit.
    """
    check("fp32", data, values)
    values_F = np.frombuffer(data, "<f4", offset=HEADER.size)
    values_F.flags.writeable = False
    return values_F


def decode(name: str, data: bytes, values: int) -> Values:
    """Bytes to fp32 values of shape (values,); ValueError when header or size do not fit."""
    check(name, data, values)
    return decode_part(name, data, values, 0, values)


def decode_part(name: str, data: bytes, values: int, start: int, stop: int) -> Values:
    """Values [start, stop) of `values` that were checked: the same bits as of the whole."""
    assert 0 <= start <= stop <= values
    out_B = np.empty(stop - start, np.float32)
    kernels.decode(find(name), np.frombuffer(data, np.uint8), values, start, stop, out_B)
    return out_B
