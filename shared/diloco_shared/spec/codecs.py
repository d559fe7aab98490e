"""Codecs by name: what everybody must know of them, and the bytes that encoded values take.

What the bytes mean stands in `numerics/codec/layout.py`. A codec whose values are a table of levels
is a row here, and no other code: settings, budgets and worlds know it from here, the encoders of
processors and of devices read the table, and merges add up what they encoded. A row stands at the
end, since its place is the codec's number on the wire. Tests pin the bytes of every codec in
`tests/golden/codec.json`.

A codec with arithmetic of its own stands in three places: its row here, its arithmetic on a
processor in `numerics/codec/kernels.py`, and its encoder on a device in the learner's
`exchange/encoding.py`. Whoever only counts bytes loads no compiler so, and a syncer loads no JAX.
"""

from dataclasses import dataclass

BLOCK = 256  # values that share a scale: 16 / 256 bits of scale per value, 4.0625 in all for int4
SCALE_BITS = 16
HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """What everybody must know of a codec who does not encode or decode.

    `bits` of a value, without its share of a scale; `scaled`: whether each block of values has a
    scale; `error`: the largest, as a share of the largest value of the block.

    `levels`: the magnitudes that four bits stand for, in units of the block's scale; empty for a
    codec with arithmetic of its own. There are eight, the first is 0, and they increase: a nibble
    sign << 3 | m is (-1)^sign * levels[m], and the scale is the block's largest magnitude divided
    by levels[7]. Levels and the midpoints between them have at most 16 significant bits, so that
    their products with a scale, which has 8, are exact in fp32.
    """

    name: str
    bits: int
    scaled: bool
    error: float
    levels: tuple[float, ...] = ()

    @property
    def bits_in_all(self) -> float:
        """Of a value, with its share of the block's scale."""
        return self.bits + (SCALE_BITS / BLOCK if self.scaled else 0.0)

    def data_bytes(self, values: int) -> int:
        """What the values themselves take, without header and scales."""
        return -(-values * self.bits // 8)


# The place is the codec's number on the wire: a new one comes last.
CODECS = (
    CodecFacts("fp32", 32, scaled=False, error=0.0),
    CodecFacts("bf16", 16, scaled=False, error=2.0**-8),
    CodecFacts("int8", 8, scaled=True, error=0.01),
    CodecFacts("int4", 4, scaled=True, error=0.1),
    CodecFacts("e3m0", 4, scaled=True, error=0.34),
    # The 4-bit float of the OCP microscaling formats.
    CodecFacts("e2m1", 4, scaled=True, error=0.17, levels=(0, 0.5, 1, 1.5, 2, 3, 4, 6)),
)
NAMES = tuple(c.name for c in CODECS)
# What has arithmetic of its own, by number.
FP32, BF16, INT8, INT4, E3M0 = range(5)


def find(name: str) -> int:
    """Number of the codec of that name; ValueError naming the known ones."""
    if name not in NAMES:
        raise ValueError(f"unknown codec {name[:40]!r}: this side knows {', '.join(NAMES)}")
    return NAMES.index(name)


def facts(name: str) -> CodecFacts:
    """Of the codec of that name; ValueError naming the known ones."""
    return CODECS[find(name)]


def blocks_of(values: int) -> int:
    """Scales that a block codec keeps for so many values."""
    return -(-values // BLOCK)


def bytes_of(name: str, values: int) -> int:
    """Size of `values` encoded values in bytes, header included."""
    codec = facts(name)
    scales = SCALE_BITS // 8 * blocks_of(values) if codec.scaled else 0
    return HEADER_BYTES + scales + codec.data_bytes(values)
