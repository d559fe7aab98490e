"""Code blocks of the documentation: what a reader is told to type, and files that he is shown."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Languages of blocks: commands to type, commands to type in the place that their first line names,
# files, and what is only looked at.
RUN, PLACED, SHOWN = "sh", "bash", ("text", "json", "")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `file`: the name that its first line, a comment, gives it."""

    language: str
    body: str

    @property
    def file(self) -> str:
        first = self.body.partition("\n")[0]
        found = re.fullmatch(r"# ([\w./-]+\.\w+)", first)
        return found[1] if found else ""


def blocks(page: Path) -> list[Block]:
    """Of one page, in order."""
    return [Block(m[1], m[2]) for m in _BLOCK.finditer(page.read_text("utf-8"))]


def pages(*parts: str) -> list[Path]:
    """Of these parts of the documentation."""
    return sorted(page for part in parts for page in (DOCS / part).rglob("*.md"))
