"""Block codecs and their decoding, compiled: what merges decode inside their own loops.

`data` is a whole payload as uint8 (header included, checked before), F its number of values. No
kernel checks bounds.
"""

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.codec.layout import BF16, BLOCK, E3M0, FP32, HEADER, INT4, INT8
from diloco_shared.numerics.compiled import kernel

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]

START = HEADER.size

# Bits of fp32.
INF = np.int32(0x7F800000)
MAGNITUDE = np.int32(0x7FFFFFFF)
ROUND = np.float32(
    1.5 * 2**23
)  # adding it leaves the nearest integer in the low bits, ties to even
SHARE_INT8, SHARE_INT4, SHARE_E3M0 = np.float32(1 / 127), np.float32(1 / 7), np.float32(1)
# bf16 patterns of scales.
SCALE_NAN = 0x7FC0
SCALE_MAX = 0x7F7F  # the largest finite one
# Below these a scale is zero: then every product, and every midpoint between two, is a normal
# number, so that devices that flush subnormal numbers agree with those that do not.
INT_SCALE_MIN = 0x0100  # 2^-125
E3M0_SCALE_MIN = 0x0400  # 2^-119


@kernel
def as_float(bits: np.int32) -> np.float32:
    """The fp32 number of these bits."""
    return np.int32(bits).view(np.float32)


@kernel
def as_bits(value: np.float32) -> np.int32:
    """The bits of an fp32 number."""
    return np.float32(value).view(np.int32)


# --- decoding ----------------------------------------------------------------------------------


@kernel
def decode(codec: int, data: Bytes, values: int, start: int, stop: int, out_B: Values) -> None:
    """Values [start, stop) into the first stop - start of `out_B`: the same bits as of the whole.

    Scales and quanta that no encoder writes (-8, a scale that is infinite) decode to their
    product too; a NaN scale makes its whole block NaN.
    """
    if codec == FP32:
        words = data[START : START + 4 * values].view(np.float32)
        out_B[: stop - start] = words[start:stop]
    elif codec == BF16:
        halves = data[START : START + 2 * values].view(np.uint16)
        for i in range(start, stop):
            out_B[i - start] = as_float(np.int32(halves[i]) << 16)
    else:
        scales = data[START : START + 2 * ((values + BLOCK - 1) // BLOCK)].view(np.uint16)
        quanta = data[START + 2 * scales.size :]
        at = start
        while at < stop:
            block = at // BLOCK
            end = min(stop, (block + 1) * BLOCK)
            scale = as_float(np.int32(scales[block]) << 16)
            part_B = out_B[at - start : end - start]
            if codec == INT8:
                _decode_int8(quanta[at:end], scale, part_B)
            else:
                _decode_nibbles(codec, quanta, at, scale, part_B)
            at = end


@kernel
def _decode_int8(quanta_B: Bytes, scale: np.float32, out_B: Values) -> None:
    for i in range(out_B.size):
        out_B[i] = np.float32(np.int8(quanta_B[i])) * scale


@kernel
def _decode_nibbles(codec: int, quanta: Bytes, at: int, scale: np.float32, out_B: Values) -> None:
    """Values from number `at` on: a first odd one, pairs, a last even one."""
    head = min(at & 1, out_B.size)
    if head:
        out_B[0] = _nibble(codec, np.int32(quanta[at >> 1] >> 4), scale)
    pairs = (out_B.size - head) >> 1
    bytes_B = quanta[(at + head) >> 1 :]
    pairs_B = out_B[head : head + 2 * pairs]
    if codec == INT4:
        for i in range(pairs):
            both = np.int32(bytes_B[i])
            pairs_B[2 * i] = np.float32(np.int32(both << 28) >> 28) * scale
            pairs_B[2 * i + 1] = np.float32(np.int32(both << 24) >> 28) * scale
    else:
        for i in range(pairs):
            both = np.int32(bytes_B[i])
            pairs_B[2 * i] = _power(both & 15) * scale
            pairs_B[2 * i + 1] = _power(both >> 4) * scale
    if head + 2 * pairs < out_B.size:
        out_B[out_B.size - 1] = _nibble(codec, np.int32(bytes_B[pairs] & 15), scale)


@kernel
def _nibble(codec: int, nibble: np.int32, scale: np.float32) -> np.float32:
    if codec == INT4:
        return np.float32(np.int32(nibble << 28) >> 28) * scale
    return _power(nibble) * scale


@kernel
def _power(nibble: np.int32) -> np.float32:
    """0 or a signed power of two, by its bits: exponent m - 7."""
    m = np.int32(nibble & 7)
    bits = np.int32(((m + 120) << 23) | ((nibble & 8) << 28))
    return as_float(bits if m > 0 else np.int32(0))


# --- encoding ----------------------------------------------------------------------------------


@kernel
def encode(codec: int, values_F: Values, first: int, last: int, data: Bytes) -> None:
    """Scales and quanta of blocks [first, last) of a block codec into a payload.

    Blocks may be encoded by several threads at once: none shares a byte with another.
    """
    blocks = (values_F.size + BLOCK - 1) // BLOCK
    scales = data[START : START + 2 * blocks].view(np.uint16)
    quanta = data[START + 2 * blocks :]
    bits_F = values_F.view(np.int32)
    for block in range(first, last):
        at = block * BLOCK
        end = min(values_F.size, at + BLOCK)
        scale = block_scale(codec, bits_F[at:end])
        scales[block] = scale
        width = end - at if codec == INT8 else (end - at + 1) // 2
        offset = at if codec == INT8 else at // 2
        part_B = quanta[offset : offset + width]
        if scale == 0 or scale == SCALE_NAN:
            part_B[:] = 0
        elif codec == E3M0:
            _encode_e3m0(bits_F[at:end], scale, part_B)
        else:
            inverse = np.float32(1) / as_float(np.int32(scale << 16))
            if codec == INT8:
                _encode_int8(values_F[at:end], inverse, part_B)
            else:
                _encode_int4(values_F[at:end], inverse, part_B)


@kernel
def block_scale(codec: int, bits_B: NDArray[np.int32]) -> int:
    """bf16 pattern of the scale of one block: max |x| / 127, / 7 or / 1, to nearest, ties to even.

    NaN when a value is not finite; 0 when it would be too small.
    """
    top = np.int32(0)
    for i in range(bits_B.size):
        top = max(top, np.int32(bits_B[i] & MAGNITUDE))  # magnitudes order like their bits
    if top >= INF:
        return SCALE_NAN
    # One over the largest quantum.
    share = SHARE_INT8 if codec == INT8 else SHARE_INT4 if codec == INT4 else SHARE_E3M0
    wide = np.int64(as_bits(as_float(top) * share))
    nearest = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    scale = SCALE_MAX if nearest > SCALE_MAX else int(nearest)
    return 0 if scale < (E3M0_SCALE_MIN if codec == E3M0 else INT_SCALE_MIN) else scale


@kernel
def _quantum(value: np.float32, inverse: np.float32) -> np.int32:
    """value / scale to the nearest integer in two's complement; the upper bits are rubbish."""
    return as_bits(value * inverse + ROUND)


@kernel
def _encode_int8(values_B: Values, inverse: np.float32, out_B: Bytes) -> None:
    for i in range(values_B.size):
        out_B[i] = np.uint8(_quantum(values_B[i], inverse) & 0xFF)


@kernel
def _encode_int4(values_B: Values, inverse: np.float32, out_B: Bytes) -> None:
    pairs = values_B.size >> 1
    for i in range(pairs):
        low = _quantum(values_B[2 * i], inverse) & 15
        high = _quantum(values_B[2 * i + 1], inverse) & 15
        out_B[i] = np.uint8(low | (high << 4))
    if values_B.size & 1:
        out_B[pairs] = np.uint8(_quantum(values_B[2 * pairs], inverse) & 15)


@kernel
def _encode_e3m0(bits_B: NDArray[np.int32], scale: int, out_B: Bytes) -> None:
    base = np.int32(np.int32(scale) << 16)
    middle = as_bits(np.float32(0.75) * as_float(base))
    least = np.int32(base - (7 << 23))  # half of the smallest power
    pairs = bits_B.size >> 1
    for i in range(pairs):
        low = _power_nearest(bits_B[2 * i], middle, least)
        high = _power_nearest(bits_B[2 * i + 1], middle, least)
        out_B[i] = np.uint8(low | (high << 4))
    if bits_B.size & 1:
        out_B[pairs] = np.uint8(_power_nearest(bits_B[2 * pairs], middle, least))


@kernel
def _power_nearest(bits: np.int32, middle: np.int32, least: np.int32) -> np.int32:
    """Nibble of the nearest power of two times the scale; a tie goes to the larger magnitude.

    `middle` = 3/4 of the scale lies halfway between the two largest; the others are it divided
    by powers of two, so the exponent of the distance counts them.
    """
    size = np.int32(bits & MAGNITUDE)
    m = np.int32(((size - middle) >> 23) + 7)
    m = max(min(m, np.int32(7)), np.int32(1))
    return np.int32(m | ((bits >> 28) & 8)) if size >= least else np.int32(0)
