"""Some tokenizers have a token more than their models have rows, which text never becomes."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared.corpora.conversations import lines_of, sums
from shared.corpora.texts import folder_of, prepared

from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import Corpus, open_corpus, read_index
from diloco_shared.corpora.sequences import WrongToken
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.splits import SPLITS, Splitter
from diloco_shared.corpora.templates import template_of
from diloco_shared.corpora.tokenizers import ByteTokenizer, Tokenizer, load, rows_for_text
from diloco_shared.hf.tokenizer import files_of

pytest.importorskip("tokenizers")
IMAGE = "<image_soft_token>"


@pytest.fixture
def gemma(tmp_path: Path) -> Tokenizer:
    """Bytes, and a token for images beyond them."""
    whole = json.loads(files_of(ByteTokenizer())["tokenizer.json"])
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": 256, "content": IMAGE})
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    found = load(str(tmp_path / "tokenizer.json"))
    assert (found.vocabulary, rows_for_text(found)) == (257, 256)
    return found


def written(corpus: Corpus) -> Any:
    """What its index says of them."""
    assert corpus.folder is not None
    return json.loads((corpus.folder / "index.json").read_text()).get("rows")


def test_a_token_that_never_occurs_needs_no_row(tmp_path: Path, gemma: Tokenizer) -> None:
    texts = folder_of(tmp_path / "texts", 60)
    corpus = prepared(texts, tmp_path / "c", with_=gemma)
    assert (corpus.vocabulary, corpus.rows, written(corpus)) == (257, 256, 256)
    (texts / "0000.txt").write_text(f"what is in {IMAGE}?")
    corpus = prepared(texts, tmp_path / "spelt", with_=gemma)
    assert (corpus.rows, written(corpus)) == (257, None)
    corpus = prepared(texts, tmp_path / "bytes")
    assert (corpus.rows, written(corpus)) == (256, None), "text may be of any of them"


@pytest.mark.parametrize(("asked", "rows"), [("a picture", 256), (IMAGE, 257)])
def test_what_is_only_read_counts_too(
    tmp_path: Path, gemma: Tokenizer, asked: str, rows: int
) -> None:
    talks = [{"messages": one} for one in sums(60)]
    talks[0]["messages"][0]["content"] = asked
    chat = Chat(template_of(gemma, "t"))
    source = find(str(lines_of(tmp_path / "talk.jsonl", talks)), chat=chat)
    assert prepare(source, gemma, tmp_path / "c", 0.2).rows == rows


def test_a_number_beyond_them_is_damage(tmp_path: Path, gemma: Tokenizer) -> None:
    corpus = prepared(folder_of(tmp_path / "texts", 60), tmp_path / "c", with_=gemma)
    file = tmp_path / "c" / "train-00000.bin"
    tokens = np.fromfile(file, np.uint16)
    tokens[3] = 256
    tokens.tofile(file)
    with pytest.raises(WrongToken):
        open_corpus(tmp_path / "c").train.windows(np.array([0]), 8)
    assert corpus.folder is not None
    index = json.loads((corpus.folder / "index.json").read_text())
    for rows in (257, 1000, 0):
        (corpus.folder / "index.json").write_text(json.dumps(index | {"rows": rows}))
        with pytest.raises(ValueError, match="is damaged"):
            read_index(corpus.folder)
    # A corpus of an earlier build says nothing.
    del index["rows"]
    (corpus.folder / "index.json").write_text(json.dumps(index))
    assert open_corpus(corpus.folder).rows == 257


@pytest.mark.parametrize("where", ["train", "validation"])
def test_a_text_that_spells_the_end_of_a_document_is_counted(
    tmp_path: Path, gemma: Tokenizer, where: str
) -> None:
    """It becomes that token, and cuts the document."""
    texts = folder_of(tmp_path / "texts", 60)
    plain = prepared(texts, tmp_path / "plain", with_=gemma)
    assert plain.ends_within == 0
    assert "ends_within" not in (tmp_path / "plain" / "index.json").read_text()
    end = gemma.decode([gemma.end_of_document])
    spelling = count(1)
    while Splitter(0.2).split((text := f"a{end}b{end}{next(spelling)}").encode()) != where:
        pass
    (texts / "new.txt").write_text(text)
    corpus = prepared(texts, tmp_path / "spelt", with_=gemma)
    assert corpus.ends_within == 2 and corpus.index is not None
    assert {name: part.ends_within for name, part in corpus.index.splits.items()} == {
        "train": 0,
        "validation": 0,
        "test": 0,
        where: 2,
    }
    ends = sum(int(np.sum(corpus.split(name)[:] == gemma.end_of_document)) for name in SPLITS)
    assert ends == 61 + 2


def test_ends_that_a_chat_template_writes_are_not_counted(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer(chat_template="{% for m in messages %}{{ m.content }}\0{% endfor %}")
    chat = Chat(template_of(tokenizer, "t"))
    talks = [{"messages": one} for one in sums(60)]
    source = find(str(lines_of(tmp_path / "talk.jsonl", talks)), chat=chat)
    assert prepare(source, tokenizer, tmp_path / "c", 0.2).ends_within == 0
