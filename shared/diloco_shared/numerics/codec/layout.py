"""What an encoded fragment looks like: header, sizes, and the errors when it does not.

    "DF"  version u8 = 1  codec u8  values u32    then
    fp32, bf16:  the values
    int8:        ceil(F/256) scales (bf16), F quanta of one byte, -127..127
    4 bits:      ceil(F/256) scales (bf16), ceil(F/2) bytes: value 2i in the low nibble of byte i,
                 2i + 1 in the high one, an unused nibble is 0

Little-endian throughout. int4 quanta are two's complement, -7..7. An e3m0 nibble is
sign << 3 | m: m = 0 is zero, m = 1..7 is 2^(m - 7). So is that of a codec with levels, as e2m1
is, and m is the place in the levels of its row in `spec/codecs.py`. A value is its quantum times
its block's scale, exact in fp32: a scale has 8 significant bits, a quantum at most 16.
"""

import struct

from diloco_shared.spec.codecs import HEADER_BYTES, NAMES, bytes_of, find

MAGIC = b"DF"
VERSION = 1
HEADER = struct.Struct("<2sBBI")
assert HEADER.size == HEADER_BYTES


def header(name: str, values: int) -> bytes:
    """The first 8 bytes of `values` encoded values."""
    if not 0 <= values < 2**32:
        raise ValueError(f"{values} values: a payload holds 0 to {2**32 - 1}; cut more fragments")
    return HEADER.pack(MAGIC, VERSION, find(name), values)


def check(name: str, data: bytes, values: int) -> None:
    """ValueError unless `data` is that many values of that codec by header and size."""
    number, count = _read(data)
    if number != find(name) or count != values:
        raise ValueError(
            f"a header of {count} values of {_name(number)} where {values} of {name} belong"
        )
    expected = bytes_of(name, values)
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes of {name} for {values} values, not {expected}")


def count(name: str, data: bytes) -> int:
    """How many values `data` holds by its header; ValueError unless it is `name` and complete."""
    values = _read(data)[1]
    check(name, data, values)
    return values


def _read(data: bytes) -> tuple[int, int]:
    """(codec number, values) of a header; ValueError when it is none that this side can read."""
    if len(data) < HEADER.size:
        raise ValueError(f"{len(data)} bytes: shorter than a header of {HEADER.size}")
    magic, version, number, values = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"begins with {magic.hex()}, not with {MAGIC.hex()}: no encoded fragment")
    if version != VERSION:
        raise ValueError(
            f"format version {version}, this side reads {VERSION}: upgrade the older side"
        )
    return number, values


def _name(number: int) -> str:
    return NAMES[number] if number < len(NAMES) else f"an unknown codec ({number})"
