"""Block codecs and all decoding, compiled: merges decode inside their own loops.

`data` is a whole payload as uint8, its header checked before, and `values` how many it holds. No
kernel checks bounds. Whole blocks go through loops of fixed length, which compile to vectors; N
counts blocks, K = 256 values and H = 128 bytes belong to one.
"""

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.codec.layout import HEADER
from diloco_shared.numerics.compiled import kernel
from diloco_shared.spec.codecs import BF16, BLOCK, CODECS, E3M0, FP32, INT4, INT8

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]
Bits = NDArray[np.int32]
Scales = NDArray[np.uint16]  # bf16 patterns
Word = np.int32
Words = tuple[Word, Word, Word, Word, Word, Word, Word]

START = HEADER.size
HALF = BLOCK // 2

# Bits of fp32. Shifts and masks are int32: wider literals would halve the vectors.
INF = np.int32(0x7F800000)
MAGNITUDE = np.int32(0x7FFFFFFF)
ZERO, ONE, TWO, FOUR, SEVEN, EIGHT = (np.int32(x) for x in (0, 1, 2, 4, 7, 8))
NIBBLE, MANTISSA, HALVES, TO_TOP = (np.int32(x) for x in (15, 23, 16, 28))
POWER_ZERO = np.int32(127 - 7)  # exponent of 2^(m - 7) at m = 0
# Adding it leaves the nearest integer in the low bits, ties to even.
ROUND = np.float32(1.5 * 2**23)
SCALE_NAN = 0x7FC0  # a bf16 pattern

# --- tables ------------------------------------------------------------------------------------

# By the codec's number on the wire. Compiled code holds them as constants: `compiled` compiles anew
# when a row changes. The first two are zeros for codecs without levels.
C = len(CODECS)
LEVELS_Cx8 = np.zeros((C, 8), np.float32)
MIDPOINTS_Cx7 = np.zeros((C, 7), np.float32)  # between neighbouring levels
# One over the largest quantum.
SHARE_C = np.zeros(C, np.float32)
SHARE_C[INT8], SHARE_C[INT4], SHARE_C[E3M0] = 1 / 127, 1 / 7, 1
# bf16 patterns. Below the least a scale is zero: then every product, and every midpoint between
# two, is normal, and devices that flush subnormal numbers agree with those that do not. At the
# largest, every product is finite.
SCALE_MIN_C = np.full(C, 0x0100, np.int32)  # 2^-125
SCALE_MIN_C[E3M0] = 0x0400  # 2^-119
SCALE_MAX_C = np.full(C, 0x7F7F, np.int32)  # the largest finite one


def _tabulate(codec: int, levels: tuple[float, ...]) -> None:
    """Fill in what belongs to a codec with levels."""
    levels_8, limits = np.array(levels, np.float32), np.finfo(np.float32)
    LEVELS_Cx8[codec], SHARE_C[codec] = levels_8, 1 / levels[-1]
    MIDPOINTS_Cx7[codec] = (levels_8[:-1] + levels_8[1:]) / 2
    # All scales from the least to the largest, as fp64, in which no product is out of range.
    patterns_S = np.arange(0x0080, 0x7F80, dtype=np.int32)
    scales_S = (patterns_S << HALVES).view(np.float32).astype(np.float64)
    normal_S = scales_S * float(MIDPOINTS_Cx7[codec, 0]) >= limits.tiny  # the least of all products
    finite_S = scales_S * levels[-1] <= limits.max
    SCALE_MIN_C[codec], SCALE_MAX_C[codec] = patterns_S[normal_S][0], patterns_S[finite_S][-1]


for _codec, _row in enumerate(CODECS):
    if _row.levels:
        _tabulate(_codec, _row.levels)


# --- bits --------------------------------------------------------------------------------------


@kernel
def as_float(bits: np.int32) -> np.float32:
    """The fp32 number of these bits."""
    return np.int32(bits).view(np.float32)


@kernel
def as_bits(value: np.float32) -> np.int32:
    """The bits of an fp32 number."""
    return np.float32(value).view(np.int32)


@kernel
def widen(half: int | np.uint16 | np.int32) -> np.float32:
    """The number of a bf16 pattern."""
    return as_float(np.int32(np.int32(half) << HALVES))


# --- decoding ----------------------------------------------------------------------------------


@kernel
def decode(codec: int, data: Bytes, values: int, start: int, stop: int, out_B: Values) -> None:
    """Values [start, stop) into the first stop - start of `out_B`: the same bits as of the whole.

    What no encoder writes decodes to its product too (a quantum of -8, an infinite scale); a NaN
    scale makes its whole block NaN.
    """
    if codec == FP32:
        words_B = data[START : START + 4 * values].view(np.float32)[start:stop]
        for i in range(stop - start):  # assigned as slices, values take seconds more to compile
            out_B[i] = words_B[i]
    elif codec == BF16:
        part_B = data[START : START + 2 * values].view(np.uint16)[start:stop]
        for i in range(stop - start):
            out_B[i] = widen(part_B[i])
    else:
        _decode_blocks(codec, data, values, start, stop, out_B)


@kernel
def _decode_blocks(
    codec: int, data: Bytes, values: int, start: int, stop: int, out_B: Values
) -> None:
    """A first part of a block and a last one value by value, what is between as whole blocks."""
    scales = data[START : START + 2 * ((values + BLOCK - 1) // BLOCK)].view(np.uint16)
    quanta = data[START + 2 * scales.size :]
    first = (start + BLOCK - 1) // BLOCK
    last = max(first, stop // BLOCK)
    begin, end = min(first * BLOCK, stop), max(min(last * BLOCK, stop), start)
    for i in range(start, begin):
        out_B[i - start] = _value(codec, quanta, i) * widen(scales[i // BLOCK])
    if end > begin:
        out_NxK = out_B[begin - start : end - start].reshape((last - first, BLOCK))
        if codec == INT8:
            quanta_NxK = quanta[begin:end].reshape((last - first, BLOCK))
            _decode_int8(quanta_NxK, scales[first:last], out_NxK)
        else:
            bytes_NxH = quanta[begin // 2 : end // 2].reshape((last - first, HALF))
            if codec == INT4:
                _decode_int4(bytes_NxH, scales[first:last], out_NxK)
            elif codec == E3M0:
                _decode_e3m0(bytes_NxH, scales[first:last], out_NxK)
            else:
                _decode_levels(LEVELS_Cx8[codec], bytes_NxH, scales[first:last], out_NxK)
    for i in range(max(end, begin), stop):
        out_B[i - start] = _value(codec, quanta, i) * widen(scales[i // BLOCK])


@kernel
def _value(codec: int, quanta: Bytes, i: int) -> np.float32:
    """Quantum number i."""
    if codec == INT8:
        return np.float32(np.int8(quanta[i]))
    both = np.int32(quanta[i >> 1])
    if codec == INT4:
        return _high(both) if i & 1 else _low(both)
    if codec == E3M0:
        return _power(both >> FOUR if i & 1 else both & NIBBLE)
    return _level(both >> FOUR if i & 1 else both & NIBBLE, _as_words(LEVELS_Cx8[codec]))


@kernel
def _low(both: np.int32) -> np.float32:
    return np.float32(np.int32(both << TO_TOP) >> TO_TOP)


@kernel
def _high(both: np.int32) -> np.float32:
    return np.float32(np.int32(np.int32(both >> FOUR) << TO_TOP) >> TO_TOP)


@kernel
def _power(nibble: np.int32) -> np.float32:
    """0 or a signed power of two, by its bits."""
    m = np.int32(nibble & SEVEN)
    bits = np.int32((m + POWER_ZERO) << MANTISSA) | np.int32((nibble & EIGHT) << TO_TOP)
    return as_float(bits if m > ZERO else ZERO)


@kernel
def _as_words(levels_8: Values) -> Words:
    """Levels 1 to 7 by their bits, for registers."""
    a, b, c, d = levels_8[1], levels_8[2], levels_8[3], levels_8[4]
    e, f, g = levels_8[5], levels_8[6], levels_8[7]
    return as_bits(a), as_bits(b), as_bits(c), as_bits(d), as_bits(e), as_bits(f), as_bits(g)


@kernel
def _level(nibble: np.int32, levels: Words) -> np.float32:
    """The level of a nibble: seven choices between two, which compile to vectors, as no load does.

    8, which no encoder writes, is -0.
    """
    odd, upper = np.int32(nibble & ONE) != ZERO, np.int32(nibble & TWO) != ZERO
    to_1, to_3 = levels[0] if odd else ZERO, levels[2] if odd else levels[1]
    to_5, to_7 = levels[4] if odd else levels[3], levels[6] if odd else levels[5]
    small, large = to_3 if upper else to_1, to_7 if upper else to_5
    size = large if np.int32(nibble & FOUR) != ZERO else small
    return as_float(np.int32(size | np.int32((nibble & EIGHT) << TO_TOP)))


@kernel
def _decode_int8(quanta_NxK: Bytes, scales_N: Scales, out_NxK: Values) -> None:
    for n in range(out_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(BLOCK):
            out_NxK[n, i] = np.float32(np.int8(quanta_NxK[n, i])) * scale


@kernel
def _decode_int4(bytes_NxH: Bytes, scales_N: Scales, out_NxK: Values) -> None:
    for n in range(out_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(HALF):
            both = np.int32(bytes_NxH[n, i])
            out_NxK[n, 2 * i] = _low(both) * scale
            out_NxK[n, 2 * i + 1] = _high(both) * scale


@kernel
def _decode_e3m0(bytes_NxH: Bytes, scales_N: Scales, out_NxK: Values) -> None:
    for n in range(out_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(HALF):
            both = np.int32(bytes_NxH[n, i])
            out_NxK[n, 2 * i] = _power(both & NIBBLE) * scale
            out_NxK[n, 2 * i + 1] = _power(both >> FOUR) * scale


@kernel
def _decode_levels(levels_8: Values, bytes_NxH: Bytes, scales_N: Scales, out_NxK: Values) -> None:
    levels = _as_words(levels_8)
    for n in range(out_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(HALF):
            both = np.int32(bytes_NxH[n, i])
            out_NxK[n, 2 * i] = _level(both & NIBBLE, levels) * scale
            out_NxK[n, 2 * i + 1] = _level(both >> FOUR, levels) * scale


# --- adding up ---------------------------------------------------------------------------------


@kernel
def add(
    codec: int, data: Bytes, values: int, start: int, stop: int, factor: np.float32, sum_B: Values
) -> None:
    """Add factor times values [start, stop) to `sum_B`: `decode`, a product and a sum, in one.

    `start` begins a block. The value, the product and the sum are each rounded.
    """
    if codec == FP32:
        words_B = data[START : START + 4 * values].view(np.float32)[start:stop]
        for i in range(stop - start):
            sum_B[i] += words_B[i] * factor
    elif codec == BF16:
        part_B = data[START : START + 2 * values].view(np.uint16)[start:stop]
        for i in range(stop - start):
            sum_B[i] += widen(part_B[i]) * factor
    else:
        _add_blocks(codec, data, values, start, stop, factor, sum_B)


@kernel
def _add_blocks(
    codec: int, data: Bytes, values: int, start: int, stop: int, factor: np.float32, sum_B: Values
) -> None:
    scales = data[START : START + 2 * ((values + BLOCK - 1) // BLOCK)].view(np.uint16)
    quanta = data[START + 2 * scales.size :]
    first, last = start // BLOCK, stop // BLOCK
    end = last * BLOCK
    sum_NxK = sum_B[: end - start].reshape((last - first, BLOCK))
    if codec == INT8:
        quanta_NxK = quanta[start:end].reshape((last - first, BLOCK))
        _add_int8(quanta_NxK, scales[first:last], factor, sum_NxK)
    else:
        bytes_NxH = quanta[start // 2 : end // 2].reshape((last - first, HALF))
        if codec == INT4:
            _add_int4(bytes_NxH, scales[first:last], factor, sum_NxK)
        elif codec == E3M0:
            _add_e3m0(bytes_NxH, scales[first:last], factor, sum_NxK)
        else:
            _add_levels(LEVELS_Cx8[codec], bytes_NxH, scales[first:last], factor, sum_NxK)
    for i in range(end, stop):
        sum_B[i - start] += _value(codec, quanta, i) * widen(scales[last]) * factor


@kernel
def _add_int8(quanta_NxK: Bytes, scales_N: Scales, factor: np.float32, sum_NxK: Values) -> None:
    for n in range(sum_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(BLOCK):
            sum_NxK[n, i] += np.float32(np.int8(quanta_NxK[n, i])) * scale * factor


@kernel
def _add_int4(bytes_NxH: Bytes, scales_N: Scales, factor: np.float32, sum_NxK: Values) -> None:
    for n in range(sum_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(HALF):
            both = np.int32(bytes_NxH[n, i])
            sum_NxK[n, 2 * i] += _low(both) * scale * factor
            sum_NxK[n, 2 * i + 1] += _high(both) * scale * factor


@kernel
def _add_e3m0(bytes_NxH: Bytes, scales_N: Scales, factor: np.float32, sum_NxK: Values) -> None:
    for n in range(sum_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(HALF):
            both = np.int32(bytes_NxH[n, i])
            sum_NxK[n, 2 * i] += _power(both & NIBBLE) * scale * factor
            sum_NxK[n, 2 * i + 1] += _power(both >> FOUR) * scale * factor


@kernel
def _add_levels(
    levels_8: Values, bytes_NxH: Bytes, scales_N: Scales, factor: np.float32, sum_NxK: Values
) -> None:
    levels = _as_words(levels_8)
    for n in range(sum_NxK.shape[0]):
        scale = widen(scales_N[n])
        for i in range(HALF):
            both = np.int32(bytes_NxH[n, i])
            sum_NxK[n, 2 * i] += _level(both & NIBBLE, levels) * scale * factor
            sum_NxK[n, 2 * i + 1] += _level(both >> FOUR, levels) * scale * factor


# --- encoding ----------------------------------------------------------------------------------


@kernel
def encode(
    codec: int, values_B: Values, first: int, values: int, data: Bytes, spare_2K: Values
) -> None:
    """Scales and quanta of `values_B`, which block `first` of a payload of a block codec begins.

    Only the last of the blocks may be short, and only at the payload's end. Threads may encode
    different blocks at once: no two share a byte.
    """
    blocks = (values + BLOCK - 1) // BLOCK
    scales = data[START : START + 2 * blocks].view(np.uint16)
    quanta = data[START + 2 * blocks :]
    width = BLOCK if codec == INT8 else HALF  # bytes of a block
    count = values_B.size // BLOCK
    whole = first + count
    if count > 0:
        part_NxK = values_B[: count * BLOCK].reshape((count, BLOCK))
        out_NxW = quanta[first * width : whole * width].reshape((count, width))
        _encode_blocks(codec, part_NxK, scales[first:whole], out_NxW)
    if values_B.size > count * BLOCK:  # zeros fill a short block, and are not sent
        rest_B = values_B[count * BLOCK :]
        padded_1xK = spare_2K[:BLOCK].reshape((1, BLOCK))
        for i in range(BLOCK):
            padded_1xK[0, i] = rest_B[i] if i < rest_B.size else np.float32(0)
        out_1xW = spare_2K[BLOCK:].view(np.uint8)[:width].reshape((1, width))
        _encode_blocks(codec, padded_1xK, scales[whole:], out_1xW)
        rest = quanta[whole * width :]
        for i in range(rest.size):
            rest[i] = out_1xW[0, i]


@kernel
def _encode_blocks(codec: int, values_NxK: Values, scales_N: Scales, out_NxW: Bytes) -> None:
    bits_NxK = values_NxK.view(np.int32)
    for n in range(values_NxK.shape[0]):
        scale = block_scale(codec, bits_NxK[n])
        scales_N[n] = scale
        if scale in (0, SCALE_NAN):
            out_NxW[n, :] = 0
        elif codec == E3M0:
            _encode_e3m0(bits_NxK[n], scale, out_NxW[n])
        elif codec == INT8:
            _encode_int8(values_NxK[n], np.float32(1) / widen(scale), out_NxW[n])
        elif codec == INT4:
            _encode_int4(values_NxK[n], np.float32(1) / widen(scale), out_NxW[n])
        else:
            _encode_levels(bits_NxK[n], MIDPOINTS_Cx7[codec], scale, out_NxW[n])


@kernel
def block_scale(codec: int, bits_K: Bits) -> int:
    """bf16 pattern of a block's scale: max |x| over the largest quantum, to nearest, ties to even.

    NaN when a value is not finite; 0 when the scale would be too small.
    """
    top = ZERO
    for i in range(BLOCK):
        top = max(top, np.int32(bits_K[i] & MAGNITUDE))  # magnitudes order like their bits
    if top >= INF:
        return SCALE_NAN
    bits = np.int64(as_bits(as_float(top) * SHARE_C[codec]))
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    scale = min(int(SCALE_MAX_C[codec]), int(nearest))
    return 0 if scale < SCALE_MIN_C[codec] else scale


@kernel
def _quantum(value: np.float32, inverse: np.float32) -> np.int32:
    """value / scale to the nearest integer in two's complement; the upper bits are rubbish."""
    return as_bits(value * inverse + ROUND)


@kernel
def _encode_int8(values_K: Values, inverse: np.float32, out_K: Bytes) -> None:
    for i in range(BLOCK):
        out_K[i] = np.uint8(_quantum(values_K[i], inverse))


@kernel
def _encode_int4(values_K: Values, inverse: np.float32, out_H: Bytes) -> None:
    for i in range(HALF):
        low = np.int32(_quantum(values_K[2 * i], inverse) & NIBBLE)
        high = np.int32(_quantum(values_K[2 * i + 1], inverse) << FOUR)
        out_H[i] = np.uint8(low | high)


@kernel
def settle(codec: int, values_B: Values, first: int, values: int, data: Bytes) -> None:
    """What `encode` has made of `values_B`, in their place: `decode`, without unpacking."""
    if codec != INT8 and codec != INT4:
        decode(codec, data, values, first * BLOCK, first * BLOCK + values_B.size, values_B)
        return
    scales = data[START : START + 2 * ((values + BLOCK - 1) // BLOCK)].view(np.uint16)
    for n in range((values_B.size + BLOCK - 1) // BLOCK):
        pattern = scales[first + n]
        scale = widen(pattern)
        part = values_B[n * BLOCK : (n + 1) * BLOCK]
        if pattern in (0, SCALE_NAN):
            for i in range(part.size):
                part[i] = np.float32(0) * scale
        else:
            _settle(part, np.float32(1) / scale, scale)


@kernel
def _settle(part_B: Values, inverse: np.float32, scale: np.float32) -> None:
    for i in range(part_B.size):
        # The sum holds the quantum in its lowest bits: the difference is it, as a number.
        part_B[i] = ((part_B[i] * inverse + ROUND) - ROUND) * scale


@kernel
def _encode_e3m0(bits_K: Bits, scale: int, out_H: Bytes) -> None:
    """Each to the nearest power of two times the scale; a tie goes to the larger magnitude."""
    middle = as_bits(np.float32(0.75) * widen(scale))  # between the two largest
    least = as_bits(np.float32(2**-7) * widen(scale))  # between the smallest and zero
    for i in range(HALF):
        low = _power_nearest(bits_K[2 * i], middle, least)
        high = _power_nearest(bits_K[2 * i + 1], middle, least)
        out_H[i] = np.uint8(low | np.int32(high << FOUR))


@kernel
def _power_nearest(bits: np.int32, middle: np.int32, least: np.int32) -> np.int32:
    """Nibble of a value. All midpoints but the least are `middle` divided by powers of two, so
    that the exponent of the distance in bits counts them."""
    size = np.int32(bits & MAGNITUDE)
    m = np.int32(np.int32((size - middle) >> MANTISSA) + SEVEN)
    m = max(min(m, SEVEN), ONE)
    nibble = np.int32(m | np.int32(np.int32(bits >> TO_TOP) & EIGHT))
    return nibble if size >= least else ZERO


@kernel
def _encode_levels(bits_K: Bits, midpoints_7: Values, scale: int, out_H: Bytes) -> None:
    """Each to the nearest level times the scale; a tie goes to the larger magnitude."""
    width = widen(scale)
    a, b = as_bits(midpoints_7[0] * width), as_bits(midpoints_7[1] * width)
    c, d = as_bits(midpoints_7[2] * width), as_bits(midpoints_7[3] * width)
    e, f = as_bits(midpoints_7[4] * width), as_bits(midpoints_7[5] * width)
    midpoints = (a, b, c, d, e, f, as_bits(midpoints_7[6] * width))
    for i in range(HALF):
        low = _level_nearest(bits_K[2 * i], midpoints)
        high = _level_nearest(bits_K[2 * i + 1], midpoints)
        out_H[i] = np.uint8(low | np.int32(high << FOUR))


@kernel
def _level_nearest(bits: np.int32, midpoints: Words) -> np.int32:
    """Nibble of a value: how many midpoints it reaches, and its sign unless it reaches none."""
    size = np.int32(bits & MAGNITUDE)
    nibble = np.int32(np.int32(np.int32(bits >> TO_TOP) & EIGHT) | ONE)
    nibble = np.int32(nibble + ONE) if size >= midpoints[1] else nibble
    nibble = np.int32(nibble + ONE) if size >= midpoints[2] else nibble
    nibble = np.int32(nibble + ONE) if size >= midpoints[3] else nibble
    nibble = np.int32(nibble + ONE) if size >= midpoints[4] else nibble
    nibble = np.int32(nibble + ONE) if size >= midpoints[5] else nibble
    nibble = np.int32(nibble + ONE) if size >= midpoints[6] else nibble
    return nibble if size >= midpoints[0] else ZERO
