"""Text of every kind is read as documents, lazily, and faults name their place."""

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.corpora import documents as module
from diloco_shared.corpora.documents import (
    DOCUMENT_MAX,
    PASSAGE,
    SINGLE_MAX,
    Tally,
    cut,
    single_passage,
)
from diloco_shared.corpora.sources import find


def texts(source: Path, field: str = "text") -> list[str]:
    return [document.text for document in find(str(source), field=field).documents(Tally())]


def lines(count: int) -> str:
    return "".join(f"line {n} of some words\n" for n in range(count))


@given(st.text(max_size=300), st.integers(8, 64))
@examples(100)
def test_passages_together_are_the_text(text: str, at_most: int) -> None:
    passages = list(cut(text, at_most))
    assert "".join(passages) == text
    assert all(0 < len(p.encode()) <= at_most for p in passages)


def test_passages_end_where_people_would_end_them() -> None:
    text = lines(100)
    assert all(p.endswith("\n") for p in cut(text, 200))
    paragraphs = "".join(f"{'a b ' * 10}\n\n{'c d ' * 5}\n" for _ in range(50))
    assert all(p.endswith("\n\n") for p in list(cut(paragraphs, 150))[:-1])


def test_a_single_file_has_enough_to_hold_out(tmp_path: Path) -> None:
    book = tmp_path / "book"
    book.write_text(lines(50_000))  # 1.2 MB
    found = texts(book)
    assert "".join(found) == lines(50_000)
    assert len(found) > 256 and max(map(len, found)) <= SINGLE_MAX


def test_a_single_file_that_grows_keeps_its_passages(tmp_path: Path) -> None:
    book = tmp_path / "book.md"
    book.write_text(lines(20_000))
    before = texts(book)
    book.write_text(lines(60_000))
    assert texts(book)[: len(before) - 1] == before[:-1]
    sizes = [single_passage(n) for n in range(0, 1 << 20, 999)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 5, "powers of two"


def test_a_long_file_of_a_folder_is_cut_and_a_short_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "a-short.txt").write_text(lines(1000))
    (tmp_path / "b-long.txt").write_text(lines(100_000))
    short, *long = texts(tmp_path)
    assert short == lines(1000)
    assert "".join(long) == lines(100_000)
    assert max(map(len, long)) <= PASSAGE < DOCUMENT_MAX


def test_passages_do_not_depend_on_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text("é" + lines(30_000) + "ü" * 200_000)
    whole = texts(tmp_path)
    monkeypatch.setattr(module, "BLOCK", 70_001)
    assert texts(tmp_path) == whole


def test_any_text_is_read_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a.txt", "b.rst", "c", "d.tex", "e.html"):
        (tmp_path / name).write_text(f"text in {name}")
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    (tmp_path / "deep" / "f.py").write_text("# text in f")
    for name in (".hidden", "deep/.git/config"):
        (tmp_path / name).write_text("nobody meant this")
    (tmp_path / "g.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "h.latin1").write_bytes("schön".encode("latin-1"))
    (tmp_path / "i.empty").write_bytes(b"")
    tally = Tally()
    found = [d.text for d in find(str(tmp_path)).documents(tally)]
    assert found == [*(f"text in {n}" for n in ("a.txt", "b.rst", "c", "d.tex")),
                     "# text in f", "text in e.html"]  # fmt: skip
    assert (tally.binary, tally.empty, tally.first_binary) == (2, 1, "g.png")


def test_json_lines_and_compressed_files(tmp_path: Path) -> None:
    records = [{"text": "ä first", "id": 1}, {"text": "second\n"}]
    body = json.dumps(records[0]) + "\n\n" + json.dumps(records[1])
    (tmp_path / "a.jsonl").write_text(body)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(body)
    with gzip.open(tmp_path / "c.txt.gz", "wt", encoding="utf-8") as file:
        file.write("under gzip")
    assert texts(tmp_path) == ["ä first", "second\n"] * 2 + ["under gzip"]
    (tmp_path / "d.jsonl").write_text('{"body": "of another field"}')
    assert texts(tmp_path / "d.jsonl", field="body") == ["of another field"]


@pytest.mark.parametrize(("kib", "plain", "packed"), [(60, 1, 1), (100, 1, 2), (300, 5, 5)])
def test_under_gzip_a_text_is_cut_sooner(tmp_path: Path, kib: int, plain: int, packed: int) -> None:
    """So copies of one text may be different documents: docs/how-to/models.md says so."""
    text = ("x" * 63 + "\n") * (16 * kib)
    for folder in ("plain", "packed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.txt").write_text("else each would be a single file")
    (tmp_path / "plain" / "a.txt").write_text(text)
    (tmp_path / "packed" / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    found = [texts(tmp_path / folder) for folder in ("plain", "packed")]
    assert [len(each) - 1 for each in found] == [plain, packed]
    assert (found[0] == found[1]) == (plain == packed)


def test_a_missing_value_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    tally = Tally()
    assert [d.text for d in find(str(tmp_path)).documents(tally)] == ["a", "b"]
    assert tally.empty == 1


def test_a_record_of_many_megabytes_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": lines(100_000)}))
    found = texts(tmp_path / "a.jsonl")
    assert "".join(found) == lines(100_000) and max(map(len, found)) <= PASSAGE


def test_half_a_character_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "before \\ud83d after"}')
    assert texts(tmp_path / "a.jsonl") == ["before ? after"]


def test_what_was_read_adds_up_to_the_whole_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(lines(5000))
    (tmp_path / "b.bin").write_bytes(b"\0" * 999)
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    (tmp_path / "d.txt").write_text(lines(30_000))
    source = find(str(tmp_path))
    read = [document.read for document in source.documents(Tally())]
    assert sum(read) == source.bytes and min(read) >= 0


def test_a_fingerprint_changes_with_names_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    prints = [find(str(folder_with(tmp_path / "a", "one"))).fingerprint]
    prints.append(find(str(tmp_path / "a"), field="body").fingerprint)
    prints.append(find(str(folder_with(tmp_path / "a", "three"))).fingerprint)
    (tmp_path / "a" / "x.txt").rename(tmp_path / "a" / "y.txt")
    prints.append(find(str(tmp_path / "a")).fingerprint)
    assert all(a != b for a, b in pairwise(prints)) and len(set(prints)) == 4
    assert find(str(tmp_path / "a")).fingerprint == prints[-1]


def folder_with(folder: Path, text: str) -> Path:
    (folder / "x.txt").write_text(text)
    return folder


def wrote(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


BAD: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: folder / "gone", r"'.*gone' is neither a folder nor a file on this machine"),
    (lambda folder: folder, r"has no files \(.* is empty\)"),
    (wrote("a.png", b"\x89PNG\0"), r"a\.png is not text: it|a\.png is not text in UTF-8: a source"),
    (wrote("a.txt", "schön".encode("latin-1")), r"a\.txt is not text in UTF-8"),
    (wrote("a.txt", b"x\n" * (1 << 20) + b"\xff"), r"begins as text .* from byte \d+ on"),
    (wrote("a.jsonl", b'{"text": "x"}\nnot json'), r"a\.jsonl:2: expected .* no JSON"),
    (wrote("a.jsonl", b'{"body": "x"}'), r"""a\.jsonl:1: .*field "text"; it has 'body'"""),
    (wrote("a.jsonl", b'{"text": 3}'), r"a\.jsonl:1: .* whose value is int"),
    (wrote("a.jsonl", b'["text"]'), r"a\.jsonl:1: .* not list"),
    (wrote("a.jsonl", b"[" * 100_000), r"a\.jsonl:1: .* no JSON"),
    (wrote("a.jsonl.gz", b"no gzip"), r"a\.jsonl\.gz is no whole gzip file"),
    (wrote("a.txt.gz", gzip.compress(b"text " * 999)[:-20]), r"is no whole gzip file"),
]


@pytest.mark.parametrize(("make", "says"), BAD)
def test_bad_input_is_named(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        texts(make(tmp_path))


def test_a_line_without_an_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_MAX", 100)
    (tmp_path / "a.jsonl").write_text("x" * 1000)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the line is longer than 100 bytes"):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["", " ", "a\0b"])
def test_a_source_has_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="the source has no name"):
        find(name)


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_shared.corpora.sources.FILES_MAX", 2)
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("x")
    with pytest.raises(ValueError, match="more than 2 files: pack them"):
        find(str(tmp_path))


def test_the_standard_library_is_without_tests_and_packages() -> None:
    source = find("stdlib")
    names = [file.name for file in source.files]
    assert "ast.py" in names and "json/decoder.py" in names and names == sorted(names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
