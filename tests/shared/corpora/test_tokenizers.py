"""Tokenizers: text to numbers and back, what ends a document, and files that are none."""

import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from settled import Settled
from shared.corpora.texts import folder_of, sentence_piece

from diloco_shared.corpora import training
from diloco_shared.corpora.documents import Tally
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.tokenizers import ByteTokenizer, Tokenizer, load
from diloco_shared.corpora.training import DOCUMENT_BYTES, END, train_tokenizer

hugging: Any = pytest.importorskip("tokenizers")
WORDS = "the cat sat on the mat and the dog sat on the log; ünïcödé 你好 🙂\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BPE of 400 tokens."""
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "text.txt").write_text("".join(f"{n} {WORDS}" for n in range(300)))
    train_tokenizer(find(str(root / "text.txt")), 400, root / "bpe")
    return root / "bpe"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model."""
    return sentence_piece(tmp_path_factory.mktemp("pieces"), WORDS)


def check(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint32
        assert not len(ids) or ids.max() < tokenizer.vocabulary
        assert tokenizer.decode(ids.tolist()) == text
    assert 0 <= tokenizer.end_of_document < tokenizer.vocabulary


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
@examples(50)
def test_bytes_decode_to_the_text(texts: list[str]) -> None:
    check(ByteTokenizer(), texts)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
@examples(50)
def test_a_trained_tokenizer_decodes_to_the_text(trained: Path, texts: list[str]) -> None:
    check(load(str(trained)), texts)


def test_a_sentence_piece_model_is_read(pieces: Path) -> None:
    tokenizer = load(str(pieces))
    check(tokenizer, ["the cat sat", "dog on the mat"])
    assert tokenizer.vocabulary == 50
    assert load(str(pieces.parent)).digest == tokenizer.digest, "a folder with one will do"


def test_training_gives_what_was_asked_for(trained: Path) -> None:
    tokenizer = load(str(trained))
    assert tokenizer.vocabulary == 400
    assert tokenizer.decode([tokenizer.end_of_document]) == END
    (ids,) = tokenizer.encode_batch(["the cat sat on the mat"])
    assert len(ids) < 10, "words of the text are tokens"
    # A text that spells it does not end its document by that: it was trained as a special token.
    assert load(str(trained / "tokenizer.json")).digest == tokenizer.digest


def test_training_again_gives_the_same(trained: Path, tmp_path: Path) -> None:
    again = train_tokenizer(find(str(trained.parent / "text.txt")), 400, tmp_path / "bpe")
    assert again.digest == load(str(trained)).digest


def test_training_of_much_text_sees_a_sample_of_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "a", 400)
    source = find(str(folder))
    every = {d.text for d in source.documents(Tally())}
    monkeypatch.setattr(training, "TEXT_MAX", source.bytes // 4)
    told: list[tuple[int, int]] = []
    sample = training._sampled(source, lambda done, total: told.append((done, total)))
    drawn = [text for batch in sample.taken() for text in batch]
    assert set(drawn) < every and 30 < len(drawn) < 160
    assert int(max(drawn).split()[1]) > 300 and int(min(drawn).split()[1]) < 100
    assert told[-1] == (source.bytes, source.bytes)


def test_a_sample_of_packed_text_is_of_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much text they hold shows only in the end; their names have an order of their own."""
    for file in range(4):
        lines = (json.dumps({"text": f"{file} {n} " + "word " * 200}) for n in range(200))
        with gzip.open(tmp_path / f"{file}.jsonl.gz", "wt") as packed:
            packed.writelines(f"{line}\n" for line in lines)
    source = find(str(tmp_path))
    every = [document.text for document in source.documents(Tally())]
    monkeypatch.setattr(training, "TEXT_MAX", 100_000)
    assert source.bytes < training.TEXT_MAX < sum(map(len, every)) // 8
    drawn = [text for batch in training._sampled(source, None).taken() for text in batch]
    assert 20_000 < sum(map(len, drawn)) <= training.TEXT_MAX
    assert len(set(drawn)) == len(drawn) and drawn == sorted(drawn, key=every.index)
    of_file = Counter(text[0] for text in drawn)
    assert len(of_file) == 4 and max(of_file.values()) < 4 * min(of_file.values())


def test_copies_of_one_text_are_sampled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "the same"}\n' * 1000)
    monkeypatch.setattr(training, "TEXT_MAX", 9000)
    sample = training._sampled(find(str(tmp_path)), None)
    assert 2000 < sample.bytes == (8 + DOCUMENT_BYTES) * len(sample.texts) <= 9000


def test_what_documents_take_beside_their_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short records it is most of the memory; and nothing is copied when a half of them goes."""
    many, sample = 20_000, training._Sample()
    monkeypatch.setattr(training, "TEXT_MAX", many * (8 + DOCUMENT_BYTES))
    tracemalloc.start()
    try:
        for n in range(many):
            sample.add(f"{n:08}")
        taken, _ = tracemalloc.get_traced_memory()
        assert 0.75 < taken / sample.bytes < 1.1 and len(sample.texts) == many
        tracemalloc.reset_peak()
        sample.add("one more")
        assert tracemalloc.get_traced_memory()[1] < 1.02 * taken
    finally:
        tracemalloc.stop()
    assert 0.4 < len(sample.texts) / many < 0.6
    assert sample.bytes == (8 + DOCUMENT_BYTES) * len(sample.texts)


@pytest.mark.parametrize(("vocabulary", "says"), [(257, "is not from 258"), (10**9, "to 1048576")])
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, vocabulary: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        train_tokenizer(find("stdlib"), vocabulary, tmp_path / "bpe")


def test_training_overwrites_nothing(trained: Path, tmp_path: Path) -> None:
    source = find(str(trained.parent / "text.txt"))
    (tmp_path / "mine").write_text("x")
    for to in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ValueError, match="is not empty: name another folder"):
            train_tokenizer(source, 300, to)
    assert (tmp_path / "mine").read_text() == "x"
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="has no text to train a tokenizer on"):
        train_tokenizer(find(str(tmp_path / "empty.txt")), 300, tmp_path / "bpe")


def copy(trained: Path, to: Path, config: Any = None, special: Any = None) -> Path:
    """The same tokenizer with other files beside it."""
    to.mkdir(exist_ok=True)
    (to / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    for name, body in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        if body is not None:
            (to / name).write_text(body if isinstance(body, str) else json.dumps(body))
    return to


def test_the_files_say_what_ends_a_document_and_how_to_talk(trained: Path, tmp_path: Path) -> None:
    plain = load(str(trained))
    cat = plain.encode_batch(["cat"])[0]
    for n, (config, special, end) in enumerate(
        [
            (None, None, END),
            ({"eos_token": "a"}, None, "a"),
            ({"eos_token": {"content": "b"}}, {"eos_token": "c"}, "b"),
            ({}, {"eos_token": "c"}, "c"),
        ]
    ):
        found = load(str(copy(trained, tmp_path / str(n), config, special)))
        assert found.decode([found.end_of_document]) == end
        assert (found.digest == plain.digest) == (end == END)
        np.testing.assert_array_equal(found.encode_batch(["cat"])[0], cat)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    several = [{"name": "tool", "template": "x"}, {"name": "default", "template": template}]
    for n, told in enumerate((template, several)):
        folder = copy(trained, tmp_path / f"t{n}", {"chat_template": told})
        assert load(str(folder)).chat_template == template
    (folder / "chat_template.jinja").write_text("a file of its own")
    assert load(str(folder)).chat_template == "a file of its own"
    assert plain.chat_template is None and "chat_template.jinja" in load(str(folder)).files


def test_what_a_tokenizer_was_told_to_cut_or_fill_up_it_does_not(
    trained: Path, tmp_path: Path
) -> None:
    inner = hugging.Tokenizer.from_file(str(trained / "tokenizer.json"))
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    texts = ["the", "the cat sat on the mat"]
    for a, b in zip(
        load(str(tmp_path)).encode_batch(texts),
        load(str(trained)).encode_batch(texts),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def no_end(trained: Path, to: Path) -> Path:
    text = (trained / "tokenizer.json").read_text().replace(END, "<|other|>")
    (to / "tokenizer.json").write_text(text)
    return to


def end_less_pieces(trained: Path, to: Path) -> Path:
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        input=str(trained.parent / "text.txt"),
        model_prefix=str(to / "m"),
        vocab_size=50,
        character_coverage=1.0,
        eos_id=-1,
        minloglevel=2,
    )
    return to / "m.model"


def put(name: str, content: str) -> Callable[[Path, Path], Path]:
    def make(trained: Path, to: Path) -> Path:
        (to / name).write_text(content)
        return to / name

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda trained, to: to / "gone", "neither 'bytes' nor a file or folder on this machine"),
        (lambda trained, to: to, r"is no tokenizer: it has no tokenizer\.json, and 0 files"),
        (put("tokenizer.json", "{"), r"tokenizer\.json is no tokenizer of Hugging Face"),
        (put("x.json", '{"a": 1}'), r"x\.json is no tokenizer of Hugging Face"),
        (put("x.model", "no model"), r"x\.model is no model of SentencePiece"),
        (no_end, r"has no token that ends a document .* name it as \"eos_token\""),
        (end_less_pieces, r"m\.model has no token that ends a document"),
        (lambda t, to: copy(t, to, "{"), r"tokenizer_config\.json is no JSON"),
        (lambda t, to: copy(t, to, "[]"), r"tokenizer_config\.json: expected an object"),
        (lambda t, to: copy(t, to, {"eos_token": "no such"}), r"'no such', which .* does not have"),
    ],
)
def test_bad_files_are_named(
    trained: Path, tmp_path: Path, make: Callable[[Path, Path], Path], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        load(str(make(trained, tmp_path)))


@pytest.mark.parametrize("package", ["tokenizers", "sentencepiece"])
def test_a_missing_package_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    (tmp_path / "x.model").write_text("x")
    path = trained if package == "tokenizers" else tmp_path / "x.model"
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=f"not installed: pip install {package}"):
        load(str(path))


def test_a_trained_tokenizer_and_its_folders_name_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = Settled(monkeypatch)
    training._written(tmp_path / "of a corpus", "text")
    inside = {path.name for path in (tmp_path / "of a corpus").iterdir()}
    assert [of for of in settled.calls if isinstance(of, set)][-2:] == [inside, {"of a corpus"}]
