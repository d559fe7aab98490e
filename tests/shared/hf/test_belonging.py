"""Tokens of another tokenizer than the weights' own are found before anything is unlearned."""

import json
import shutil
from pathlib import Path

import pytest
from shared.corpora.texts import folder_of, prepared, sentence_piece

from diloco_shared.corpora.prepared import Corpus
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.tokenizers import FILE_BYTES_MAX, ByteTokenizer, load
from diloco_shared.corpora.training import train_tokenizer
from diloco_shared.hf.belonging import Made, check_belongs
from diloco_shared.hf.tokenizer import files_of

tokenizers = pytest.importorskip("tokenizers")
OTHER = r"of texts are made by the tokenizer .* come with another one \(tokenizer\.json\)"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "texts", 60)


@pytest.fixture
def weights(tmp_path: Path, texts: Path) -> Path:
    """A folder with a tokenizer, as it lies beside weights."""
    train_tokenizer(find(str(texts)), 300, tmp_path / "weights")
    return tmp_path / "weights"


def check(weights: Path, corpus: Corpus) -> None:
    made = Made.of_corpus(corpus, "texts")
    assert made is not None
    check_belongs(weights, made)


def test_a_corpus_of_bytes_is_none_for_weights_with_a_tokenizer(
    tmp_path: Path, texts: Path, weights: Path
) -> None:
    of_bytes = prepared(texts, tmp_path / "bytes")
    with pytest.raises(ValueError, match=OTHER) as found:
        check(weights, of_bytes)
    said = str(found.value)
    assert "'bytes'" in said and "set data.tokenizer" in said
    assert f"--tokenizer {weights}" in said, "what to do, as it is typed"
    check(weights, prepared(texts, tmp_path / "own", with_=load(str(weights))))
    with pytest.raises(ValueError, match="are made by the tokenizer 'bytes'"):
        check_belongs(weights, Made.by(load("bytes"), "texts"))
    check_belongs(weights, Made.by(load(str(weights)), "texts"))


def test_bytes_written_as_a_tokenizer_are_bytes(tmp_path: Path, texts: Path, weights: Path) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, content in files_of(ByteTokenizer()).items():
        (exported / name).write_bytes(content)
    check(exported, prepared(texts, tmp_path / "bytes"))
    check(exported, prepared(texts, tmp_path / "again", with_=load(str(exported))))
    with pytest.raises(ValueError, match=OTHER):
        check(exported, prepared(texts, tmp_path / "own", with_=load(str(weights))))


def test_how_a_tokenizer_is_written_down_is_no_difference(
    tmp_path: Path, texts: Path, weights: Path
) -> None:
    """Nor are tokens that it would put in front of a text, or which one ends a document."""
    corpus = prepared(texts, tmp_path / "own", with_=load(str(weights)))
    whole = json.loads((weights / "tokenizer.json").read_text())
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in whole["model"]["merges"]
    ]
    whole["model"]["merges"] = merges  # as it was written for years
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    (weights / "tokenizer.json").write_text(json.dumps(whole))
    (weights / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t"}))
    assert load(str(weights)).digest != Made.of_corpus(corpus, "").digest  # type: ignore[union-attr]
    check(weights, corpus)
    vocabulary = whole["model"]["vocab"]
    vocabulary["!"], vocabulary["?"] = vocabulary["?"], vocabulary["!"]
    (weights / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=OTHER):
        check(weights, corpus)
    (weights / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=OTHER):
        check(weights, corpus)


def test_a_model_of_sentencepiece_is_compared_as_a_file(tmp_path: Path, texts: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    model = sentence_piece(tmp_path, "some words to learn from\n")
    shutil.copy(model, weights / "tokenizer.model")
    corpus = prepared(texts, tmp_path / "own", with_=load(str(model)))
    check(weights, corpus)
    # Many folders have both: one of them is enough.
    (weights / "tokenizer.json").write_bytes(files_of(ByteTokenizer())["tokenizer.json"])
    check(weights, corpus)
    (weights / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"another one \(tokenizer\.model\)"):
        check(weights, prepared(texts, tmp_path / "bytes"))


def test_a_tokenizer_may_be_a_json_here_and_a_model_there(tmp_path: Path, texts: Path) -> None:
    """Whoever wrote the one after the other treats spaces in his own way. The numbers mean the
    same, so the weights know them."""
    model = sentence_piece(tmp_path, "some words to learn from\n")
    files = files_of(load(str(model)))
    whole = json.loads(files["tokenizer.json"])
    whole["normalizer"] = None
    whole["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "split": True}
    for name in ("json", "model", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "json" / "tokenizer.json").write_text(json.dumps(whole))
    shutil.copy(model, tmp_path / "model" / "tokenizer.model")
    of_json, of_model = (
        prepared(texts, tmp_path / f"of-{n}", with_=load(str(tmp_path / n)))
        for n in ("json", "model")
    )
    for weights in ("json", "model"):
        check(tmp_path / weights, of_json)
        check(tmp_path / weights, of_model)
        check_belongs(tmp_path / weights, Made.by(load(str(model)), "texts"))
    vocabulary = whole["model"]["vocab"]
    vocabulary[3:] = vocabulary[:2:-1]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=OTHER):
        check(tmp_path / "other", of_model)
    other = prepared(texts, tmp_path / "of-other", with_=load(str(tmp_path / "other")))
    with pytest.raises(ValueError, match=r"another one \(tokenizer\.model\)"):
        check(tmp_path / "model", other)


def test_what_cannot_be_compared_is_not_refused(tmp_path: Path, texts: Path) -> None:
    """A run that is right would never begin."""
    model = sentence_piece(tmp_path, "some words to learn from\n")
    corpus = prepared(texts, tmp_path / "c", with_=load(str(model)))
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "tokenizer.json").write_text("{}")
    check(weights, corpus)
    (tmp_path / "c" / "tokenizer" / "m.model").unlink()
    (weights / "tokenizer.json").unlink()
    shutil.copy(model, weights / "tokenizer.model")
    (weights / "tokenizer.model").write_bytes(model.read_bytes() * 2)
    check(weights, corpus)


def test_not_every_file_of_that_name_is_a_tokenizer(tmp_path: Path, texts: Path) -> None:
    weights = tmp_path / "weights"
    (weights / "folder.model").mkdir(parents=True)
    (weights / "reward.model").write_bytes(b"a tree of decisions")
    (weights / "empty.model").write_bytes(b"")
    with (weights / "huge.model").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    corpus = prepared(texts, tmp_path / "bytes")
    check(weights, corpus)
    (weights / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=OTHER):
        check(weights, corpus)


def test_weights_without_a_tokenizer_take_any_tokens(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "weights").mkdir()
    check(tmp_path / "weights", prepared(texts, tmp_path / "bytes"))
