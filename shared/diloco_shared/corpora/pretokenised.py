"""Tokens that somebody else made: a raw `.bin` of numbers, or a `.npy` of numpy.

    tokens.bin       little-endian uint16 or uint32, nothing else
    tokens.json      beside it: {"dtype": "uint16", "vocabulary": 50257, "end_of_document": 50256}

Without that file the tokenizer of the run's settings says how many tokens there are, and a `.npy`
says its own type. Such a file has no documents that could be dealt to splits: its end is held out.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diloco_shared.corpora.prepared import VOCABULARY_MAX, Corpus
from diloco_shared.corpora.sequences import Tokens
from diloco_shared.corpora.splits import check_fraction
from diloco_shared.corpora.token_files import TokenFile, token_file

SUFFIXES = (".bin", ".npy")
DTYPES = ("uint16", "uint32")
# A few numbers.
BESIDE_BYTES_MAX = 1 << 16
FIELDS = ("dtype", "vocabulary", "end_of_document")


@dataclass(frozen=True, slots=True)
class _Said:
    """What the file beside it says; None for what it does not."""

    dtype: str | None
    vocabulary: int | None
    end_of_document: int | None


def is_tokens(path: Path) -> bool:
    """Whether a source is such a file, by its name."""
    return path.suffix in SUFFIXES and path.is_file()


def open_tokens(path: Path, fraction: float, vocabulary: int | None = None) -> Corpus:
    """The last `fraction` of the tokens is for test, the one before it for validation.

    `vocabulary`: of the run's tokenizer, where no file beside this one says it. Raises ValueError.
    """
    check_fraction(fraction)
    said = _beside(path)
    array = _numpy(path, said) if path.suffix == ".npy" else _raw(path, said, vocabulary)
    size = said.vocabulary or vocabulary
    if size is None and array.dtype == np.uint8:
        size = 256
    if size is None:
        raise ValueError(
            f"how many tokens {path} knows is not known: write {_example(path)}, or set "
            "data.tokenizer"
        )
    held_out = int(len(array) * fraction)
    if not held_out:
        raise ValueError(
            f"{path} has {len(array)} tokens: too few to hold {fraction:.0%} of them out"
        )
    train = len(array) - 2 * held_out
    ends = ((0, train), (train, train + held_out), (train + held_out, len(array)))
    training, validation, test = (Tokens([array.part(a, b)], size, str(path)) for a, b in ends)
    return Corpus(training, validation, test, size, said.end_of_document, "", str(path))


def _example(path: Path) -> str:
    return f'{{"dtype": "uint16", "vocabulary": N}} to {path.with_suffix(".json")}'


def _beside(path: Path) -> _Said:
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return _Said(None, None, None)
    try:
        if beside.stat().st_size > BESIDE_BYTES_MAX:
            raise ValueError(f"it is longer than {BESIDE_BYTES_MAX} bytes")
        body: Any = json.loads(beside.read_bytes())
        if not isinstance(body, dict):
            raise ValueError("expected an object")
        if unknown := sorted(body.keys() - set(FIELDS)):
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(FIELDS)}")
        if (dtype := body.get("dtype")) is not None and dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        vocabulary = _number(body, "vocabulary", 2)
        return _Said(dtype, vocabulary, _number(body, "end_of_document", 0))
    except OSError as error:
        raise ValueError(f"{beside} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{beside} does not describe {path.name}: {error}") from None


def _number(body: dict[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or not least <= value <= VOCABULARY_MAX:
        raise ValueError(f"{name} {value!r} is no whole number from {least} to {VOCABULARY_MAX}")
    return value


def _raw(path: Path, said: _Said, vocabulary: int | None) -> TokenFile:
    dtype = said.dtype
    if dtype is None:
        known = said.vocabulary or vocabulary
        if known is None:
            raise ValueError(
                f"{path} does not say what its numbers are: write {_example(path)}, or set "
                "data.tokenizer"
            )
        dtype = "uint16" if known <= 1 << 16 else "uint32"
    size, each = path.stat().st_size, np.dtype(dtype).itemsize
    if size % each:
        raise ValueError(
            f"{path} has {size} bytes, which are no whole number of {dtype}: it is cut"
        )
    return token_file(path, dtype, size // each)


def _numpy(path: Path, said: _Said) -> TokenFile:
    try:
        # Mapped to read what the file says of itself; the numbers are read otherwise.
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            raise ValueError("it holds several arrays, or none")
        found = TokenFile(path, array.dtype, array.offset, array.size)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no array of numpy: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}: tokens are whole numbers in one "
            "dimension"
        )
    if said.dtype is not None and said.dtype != array.dtype.name:
        raise ValueError(
            f"{path} holds {array.dtype}, and {path.with_suffix('.json').name} says {said.dtype}"
        )
    return found
