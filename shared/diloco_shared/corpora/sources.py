"""What a run's `source` names: which files, of which kind, and how to read their documents.

A source is one of these:

- `stdlib`, the source code of the running Python's standard library: real text, no download;
- a file: text of any kind, `.jsonl`, `.parquet`, or text and JSON lines with `.gz` behind;
- a data set that Hugging Face `datasets` saved on disk;
- a folder of any such files, and of links to folders, each read once. What is not text is left out
  and counted; hidden files are left out.

Of conversations (`chat`) the records are read, each as one document; plain text holds none.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.documents import (
    Document,
    NotText,
    Record,
    Tally,
    json_records,
    lines_of,
    readable,
    text_of,
)
from diloco_shared.corpora.tables import (
    arrow_of,
    arrow_records,
    is_saved,
    parquet_of,
    parquet_records,
    saved_files,
)
from diloco_shared.reach.local import Root, located

STDLIB = "stdlib"
# Not the library itself: installed packages, and tests, which some distributions leave out.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Names, sizes and times of so many files take some hundred MB. A corpus of more is better packed.
FILES_MAX = 1_000_000
# How documents are made of files. Another number for another way: then old caches are not used.
READING = 1

Kind = Literal["text", "lines", "parquet", "arrow"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file: `name` is relative to the source."""

    path: Path
    name: str
    kind: Kind
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Source:
    """Files to be read as documents, in the order of their names."""

    name: str  # as it was given
    path: Path
    files: tuple[SourceFile, ...]
    single: bool  # a file, rather than a folder
    field: str
    chat: Chat | None = None  # how records become conversations, where they are ones

    @property
    def bytes(self) -> int:
        """Of all files, as they lie on disk."""
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change when a file does, as far as sizes and times tell."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((READING, str(self.path), self.single, self.field)).encode())
        if self.chat is not None:
            digest.update(repr((self.chat.field, self.chat.template.text)).encode())
        for file in self.files:
            digest.update(repr((file.name, file.size, file.mtime_ns)).encode())
        return digest.hexdigest()

    def documents(self, tally: Tally) -> Iterator[Document]:
        """Every document that has a character, lazily. ValueError names the file at fault."""
        unread = 0  # bytes of what is left out: they count as done with the next document
        for file in self.files:
            left = file.size
            try:
                with readable(file.path):
                    for document in _read(file, self):
                        left -= document.read
                        if document.text:
                            yield document._replace(read=document.read + unread)
                            unread = 0
                        else:
                            tally.empty += 1
                            unread += document.read
            except NotText as error:
                if self.single:
                    kinds = ".jsonl, .parquet" if self.chat else "text, .jsonl, .parquet"
                    raise ValueError(
                        f"{error}: a source is {kinds}, or a folder of those"
                    ) from None
                tally.binary += 1
                tally.first_binary = tally.first_binary or file.name
            unread += max(left, 0)


def _read(file: SourceFile, source: Source) -> Iterator[Document]:
    if source.chat is not None:
        yield from map(source.chat.document, _records(file, source.chat))
        return
    yield from _documents(file, source)


def _records(file: SourceFile, chat: Chat) -> Iterator[Record]:
    match file.kind:
        case "text":
            raise NotText(f"{file.path} is no file of conversations")
        case "lines":
            return json_records(file.path, "expected a conversation")
        case "parquet":
            return parquet_records(file.path, chat.columns)
        case "arrow":
            return arrow_records(file.path, chat.columns)


def _documents(file: SourceFile, source: Source) -> Iterator[Document]:
    match file.kind:
        case "text":
            return text_of(file.path, single=source.single)
        case "lines":
            return lines_of(file.path, source.field)
        case "parquet":
            return parquet_of(file.path, source.field)
        case "arrow":
            return arrow_of(file.path, source.field)


def find(
    name: str, root: Root | None = None, field: str = "text", chat: Chat | None = None
) -> Source:
    """The files of source `name`; a relative path is looked for in `root`.

    `field` of a record holds its text, unless `chat` makes a conversation of it. Raises ValueError
    if there is nothing to read.
    """
    if not name.strip() or "\0" in name:
        raise ValueError("the source has no name: 'stdlib', or a folder or file of text")
    path = stdlib() if name == STDLIB else located(name, root)
    with readable(path):
        if path.is_file():
            return Source(name, path.resolve(), (_file(path, path.name),), True, field, chat)
        if not path.is_dir():
            raise ValueError(
                f"source {name!r} is neither a folder nor a file on this machine (looked for "
                f"{path.absolute()})"
            )
        if name != STDLIB and is_saved(path):
            files = tuple(
                _file(p, p.relative_to(path).as_posix(), "arrow") for p in saved_files(path)
            )
        else:
            files = tuple(_walked(path, library=name == STDLIB))
    if not files:
        raise ValueError(f"source {name!r} has no files ({path.absolute()} is empty)")
    return Source(name, path.resolve(), files, False, field, chat)


def stdlib() -> Path:
    """Where the running Python's standard library is."""
    return Path(sysconfig.get_path("stdlib"))


def _walked(root: Path, *, library: bool) -> Iterator[SourceFile]:
    found: list[tuple[str, Path]] = []
    seen = {_identity(root)}
    for folder, inner, names in os.walk(root, onerror=_refused, followlinks=not library):
        # Not entered at all: installed packages are many times the library.
        left_out = NOT_LIBRARY if library else frozenset[str]()
        inner[:] = [n for n in inner if n not in left_out and not n.startswith(".")]
        _once(Path(folder), inner, seen)
        for name in names:
            path = Path(folder, name)
            wanted = path.suffix == ".py" if library else not name.startswith(".")
            if wanted and path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
        if len(found) > FILES_MAX:
            raise ValueError(
                f"{root} has more than {FILES_MAX} files: pack them into .jsonl or .parquet files"
            )
    return (_file(path, name) for name, path in sorted(found))


def _once(folder: Path, inner: list[str], seen: set[tuple[int, int]]) -> None:
    """Of folders that are links, those that nobody leads to otherwise: else a link to what is above
    it would be walked for ever, and one to what is beside it be read twice."""
    for name in sorted(n for n in inner if (folder / n).is_symlink()):
        if (identity := _identity(folder / name)) in seen:
            inner.remove(name)
        seen.add(identity)


def _identity(folder: Path) -> tuple[int, int]:
    stat = folder.stat()
    return stat.st_dev, stat.st_ino


def _refused(error: OSError) -> None:
    raise error


def _file(path: Path, name: str, kind: Kind | None = None) -> SourceFile:
    stat = path.stat()
    return SourceFile(path, name, kind or _kind(path), stat.st_size, stat.st_mtime_ns)


def _kind(path: Path) -> Kind:
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return "lines"
    return "parquet" if path.suffix == ".parquet" else "text"
