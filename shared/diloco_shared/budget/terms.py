"""What a figure is made of: every term in words."""

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
