"""A corpus of conversations on disk: signs beside the tokens, and a format that says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared.corpora.conversations import LINES, SPECIAL, lines_of, said, sums
from shared.corpora.texts import folder_of, prepared, sentence_piece

from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.documents import Tally
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import Corpus, digest_of, open_corpus, verify
from diloco_shared.corpora.sequences import Tokens, WrongToken
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.templates import compiled, template_of
from diloco_shared.corpora.tokenizers import ByteTokenizer, Tokenizer, load
from diloco_shared.corpora.training import train_tokenizer
from diloco_shared.hf.tokenizer import files_of

ALL = ("train", "validation", "test")


def chat_corpus(source: Path, to: Path, chat: Chat | None = None) -> Corpus:
    chat = chat or Chat(template_of(ByteTokenizer(), "bytes"))
    return prepare(find(str(source), chat=chat), ByteTokenizer(), to, 0.2, 2)


def written(folder: Path, count: int = 60) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return lines_of(folder / "c.jsonl", [{"messages": m} for m in sums(count)])


def texts(corpus: Corpus) -> list[list[str]]:
    """Of each split the conversations, with the answers in brackets."""
    found = []
    for name in ALL:
        tokens = corpus.split(name)[:]
        text = "".join(chr(t) if t >= 0 else chr(~t + 0x1000) for t in tokens.tolist())
        found.append(text.split("\0")[:-1])
    return found


def test_conversations_are_dealt_to_splits_with_one_end_between_them(tmp_path: Path) -> None:
    corpus = chat_corpus(written(tmp_path), tmp_path / "corpus")
    splits = texts(corpus)
    every = sorted(text for split in splits for text in split)
    wanted = [
        "".join(chr(ord(c) + 0x1000) for c in f"[user]\nWhat is {n} and {n}?\n[assistant]\n")
        + f"It is {2 * n}."
        for n in range(60)
    ]
    assert every == sorted(wanted)
    assert all(len(split) > 3 for split in splits)
    index = corpus.index
    assert index is not None and corpus.masked
    assert (index.format, index.dtype, index.masked) == (2, "int32", True)
    for name, split in zip(ALL, splits, strict=True):
        part = index.splits[name]  # type: ignore[index]
        assert part.documents == len(split)
        assert part.predicted == sum(len(t.split(chr(0x1000 + 10))[-1]) + 1 for t in split)
    assert verify(corpus) == []


def test_a_template_that_ends_with_something_else_gets_an_end_that_is_not_predicted(
    tmp_path: Path,
) -> None:
    corpus = chat_corpus(
        written(tmp_path), tmp_path / "corpus", Chat(compiled(LINES, "t", SPECIAL))
    )
    tokens = corpus.train[:]
    ends = np.flatnonzero(tokens == ~0)
    assert not (tokens == 0).any() and corpus.index is not None
    assert len(ends) == corpus.index.splits["train"].documents and tokens[-1] == ~0
    assert (tokens[ends - 1] == ~ord("\n")).all()


def test_a_conversation_stays_in_its_split_when_others_come(tmp_path: Path) -> None:
    few = texts(chat_corpus(written(tmp_path / "a"), tmp_path / "few"))
    many = texts(chat_corpus(written(tmp_path / "b", 120), tmp_path / "many"))
    for before, after in zip(few, many, strict=True):
        assert set(before) <= set(after)


def test_the_digest_is_of_the_signs_as_well(tmp_path: Path) -> None:
    source = written(tmp_path)
    first = chat_corpus(source, tmp_path / "first")
    same = chat_corpus(source, tmp_path / "same")
    assert first.digest == same.digest == digest_of(open_corpus(tmp_path / "first"))
    # The same text, of which less is to be predicted.
    template = (
        "{% for m in messages %}{% if not loop.first %}\n\n{% endif %}[{{ m.role }}]\n"
        "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}\n\n[assistant]\nIt is {% endif %}"
    )
    less = Chat(compiled(template, "t", ByteTokenizer().special))
    other = chat_corpus(source, tmp_path / "other", less)
    for name in ALL:
        a, b = (np.asarray(c.split(name)[:]) for c in (first, other))
        np.testing.assert_array_equal(np.where(a < 0, ~a, a), np.where(b < 0, ~b, b))
    assert first.digest != other.digest
    shard = tmp_path / "first" / "test-00000.bin"
    flipped = ~np.fromfile(shard, "<i4")
    flipped.tofile(shard)
    assert [fault.split()[1] for fault in verify(open_corpus(tmp_path / "first"))] == ["test"]


def test_plain_corpora_say_nothing_of_signs(tmp_path: Path) -> None:
    """So releases that know none read them."""
    corpus = prepared(folder_of(tmp_path / "a", 60), tmp_path / "c")
    body = json.loads((tmp_path / "c" / "index.json").read_bytes())
    assert list(body) == [
        "format",
        "digest",
        "tokenizer",
        "vocabulary",
        "end_of_document",
        "dtype",
        "source",
        "fraction",
        "skipped_files",
        "splits",
    ]
    assert body["format"] == 1 and not corpus.masked
    assert list(body["splits"]["test"]) == ["tokens", "documents", "digest", "shards"]
    assert list(body["splits"]["test"]["shards"][0]) == ["file", "tokens", "documents", "digest"]


def changed(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: body | fields


def more_predicted(body: dict[str, Any]) -> dict[str, Any]:
    body["splits"]["test"]["predicted"] += 1
    return body


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (changed(format=1), "damaged: a masked corpus, and no other, is of int32"),
        (changed(dtype="uint32"), "this is of uint32, of format 2, and masked is true"),
        (changed(masked=False), "of int32, of format 2, and masked is false"),
        (more_predicted, r"splits\.test has \d+ predicted, its shards \d+"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    tmp_path: Path, act: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    chat_corpus(written(tmp_path), tmp_path / "c")
    index = tmp_path / "c" / "index.json"
    index.write_text(json.dumps(act(json.loads(index.read_bytes()))))
    with pytest.raises(ValueError, match=says):
        open_corpus(tmp_path / "c")


def test_numbers_below_0_are_tokens_of_masked_sequences_alone() -> None:
    numbers = np.array([3, ~3, ~8, 8, ~9], np.int32)
    masked = Tokens([numbers], 9, "c", masked=True)
    assert masked.windows(np.array([0]), 4).tolist() == [[3, ~3, ~8, 8]]
    with pytest.raises(WrongToken, match="c has the number -10, which is no token"):
        masked.windows(np.array([1]), 4)
    with pytest.raises(WrongToken, match="the number -9"):
        Tokens([numbers], 9).windows(np.array([0]), 4)


def test_the_template_travels_with_the_tokenizer(tmp_path: Path) -> None:
    """Whoever writes with the model finds what it was taught in."""
    bpe = train_tokenizer(find(str(folder_of(tmp_path / "a", 60))), 300, tmp_path / "bpe")
    assert bpe.chat_template is None
    chat = Chat(template_of(bpe, "bpe"))
    source = find(str(written(tmp_path)), chat=chat)
    corpus = prepare(source, bpe, tmp_path / "c", 0.2)
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.chat_template == chat.template.text
    assert corpus.tokenizer.digest == bpe.digest
    assert load(str(tmp_path / "c" / "tokenizer")).special["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize("kind", ["bytes", "tokenizer.json", "sentencepiece"])
def test_the_template_is_found_beside_the_weights(tmp_path: Path, kind: str) -> None:
    """The model is asked in the form in which it was taught, whatever its tokenizer."""
    tokenizer: Tokenizer = ByteTokenizer()
    if kind == "tokenizer.json":
        tokenizer = train_tokenizer(find(str(folder_of(tmp_path / "a", 60))), 300, tmp_path / "bpe")
    elif kind == "sentencepiece":
        # Of all characters that the conversations have.
        words = "What is and? are. 0123456789 abcdefghijklmnopqrstuvwxyz [user] [assistant]\n"
        (tmp_path / "sp").mkdir()
        tokenizer = load(str(sentence_piece(tmp_path / "sp", words)))
    source = find(str(written(tmp_path / "talk")), chat=Chat(compiled(LINES, "t", SPECIAL)))
    prepare(source, tokenizer, tmp_path / "c", 0.2)
    corpus = open_corpus(tmp_path / "c")
    assert corpus.tokenizer is not None and corpus.tokenizer.digest == tokenizer.digest
    assert template_of(corpus.tokenizer, kind).text == LINES
    (tmp_path / "export").mkdir()
    for name, content in files_of(corpus.tokenizer).items():
        (tmp_path / "export" / name).write_bytes(content)
    assert template_of(load(str(tmp_path / "export")), kind).text == LINES


def documents(source: Path, chat: Chat) -> tuple[list[str], Tally]:
    tally = Tally()
    found = find(str(source), chat=chat).documents(tally)
    return [d.text for d in found], tally


def test_of_a_folder_only_records_are_read(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (tmp_path / "README.md").write_text("about them")
    texts, tally = documents(tmp_path, Chat(compiled(LINES, "t", {})))
    assert len(texts) == 3 and (tally.binary, tally.first_binary) == (1, "README.md")
    (tmp_path / "c.jsonl").unlink()
    with pytest.raises(ValueError, match="has no conversations: they are in"):
        chat_corpus(tmp_path, tmp_path.parent / f"{tmp_path.name}-c")
    with pytest.raises(ValueError, match=r"README\.md is no file of conversations: a source is \."):
        documents(tmp_path / "README.md", Chat(compiled(LINES, "t", {})))


def test_rows_of_tables_are_conversations(tmp_path: Path) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    rows = sums(600)
    chat = Chat(compiled(LINES, "t", {}), "talk")
    lines_of(tmp_path / "a.jsonl", [{"talk": m} for m in rows])
    wanted, _ = documents(tmp_path / "a.jsonl", chat)
    table = pa.table({"id": list(range(600)), "talk": rows})
    parquet.write_table(table, tmp_path / "a.parquet", 100)
    assert documents(tmp_path / "a.parquet", chat)[0] == wanted
    saved = tmp_path / "saved"
    saved.mkdir()
    with pa.OSFile(str(saved / "d.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as s:
        s.write_table(table, max_chunksize=100)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "d.arrow"}]}))
    assert documents(saved, chat)[0] == wanted
    pairs = {name: [m[n]["content"] for m in rows] for n, name in enumerate(("prompt", "complet"))}
    pairs = {"prompt": pairs["prompt"], "completion": pairs["complet"]}
    parquet.write_table(pa.table(pairs), tmp_path / "b.parquet")
    assert documents(tmp_path / "b.parquet", chat)[0] == wanted
    source = find(str(tmp_path / "a.parquet"), chat=chat)
    assert sum(document.read for document in source.documents(Tally())) == source.bytes


def test_bad_rows_and_lines_are_named(tmp_path: Path) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    chat = Chat(compiled(LINES, "t", {}))
    parquet.write_table(pa.table({"messages": [said("a", "b"), None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: expected an object .* no field"):
        documents(tmp_path / "a.parquet", chat)
    parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match="has no column 'messages', or 'prompt' and 'completion': it has 'text'"
    ):
        documents(tmp_path / "b.parquet", chat)
    (tmp_path / "c.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r'c\.jsonl:1: "messages" is empty'):
        documents(tmp_path / "c.jsonl", chat)
    (tmp_path / "d.jsonl").write_text("\n{no\n")
    with pytest.raises(ValueError, match=r"d\.jsonl:2: expected a conversation, .* no JSON"):
        documents(tmp_path / "d.jsonl", chat)


def test_another_template_is_another_source(tmp_path: Path) -> None:
    source = written(tmp_path)
    chats = [None, Chat(compiled(LINES, "t", {})), Chat(compiled("x", "t", {}))]
    assert len({find(str(source), chat=chat).fingerprint for chat in chats}) == 3
