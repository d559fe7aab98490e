"""Tokenizers: text to numbers and back.

`bytes` needs no file: each byte of UTF-8 is a number. Others are named by a path: a Hugging Face
`tokenizer.json`, or a folder that has one, or a SentencePiece `.model`. None is ever downloaded.

A tokenizer has a *digest*: two that have the same one make the same numbers of the same text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BYTES = "bytes"
# Of a file that describes a tokenizer; those with a quarter of a million pieces have 35 MB.
FILE_BYTES_MAX = 512 << 20
# What ends a document in well-known tokenizers, tried in this order where no file names it.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
JSON, CONFIG, SPECIAL, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class Tokenizer(Protocol):
    """What turns text into numbers below `vocabulary`."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest number that it makes."""

    @property
    def end_of_document(self) -> int:
        """The number that stands behind every document."""

    @property
    def digest(self) -> str:
        """32 hex digits of all that decides which numbers a text becomes."""

    @property
    def chat_template(self) -> str | None:
        """How a conversation is written as one text (a Jinja template), where it says so."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Name and content of each file that it was read from, for a copy; none for `bytes`."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The numbers of each text, without the end of document. May be called by several
        threads at once."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these numbers; what is no whole character is shown as such."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Each byte of the text in UTF-8. Byte 0 ends a document: text does not contain it."""

    vocabulary: int = 256
    end_of_document: int = 0
    chat_template: str | None = None

    @property
    def digest(self) -> str:
        """Of its name: there is one of it."""
        return _digest(BYTES.encode(), self.end_of_document, self.vocabulary)

    @property
    def files(self) -> Mapping[str, bytes]:
        """None."""
        return {}

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return bytes(ids).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A `tokenizer.json` of the package `tokenizers`."""

    inner: Any = field(repr=False)  # tokenizers.Tokenizer
    vocabulary: int
    end_of_document: int
    digest: str
    chat_template: str | None
    files: Mapping[str, bytes] = field(repr=False)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer. Computes on the cores of as many threads as call it."""
        # A batch of one text each: the package would spread a longer one over all cores, whatever
        # number of workers was asked for, and is not quicker for that.
        encode = self.inner.encode_batch_fast
        return [np.array(encode([t], add_special_tokens=False)[0].ids, np.uint32) for t in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        text: str = self.inner.decode(list(map(int, ids)), skip_special_tokens=False)
        return text


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A `.model` of the package `sentencepiece`."""

    inner: Any = field(repr=False)  # sentencepiece.SentencePieceProcessor
    vocabulary: int
    end_of_document: int
    digest: str
    files: Mapping[str, bytes] = field(repr=False)
    chat_template: str | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer."""
        # One thread for each that calls it: as many workers as were asked for.
        found = self.inner.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, np.uint32) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        text: str = self.inner.decode(list(map(int, ids)))
        return text


def load(name: str, root: Path | None = None) -> Tokenizer:
    """`bytes`, or the tokenizer at a path; a relative one is looked for in `root`.

    Raises ValueError that names the file and what is wrong with it.
    """
    if name == BYTES:
        return Bytes()
    path = (root or Path()) / Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise ValueError(
            f"tokenizer {name!r} is neither 'bytes' nor a file or folder on this machine (looked "
            f"for {path.absolute()})"
        )
    if path.suffix == ".model":
        return _sentence_piece(path)
    return _hugging_face(path, path.parent if path.name == JSON else None)


def _from_folder(folder: Path) -> Tokenizer:
    if (folder / JSON).is_file():
        return _hugging_face(folder / JSON, folder)
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return _sentence_piece(models[0])
    raise ValueError(
        f"folder {folder} is no tokenizer: it has no {JSON}, and {len(models)} files *.model "
        "where one is wanted"
    )


def _hugging_face(path: Path, beside: Path | None) -> HuggingFace:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"{path} is read by the package tokenizers, which is not installed: pip install "
            "tokenizers"
        ) from None
    raw = _content(path)
    try:
        inner = tokenizers.Tokenizer.from_str(raw.decode())
    except Exception as error:  # whatever the package's own code raises: it has no class for it
        raise ValueError(f"{path} is no tokenizer of Hugging Face: {error}") from None
    # Of a training set-up long gone; either would make other text of a document.
    inner.no_truncation()
    inner.no_padding()
    settings = {name: _settings(beside, name) for name in (CONFIG, SPECIAL)}
    vocabulary = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if vocabulary < 2:
        raise ValueError(f"{path} has a vocabulary of {vocabulary} tokens")
    end = _end(inner, settings, path)
    files = {JSON: raw}
    for name in (CONFIG, SPECIAL, TEMPLATE):
        if beside is not None and (beside / name).is_file():
            files[name] = _content(beside / name)
    template = _template(settings[CONFIG], files.get(TEMPLATE))
    digest = _digest(raw, end, vocabulary)
    return HuggingFace(inner, vocabulary, end, digest, template, files)


def _settings(beside: Path | None, name: str) -> dict[str, Any]:
    path = None if beside is None else beside / name
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(_content(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object")
    return found


def _end(inner: Any, settings: Mapping[str, dict[str, Any]], path: Path) -> int:
    """The token that ends a document: the one that the files name, or a well-known one."""
    for name, found in settings.items():
        token = found.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            number = inner.token_to_id(token)
            if number is None:
                raise ValueError(
                    f"{path.parent / name} names eos_token {token!r}, which {path.name} does not "
                    "have"
                )
            return int(number)
    for token in KNOWN_ENDS:
        if (number := inner.token_to_id(token)) is not None:
            return int(number)
    raise ValueError(
        f"{path} has no token that ends a document (such as {KNOWN_ENDS[0]}): name it as "
        f'"eos_token" in a {CONFIG} beside it'
    )


def _template(config: Mapping[str, Any], separate: bytes | None) -> str | None:
    if separate is not None:
        return separate.decode("utf-8", "replace")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _sentence_piece(path: Path) -> SentencePiece:
    try:
        import sentencepiece
    except ImportError:
        raise ValueError(
            f"{path} is read by the package sentencepiece, which is not installed: pip install "
            "sentencepiece"
        ) from None
    raw = _content(path)
    inner = sentencepiece.SentencePieceProcessor()
    try:
        inner.LoadFromSerializedProto(raw)
        vocabulary, end = int(inner.get_piece_size()), int(inner.eos_id())
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{path} is no model of SentencePiece: {error}") from None
    if end < 0:
        raise ValueError(
            f"{path} has no token that ends a document: train it with an eos_id of 0 or more"
        )
    digest = _digest(raw, end, vocabulary)
    return SentencePiece(inner, vocabulary, end, digest, {path.name: raw})


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"{path} is longer than {FILE_BYTES_MAX} bytes: no tokenizer is")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _digest(content: bytes, end_of_document: int, vocabulary: int) -> str:
    digest = hashlib.blake2b(content, digest_size=16)
    digest.update(f"{end_of_document} {vocabulary}".encode())
    return digest.hexdigest()
