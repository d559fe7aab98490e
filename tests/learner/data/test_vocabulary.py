"""Tokens that a model has rows for, and that its weights know."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared.corpora.texts import folder_of, prepared

from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import check_tokenizer, check_vocabulary, load
from diloco_shared.corpora.prepared import FORMAT, Corpus
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.tokenizers import Tokenizer
from diloco_shared.corpora.tokenizers import load as load_tokenizer
from diloco_shared.corpora.training import train_tokenizer
from diloco_shared.spec.run import Data, RunSpec


def with_images(folder: Path, text: Path) -> int:
    """A tokenizer with a token beyond those of text: how many rows text needs."""
    rows = train_tokenizer(find(str(text)), 300, folder).vocabulary
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": rows, "content": "<image>"})
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return rows


def key_of_an_earlier_build(text: Path, tokenizer: Tokenizer, fraction: float) -> str:
    """Where its learners kept a text that they had prepared."""
    made_of = repr((FORMAT, find(str(text)).fingerprint, tokenizer.digest, fraction))
    return hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()


def test_text_that_an_earlier_build_prepared_is_counted_anew(tmp_path: Path) -> None:
    """It has a row for every token, and weights have fewer. Other text is not prepared twice."""
    text = folder_of(tmp_path / "a", 60)
    rows = with_images(tmp_path / "t", text)
    cache = CorpusCache(tmp_path / "cache")
    for name, wanted, kept in (("t", rows, 2), ("bytes", 256, 3)):
        data = Data(source="a", tokenizer=name)
        tokenizer = load_tokenizer(name, tmp_path)
        key = key_of_an_earlier_build(text, tokenizer, data.validation_fraction)
        old = prepared(text, cache.folder / key, data.validation_fraction, tokenizer)
        assert old.folder is not None
        index = json.loads((old.folder / "index.json").read_text())
        index.pop("rows", None)
        (old.folder / "index.json").write_text(json.dumps(index))
        found = load(data, tmp_path, cache)
        assert isinstance(found, Corpus) and found.rows == wanted
        assert found.digest == old.digest, "the tokens are the same"
        assert len([path for path in cache.folder.iterdir() if path.is_dir()]) == kept


def test_a_token_that_never_occurs_needs_no_row(tmp_path: Path) -> None:
    rows = with_images(tmp_path / "t", folder_of(tmp_path / "a", 60))
    body = {"name": "x", "budget": {"steps": 1}, "model": {"overrides": {"vocabulary": rows}}}
    prepared(tmp_path / "a", tmp_path / "c", with_=load_tokenizer(str(tmp_path / "t")))
    for given in ({"source": "c"}, {"mixture": [{"source": "c", "weight": 1}] * 2}):
        spec = RunSpec.model_validate(body | {"data": given})
        corpus = load(spec.data, tmp_path)
        check_vocabulary(spec, corpus)
        assert (corpus.vocabulary if isinstance(corpus, Corpus) else rows + 1) == rows + 1
        less = {"model": {"overrides": {"vocabulary": rows - 1}}}
        with pytest.raises(ValueError, match=f"has {rows} different tokens"):
            check_vocabulary(RunSpec.model_validate(body | {"data": given} | less), corpus)


def test_tokens_of_another_tokenizer_than_the_weights_own_are_refused(tmp_path: Path) -> None:
    """Each corpus of a mixture, and tokens of which the settings say what made them."""
    folder = folder_of(tmp_path / "a", 60)
    tokenizer = train_tokenizer(find(str(folder)), 300, tmp_path / "w")
    prepared(folder, tmp_path / "own", with_=tokenizer)
    prepared(folder, tmp_path / "bytes")
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "t.bin")
    (tmp_path / "t.json").write_text('{"vocabulary": 1000}')
    cache = CorpusCache(tmp_path / "cache")

    def check(weights: str = "w", **data: Any) -> None:
        body = {"name": "x", "budget": {"steps": 1}, "model": {"weights": weights}, "data": data}
        spec = RunSpec.model_validate(body)
        check_tokenizer(spec, load(spec.data, tmp_path, cache), tmp_path)

    check(source="own")
    check(source="a", tokenizer="w")
    check(source="t.bin")
    check(source="t.bin", tokenizer="w")
    for weights in ("nowhere", "checkpoint:r.a/000001", "run:other", ""):
        check(weights, source="bytes")
    with pytest.raises(ValueError, match="the tokens of bytes are made by the tokenizer 'bytes'"):
        check(source="bytes")
    with pytest.raises(ValueError, match="the tokens of a are made by"):
        check(source="a")
    train_tokenizer(find(str(folder)), 290, tmp_path / "other")
    with pytest.raises(ValueError, match=r"the tokens of t\.bin are made by"):
        check(source="t.bin", tokenizer="other")
