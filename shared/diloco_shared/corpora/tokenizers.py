"""Tokenizers: text to numbers and back.

`bytes` needs no file: each byte of UTF-8 is a number. Others are named by a path: a Hugging Face
`tokenizer.json`, or a folder that has one, or a SentencePiece `.model`. None is ever downloaded.

A tokenizer has a *digest*: two that have the same one make the same numbers of the same text.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco_shared.reach.local import Root, located

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
    def special(self) -> Mapping[str, str]:
        """Texts of special tokens by the names that chat templates know, such as `eos_token`. In a
        text that is encoded by `encode_pieces` they become those tokens."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Name and content of each file that it was read from, for a copy; of `bytes` there is none
        but a chat template."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The numbers of each text, without the end of document. May be called by several
        threads at once."""

    def encode_pieces(self, pieces: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The numbers of one text that is given in pieces, of each piece.

        They are those of the whole text, unless a token would have characters of two pieces: there
        the text is cut, and both sides are encoded as if they stood alone.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these numbers; what is no whole character is shown as such."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Each byte of the text in UTF-8. Byte 0 ends a document: text does not contain it."""

    vocabulary: int = 256
    end_of_document: int = 0
    chat_template: str | None = None

    @property
    def digest(self) -> str:
        """Of its name: there is one of it."""
        return digest_of_content(BYTES.encode(), self.end_of_document, self.vocabulary)

    @property
    def special(self) -> Mapping[str, str]:
        """See Tokenizer."""
        return {"eos_token": chr(self.end_of_document)}

    @property
    def files(self) -> Mapping[str, bytes]:
        """See Tokenizer."""
        return {} if self.chat_template is None else {TEMPLATE: self.chat_template.encode()}

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def encode_pieces(self, pieces: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer."""
        return self.encode_batch(pieces)

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
    special: Mapping[str, str]
    files: Mapping[str, bytes] = field(repr=False)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer. Computes on the cores of as many threads as call it."""
        # A batch of one text each: the package would spread a longer one over all cores, whatever
        # number of workers was asked for, and is not quicker for that.
        encode = self.inner.encode_batch_fast
        return [np.array(encode([t], add_special_tokens=False)[0].ids, np.uint32) for t in texts]

    def encode_pieces(self, pieces: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer."""
        found, crossed = self._divided(pieces)
        if not len(crossed):
            return found
        # Cut there, once: what is then still of two pieces is encoded piece by piece.
        cuts, parts = [0, *(crossed + 1), len(pieces)], []
        for a, b in pairwise(cuts):
            divided, still = self._divided(pieces[a:b])
            parts += self.encode_batch(pieces[a:b]) if len(still) else divided
        return parts

    def _divided(self, pieces: Sequence[str]) -> tuple[list[NDArray[np.uint32]], NDArray[np.int64]]:
        """The tokens of the whole text by the piece in which each ends, and the pieces behind whose
        end a token goes on that began in it."""
        (whole,) = self.inner.encode_batch(["".join(pieces)], add_special_tokens=False)
        ids = np.array(whole.ids, np.uint32)
        ends_K = np.cumsum([len(piece) for piece in pieces])
        # A token stands for all that the ones before it do not: where it says that it begins, white
        # space in front may be left out.
        last_T = np.maximum.accumulate(np.array([end for _, end in whole.offsets], np.int64))
        first_T = np.concatenate([[0], last_T[:-1]]).astype(np.int64)[: len(last_T)]
        owner_T = np.searchsorted(ends_K, last_T, side="left")
        begun_T = np.minimum(np.searchsorted(ends_K, first_T, side="right"), owner_T)
        crossed: set[int] = set()
        for token in np.flatnonzero(begun_T < owner_T):
            over = range(int(begun_T[token]), int(owner_T[token]))
            rest = pieces[over[0] + 1] if len(over) == 1 else ""
            behind = rest[: int(last_T[token] - ends_K[over[0]])]
            if behind.isspace() and int(ids[token]) in self.inner.get_added_tokens_decoder():
                owner_T[token] = over[0]  # some special tokens take the white space behind them
            else:
                crossed.update(over)
        starts = np.searchsorted(owner_T, np.arange(len(pieces) + 1))
        found = [ids[a:b] for a, b in pairwise(starts)]
        return found, np.array(sorted(crossed), np.int64)

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
    special: Mapping[str, str]
    files: Mapping[str, bytes] = field(repr=False)
    chat_template: str | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer."""
        # One thread for each that calls it: as many workers as were asked for.
        found = self.inner.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, np.uint32) for ids in found]

    def encode_pieces(self, pieces: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See Tokenizer. The package itself takes no special token for one in a text."""
        names = "|".join(map(re.escape, self.special.values()))
        found: list[list[int]] = [[] for _ in pieces]
        run: list[tuple[int, str]] = []  # since the last special token: pieces, and their texts

        def close() -> None:
            for (number, _), ids in zip(run, self._divided([t for _, t in run]), strict=True):
                found[number] += ids
            run.clear()

        for number, piece in enumerate(pieces):
            # Every second part is a special token.
            for place, part in enumerate(re.split(f"({names})", piece)):
                if place % 2:
                    close()
                    found[number].append(int(self.inner.piece_to_id(part)))
                elif part:
                    run.append((number, part))
        close()
        return [np.array(ids, np.uint32) for ids in found]

    def _divided(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of the joined texts, of each; where a token is of two, each text's own."""
        if not texts:
            return []
        ids = self.inner.encode("".join(texts), out_type=int)
        cuts, before = [0], ""
        for text in texts[:-1]:
            before += text
            begin = self.inner.encode(before, out_type=int)
            if ids[: len(begin)] != begin or len(begin) < cuts[-1]:
                return [list(map(int, found)) for found in self.encode_batch(texts)]
            cuts.append(len(begin))
        cuts.append(len(ids))
        return [ids[a:b] for a, b in pairwise(cuts)]

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        text: str = self.inner.decode(list(map(int, ids)))
        return text


def load(name: str, root: Root | None = None) -> Tokenizer:
    """`bytes`, or the tokenizer at a path; a relative one is looked for in `root`.

    Raises ValueError that names the file and what is wrong with it.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = located(name, root)
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


def rows_for_text(tokenizer: Tokenizer) -> int:
    """How many rows a model needs for whatever people write, and for the ends of documents. Some
    tokenizers have tokens above those which only a text has that spells them, and come with models
    that have no row for them."""
    if not isinstance(tokenizer, HuggingFace):
        return tokenizer.vocabulary
    of_text = max(tokenizer.inner.get_vocab(with_added_tokens=False).values(), default=-1)
    return max(of_text, tokenizer.end_of_document) + 1


def load_bytes(folder: Path) -> ByteTokenizer:
    """`bytes`, with the chat template that a folder has, if it has one. Raises ValueError."""
    return ByteTokenizer(chat_template=_template({}, _beside(folder, TEMPLATE).get(TEMPLATE)))


def _from_folder(folder: Path) -> Tokenizer:
    if (folder / JSON).is_file():
        return _hugging_face(folder / JSON, folder)
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return _sentence_piece(models[0], folder)
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
    raw = content_of(path)
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
    files = {JSON: raw, **_beside(beside, CONFIG, SPECIAL, TEMPLATE)}
    template = _template(settings[CONFIG], files.get(TEMPLATE))
    digest = digest_of_content(raw, end, vocabulary)
    special = _special(inner, settings, end)
    return HuggingFace(inner, vocabulary, end, digest, template, special, files)


def _beside(folder: Path | None, *names: str) -> dict[str, bytes]:
    """Of these files those that the folder has."""
    if folder is None:
        return {}
    return {name: content_of(folder / name) for name in names if (folder / name).is_file()}


def _settings(beside: Path | None, name: str) -> dict[str, Any]:
    path = None if beside is None else beside / name
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(content_of(path))
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


def _special(inner: Any, settings: Mapping[str, dict[str, Any]], end: int) -> dict[str, str]:
    """Every `…_token` that the files name; the end of a document in any case."""
    found = {"eos_token": str(inner.id_to_token(end))}
    for of_file in reversed(list(settings.values())):
        for name, token in of_file.items():
            token = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(token, str):
                found[name] = token
    return found


def _template(config: Mapping[str, Any], separate: bytes | None) -> str | None:
    if separate is not None:
        return separate.decode("utf-8", "replace")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _sentence_piece(path: Path, beside: Path | None = None) -> SentencePiece:
    try:
        import sentencepiece
    except ImportError:
        raise ValueError(
            f"{path} is read by the package sentencepiece, which is not installed: pip install "
            "sentencepiece"
        ) from None
    raw = content_of(path)
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
    digest = digest_of_content(raw, end, vocabulary)
    special = {"eos_token": str(inner.id_to_piece(end))}
    if (begin := int(inner.bos_id())) >= 0:
        special["bos_token"] = str(inner.id_to_piece(begin))
    files = {path.name: raw, **_beside(beside, TEMPLATE)}
    template = _template({}, files.get(TEMPLATE))
    return SentencePiece(inner, vocabulary, end, digest, special, files, template)


def content_of(path: Path) -> bytes:
    """A file of a tokenizer; ValueError if it cannot be read, or is too long for one."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"{path} is longer than {FILE_BYTES_MAX} bytes: no tokenizer is")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def digest_of_content(content: bytes, end_of_document: int, vocabulary: int) -> str:
    """Of a tokenizer, whose file has this content: see Tokenizer."""
    digest = hashlib.blake2b(content, digest_size=16)
    digest.update(f"{end_of_document} {vocabulary}".encode())
    return digest.hexdigest()
