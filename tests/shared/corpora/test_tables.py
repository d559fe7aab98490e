"""Parquet files and data sets that `datasets` saved are read row by row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_shared.corpora.documents import Tally
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.tables import ROWS

pa: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"row {n}" for n in range(3 * ROWS)]


def table(texts: list[str | None] | None = None, **more: Any) -> Any:
    return pa.table({"text": texts or TEXTS, **more})


def saved(folder: Path, texts: list[str], files: int = 2) -> Path:
    """As `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
    for n, name in enumerate(names):
        part = table(texts[n::files])
        with pa.OSFile(str(folder / name), "wb") as out, pa.ipc.new_stream(out, part.schema) as s:
            s.write_table(part, max_chunksize=100)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x"}
    (folder / "state.json").write_text(json.dumps(state | {"_indices_files": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def texts(source: Path, field: str = "text") -> list[str]:
    return [document.text for document in find(str(source), field=field).documents(Tally())]


def test_rows_of_a_parquet_file_come_in_their_order(tmp_path: Path) -> None:
    parquet.write_table(table(other=list(range(len(TEXTS)))), tmp_path / "a.parquet", 100)
    assert texts(tmp_path / "a.parquet") == TEXTS
    source = find(str(tmp_path / "a.parquet"))
    assert sum(document.read for document in source.documents(Tally())) == source.bytes


def test_a_missing_value_is_an_empty_document(tmp_path: Path) -> None:
    parquet.write_table(table(["a", None, "", "b"]), tmp_path / "a.parquet")
    tally = Tally()
    assert [d.text for d in find(str(tmp_path)).documents(tally)] == ["a", "b"]
    assert tally.empty == 2


def test_a_saved_data_set_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    assert texts(saved(tmp_path / "d", TEXTS)) == [*TEXTS[::2], *TEXTS[1::2]]


def test_of_several_splits_the_one_to_train_on_is_read(tmp_path: Path) -> None:
    saved(tmp_path / "d" / "train", ["a", "b"])
    saved(tmp_path / "d" / "test", ["c", "d"])
    listed = tmp_path / "d" / "dataset_dict.json"
    listed.write_text(json.dumps({"splits": ["train", "test"]}))
    assert texts(tmp_path / "d") == ["a", "b"]
    assert texts(tmp_path / "d" / "test") == ["c", "d"]
    listed.write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(ValueError, match=r"none is 'train' \(it has 'test'\): name the folder"):
        find(str(tmp_path / "d"))


def no_column(folder: Path) -> Path:
    parquet.write_table(pa.table({"content": ["a"]}), folder / "a.parquet")
    return folder / "a.parquet"


def numbers(folder: Path) -> Path:
    parquet.write_table(pa.table({"text": [1]}), folder / "a.parquet")
    return folder / "a.parquet"


def cut_parquet(folder: Path) -> Path:
    parquet.write_table(table(), folder / "a.parquet")
    (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-10])
    return folder / "a.parquet"


def cut_arrow(folder: Path) -> Path:
    saved(folder / "d", TEXTS, 1)
    file = folder / "d" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder / "d"


def missing_arrow(folder: Path) -> Path:
    saved(folder / "d", TEXTS)
    (folder / "d" / "data-00001-of-00002.arrow").unlink()
    return folder / "d"


def outside(folder: Path) -> Path:
    saved(folder / "d", TEXTS)
    state = {"_data_files": [{"filename": "../secret"}]}
    (folder / "d" / "state.json").write_text(json.dumps(state))
    (folder / "secret").write_text("x")
    return folder / "d"


def selected(folder: Path) -> Path:
    saved(folder / "d", TEXTS)
    (folder / "d" / "state.json").write_text(json.dumps({"_indices_files": [{"filename": "i"}]}))
    return folder / "d"


def no_json(folder: Path) -> Path:
    saved(folder / "d", TEXTS)
    (folder / "d" / "state.json").write_text("{")
    return folder / "d"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (no_column, r"a\.parquet has no column 'text': it has 'content'"),
        (numbers, r"column 'text' holds int64, not text"),
        (cut_parquet, r"a\.parquet is no whole parquet file"),
        (cut_arrow, r"arrow (is no whole Arrow stream|cannot be read: Expected)"),
        (missing_arrow, r"state\.json names 'data-00001-of-00002\.arrow', which is not there"),
        (outside, r"state\.json names 'secret', which is not there"),
        (selected, r"call flatten_indices\(\) before it is saved"),
        (no_json, r"state\.json is no JSON"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        texts(make(tmp_path))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = no_column(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"not installed: pip install pyarrow"):
        texts(path)
