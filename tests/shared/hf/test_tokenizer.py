"""The tokenizer beside the weights makes the numbers that the model was trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from shared.corpora.conversations import LAST_TURNS, LINES, lines_of, sums
from shared.corpora.texts import folder_of, prepared, sentence_piece

from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import Corpus
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.templates import template_of
from diloco_shared.corpora.tokenizers import ByteTokenizer, Tokenizer, load
from diloco_shared.hf.tokenizer import (
    ends_of_answers,
    files_of,
    generation_config,
    special_tokens,
    tokenizer_of,
)
from diloco_shared.protocol.exports import ExportedFile
from diloco_shared.reach.local import DataRoots
from diloco_shared.spec.run import Data

tokenizers = pytest.importorskip("tokenizers")
BYTES = files_of(ByteTokenizer())
END = "<|endoftext|>"
WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }} (over){% endfor %}"
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
    made = json.loads(found["tokenizer_config.json"])
    assert made | own == made, "and what says that nothing is added"
    again = {**own, **{name: made[name] for name in made.keys() - own.keys()}}
    (tmp_path / "tokenizer_config.json").write_text(as_it_is := json.dumps(again))
    assert files_of(load(str(tmp_path)))["tokenizer_config.json"].decode() == as_it_is
    assert found["tokenizer.json"] == BYTES["tokenizer.json"]
    (tmp_path / "tokenizer_config.json").unlink()
    made = json.loads(files_of(load(str(tmp_path)))["tokenizer_config.json"])
    assert made["eos_token"] == END


BEGIN = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT, OTHER = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [BEGIN, TEXT],
    "pair": [BEGIN, TEXT, BEGIN, OTHER],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
}
AROUND: dict[str, Any] = {"sep": [END, 0], "cls": ["<s>", 256]}
LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
STEPS = {
    "llama 2": (TEMPLATE, None),
    "llama 3": (
        {"type": "Sequence", "processors": [LEVEL, TEMPLATE]},
        {"type": "Sequence", "processors": [LEVEL]},
    ),
    "alone": ({"type": "Sequence", "processors": [TEMPLATE]}, None),
    "bert": ({"type": "BertProcessing", **AROUND}, None),
    "roberta": (
        {"type": "RobertaProcessing", **AROUND, "trim_offsets": True, "add_prefix_space": False},
        None,
    ),
    "gpt 2": (LEVEL, LEVEL),
}


@pytest.mark.parametrize(("step", "left"), STEPS.values(), ids=STEPS)
def test_nothing_stands_in_front_of_a_text_that_was_not_there_in_training(
    tmp_path: Path, step: dict[str, Any], left: dict[str, Any] | None
) -> None:
    whole = json.loads(BYTES["tokenizer.json"])
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": 256, "content": "<s>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"post_processor": step}))
    own = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    trained = load(str(tmp_path))
    found = files_of(trained)
    assert json.loads(found["tokenizer.json"])["post_processor"] == left
    read = tokenizers.Tokenizer.from_str(found["tokenizer.json"].decode())
    assert read.encode("née").ids == trained.encode_batch(["née"])[0].tolist()
    config = json.loads(found["tokenizer_config.json"])
    # Others follow their class where they know it, and what is said here beside that.
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["add_bos_token"] is config["add_eos_token"] is False
    assert (config["bos_token"], config["eos_token"]) == ("<s>", END), "for chat templates"


def test_a_token_that_text_may_spell_gets_no_name(tmp_path: Path) -> None:
    """A token of that name would be cut out of every text."""
    (tmp_path / "tokenizer.json").write_bytes(BYTES["tokenizer.json"])
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "t"}))
    found = files_of(load(str(tmp_path)))
    assert "eos_token" not in json.loads(found["tokenizer_config.json"])


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


def hidden(tmp_path: Path, kind: str) -> str:
    """A source of which nothing can be read here."""
    if kind == "out of reach":
        return "../elsewhere"
    prepared(folder_of(tmp_path / "b", 60), tmp_path / "damaged")
    (tmp_path / "damaged" / "index.json").write_text('{"format": 1}')
    return "damaged"


@pytest.mark.parametrize("kind", ["out of reach", "damaged"])
def test_one_part_that_cannot_be_read_here_hides_no_other(tmp_path: Path, kind: str) -> None:
    """An export of a mixture has the tokenizer that any part tells, whichever comes first."""
    root, source = DataRoots((tmp_path,)), hidden(tmp_path, kind)
    tokenizer = with_turns(tmp_path / "turns")
    talk(tmp_path / "talk", tokenizer)
    for names in (("talk", source), (source, "talk")):
        data = Data.model_validate({"mixture": [{"source": n, "weight": 1} for n in names]})
        assert tokenizer_of(data, root).digest == tokenizer.digest
        assert ends_of_answers(data, root) == (256,)
    alone = Data(source=source)
    for rows in (256, 257):  # it may have been made by any tokenizer, also one of as many tokens
        with pytest.raises(ValueError, match=r"may not use|is damaged"):
            tokenizer_of(alone, root, rows)
    assert ends_of_answers(alone, root) == ()


def test_a_damaged_tokenizer_of_one_part_hides_that_of_no_other(tmp_path: Path) -> None:
    tokenizer = with_turns(tmp_path / "turns")
    talk(tmp_path / "talk", tokenizer)
    prepared(folder_of(tmp_path / "texts", 60), tmp_path / "plain", with_=tokenizer)
    (tmp_path / "talk" / "tokenizer" / "tokenizer.json").write_text("{")
    mixture = [{"source": name, "weight": 1} for name in ("talk", "plain")]
    assert of(tmp_path, mixture=mixture).digest == tokenizer.digest
    assert ends(tmp_path, mixture=mixture) == ()


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


# --- where an answer ends ------------------------------------------------------------------------


def with_turns(folder: Path, template: str = LINES) -> Tokenizer:
    """Bytes, and a token that ends a turn of an assistant."""
    whole = json.loads(BYTES["tokenizer.json"])
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": 256, "content": "<|im_end|>"})
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "chat_template.jinja").write_text(template)
    return load(str(folder))


def talk(folder: Path, tokenizer: Tokenizer) -> Corpus:
    """A corpus of conversations."""
    source = lines_of(folder.with_suffix(".jsonl"), [{"messages": one} for one in sums(60)])
    chat = Chat(template_of(tokenizer, "t"))
    return prepare(find(str(source), chat=chat), tokenizer, folder, 0.2)


def ends(folder: Path, **data: Any) -> tuple[int, ...]:
    return ends_of_answers(Data.model_validate(data), folder)


def test_a_model_of_conversations_stops_where_an_answer_ends(tmp_path: Path) -> None:
    """It never learns to write what ends the document: that is only read."""
    tokenizer = with_turns(tmp_path / "turns")
    made = talk(tmp_path / "talk", tokenizer)
    plain = prepared(folder_of(tmp_path / "texts", 60), tmp_path / "plain", with_=tokenizer)
    assert ends(tmp_path, source="talk") == (256,)
    assert ends(tmp_path, source="talk", digest=made.digest) == (256,)
    parts = [{"source": name, "weight": 1} for name in ("plain", "talk", "far")]
    assert ends(tmp_path, mixture=parts) == (256,)
    for source in ("plain", "texts", "stdlib", "far"):
        assert ends(tmp_path, source=source) == ()
    assert ends(tmp_path, source="talk", digest=plain.digest) == (), "another one"
    found = special_tokens(tokenizer, (256,))
    assert found == {"bos_token_id": 0, "eos_token_id": [0, 256], "pad_token_id": None}
    assert json.loads(generation_config(found) or b"") == found
    assert generation_config(special_tokens(tokenizer)) is None


@pytest.mark.parametrize("template", [LAST_TURNS.replace("eos_token", "'<|endoftext|>'"), WORDS])
def test_what_ends_the_document_or_is_text_is_no_other_end(tmp_path: Path, template: str) -> None:
    talk(tmp_path / "talk", with_turns(tmp_path / "turns", template))
    assert ends(tmp_path, source="talk") == ()


def test_the_template_is_that_of_the_conversations(tmp_path: Path) -> None:
    """Of a mixture with plain text, whichever comes first."""
    tokenizer = load("bytes")
    prepared(folder_of(tmp_path / "texts", 60), tmp_path / "plain", with_=tokenizer)
    talk(tmp_path / "talk", tokenizer)
    parts = [{"source": name, "weight": 1} for name in ("plain", "talk")]
    assert of(tmp_path, mixture=parts).chat_template is not None
    parts[1]["digest"] = "0" * 32
    assert of(tmp_path, mixture=parts).chat_template is None, "another corpus has its name"
