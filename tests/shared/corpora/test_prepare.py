"""Text becomes shards: all of it, once, in the right split, whatever dies on the way."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from settled import UNKNOWN, Settled, settles_no_names
from shared.corpora.texts import Slow, documents, few_open_files, folder_of, killed, prepared

from diloco_shared.corpora import prepare as module
from diloco_shared.corpora.folders import Busy, locked
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import (
    Corpus,
    digest_of,
    is_prepared,
    open_corpus,
    verify,
    whole,
)
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.token_files import TokenFile
from diloco_shared.corpora.tokenizers import ByteTokenizer
from diloco_shared.corpora.training import train_tokenizer


def test_every_document_is_in_one_split(tmp_path: Path) -> None:
    corpus = prepared(folder_of(tmp_path / "a", 200), tmp_path / "corpus")
    splits = documents(corpus)
    every = sorted(text for texts in splits for text in texts)
    assert every == sorted(f"text {n:04d} " * 5 for n in range(200))
    assert all(20 <= len(held) <= 60 for held in splits[1:])
    assert splits[0] == sorted(splits[0]), "in the order of the source"
    index = corpus.index
    assert index is not None
    assert [index.splits[name].documents for name in ("train", "validation", "test")] == [
        len(texts) for texts in splits
    ]
    assert (index.dtype, index.vocabulary, index.skipped_files) == ("uint16", 256, 0)


def test_splits_follow_the_content_and_nothing_else(tmp_path: Path) -> None:
    """Not names, places, or what else there is."""
    few = documents(prepared(folder_of(tmp_path / "a", 60), tmp_path / "few"))
    more = folder_of(tmp_path / "b", 120)
    (more / "0000.txt").rename(more / "renamed.txt")
    many = documents(prepared(more, tmp_path / "many"))
    for before, after in zip(few, many, strict=True):
        assert set(before) <= set(after)


def test_a_single_file_of_a_megabyte_fills_all_splits(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {n} of a book\n" for n in range(50_000)))
    corpus = prepared(book, tmp_path / "corpus", 0.05)
    splits = documents(corpus)
    held = [sum(map(len, texts)) for texts in splits]
    assert sum(held) == book.stat().st_size
    assert all(0.02 < part / sum(held) < 0.09 for part in held[1:])
    with book.open("a") as file:
        file.writelines(f"line {n} of its second volume\n" for n in range(20_000))
    longer = documents(prepared(book, tmp_path / "longer", 0.05))
    for before, after in zip(splits, longer, strict=True):
        assert len(set(before) - set(after)) <= 1, "only the passage that was the last is another"


def test_a_split_that_chance_leaves_empty_is_filled(tmp_path: Path) -> None:
    corpus = prepared(folder_of(tmp_path / "a", 3), tmp_path / "corpus", 0.001)
    splits = documents(corpus)
    assert [len(texts) for texts in splits] == [1, 1, 1]
    assert len({text for texts in splits for text in texts}) == 3
    assert not verify(corpus)
    names = sorted(path.name for path in (tmp_path / "corpus").iterdir())
    assert names == ["index.json", "test-00000.bin", "train-00000.bin", "validation-00000.bin"]


def test_shards_are_of_a_bounded_size_and_one_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "a", 100)
    whole = prepared(folder, tmp_path / "whole")
    monkeypatch.setattr(module, "SHARD_BYTES", 1000)
    shards = prepared(folder, tmp_path / "shards")
    sizes = [path.stat().st_size for path in (tmp_path / "shards").glob("*.bin")]
    assert max(sizes) <= 1000 and len(sizes) > 8
    assert shards.digest == whole.digest, "the digest is of the tokens, not of the files"
    np.testing.assert_array_equal(shards.train[:], whole.train[:])
    starts = np.arange(0, len(whole.train) - 40, 7)
    np.testing.assert_array_equal(shards.train.windows(starts, 40), whole.train.windows(starts, 40))


def test_a_corpus_of_more_files_than_are_allowed_unasked_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "a", 200)
    monkeypatch.setattr(module, "SHARD_BYTES", 60)
    with few_open_files(50):
        corpus = prepared(folder, tmp_path / "corpus")
        assert len(corpus.train.parts) > 100
        assert sum(map(len, documents(corpus))) == 200


def test_a_corpus_of_more_files_than_are_allowed_at_all_names_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, to = folder_of(tmp_path / "a", 200), tmp_path / "corpus"
    monkeypatch.setattr(module, "SHARD_BYTES", 60)
    monkeypatch.setattr("diloco_shared.corpora.prepared.allow_most", lambda: None)
    says = r"-\d+\.bin cannot be read: this process has as many files open as it may, \d+, .*ulimit"
    with few_open_files(50), pytest.raises(ValueError, match=says):
        prepared(folder, to)
    assert is_prepared(to) and verify(open_corpus(to)) == []


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    source = find(str(folder_of(tmp_path / "a", 300)))
    wanted = prepare(source, ByteTokenizer(), tmp_path / "wanted", 0.2, 1).digest
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    assert prepare(source, ByteTokenizer(), tmp_path / "b", 0.2, workers).digest == wanted


def test_what_waits_for_threads_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the source."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    source = find(str(folder_of(tmp_path / "a", 300)))
    tokenizer, job_to = ByteTokenizer(), tmp_path / "c"
    job = module._Job(source, tokenizer, job_to, 2, lambda done, total: None)
    begun = 0

    def chunks() -> Any:
        nonlocal begun
        for begun in range(1, 101):  # noqa: B007
            yield module._Chunk(["text"], ["train"], [4])

    for done, _ in enumerate(job._encoded(chunks()), 1):
        assert begun - done <= module.AHEAD * 2
    assert done == begun == 100


def test_progress_goes_to_the_end(tmp_path: Path) -> None:
    source = find(str(folder_of(tmp_path / "a", 50)))
    told: list[tuple[int, int]] = []
    prepare(source, ByteTokenizer(), tmp_path / "c", 0.2, 1, lambda *done: told.append(done))
    assert told == sorted(told) and told[-1] == (source.bytes, source.bytes)


def test_a_tokenizer_travels_with_its_corpus(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", 60)
    bpe = train_tokenizer(find(str(folder)), 300, tmp_path / "bpe")
    corpus = prepared(folder, tmp_path / "corpus", with_=bpe)
    plain = prepared(folder, tmp_path / "plain")
    tokenizer = corpus.tokenizer
    assert tokenizer is not None and tokenizer.digest == bpe.digest
    assert corpus.vocabulary == bpe.vocabulary and corpus.digest != plain.digest
    assert corpus.end_of_document == bpe.end_of_document
    for coded, text in zip(
        (corpus.train, corpus.validation, corpus.test), documents(plain), strict=True
    ):
        ids = coded[:].tolist()
        assert ids[-1] == bpe.end_of_document
        assert tokenizer.decode(ids).split("<|endoftext|>")[:-1] == text


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    class Large(Slow):
        vocabulary, end_of_document = 70_000, 69_999

    corpus = prepare(find(str(folder_of(tmp_path / "a", 60))), Large(), tmp_path / "c", 0.2)
    assert corpus.index is not None and corpus.index.dtype == "uint32"
    assert corpus.train[-1] == 69_999


class Died(Exception):
    pass


def die() -> None:
    raise Died


def test_what_dies_on_the_way_is_no_corpus_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    monkeypatch.setattr(module, "SHARD_BYTES", 1000)
    source, to = find(str(folder_of(tmp_path / "a", 100))), tmp_path / "c"
    with pytest.raises(Died):
        prepare(source, Slow("text 0060", die), to, 0.2)
    (to / "tokenizer").mkdir()
    assert any(to.iterdir()) and not is_prepared(to)
    with pytest.raises(ValueError, match=r"has no index\.json, so it is no prepared corpus"):
        open_corpus(to)
    again = prepare(source, ByteTokenizer(), to, 0.2)
    monkeypatch.undo()
    assert again.digest == prepare(source, ByteTokenizer(), tmp_path / "other", 0.2).digest
    assert not list(to.glob("*.part")) and not (to / module.UNFINISHED).exists()


def test_what_dies_while_it_is_removed_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, to = find(str(folder_of(tmp_path / "a", 60))), tmp_path / "c"
    digest = prepare(source, ByteTokenizer(), to, 0.2).digest
    remove, left = module._remove, [1]

    def dying(path: Path) -> None:
        if not left:
            die()
        left.pop()
        remove(path)

    for act in (lambda: module.removed(to), lambda: prepare(source, ByteTokenizer(), to, 0.2)):
        monkeypatch.setattr(module, "_remove", dying)
        left[:] = [1]
        with pytest.raises(Died):
            act()
        monkeypatch.undo()
        assert not is_prepared(to) and list(to.glob("*.bin"))
    assert prepare(source, ByteTokenizer(), to, 0.2).digest == digest


@pytest.mark.whole
def test_a_killed_process_leaves_no_lock_and_no_corpus(tmp_path: Path) -> None:
    folder, to = folder_of(tmp_path / "a", 100), tmp_path / "c"
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(folder, to))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    assert list(to.glob("*.bin*")) and not is_prepared(to)
    assert sum(map(len, documents(prepared(folder, to)))) == 100


def test_one_process_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    source, to = find(str(folder_of(tmp_path / "a", 60))), tmp_path / "c"
    with locked(to, wait=False), pytest.raises(Busy, match="another process is writing"):
        prepare(source, ByteTokenizer(), to, 0.2)
    prepare(source, ByteTokenizer(), to, 0.2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"], "no lock is left"


def foreign(tmp: Path) -> Path:
    (tmp / "c").mkdir()
    (tmp / "c" / "thesis.tex").write_text("years of work")
    return tmp / "c"


def a_tokenizer(tmp: Path) -> Path:
    """A name of ours, and somebody's work."""
    (tmp / "c" / "tokenizer").mkdir(parents=True)
    (tmp / "c" / "tokenizer" / "tokenizer.json").write_text("hours of training")
    return tmp / "c"


def foreign_in_ours(tmp: Path) -> Path:
    (tmp / "c").mkdir()
    for name in (module.UNFINISHED, "train-00000.bin.part", "thesis.tex"):
        (tmp / "c" / name).write_text("x")
    return tmp / "c"


def a_file(tmp: Path) -> Path:
    (tmp / "c").write_text("x")
    return tmp / "c"


def finished(tmp: Path) -> Path:
    prepared(tmp / "a", tmp / "c")
    return tmp / "c"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (foreign, r"is not empty and is no corpus \(it has 'thesis\.tex'\)"),
        (foreign_in_ours, r"is no corpus \(it has 'thesis\.tex'\)"),
        (a_tokenizer, r"is no corpus \(it has 'tokenizer'\)"),
        (a_file, "is a file: name a folder"),
        (finished, "holds a prepared corpus already: remove it"),
        (lambda tmp: tmp / "a" / "inside", "lies in the source"),
        (lambda tmp: tmp / "a", "lies in the source"),
    ],
)
def test_nothing_of_anybodys_is_overwritten(
    tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    source = find(str(folder_of(tmp_path / "a", 60)))
    to = make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=says):
        prepare(source, ByteTokenizer(), to, 0.2)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_sources_without_enough_text_are_refused(tmp_path: Path) -> None:
    two = folder_of(tmp_path / "two", 2)
    with pytest.raises(ValueError, match=r"'.*two': 2 different documents cannot be split"):
        prepared(two, tmp_path / "c")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x.png").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"no text: 1 files were left out .* x\.png"):
        prepared(tmp_path / "binary", tmp_path / "c")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x").write_text("")
    with pytest.raises(ValueError, match="no text: all of its 1 files are empty"):
        prepared(tmp_path / "empty", tmp_path / "c")
    with pytest.raises(ValueError, match=r"fraction of 0\.6 is not above 0 and below 0\.5"):
        prepared(two, tmp_path / "d", 0.6)
    assert not (tmp_path / "d").exists()
    prepared(folder_of(tmp_path / "three", 3), tmp_path / "e")
    with pytest.raises(ValueError, match="is a prepared corpus already"):
        prepared(tmp_path / "e", tmp_path / "f")


def damage(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / name
        if name.endswith(".json"):
            body = json.loads(path.read_text())
            path.write_text(json.dumps(change(body)))
        else:
            path.write_bytes(change(path.read_bytes()))

    return act


def without(body: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != key}


def shorter(body: dict[str, Any]) -> dict[str, Any]:
    body["splits"]["test"]["tokens"] += 1
    return body


def elsewhere(body: dict[str, Any]) -> dict[str, Any]:
    body["splits"]["test"]["shards"][0]["file"] = "../test-00000.bin"
    return body


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (damage("train-00000.bin", lambda raw: raw[:-2]), "it is shorter than when it was written"),
        (damage("test-00000.bin", lambda raw: raw + b"\0\0"), "longer than when it was written"),
        (lambda folder: (folder / "train-00000.bin").unlink(), r"train-00000\.bin cannot be read"),
        (damage("index.json", lambda b: b | {"format": 3}), "of format 3, .* formats 1 and 2"),
        (damage("index.json", lambda b: b | {"format": 2}), "damaged: a masked corpus, and no"),
        (damage("index.json", lambda b: without(b, "format")), "of format None"),
        (damage("index.json", lambda b: [b]), "of format None"),
        (damage("index.json", lambda b: without(b, "dtype")), "damaged: dtype: Field required"),
        (damage("index.json", lambda b: b | {"dtype": "uint8"}), "damaged: dtype: .*'uint16'"),
        (damage("index.json", lambda b: b | {"more": 1}), "damaged: more: Extra inputs"),
        (damage("index.json", lambda b: b | {"digest": "0" * 32}), "its digest is 0{32}, and its"),
        (damage("index.json", lambda b: b | {"vocabulary": 70_000}), "does not fit uint16"),
        (damage("index.json", lambda b: b | {"vocabulary": "256"}), "damaged: vocabulary"),
        (damage("index.json", shorter), r"splits\.test has \d+ tokens, its shards \d+"),
        (damage("index.json", elsewhere), r"damaged: splits\.test\.shards\.0\.file"),
        (
            damage("index.json", lambda b: b | {"splits": without(b["splits"], "test")}),
            "it has no split test",
        ),
        (lambda folder: (folder / "index.json").write_text("{"), "is no index of a corpus"),
        (lambda folder: (folder / "index.json").unlink(), "'diloco data prepare' makes one"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(
    tmp_path: Path, act: Callable[[Path], None], says: str
) -> None:
    prepared(folder_of(tmp_path / "a", 60), tmp_path / "c")
    act(tmp_path / "c")
    with pytest.raises(ValueError, match=says):
        open_corpus(tmp_path / "c")


def test_bytes_that_changed_are_found_where_somebody_looks(tmp_path: Path) -> None:
    corpus = prepared(folder_of(tmp_path / "a", 60), tmp_path / "c")
    assert verify(corpus) == []
    damage("validation-00000.bin", lambda raw: b"x" + raw[1:])(tmp_path / "c")
    assert [fault.split()[1] for fault in verify(open_corpus(tmp_path / "c"))] == ["validation"]


def test_a_file_that_becomes_shorter_is_one_of_the_faults_that_are_found(tmp_path: Path) -> None:
    corpus = prepared(folder_of(tmp_path / "a", 60), tmp_path / "c")
    os.truncate(tmp_path / "c" / "test-00000.bin", 10)
    (fault,) = verify(corpus)
    assert fault.startswith("the test tokens: ") and "test-00000.bin ends at byte 10" in fault


def test_opening_reads_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(folder_of(tmp_path / "a", 60), tmp_path / "c")
    opened: Corpus = open_corpus(tmp_path / "c")
    parts = [*opened.train.parts, *opened.validation.parts, *opened.test.parts]
    assert parts and all(isinstance(part, TokenFile) for part in parts)
    assert digest_of(opened) == opened.digest


def test_a_folder_that_somebody_else_calls_so_is_text(tmp_path: Path) -> None:
    """`index.json` is what many a dump of pages begins with."""
    folder = folder_of(tmp_path / "a", 60)
    (folder / "index.json").write_text('{"pages": ["one", "two"]}')
    assert not is_prepared(folder)
    corpus = prepared(folder, tmp_path / "c")
    assert is_prepared(tmp_path / "c") and whole(tmp_path / "c")
    assert sum(map(len, documents(corpus))) == 61
    (tmp_path / "c" / "train-00000.bin").unlink()
    assert is_prepared(tmp_path / "c"), "damaged, and not another thing"
    assert not whole(tmp_path / "c")


def test_a_folder_may_be_named_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, here = find(str(folder_of(tmp_path / "a", 60))), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    prepare(source, ByteTokenizer(), Path(), 0.2)
    assert is_prepared(here) and not list(here.glob(".*lock"))


def test_folders_that_are_links_are_read_once(tmp_path: Path) -> None:
    source, elsewhere = folder_of(tmp_path / "a", 60), folder_of(tmp_path / "b", 40)
    alone = sum(map(len, documents(prepared(source, tmp_path / "c1"))))
    (source / "books").symlink_to(elsewhere)
    (source / "again").symlink_to(elsewhere)
    (source / "loop").symlink_to(source)
    found = find(str(source))
    names = [file.name for file in found.files]
    assert len(names) == len(set(names)) and sum(n.startswith("again/") for n in names) >= 40
    assert not any(n.startswith(("books/", "loop/")) for n in names)
    assert sum(map(len, documents(prepared(source, tmp_path / "c2")))) == alone + 40


def test_a_corpus_is_on_the_disk_before_its_index_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find(str(folder_of(tmp_path / "a", 60)))
    settled = Settled(monkeypatch)
    prepare(source, ByteTokenizer(), tmp_path / "c", 0.2, 1)
    there = {path.name for path in (tmp_path / "c").iterdir()}
    before, named, whole_ = [of for of in settled.calls if isinstance(of, set)][-3:]
    begun = there | {module.UNFINISHED}
    assert (before, named, whole_) == (begun - {module.INDEX}, begun, there)


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_file_system_that_settles_no_names_takes_corpora_and_tokenizers_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source = find(str(folder_of(tmp_path / "a", 60)))
    settles_no_names(monkeypatch, number)
    tokenizer = train_tokenizer(source, 300, tmp_path / "bpe")
    assert prepare(source, tokenizer, tmp_path / "c", 0.2, 1).digest


def test_a_source_whose_name_is_no_utf_8_becomes_a_corpus(tmp_path: Path) -> None:
    """The index came after hours of work, and could not be written."""
    named = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    corpus = prepared(folder_of(Path(named), 60), tmp_path / "corpus")
    assert sum(map(len, documents(corpus))) == 60 and not verify(corpus)
    assert corpus.index is not None and corpus.index.source.endswith("/caf? (60 files, 3000 bytes)")
