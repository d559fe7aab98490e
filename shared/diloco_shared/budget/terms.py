"""What a figure is made of: every term in words, and the bytes of encoded values."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Term:
    """`bytes` of one thing, and how they come about."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Need:
    """A sum of terms, and the settings that make it smaller."""

    what: str
    terms: tuple[Term, ...]
    lower: str = ""

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)

    def view(self) -> dict[str, Any]:
        """JSON-ready."""
        terms = [{"name": t.name, "bytes": t.bytes, "how": t.how} for t in self.terms]
        return {"bytes": self.bytes, "terms": terms, "lower": self.lower}


def shown(size: float) -> str:
    """Bytes for people, in decimal units: 512 B, 1.5 kB, 47.1 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} B" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


# --------------------------------------------------------------------------------------------------
# How many bytes encoded values take, by codec; what they mean: `numerics/codec/layout.py`.

NAMES = ("fp32", "bf16", "int8", "int4", "e3m0")  # the place is the codec's number
IDS = {name: number for number, name in enumerate(NAMES)}
FP32, BF16, INT8, INT4, E3M0 = range(len(NAMES))

HEADER_BYTES = 8
BLOCK = 256  # values that share a scale: 16 / 256 bits of scale per value, 4.0625 in all for int4


def find(name: str) -> int:
    """Number of the codec of that name; ValueError naming the known ones."""
    try:
        return IDS[name]
    except KeyError:
        raise ValueError(
            f"unknown codec {name[:40]!r}: this side knows {', '.join(NAMES)}"
        ) from None


def blocks_of(values: int) -> int:
    """Scales that a block codec keeps for so many values."""
    return -(-values // BLOCK)


def bytes_of(name: str, values: int) -> int:
    """Size of `values` encoded values in bytes, header included."""
    number = find(name)
    if number in (FP32, BF16):
        return HEADER_BYTES + (4 if number == FP32 else 2) * values
    quanta = values if number == INT8 else -(-values // 2)
    return HEADER_BYTES + 2 * blocks_of(values) + quanta
