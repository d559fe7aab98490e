"""Documents of files, one after another: text, JSON lines, and either of them under gzip.

A document is what the splits are made of: all of it is trained on, or all of it is held out. What
is too long to be one is cut at line ends into *passages*, each a document of its own. So whatever
is read is read in pieces of a bounded size, and a single long file has something to hold out.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

# Above this, in bytes, a document is cut: nearly every article and source file is shorter, and an
# encoder holds some hundred bytes for each token of what it works on.
DOCUMENT_MAX = 256 << 10
# Bytes of a passage of what is longer than that.
PASSAGE = 64 << 10
# And of a single file, from the shortest to the longest: of 64 passages a twentieth are three.
SINGLE_MIN, SINGLE_MAX, SINGLE_PASSAGES = 256, 4096, 64
# Read at once; a passage is shorter.
BLOCK = 1 << 20
# A line of JSON: a document, its quotes and what else belongs to it. Longer is no such file.
LINE_MAX = 64 << 20


# From where to where, in characters, in ascending order.
Spans = tuple[tuple[int, int], ...]


class Document(NamedTuple):
    """A text, and how many bytes of the source were read since the document before it.

    `spans`: of a conversation, what is to be predicted.
    """

    text: str
    read: int
    spans: Spans = ()


class Record(NamedTuple):
    """An object of JSON lines or a row of a table; `where` it stands, and bytes read for it."""

    value: Any
    where: str
    read: int


@dataclass(slots=True)
class Tally:
    """What was left out. Mutated by whoever reads documents."""

    binary: int = 0  # files that are no UTF-8 text
    empty: int = 0  # documents without a character
    first_binary: str = ""


class NotText(ValueError):
    """A file is not text; nothing of it was read as a document."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """ValueError, with the file's name, for whatever goes wrong while it is read."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def text_of(path: Path, *, single: bool) -> Iterator[Document]:
    """Documents of a text file: itself, or its passages if it is long or all that there is.

    Raises NotText before the first document, and ValueError for a byte that is no text after it.
    """
    size = path.stat().st_size
    if single:
        yield from _passages(path, single_passage(size))
    elif size > DOCUMENT_MAX or path.suffix == ".gz":
        yield from _passages(path, PASSAGE)
    else:
        raw = path.read_bytes()
        yield Document(_decoded(raw, path), len(raw))


def single_passage(size: int) -> int:
    """Bytes of a passage of a single file of `size`.

    A power of two: a text that grows keeps its passages until it has doubled, and from 256 KiB on
    for ever.
    """
    wished = 1 << max((size // SINGLE_PASSAGES).bit_length() - 1, 0)
    return min(max(wished, SINGLE_MIN), SINGLE_MAX)


def cut(text: str, at_most: int = PASSAGE) -> Iterator[str]:
    """A text in passages of at most so many bytes of UTF-8, which together are the text."""
    raw = text.encode()
    start = 0
    while start < len(raw):
        end = _end(raw, start, at_most) if len(raw) - start > at_most else len(raw)
        yield raw[start:end].decode()
        start = end


def _end(raw: bytes, start: int, at_most: int) -> int:
    """Where the passage from `start` ends: a blank line, a line's end, a space, a character."""
    last = start + at_most
    for mark, first in ((b"\n\n", start + at_most // 2), (b"\n", start), (b" ", start)):
        found = raw.rfind(mark, first, last)
        if found > start:
            return found + len(mark)
    while last > start + 1 and raw[last] & 0xC0 == 0x80:  # inside a character
        last -= 1
    return last


def _passages(path: Path, at_most: int) -> Iterator[Document]:
    """Of a text file, block by block."""
    with _opened(path) as (file, position):
        rest, offset, first = b"", 0, True
        while True:
            block = file.read(BLOCK)
            if first and not _is_text(block):
                raise NotText(f"{path} is not text in UTF-8")
            raw, first = rest + block, False
            start = 0
            while len(raw) - start > at_most or (not block and start < len(raw)):
                end = _end(raw, start, at_most) if len(raw) - start > at_most else len(raw)
                yield Document(_later(raw[start:end], path, offset + start), position())
                start = end
            rest, offset = raw[start:], offset + start
            if not block:
                return


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """A file's content, and a function: bytes of the file read since it was last called."""
    with readable(path), path.open("rb") as raw:
        seen = 0

        def position() -> int:
            nonlocal seen
            before, seen = seen, raw.tell()
            return seen - before

        if path.suffix == ".gz":
            with gzip.open(raw, "rb") as file:
                yield cast("IO[bytes]", file), position
        else:
            yield raw, position


def _is_text(block: bytes) -> bool:
    """Whether a file that begins with this is text: UTF-8, and without the byte 0."""
    if b"\0" in block:
        return False
    try:
        block.decode()
    except UnicodeDecodeError as error:
        # The block may end inside a character, of at most four bytes.
        return error.reason == "unexpected end of data" and error.start >= len(block) - 3
    return True


def _decoded(raw: bytes, path: Path) -> str:
    if b"\0" in raw:
        raise NotText(f"{path} is not text: it has bytes 0")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise NotText(f"{path} is not text in UTF-8: see byte {error.start}") from None


def _later(raw: bytes, path: Path, offset: int) -> str:
    """Of a file whose beginning is text."""
    try:
        return _decoded(raw, path)
    except NotText:
        raise ValueError(
            f"{path} begins as text and has something else from byte {offset} on: save it as "
            "UTF-8, or take it out of the source"
        ) from None


def lines_of(path: Path, field: str) -> Iterator[Document]:
    """Documents of JSON lines: the text in `field` of each. ValueError names file and line."""
    wanted = f'expected an object with a string field "{field}"'
    for record in json_records(path, wanted):
        read = record.read
        for passage in pieces(_text_in(record.value, field, f"{record.where}: {wanted}")):
            yield Document(passage, read)
            read = 0


def json_records(path: Path, wanted: str) -> Iterator[Record]:
    """Whatever stands on each line of JSON that is not empty.

    Raises ValueError that names file and line, and says what was `wanted`.
    """
    with _opened(path) as (file, position):
        number = 0
        while line := file.readline(LINE_MAX):
            number += 1
            where = f"{path}:{number}"
            if len(line) >= LINE_MAX:
                raise ValueError(
                    f"{where}: the line is longer than {LINE_MAX} bytes: is it JSON lines?"
                )
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {wanted}, and this is no JSON: {error}") from None
            yield Record(value, where, position())


def pieces(text: str) -> Iterator[str]:
    """A record's text: itself, or passages if it is long. An empty one is given as it is."""
    # A character takes at most four bytes.
    if len(text) * 4 <= DOCUMENT_MAX or len(text.encode()) <= DOCUMENT_MAX:
        yield text
    else:
        yield from cut(text)


def _text_in(record: Any, field: str, wanted: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{wanted}, not {type(record).__name__}")
    if field not in record:
        has = ", ".join(map(repr, list(record)[:8])) or "no field"
        raise ValueError(f"{wanted}; it has {has}")
    if (text := record[field]) is None:
        return ""  # a missing value is an empty document, as in a table
    if not isinstance(text, str):
        raise ValueError(f"{wanted}, whose value is {type(text).__name__}")
    # JSON can write half a character, which no text in UTF-8 holds.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
