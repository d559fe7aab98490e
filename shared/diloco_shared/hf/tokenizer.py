"""The tokenizer's files in a checkpoint: what others need to turn text into the model's tokens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_shared.corpora.chat import Chat, closing_token
from diloco_shared.corpora.prepared import Corpus, is_prepared, open_corpus
from diloco_shared.corpora.pretokenised import is_tokens
from diloco_shared.corpora.sources import STDLIB
from diloco_shared.corpora.templates import template_of
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
from diloco_shared.spec.run import Data, Part

# Of config.json: the ids of special tokens by name; several end a text, and one does all else.
SpecialTokens = dict[str, int | list[int] | None]
GENERATION = "generation_config.json"
# By this name others look for a model of SentencePiece; and by this one nobody does.
SPM, SPM_ALONE = "tokenizer.model", "sentencepiece.model"
# In a tokenizer_config.json: the tokenizer.json is read as it is, where other classes would read
# its tokens and follow rules of their own; and nothing is put in front of a text or behind it.
_AS_IT_IS: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": False,
    "add_eos_token": False,
}
# Steps of a tokenizer.json that put tokens there, by their type.
_PUT_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
# Byte 0 ends a document; as text it is shown so.
END_OF_BYTES = "<|endoftext|>"


def tokenizer_of(data: Data, root: Root, vocabulary: int | None = None) -> Tokenizer:
    """That of the corpus, which has a copy of it; or the one that the run names.

    `vocabulary`: rows of the model, if they are known. Raises ValueError where nothing on this
    machine tells what made the tokens: another tokenizer would do for other numbers.
    """
    unknown, damaged, corpora = "", "", list[tuple[Corpus, str]]()
    for part in data.sources:
        try:
            corpus = _prepared(part, root)
            if corpus is not None:
                corpora.append((corpus, part.digest))
            elif said := _says_nothing(part, root):
                unknown = unknown or said
        except (ValueError, OSError) as error:  # out of reach, or damaged: another part may tell
            damaged = damaged or str(error)
    # All of a run have one tokenizer; that of conversations has the template that wrote them, too.
    corpora.sort(key=lambda one: (_is_other(*one), not one[0].masked))
    for corpus, wanted in corpora:
        try:
            if (found := _of_corpus(corpus, wanted)) is not None:
                return found
        except (ValueError, OSError) as error:
            damaged = damaged or str(error)
    if damaged:
        raise ValueError(damaged)
    if unknown and data.tokenizer == BYTES and vocabulary != ByteTokenizer().vocabulary:
        raise ValueError(f"{unknown}, and data.tokenizer names no tokenizer")
    return load(data.tokenizer, root)


def _prepared(part: Part, root: Root) -> Corpus | None:
    """None for a source that is no prepared corpus. Raises ValueError or OSError."""
    if part.source == STDLIB or not is_prepared(path := located(part.source, root)):
        return None
    return open_corpus(path)


def _says_nothing(part: Part, root: Root) -> str:
    """Why such a source does not tell what made its tokens; "" for text, which the run's own
    tokenizer reads. Raises ValueError or OSError."""
    if part.source == STDLIB:
        return ""
    path = located(part.source, root)
    if not path.exists():
        return f"the corpus {part.source!r} is not on this machine"
    if is_tokens(path):
        return f"{part.source!r} holds tokens, and does not say what made them"
    return ""


def _is_other(corpus: Corpus, wanted: str) -> bool:
    return bool(wanted) and corpus.digest != wanted


def _of_corpus(corpus: Corpus, wanted: str) -> Tokenizer | None:
    if _is_other(corpus, wanted):
        raise ValueError(
            f"the corpus at {corpus.name} has digest {corpus.digest}, and the run's has {wanted}: "
            "its tokenizer may be another one"
        )
    found = corpus.tokenizer
    made_by = None if corpus.index is None else corpus.index.tokenizer.digest
    if found is not None and found.digest != made_by:
        raise ValueError(f"the tokenizer in {corpus.name} is not the one that made its tokens")
    return found


def ends_of_answers(data: Data, root: Root) -> tuple[int, ...]:
    """The tokens with which answers end in the conversations of a run, by the templates that wrote
    them, but for the one that ends a document: of the corpora that are here, and sound.

    Raises ValueError where a template cannot be read here.
    """
    found = set[int]()
    for part in data.sources:
        try:
            corpus = _prepared(part, root)
            if corpus is None or not corpus.masked:
                continue
            tokenizer = _of_corpus(corpus, part.digest)
        except (ValueError, OSError):  # out of reach, damaged or another one: others have ends, too
            continue
        if tokenizer is not None:
            chat = Chat(template_of(tokenizer, corpus.name))
            _, closing = chat.asked([{"role": "user", "content": "?"}])
            last = closing_token(tokenizer, closing)
            if last is not None and last != tokenizer.end_of_document:
                found.add(last)
    return tuple(sorted(found))


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name and content of each file. `bytes` has none that says what it does: it is
    written as a tokenizer of 256 tokens that are never merged, which makes the same numbers.

    None puts a token in front of a text, or behind it: in training there was none.
    """
    files = dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        files[JSON] = _written(_byte_by_byte())
    if isinstance(tokenizer, SentencePiece):
        files = _sentence_piece(tokenizer, files)
    return _as_trained(tokenizer, files) if JSON in files else files


def _sentence_piece(tokenizer: SentencePiece, files: dict[str, bytes]) -> dict[str, bytes]:
    """The model as it is, and a file beside it that others read: of the model alone they would make
    other numbers. Where no such file makes the same ones, the model has a name of which they
    make nothing."""
    written = tokenizer_json(tokenizer)
    name = SPM_ALONE if written is None else SPM
    found = {name if was.endswith(".model") else was: raw for was, raw in files.items()}
    if written is not None:
        found[JSON] = _written(written)
    return found


def _as_trained(tokenizer: Tokenizer, files: dict[str, bytes]) -> dict[str, bytes]:
    """These files, so that others make the tokens of a text that training made, and no more.

    What is so already stays as it is, byte for byte: whoever compares files finds the same one.
    """
    whole = json.loads(files[JSON])
    after = whole.get("post_processor")
    if (left := _without_tokens(after)) != after:
        files[JSON] = _written({**whole, "post_processor": left})
    said = {"clean_up_tokenization_spaces": False}
    if CONFIG in files:
        said = json.loads(files[CONFIG])
    config = {**_special(tokenizer, whole), **said, **_AS_IT_IS}
    if config != said:
        files[CONFIG] = _written(config)
    return files


def _special(tokenizer: Tokenizer, whole: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, of those that are tokens whatever stands around them: another one
    would become such a token, and a text that spells it other numbers."""
    added = {str(token["content"]): token["id"] for token in whole.get("added_tokens") or ()}
    named = {name: text for name, text in tokenizer.special.items() if text in added}
    ends = [text for text, number in added.items() if number == tokenizer.end_of_document]
    return {"eos_token": ends[0], **named} if ends else named


def _without_tokens(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a tokenizer.json does with the tokens of a text, but for putting others around them."""
    if step is None or step.get("type") in _PUT_TOKENS:
        return None
    if step.get("type") != "Sequence":
        return step
    steps = [left for one in step.get("processors", ()) if (left := _without_tokens(one))]
    return {**step, "processors": steps} if steps else None


def special_tokens(tokenizer: Tokenizer | None, ends: Sequence[int] = ()) -> SpecialTokens:
    """Ids of special tokens, by the name that they have in config.json: else each kind of model has
    some of its own. None: there is none, or nobody knows. `ends`: of answers.

    What ends a document is what stands before the next one: so it begins one as well. A model that
    has learned to answer may never write it: whoever lets it write is to stop at either.
    """
    end = None if tokenizer is None else tokenizer.end_of_document
    eos = end if end is None or not ends else [end, *ends]
    return {"bos_token_id": end, "eos_token_id": eos, "pad_token_id": None}


def generation_config(tokens: SpecialTokens) -> bytes | None:
    """The file of which others read where a text ends before they read config.json. None where one
    token does: that one they find there."""
    return _written(dict(tokens)) if isinstance(tokens.get("eos_token_id"), list) else None


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


def _written(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
