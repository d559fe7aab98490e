"""The tokenizer beside the weights makes the numbers that the model was trained on."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diloco_shared.corpora.tokenizers import Bytes, load
from diloco_shared.hf.tokenizer import files_of, special_tokens

tokenizers = pytest.importorskip("tokenizers")
BYTES = files_of(Bytes())
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
    assert special_tokens(found) == special_tokens(Bytes()) == {"eos_token_id": 0}
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
