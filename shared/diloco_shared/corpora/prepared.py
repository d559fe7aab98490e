"""A prepared corpus on disk, and how it is opened.

    DIR/index.json              what there is, and the corpus' digest; written last
    DIR/train-00000.bin, …      tokens and nothing else, little-endian uint16, uint32 or int32
    DIR/validation-00000.bin, …
    DIR/test-00000.bin, …
    DIR/tokenizer/              the files of the tokenizer, unless it is `bytes`; and the template
                                by which conversations were written

Behind every document stands the token that ends it. A folder without an index is no corpus.

A *masked* corpus, of conversations, is of int32: a number below 0 is the complement (~token) of a
token that is read and not to be predicted. It has a format of its own, which releases that know no
signs refuse by its number.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco_shared.corpora.open_files import allow_most
from diloco_shared.corpora.sequences import Tokens
from diloco_shared.corpora.splits import SPLITS, Split
from diloco_shared.corpora.token_files import Unreadable, token_file
from diloco_shared.corpora.tokenizers import BYTES, Tokenizer, load_bytes
from diloco_shared.corpora.tokenizers import load as load_tokenizer

INDEX, TOKENIZER = "index.json", "tokenizer"
# The number of this format. A change that an older reader would misread gets the next one.
FORMAT, MASKED_FORMAT = 1, 2
# Of an index, with some hundred bytes for each of FILES_MAX shards.
INDEX_BYTES_MAX = 32 << 20
# Shards of a split: at 256 MiB each, sixteen times what the largest public corpora have.
SHARDS_MAX = 65_536

# How every index of ours begins.
_OURS = re.compile(rb'\s*\{\s*"format":\s*\d+,\s*"digest":\s*"[0-9a-f]{32}"')

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Moved = Callable[[int], None]  # told how many bytes were read since it was told last
# A model's embedding has no more rows than this (spec.shapes.DIMENSION_MAX).
VOCABULARY_MAX = 1 << 24


class IndexEntry(BaseModel):
    """Of an index: nothing unknown, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(IndexEntry):
    """One file of tokens. `documents`: how many end in it. `predicted`: of a masked corpus, how
    many tokens are to be predicted."""

    file: str = Field(pattern=r"^(train|validation|test)-\d{5,}\.bin$")
    tokens: Count
    documents: Count
    digest: Digest
    predicted: Count = 0


class PreparedSplit(IndexEntry):
    """One split. `digest`: of its tokens, however they are cut into files. `ends_within`: how often
    the token that ends a document stands within one, since the text spells it; of text alone."""

    tokens: Count
    documents: Count
    digest: Digest
    predicted: Count = 0
    ends_within: Count = 0
    shards: Annotated[list[Shard], Field(max_length=SHARDS_MAX)]


class Described(IndexEntry):
    """The tokenizer: `bytes`, or the copy in the folder."""

    kind: Literal["bytes", "files"]
    digest: Digest


class Index(IndexEntry):
    """What `index.json` says. `rows`: that a model needs for these tokens, where the tokenizer has
    more of them; none in a corpus of an earlier build."""

    format: int
    digest: Digest
    tokenizer: Described
    vocabulary: int = Field(ge=2, le=VOCABULARY_MAX)
    rows: int | None = Field(None, ge=1, lt=VOCABULARY_MAX)
    end_of_document: int = Field(ge=0, lt=VOCABULARY_MAX)
    dtype: Literal["uint16", "uint32", "int32"]
    masked: bool = False
    source: str
    fraction: float = Field(gt=0, lt=0.5)
    skipped_files: Count
    splits: dict[Literal["train", "validation", "test"], PreparedSplit]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Corpus:
    """The three splits as token sequences, and what is known of them.

    `digest` is empty for tokens that came without one: `digest_of` computes it.
    """

    train: Tokens
    validation: Tokens
    test: Tokens
    vocabulary: int
    end_of_document: int | None
    digest: str
    name: str
    folder: Path | None = None
    index: Index | None = None

    def split(self, name: Split) -> Tokens:
        """One of the three."""
        found: Tokens = getattr(self, name)
        return found

    @property
    def rows(self) -> int:
        """How many rows a model needs for these tokens. Their tokenizer may have more, such as one
        that stands for an image, and never occurs."""
        return self.vocabulary if self.index is None else self.index.rows or self.vocabulary

    @property
    def masked(self) -> bool:
        """Whether some tokens are only read: the sign says which."""
        return self.index is not None and self.index.masked

    @property
    def ends_within(self) -> int:
        """How often the token that ends a document stands within one, as far as that is known: it
        cuts the document in two."""
        splits = {} if self.index is None else self.index.splits
        return sum(part.ends_within for part in splits.values())

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What made the tokens, if it is known; reads its files."""
        if self.folder is None or self.index is None:
            return None
        folder = self.folder / TOKENIZER
        if self.index.tokenizer.kind == BYTES:
            return load_bytes(folder)
        return load_tokenizer(str(folder))


def is_prepared(folder: Path) -> bool:
    """Whether a corpus was written here to its end. Others call files `index.json`, too.

    Raises OSError where this process may not look.
    """
    index = folder / INDEX
    if not index.is_file():
        return False
    if (folder / "train-00000.bin").is_file():
        return True
    try:
        with index.open("rb") as file:
            return _OURS.match(file.read(200)) is not None
    except OSError:
        return True  # whoever opens it says what is wrong


def whole(folder: Path) -> bool:
    """Whether all that its index names is there, as long as it should be. Reads the index alone."""
    try:
        index = read_index(folder)
        shards = [shard for part in index.splits.values() for shard in part.shards]
        size = np.dtype(index.dtype).itemsize
        return all((folder / s.file).stat().st_size == s.tokens * size for s in shards)
    except (ValueError, OSError):
        return False


def open_corpus(folder: Path) -> Corpus:
    """The corpus in a folder, whatever its size, at once: nothing of its tokens is read.

    Raises ValueError if the index or a file is not as it was written, or if it has more files than
    this process may open.
    """
    index = read_index(folder)
    allow_most()
    splits = {}
    for name, part in index.splits.items():
        parts = [token_file(folder / s.file, index.dtype, s.tokens) for s in part.shards]
        # Beyond the largest that was written a number is damaged.
        below = index.rows or index.vocabulary
        splits[name] = Tokens(parts, below, f"{folder} ({name})", masked=index.masked)
    return Corpus(
        splits["train"],
        splits["validation"],
        splits["test"],
        index.vocabulary,
        index.end_of_document,
        index.digest,
        str(folder),
        folder,
        index,
    )


def read_index(folder: Path) -> Index:
    """What a corpus says of itself; ValueError if it is not sound."""
    path = folder / INDEX
    try:
        if path.stat().st_size > INDEX_BYTES_MAX:
            raise ValueError(f"{path} is longer than {INDEX_BYTES_MAX} bytes: it is no index")
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {INDEX}, so it is no prepared corpus: 'diloco data prepare' makes one"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no index of a corpus: {error}") from None
    given = body.get("format") if isinstance(body, dict) else None
    if given not in (FORMAT, MASKED_FORMAT):
        raise ValueError(
            f"{path} is of format {given!r}, and this release reads formats {FORMAT} and "
            f"{MASKED_FORMAT}: prepare the corpus again, or use the release that made it"
        )
    try:
        index = Index.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is damaged: {where}: {first['msg']}") from None
    _check(index, path)
    return index


def _check(index: Index, path: Path) -> None:
    """What no single field shows."""
    missing = [name for name in SPLITS if name not in index.splits]
    if missing:
        raise ValueError(f"{path} is damaged: it has no split {', '.join(missing)}")
    for name, part in index.splits.items():
        for what in ("tokens", "documents", "predicted"):
            total = sum(getattr(shard, what) for shard in part.shards)
            if total != getattr(part, what):
                raise ValueError(
                    f"{path} is damaged: splits.{name} has {getattr(part, what)} {what}, its "
                    f"shards {total}"
                )
    signed = (index.masked, index.dtype == "int32", index.format == MASKED_FORMAT)
    if len(set(signed)) > 1:
        raise ValueError(
            f"{path} is damaged: a masked corpus, and no other, is of int32 and of format "
            f"{MASKED_FORMAT}; this is of {index.dtype}, of format {index.format}, and masked is "
            f"{str(index.masked).lower()}"
        )
    if index.rows is not None and not index.end_of_document < index.rows < index.vocabulary:
        raise ValueError(
            f"{path} is damaged: {index.rows} rows are not below a vocabulary of "
            f"{index.vocabulary}, or not enough for the token that ends a document"
        )
    if index.vocabulary > (most := np.iinfo(index.dtype).max + 1):
        raise ValueError(
            f"{path} is damaged: a vocabulary of {index.vocabulary} does not fit {index.dtype} "
            f"({most} values)"
        )
    splits = {name: part.digest for name, part in index.splits.items()}
    digest = combined(index.tokenizer.digest, splits, index.format)
    if digest != index.digest:
        raise ValueError(
            f"{path} is damaged: its digest is {index.digest}, and its splits make {digest}"
        )


def combined(tokenizer: str, splits: Mapping[Split, str], format_: int = FORMAT) -> str:
    """The corpus' digest, 32 hex digits, of those of its tokenizer and its splits, which are of the
    numbers with their signs."""
    text = json.dumps([format_, tokenizer, *(splits[name] for name in SPLITS)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_tokens(tokens: Tokens, dtype: str, moved: Moved = lambda more: None) -> str:
    """Digest of a split as `PreparedSplit.digest` has it; reads all of it, a block at a time.

    Raises Unreadable.
    """
    digest = hashlib.blake2b(digest_size=16)
    for block in tokens.blocks():
        numbers = np.ascontiguousarray(block, np.dtype(dtype).newbyteorder("<"))
        digest.update(numbers.view(np.uint8).data)
        moved(block.nbytes)
    return digest.hexdigest()


def verify(corpus: Corpus) -> list[str]:
    """Every split whose tokens are not those that were written, in words; reads all of them."""
    index, faults = corpus.index, list[str]()
    if index is None:
        return faults
    for name, part in index.splits.items():
        try:
            sound = hash_tokens(corpus.split(name), index.dtype) == part.digest
        except Unreadable as error:
            faults.append(f"the {name} tokens: {error}")
            continue
        if not sound:
            faults.append(
                f"the {name} tokens of {corpus.name} are not those that were written: copy or "
                "prepare them again"
            )
    return faults


def digest_of(corpus: Corpus, moved: Moved = lambda more: None) -> str:
    """The digest, computed where the corpus came without one: then all of it is read."""
    if corpus.digest:
        return corpus.digest
    dtype = "uint16" if corpus.vocabulary <= 1 << 16 else "uint32"
    return combined("", {name: hash_tokens(corpus.split(name), dtype, moved) for name in SPLITS})
