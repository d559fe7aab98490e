"""A model of SentencePiece, written as a `tokenizer.json` that makes the same numbers.

Programs that load a bare model of SentencePiece leave out how it normalises a text (`ﬁne` becomes
`fine`, two spaces become one), and then make other numbers of it. So its rules are written down
here in the words of the package `tokenizers`, and compared with the model itself, text by text.
"""

import base64
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_shared.corpora.tokenizers import SentencePiece

SPACE = "\u2581"  # what SentencePiece writes for a space
# Types of pieces, and of models, as sentencepiece_model.proto numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
# Of what such a file says, the fields that are read here, by their numbers there.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTES = 3, 35
_CHARSMAP, _PREFIX, _FEW_SPACES = 2, 3, 4
# Texts that are compared: what scripts, spaces and signs there are. The model's own pieces follow.
TEXTS = (
    "", " ", "The quick brown fox jumps over the lazy dog.", "a  b", " a", "a ", "   a   b   ",
    "def f(x):\n    return x + 1\n", "tabs\tand\r\nlines\n\n\nof\x0ball\x0ckinds", "x" * 200,
    "1,234.5e-6 €", "ﬁne Ⅳ ① ｆｕｌｌ ™ ½", "café cafe\u0301 naïve größe GRÖSSE ß İi", "a \u2581b",
    "Привет, мир", "你好，世界", "カ゛ ガ ｶﾞ", "한국어 \u1112\u1161\u11ab", "مرحبا بالعالم", "שָׁלוֹם",
    "नमस्ते", "สวัสดี", "😀 👩\u200d👩\u200d👧 🇩🇪", "a\u00a0b\u2003c\u3000d",
    "zero\u200bwidth \ufeffmark\u00ad", "\x01\x07\x7f\u0085", "“quotes” — dashes… ‚low‘",
)  # fmt: skip
# Pieces of a model that are put together into texts, and how many make one.
OWN_PIECES, OWN_TOGETHER = 4096, 8
# Of those that are always one token, about so many are tried: models have thousands at most.
DEFINED = 256


@dataclass(frozen=True, slots=True)
class _Proto:
    """What a model says, of which its own package tells only a part."""

    pieces: Sequence[tuple[str, float, int]]  # text, score and type
    trainer: Mapping[int, Any] = field(default_factory=dict)
    normalizer: Mapping[int, Any] = field(default_factory=dict)


def tokenizer_json(tokenizer: SentencePiece) -> dict[str, Any] | None:
    """The content of a tokenizer.json that makes the numbers of this model; None: none is known
    that makes them of every text that was tried."""
    try:
        import tokenizers

        (raw,) = (raw for name, raw in tokenizer.files.items() if name.endswith(".model"))
        proto = _read(raw)
        # The package looks at fewer signs at a time: of some scripts it leaves apart what belongs
        # together, and what puts it together afterwards is too much for other models.
        for composed in (True, False):
            content = _content(proto, composed)
            made = tokenizers.Tokenizer.from_str(json.dumps(content))
            if all(
                made.encode(text, add_special_tokens=False).ids == ids.tolist()
                for text, ids in _compared(tokenizer, proto)
            ):
                return content
    except Exception:  # no such package, a model that is read in another way, rules that it refuses
        return None
    return None


def _compared(tokenizer: SentencePiece, proto: _Proto) -> Iterator[tuple[str, Any]]:
    """Texts, and their numbers. Of a text that spells a special token they are those of a
    conversation: elsewhere such a text stays text here, and is that token for all others."""
    known = [piece for piece, _, kind in proto.pieces if kind in (_CONTROL, _UNKNOWN)]
    step = max(len(proto.pieces) // OWN_PIECES, 1)
    own = [text for text, _, kind in proto.pieces[::step] if kind in (_NORMAL, _USER_DEFINED)]
    joined = ("".join(own[n : n + OWN_TOGETHER]) for n in range(0, len(own), OWN_TOGETHER))
    for text in (*TEXTS, *(text.replace(SPACE, " ") for text in joined)):
        if not any(piece in text for piece in known):
            yield text, tokenizer.encode_batch([text])[0]
    defined = [piece for piece, _, kind in proto.pieces if kind == _USER_DEFINED]
    for piece in defined[:: max(len(defined) // DEFINED, 1)]:
        yield (text := f"{piece}one {piece}two"), tokenizer.encode_batch([text])[0]
    for special in tokenizer.special.values():
        text = f"one {special}two\n{special}"
        yield text, tokenizer.encode_pieces([text])[0]


def _content(proto: _Proto, composed: bool) -> dict[str, Any]:
    """A tokenizer.json. KeyError for a kind of model that the package does not have."""
    make = {_UNIGRAM: _unigram, _BPE: _bpe}[proto.trainer.get(_MODEL_TYPE, _UNIGRAM)]
    rules = proto.normalizer
    prefix = bool(rules.get(_PREFIX, 1))
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(n, *piece) for n, piece in enumerate(proto.pieces) if _is_added(piece)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(rules, prefix, composed)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": make(proto.pieces, bool(proto.trainer.get(_BYTES, 0))),
    }


def _normalizers(rules: Mapping[int, Any], prefix: bool, composed: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if charsmap := rules.get(_CHARSMAP):
        map_ = base64.b64encode(charsmap).decode()
        found.append({"type": "Precompiled", "precompiled_charsmap": map_})
        found += [{"type": "NFC"}] * composed
    if rules.get(_FEW_SPACES, 1):
        for pattern, content in ((r"\A +", ""), (r" +\z", ""), (" {2,}", " ")):
            found.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    if prefix:
        found.append({"type": "Prepend", "prepend": SPACE})
    found.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return found


def _is_added(piece: tuple[str, float, int]) -> bool:
    return piece[2] in (_UNKNOWN, _CONTROL, _USER_DEFINED)


def _added(number: int, text: str, score: float, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": kind != _USER_DEFINED}


def _unigram(pieces: Sequence[tuple[str, float, int]], in_bytes: bool) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": _unknown(pieces),
        "vocab": [[text, score] for text, score, _ in pieces],
        "byte_fallback": in_bytes,
    }


def _bpe(pieces: Sequence[tuple[str, float, int]], in_bytes: bool) -> dict[str, Any]:
    """The two parts of which a piece may be joined, by the score of the piece."""
    numbers = {text: number for number, (text, _, _) in enumerate(pieces)}
    usable = {text: score for text, score, kind in pieces if kind == _NORMAL}
    merges = []
    for text, score in usable.items():
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [
            (-score, numbers[a], numbers[b], a, b) for a, b in halves if {a, b} <= usable.keys()
        ]
    merges.sort()
    unknown = _unknown(pieces)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else pieces[unknown][0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": in_bytes,
        "ignore_merges": False,
        "vocab": numbers,
        "merges": [[a, b] for *_, a, b in merges],
    }


def _unknown(pieces: Sequence[tuple[str, float, int]]) -> int | None:
    return next((n for n, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN), None)


# --------------------------------------------------------------------------------------------------
# The file: messages of Protocol Buffers, of which each field has its number and its type in front.


def pieces_of(raw: bytes) -> dict[int, str]:
    """The pieces that text becomes, by their numbers, without those that stand for one byte or for
    what no text is: all models have these. Nothing for a file that is no model of SentencePiece."""
    try:
        pieces = _read(raw).pieces
    except Exception:  # any file may end in .model, and each is odd in its own way
        return {}
    return {number: text for number, (text, _, kind) in enumerate(pieces) if kind == _NORMAL}


def _read(raw: bytes) -> _Proto:
    """Raises ValueError, IndexError or struct.error for what is none."""
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(raw):
        if number == _PIECES:
            text, score, kind = _pieces_fields(dict(_fields(value)))
            pieces.append((text, score, kind))
        elif number == _TRAINER:
            trainer = dict(_fields(value))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(value))
    return _Proto(pieces, trainer, normalizer)


def _pieces_fields(fields: Mapping[int, Any]) -> tuple[str, float, int]:
    score = struct.unpack("<f", fields.get(2, bytes(4)))[0]
    return fields.get(1, b"").decode(), score, fields.get(3, _NORMAL)


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each: an int, or its bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(raw, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(raw, at)
        else:
            size = {1: 8, 5: 4}[kind]
        yield number, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first; and where what follows begins."""
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
