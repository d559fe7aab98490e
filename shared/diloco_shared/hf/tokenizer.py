"""The tokenizer's files in a checkpoint: what others need to turn text into the model's tokens."""

import json
from collections.abc import Mapping
from typing import Any

from diloco_shared.corpora.prepared import Corpus, is_prepared, open_corpus
from diloco_shared.corpora.pretokenised import is_tokens
from diloco_shared.corpora.sources import STDLIB, stdlib
from diloco_shared.corpora.tokenizers import (
    BYTES,
    CONFIG,
    JSON,
    ByteTokenizer,
    SentencePiece,
    Tokenizer,
    load,
)
from diloco_shared.hf.sentence_piece import tokenizer_json
from diloco_shared.reach.local import Root, located
from diloco_shared.spec.run import Data

# By this name others look for a model of SentencePiece; and by this one nobody does.
SPM, SPM_ALONE = "tokenizer.model", "sentencepiece.model"
# How others read a tokenizer.json: as it is, and without a token in front of a text or behind it.
_OF_JSON: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
}
# Byte 0 ends a document; as text it is shown so.
END_OF_BYTES = "<|endoftext|>"


def tokenizer_of(data: Data, root: Root, vocabulary: int | None = None) -> Tokenizer:
    """That of the corpus, which has a copy of it; or the one that the run names.

    `vocabulary`: rows of the model, if they are known. Raises ValueError where nothing on this
    machine tells what made the tokens: another tokenizer would do for other numbers.
    """
    unknown = ""
    for part in data.sources:
        path = stdlib() if part.source == STDLIB else located(part.source, root)
        if part.source != STDLIB and is_prepared(path):
            if (found := _of_corpus(open_corpus(path), part.digest)) is not None:
                return found
        elif not path.exists():
            unknown = unknown or f"the corpus {part.source!r} is not on this machine"
        elif part.source != STDLIB and is_tokens(path):
            unknown = unknown or f"{part.source!r} holds tokens, and does not say what made them"
    if unknown and data.tokenizer == BYTES and vocabulary != ByteTokenizer().vocabulary:
        raise ValueError(f"{unknown}, and data.tokenizer names no tokenizer")
    return load(data.tokenizer, root)


def _of_corpus(corpus: Corpus, wanted: str) -> Tokenizer | None:
    if wanted and corpus.digest != wanted:
        raise ValueError(
            f"the corpus at {corpus.name} has digest {corpus.digest}, and the run's has {wanted}: "
            "its tokenizer may be another one"
        )
    found = corpus.tokenizer
    made_by = None if corpus.index is None else corpus.index.tokenizer.digest
    if found is not None and found.digest != made_by:
        raise ValueError(f"the tokenizer in {corpus.name} is not the one that made its tokens")
    return found


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name and content of each file. `bytes` has none that says what it does: it is
    written as a tokenizer of 256 tokens that are never merged, which makes the same numbers."""
    files = dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        files[JSON] = _written(_byte_by_byte())
    if isinstance(tokenizer, SentencePiece):
        return _sentence_piece(tokenizer, files)
    if JSON in files and CONFIG not in files:
        end = _name(files[JSON], tokenizer.end_of_document)
        files[CONFIG] = _written({**_OF_JSON, **({"eos_token": end} if end else {})})
    return files


def _sentence_piece(tokenizer: SentencePiece, files: dict[str, bytes]) -> dict[str, bytes]:
    """The model as it is, and a file beside it that others read: of the model alone they would make
    other numbers. Where no such file makes the same ones, the model has a name of which they
    make nothing."""
    written = tokenizer_json(tokenizer)
    name = SPM_ALONE if written is None else SPM
    found = {name if was.endswith(".model") else was: raw for was, raw in files.items()}
    if written is not None:
        found[JSON] = _written(written)
        found.setdefault(CONFIG, _written({**_OF_JSON, **tokenizer.special}))
    return found


def special_tokens(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Ids of special tokens, by the name that they have in config.json: else each kind of model has
    some of its own. None: there is none, or nobody knows.

    What ends a document is what stands before the next one: so it begins one as well.
    """
    end = None if tokenizer is None else tokenizer.end_of_document
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}


def _byte_by_byte() -> dict[str, Any]:
    names = _names_of_bytes()
    vocabulary = {name: number for number, name in enumerate(names)} | {END_OF_BYTES: 0}
    del vocabulary[names[0]]
    end = {
        "id": 0,
        "content": END_OF_BYTES,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }


def _names_of_bytes() -> list[str]:
    """The character that stands for each byte in such files: itself where it is visible, else one
    of those from 256 on, in turn."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def _name(raw: bytes, number: int) -> str | None:
    """How a tokenizer.json calls a token."""
    whole = json.loads(raw)
    for token in whole.get("added_tokens", ()):
        if token.get("id") == number:
            return str(token["content"])
    return None


def _written(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
