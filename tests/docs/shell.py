"""A small reader of shell: the simple commands of a text, each with its words and variables.

It knows what pages use: quotes, comments, lines that go on, here-documents, pipes, loops, functions
and `$(...)`. What a variable holds it does not know: `$NAME` stays as it is written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# What may stand before a command, and what has no command behind it.
_BEFORE = {"if", "then", "else", "elif", "while", "until", "do", "!", "{", "time"}
_ALONE = {"fi", "done", "}", "for"}
_OPERATOR = re.compile(r"\d?>>|\d?>&\d|\d?>|<<-?|<|&&|\|\||[;&|()\n]")
# A reader puts something of his own in its place: <the address of this repository>.
_TO_FILL = re.compile(r"<[a-z][^<>\n]*>")


class Unreadable(Exception):
    """A text that is no shell, as far as this reader knows it."""


@dataclass(frozen=True, slots=True)
class Typed:
    """One simple command. `environment`: what stands before it as NAME=value, or is exported."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """Without the folder in which it lies."""
        return PurePosixPath(self.words[0]).name if self.words else ""


def commands(text: str) -> list[Typed]:
    """In the order in which they stand; those within `$(...)` before the one that they are for."""
    found: list[Typed] = []
    words: list[str] = []
    tokens = _tokens(text, found)
    for token in [*tokens, ("op", "\n")]:
        kind, said = token
        if kind == "word":
            words.append(said)
            continue
        if words:
            found += _simple(words)
        words = []
    return found


def _tokens(text: str, inner: list[Typed]) -> list[tuple[str, str]]:
    """Words and operators. Redirections are left out, with the files that they name."""
    found: list[tuple[str, str]] = []
    at, ends, to_file = 0, list[str](), False
    while at < len(text):
        here = text[at]
        if here in " \t":
            at += 1
        elif text.startswith("\\\n", at):
            at += 2
        elif here == "#":
            at = _end(text, at)
        elif filled := _TO_FILL.match(text, at):
            found.append(("word", filled[0]))
            at = filled.end()
        elif operator := _OPERATOR.match(text, at):
            at = operator.end()
            said = operator[0]
            if said.startswith("<<"):
                word, at = _word(text, _blank(text, at), inner)
                ends.append(word)
            elif said == "\n" and ends:
                at = _behind(text, at, ends)
                ends = []
                found.append(("op", said))
            elif said.lstrip("0123456789")[0] in "<>":
                to_file = "&" not in said
            elif said == "(" and text.startswith("()", at - 1):
                at += 1  # a function is made; what stood before it is its name
                found.pop()
            else:
                found.append(("op", said))
        else:
            word, at = _word(text, at, inner)
            if not to_file:
                found.append(("word", word))
            to_file = False
    return found


def _blank(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _behind(text: str, at: int, ends: list[str]) -> int:
    """Behind the here-documents that end with these lines."""
    for end in ends:
        found = re.compile(rf"^{re.escape(end)}$", re.MULTILINE).search(text, at)
        if found is None:
            raise Unreadable(f"nothing ends the here-document {end}")
        at = found.end()
    return at


def _word(text: str, at: int, inner: list[Typed]) -> tuple[str, int]:
    """The word that begins here, without its quotes, and where it ends."""
    said = ""
    while at < len(text) and text[at] not in " \t\n;&|()<>":
        here = text[at]
        if here == "\\":
            said += text[at + 1 : at + 2].replace("\n", "")
            at += 2
        elif here == "'":
            end = _closing(text, "'", at + 1)
            said += text[at + 1 : end]
            at = end + 1
        elif here == '"':
            part, at = _quoted(text, at + 1, inner)
            said += part
        elif text.startswith("$(", at):
            part, at = _inner(text, at, inner)
            said += part
        else:
            said += here
            at += 1
    return said, at


def _closing(text: str, mark: str, at: int) -> int:
    end = text.find(mark, at)
    if end < 0:
        raise Unreadable(f"no {mark} ends {text[at : at + 20]!r}")
    return end


def _quoted(text: str, at: int, inner: list[Typed]) -> tuple[str, int]:
    said = ""
    while text[at : at + 1] != '"':
        if at >= len(text):
            raise Unreadable(f"no quote ends {text!r}")
        if text[at] == "\\":
            said += text[at + 1]
            at += 2
        elif text.startswith("$(", at):
            part, at = _inner(text, at, inner)
            said += part
        else:
            said += text[at]
            at += 1
    return said, at + 1


def _inner(text: str, at: int, inner: list[Typed]) -> tuple[str, int]:
    """What `$(...)` executes is a text of its own."""
    depth, end, quote = 0, at + 1, ""
    while end < len(text):
        here = text[end]
        if quote or here in "'\"":
            quote = "" if here == quote else quote or here
        else:
            depth += (here == "(") - (here == ")")
            if not depth:
                inner += commands(text[at + 2 : end])
                return "$(...)", end + 1
        end += 1
    raise Unreadable(f"no bracket ends {text[at : at + 20]!r}")


# Programs that start another one, and those of their options that take a value.
_STARTERS = {"sudo": {"-u", "-g"}, "nohup": set(), "env": set(), "srun": set(), "exec": set()}
_SHELLS = ("sh", "bash")


def _simple(words: Sequence[str], around: dict[str, str] | None = None) -> list[Typed]:
    """The command that these words are, and those that it starts in its turn."""
    while words and words[0] in _BEFORE:
        words = words[1:]
    if not words or words[0] in _ALONE:
        return []
    environment = dict(around or {})
    while words and (said := _ASSIGNED.fullmatch(words[0])):
        environment[said[1]] = said[2]
        words = words[1:]
    if words[:1] == ["export"]:
        pairs = [_ASSIGNED.fullmatch(word) for word in words[1:]]
        environment |= {said[1]: said[2] for said in pairs if said}
        words = words[:1]
    typed = Typed(tuple(words), environment)
    return [typed, *_started(typed)]


def _started(typed: Typed) -> list[Typed]:
    words = list(typed.words)
    if typed.program in _STARTERS:
        at = 1
        while at < len(words) and words[at].startswith("-"):
            at += 2 if words[at] in _STARTERS[typed.program] else 1
        return _simple(words[at:], typed.environment)
    if typed.program in _SHELLS and len(words) > 2 and words[1].endswith("c"):
        return commands(words[2])
    if typed.program == "kubectl" and "--" in words:
        return _simple(words[words.index("--") + 1 :])
    if typed.program == "alias" and len(words) > 1:
        return commands(words[1].partition("=")[2])
    return []
