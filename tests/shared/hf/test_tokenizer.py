"""The tokenizer beside the weights makes the numbers that the model was trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from shared.corpora.texts import folder_of, prepared, sentence_piece

from diloco_shared.corpora.tokenizers import ByteTokenizer, Tokenizer, load
from diloco_shared.hf.tokenizer import files_of, special_tokens, tokenizer_of
from diloco_shared.protocol.exports import ExportedFile
from diloco_shared.spec.run import Data

tokenizers = pytest.importorskip("tokenizers")
BYTES = files_of(ByteTokenizer())
END = "<|endoftext|>"
WRITTEN = tokenizers.Tokenizer.from_str(BYTES["tokenizer.json"].decode())


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_bytes_are_written_as_a_tokenizer_that_never_merges(text: str) -> None:
    # The name of the token that ends a document is that token, as in every tokenizer of this kind.
    assume(END not in text)
    found = WRITTEN.encode(text, add_special_tokens=False).ids
    assert found == list(text.encode())
    assert WRITTEN.decode(found, skip_special_tokens=False) == text


def test_byte_0_ends_a_document(tmp_path: Path) -> None:
    for name, content in BYTES.items():
        (tmp_path / name).write_bytes(content)
    found = load(str(tmp_path))
    assert (found.vocabulary, found.end_of_document) == (256, 0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    assert special_tokens(found) == special_tokens(ByteTokenizer()) == ids
    assert set(special_tokens(None).values()) == {None}, "else each kind of model has its own"
    assert found.encode_batch(["née"])[0].tolist() == list("née".encode())


def test_what_a_tokenizer_came_with_stays_as_it_is(tmp_path: Path) -> None:
    for name, content in BYTES.items():
        (tmp_path / name).write_bytes(content)
    own = {"eos_token": END, "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    found = files_of(load(str(tmp_path)))
    assert json.loads(found["tokenizer_config.json"]) == own
    assert found["tokenizer.json"] == BYTES["tokenizer.json"]
    (tmp_path / "tokenizer_config.json").unlink()
    made = json.loads(files_of(load(str(tmp_path)))["tokenizer_config.json"])
    assert made["eos_token"] == END


# --- which one it is -----------------------------------------------------------------------------


def of(folder: Path, vocabulary: int | None = None, **data: Any) -> Tokenizer:
    return tokenizer_of(Data.model_validate(data), folder, vocabulary)


def test_text_that_is_here_was_read_with_what_the_run_names(tmp_path: Path) -> None:
    folder_of(tmp_path / "text", 3)
    assert isinstance(of(tmp_path, source="text"), ByteTokenizer)
    assert isinstance(of(tmp_path, source="stdlib"), ByteTokenizer)
    for name, content in BYTES.items():
        (tmp_path / name).write_bytes(content)
    named = of(tmp_path, source="text", tokenizer="tokenizer.json")
    assert named.digest == load(str(tmp_path)).digest


@pytest.mark.parametrize("there", ["nothing", "tokens"])
def test_what_made_the_tokens_is_not_guessed(tmp_path: Path, there: str) -> None:
    """An export with another tokenizer loads anywhere, and writes nonsense."""
    source = "corpus"
    if there == "tokens":
        source = "t.bin"
        np.arange(1000, dtype=np.uint16).tofile(tmp_path / source)
    for vocabulary in (None, 50257):
        with pytest.raises(ValueError, match=r"and data\.tokenizer names no tokenizer"):
            of(tmp_path, vocabulary, source=source)
    assert isinstance(of(tmp_path, 256, source=source), ByteTokenizer), "a model of bytes"
    for name, content in BYTES.items():
        (tmp_path / name).write_bytes(content)
    assert of(tmp_path, 50257, source=source, tokenizer="tokenizer.json").vocabulary == 256


def test_a_prepared_corpus_tells_if_it_is_the_runs(tmp_path: Path) -> None:
    for name, content in BYTES.items():
        (tmp_path / name).write_bytes(content)
    made = prepared(folder_of(tmp_path / "a", 60), tmp_path / "c", with_=load(str(tmp_path)))
    own = load(str(tmp_path)).digest
    assert of(tmp_path, source="c").digest == own
    assert of(tmp_path, source="c", digest=made.digest).digest == own
    mixture = [{"source": "elsewhere", "weight": 1}, {"source": "c", "weight": 1}]
    assert of(tmp_path, mixture=mixture).digest == own
    with pytest.raises(ValueError, match="and the run's has"):
        of(tmp_path, source="c", digest="0" * 32)
    (tmp_path / "c" / "tokenizer" / "tokenizer.json").write_bytes(
        BYTES["tokenizer.json"].replace(b'"id": 0', b'"id": 1')
    )
    with pytest.raises(ValueError, match="tokenizer"):
        of(tmp_path, source="c")


def test_a_model_of_sentencepiece_lies_where_others_look_for_it(tmp_path: Path) -> None:
    model = sentence_piece(tmp_path, "some words to learn from\n")
    odd = model.rename(tmp_path / "my own größe.model")
    found = files_of(load(str(odd)))
    assert found["tokenizer.model"] == odd.read_bytes() and odd.name not in found
    config = json.loads(found["tokenizer_config.json"])
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["add_bos_token"] is False and config["eos_token"] == "</s>"
    for name in found:
        ExportedFile(name=name, bytes=1, sha256="0" * 64)
