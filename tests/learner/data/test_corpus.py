"""Corpora: splits by file that stay put, and faults that name the place."""

import json
from pathlib import Path

import pytest

from diloco_learner.data.corpus import END_OF_DOCUMENT, load
from diloco_shared.spec.run import Data


def write(folder: Path, files: int) -> Path:
    folder.mkdir(parents=True)
    for n in range(files):
        (folder / f"{n:03d}.txt").write_text(f"text {n:03d}")
    return folder


def data(folder: Path, fraction: float = 0.2) -> Data:
    return Data(source=str(folder), validation_fraction=fraction)


def splits(folder: Path, fraction: float = 0.2) -> list[set[bytes]]:
    corpus = load(data(folder, fraction))
    return [
        set(tokens.tobytes().split(END_OF_DOCUMENT))
        for tokens in (corpus.train, corpus.validation, corpus.test)
    ]


def test_splits_are_disjoint_and_hold_every_file(tmp_path: Path) -> None:
    train, validation, test = splits(write(tmp_path / "a", 200))
    assert not (train & validation or train & test or validation & test)
    assert train | validation | test == {f"text {n:03d}".encode() for n in range(200)}
    # About a fifth each.
    assert all(20 <= len(held) <= 60 for held in (validation, test))


def test_the_same_files_split_alike_wherever_they_lie(tmp_path: Path) -> None:
    assert splits(write(tmp_path / "a", 60)) == splits(write(tmp_path / "elsewhere" / "b", 60))


def test_more_files_move_no_other(tmp_path: Path) -> None:
    few, many = splits(write(tmp_path / "few", 60)), splits(write(tmp_path / "many", 120))
    for before, after in zip(few, many, strict=True):
        assert before <= after


def test_a_larger_share_only_moves_files_out_of_training(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 100)
    small, large = splits(folder, 0.1), splits(folder, 0.3)
    assert large[0] < small[0] and small[1] < large[1]


def test_json_lines_are_a_document_each(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 60)
    lines = [json.dumps({"text": "ä first", "id": 1}), "", json.dumps({"text": "second"})]
    (folder / "more.jsonl").write_text("\n".join(lines))
    (folder / "ignored.bin").write_bytes(b"\xff")
    documents = set().union(*splits(folder))
    assert {"ä first".encode(), b"second"} <= documents
    assert b"\xff" not in documents and len(documents) == 62


@pytest.mark.parametrize("line", ['{"body": "x"}', '{"text": 3}', '["text"]', "not json"])
def test_a_faulty_line_is_named(tmp_path: Path, line: str) -> None:
    folder = write(tmp_path / "a", 5)
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: expected an object"):
        load(data(folder))


def test_one_file_is_cut_and_its_end_held_out(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(100)))
    corpus = load(data(file, 0.1))
    assert corpus.train.tobytes() == bytes(range(80))
    assert corpus.validation.tobytes() == bytes(range(80, 90))
    assert corpus.test.tobytes() == bytes(range(90, 100))
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="too short to hold 12% of it out"):
        load(data(file, 0.12))


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere' is neither a folder nor a file"):
        load(data(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no files for validation, test; it needs more files"):
        load(data(write(tmp_path / "one", 1), 0.01))
    with pytest.raises(ValueError, match=r"data.tokenizer 'words' is unknown: use 'bytes'"):
        load(Data(tokenizer="words"))


def test_the_standard_library_is_read_without_its_tests_and_packages() -> None:
    corpus = load(Data())
    assert len(corpus.train) > 5_000_000
    assert min(len(corpus.validation), len(corpus.test)) > 100_000
    assert corpus is load(Data())  # read once per process
