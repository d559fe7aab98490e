"""What pages show of commands: within fenced blocks, and within lines.

Rules, by which a page can be read by a program:

- A block in `sh` or `bash` is of commands, and so is any other block in which a line begins with a
  program that is named below. All other blocks are looked at.
- In a line, code is a command if it begins with one of our programs, or with one of make, docker
  compose, curl, python, kubectl and pytest.
- A word in capitals (NAME, FOLDER/NUMBER), a word with "…" or "$" in it, and <words in brackets>
  stand for what the reader puts there. "..." stands for more of the same.
- [words in brackets] may be left out, and `a|b` or [--a | --b] is one of them. Every way is tried.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.shell import Typed, commands
from pages import DOCS, PLACED, RUN, Block, blocks

ROOT = DOCS.parent
# All but CHANGELOG.md, which tells of what was before.
PAGES = sorted({*DOCS.rglob("*.md"), *ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"})
OURS = ("diloco", "diloco-learner", "diloco-syncer", "diloco-coordinator", "operator")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
# What commands begin with, whoever's they are.
_PROGRAMS = (
    *("alias", "apt-get", "cd", "chmod", "cp", "curl", "docker", "export", "git", "kubectl", "ln"),
    *(
        "install",
        "ls",
        "make",
        "mkdir",
        "nats",
        "nats-server",
        "pip",
        "pytest",
        "python",
        "python3",
        "rm",
        "sbatch",
    ),
    *("scontrol", "sky", "srun", "sudo", "tar", "umask"),
)
_BEGINS = re.compile(
    r"^\(?(?:[A-Z_]+=(?:\"[^\"\n]*\"|\S)* +(?:\\\n *)?)*(?:[\w./~-]*/)?"
    rf"(?:{'|'.join(sorted((*OURS, *_PROGRAMS), key=len, reverse=True))})(?: |$|;)",
    re.MULTILINE,
)
_IN_A_LINE = re.compile(
    rf"(?:[A-Z_]+=\S+ )*(?:\./|\.venv/bin/)?"
    rf"(?:{'|'.join(OURS)}|make|docker (?:compose|buildx)|curl|python3?|kubectl|pip|pytest|sbatch)"
    r"(?: .*|$)",
    re.DOTALL,
)
_PLACEHOLDER = re.compile(r"[…$<>]|(?<![A-Za-z0-9_])[A-Z][A-Z0-9_]*(?![A-Za-z0-9])")
_OPTIONAL = re.compile(r"\[((?:--|[A-Z])[^\[\]]*)\]")
_EITHER = re.compile(r"(?<!\S)[\w.-]+(?:\|[\w.-]+)+(?!\S)")


@dataclass(frozen=True, slots=True)
class Shown:
    """A text of commands. `whole`: it is to be typed as it stands; else it need not be complete."""

    page: Path
    text: str
    whole: bool

    def typed(self) -> list[Typed]:
        return [found for text in variants(self.text) for found in commands(text)]


def is_placeholder(word: str) -> bool:
    """Whether the reader puts something else in its place."""
    return _PLACEHOLDER.search(word) is not None


def of_commands(block: Block) -> bool:
    return block.language in (RUN, PLACED) or (
        block.language in ("text", "", "console", "shell")
        and _BEGINS.search(block.body) is not None
    )


@cache
def shown(page: Path) -> list[Shown]:
    """Of a page, blocks first."""
    found = [Shown(page, b.body, whole=True) for b in blocks(page) if of_commands(b)]
    return found + [Shown(page, code, whole=False) for code in codes(page) if is_command(code)]


def is_command(code: str) -> bool:
    """Of code within a line."""
    return _IN_A_LINE.fullmatch(code) is not None


def codes(page: Path) -> list[str]:
    """The code within lines, each in one line."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    return [" ".join(m[1].replace("\\|", "|").split()) for m in _CODE.finditer(text)]


def paragraphs(page: Path) -> Iterator[str]:
    """Paragraphs, and rows of tables, each in one line."""
    for part in _FENCE.sub("", page.read_text("utf-8")).split("\n\n"):
        yield from part.split("\n") if part.startswith("|") else [" ".join(part.split())]


def variants(text: str) -> list[str]:
    """The ways of typing a text that says what may be left out, and what is one of several."""
    text = re.sub(r"\n +(?=\[)", " ", text)
    optional = [m[1].split(" | ") for m in _OPTIONAL.finditer(text)]
    either = [m[0].split("|") for m in _EITHER.finditer(_OPTIONAL.sub(lambda m: f" {m[1]} ", text))]
    if not optional and not either:
        return [text]
    ways = max(map(len, (*optional, *either)))
    found = [_way(_OPTIONAL.sub("", text), 0)]
    for way in range(ways):
        given = _OPTIONAL.sub(lambda m, way=way: _one(m[1].split(" | "), way), text)  # type: ignore[misc]
        found.append(_way(given, way))
    return found


def _way(text: str, way: int) -> str:
    return _EITHER.sub(lambda m: _one(m[0].split("|"), way), text)


def _one(of: list[str], way: int) -> str:
    return of[way % len(of)]
