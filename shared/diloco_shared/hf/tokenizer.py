"""The tokenizer's files in a checkpoint: what others need to turn text into the model's tokens."""

import json
from typing import Any

from diloco_shared.corpora.prepared import is_prepared, open_corpus
from diloco_shared.corpora.tokenizers import CONFIG, JSON, Bytes, Tokenizer, load
from diloco_shared.reach.local import Root, located
from diloco_shared.spec.run import Data

# Byte 0 ends a document; as text it is shown so.
END_OF_BYTES = "<|endoftext|>"


def tokenizer_of(data: Data, root: Root) -> Tokenizer:
    """That of the corpus, which has a copy of it; or the one that the run names.

    Raises ValueError.
    """
    folder = located(data.sources[0].source, root)
    if is_prepared(folder):
        found = open_corpus(folder).tokenizer
        if found is not None:
            return found
    return load(data.tokenizer, root)


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name and content of each file. `bytes` has none that says what it does: it is
    written as a tokenizer of 256 tokens that are never merged, which makes the same numbers."""
    files = dict(tokenizer.files)
    if isinstance(tokenizer, Bytes):
        files[JSON] = _written(_byte_by_byte())
    if JSON in files and CONFIG not in files:
        end = _name(files[JSON], tokenizer.end_of_document)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        files[CONFIG] = _written(config | ({"eos_token": end} if end else {}))
    return files


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of special tokens, by the name that they have in config.json."""
    return {"eos_token_id": tokenizer.end_of_document}


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
