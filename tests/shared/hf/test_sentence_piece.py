"""A model of SentencePiece is exported as a file that makes its numbers, or as itself alone."""

from pathlib import Path
from typing import Any

import pytest
from shared.corpora.texts import folder_of, prepared

from diloco_shared.corpora.tokenizers import SentencePiece, load
from diloco_shared.hf.sentence_piece import TEXTS, tokenizer_json
from diloco_shared.hf.tokenizer import SPM_ALONE, files_of
from diloco_shared.protocol.exports import ExportedFile

pytest.importorskip("tokenizers")
sentencepiece: Any = pytest.importorskip("sentencepiece")
WORDS = "the quick brown fox jumps over a lazy dog; größe café naïve fine full 12 = 7 + 5\n"
# Others than those that are compared at export.
ASKED = (
    "ﬀ ﬁ ﬂ ½ ⅷ",
    "  the   fox ",
    "cafe\u0301",
    "ﾊﾟﾝ \u1112\u1161\u11ab\u1100\u1173\u11af",
    "fox\tdog\nfox",
)


def trained(folder: Path, **more: Any) -> Path:
    (folder / "text.txt").write_text("".join(f"{n} {WORDS}" for n in range(300)))
    usual = {"vocab_size": 340, "byte_fallback": True, "hard_vocab_limit": False}
    settings = usual | {"minloglevel": 2} | more
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "m"), **settings
    )
    return folder / "m.model"


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"model_type": "bpe"},
        {"normalization_rule_name": "nfkc_cf", "byte_fallback": False, "vocab_size": 60},
        {
            "model_type": "bpe",
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "control_symbols": ["[ask]", "[answer]"],
        },
        {
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["<turn>"],
        },
    ],
    ids=["as it is usual", "bpe", "case folded", "llama", "gemma"],
)
def test_others_make_the_numbers_of_which_the_run_has_learned(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    model = load(str(trained(tmp_path, **rules)))
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, content in files_of(model).items():
        (exported / name).write_bytes(content)
    read = load(str(exported))
    assert not isinstance(read, SentencePiece), "what others read is the tokenizer.json"
    texts = [*TEXTS, *ASKED]
    for text, one, other in zip(
        texts, model.encode_batch(texts), read.encode_batch(texts), strict=True
    ):
        assert other.tolist() == one.tolist(), text
    answered = ["one two", *model.special.values(), "fox", model.special["eos_token"]]
    for one, other in zip(*(t.encode_pieces(answered) for t in (model, read)), strict=True):
        assert other.tolist() == one.tolist()
    ids = model.encode_batch(["the quick fox"])[0].tolist()
    assert read.decode(ids) == model.decode(ids) == "the quick fox"
    assert (read.end_of_document, read.special) == (model.end_of_document, model.special)
    assert (exported / "tokenizer.model").read_bytes() == (tmp_path / "m.model").read_bytes()


@pytest.mark.parametrize(
    "rules",
    [
        {"user_defined_symbols": ["<turn>"]},  # a space in front of the text, and of no part of it
        {"treat_whitespace_as_suffix": True},
        {"model_type": "word", "vocab_size": 20, "byte_fallback": False},
    ],
    ids=["a symbol", "spaces behind words", "words"],
)
def test_where_no_file_makes_them_others_find_none(tmp_path: Path, rules: dict[str, Any]) -> None:
    """They would take a `tokenizer.model` for one of Llama, and make other numbers of a text."""
    model = load(str(trained(tmp_path, **rules)))
    assert isinstance(model, SentencePiece) and tokenizer_json(model) is None
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, content in files_of(model).items():
        (exported / name).write_bytes(content)
        ExportedFile(name=name, bytes=1, sha256="0" * 64)
    assert [path.name for path in exported.iterdir()] == [SPM_ALONE]
    assert load(str(exported)).digest == model.digest, "diloco generate reads it"


def test_a_corpus_of_it_has_the_model_that_made_it(tmp_path: Path) -> None:
    model = load(str(trained(tmp_path)))
    corpus = prepared(folder_of(tmp_path / "a", 60), tmp_path / "c", with_=model)
    assert files_of(model) == files_of(corpus.tokenizer)  # type: ignore[arg-type]
