"""Corpora: text to three token arrays, split the same way on every machine.

`stdlib` is the source code of the running Python's standard library: real text that needs no
download. Any other source is a folder of .txt, .md, .py or .jsonl (field "text") files, split by
file, or one such file, whose end is held out.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_shared.spec.run import Data

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
VOCABULARY = {"bytes": 256}
# Not the library itself: installed packages, and tests, which some distributions leave out.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Separates documents: a byte that text does not contain.
END_OF_DOCUMENT = b"\x00"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token arrays of the three splits."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    test: NDArray[np.uint8]


def load(data: Data) -> Corpus:
    """Read the corpus that `data` names; ValueError says what is missing."""
    if data.tokenizer not in VOCABULARY:
        raise ValueError(f"data.tokenizer {data.tokenizer!r} is unknown: use 'bytes'")
    return _load(data.source, data.validation_fraction)


@lru_cache(maxsize=2)  # several learners of one process share it
def _load(source: str, fraction: float) -> Corpus:
    root = Path(sysconfig.get_path("stdlib")) if source == "stdlib" else Path(source)
    if root.is_file() and root.suffix in SUFFIXES:
        return _cut(_text(root), fraction, source)
    if not root.is_dir():
        raise ValueError(
            f"data.source {source!r} is neither a folder nor a file "
            f"({', '.join(SUFFIXES)}) on this machine"
        )
    splits: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for path in sorted(_files(root, stdlib=source == "stdlib")):
        name = path.relative_to(root).as_posix()
        splits[_split(name, fraction)].append(_text(path))
    empty = [name for name, parts in splits.items() if not parts]
    if empty:
        raise ValueError(
            f"data.source {source!r}: no files for {', '.join(empty)}; it needs more files "
            f"({', '.join(SUFFIXES)}), since splits go by file"
        )
    arrays = {
        name: np.frombuffer(END_OF_DOCUMENT.join(parts), dtype=np.uint8)
        for name, parts in splits.items()
    }
    return Corpus(**arrays)


def _cut(text: bytes, fraction: float, source: str) -> Corpus:
    """One text: its last `fraction` is for tests, the one before it for validation."""
    tokens = np.frombuffer(text, dtype=np.uint8)
    held_out = int(len(tokens) * fraction)
    if not held_out:
        raise ValueError(f"data.source {source!r} is too short to hold {fraction:.0%} of it out")
    train, validation, test = np.split(tokens, [len(tokens) - 2 * held_out, len(tokens) - held_out])
    return Corpus(train, validation, test)


def _files(root: Path, *, stdlib: bool) -> Iterator[Path]:
    suffixes = (".py",) if stdlib else SUFFIXES
    for folder, inner, names in os.walk(root):
        if stdlib:
            # Not entered at all: installed packages are many times the library.
            inner[:] = [name for name in inner if name not in NOT_LIBRARY]
        for name in names:
            path = Path(folder, name)
            if path.suffix in suffixes and path.is_file():
                yield path


def _split(name: str, fraction: float) -> str:
    """By a hash of the name: adding a file moves no other."""
    place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64
    if place < fraction:
        return "validation"
    return "test" if place < 2 * fraction else "train"


def _text(path: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix != ".jsonl":
        return raw
    texts = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f'{path}:{number}: expected an object with a string field "text"')
        texts.append(record["text"].encode())
    return END_OF_DOCUMENT.join(texts)
