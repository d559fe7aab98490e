"""Documents and records of tables: parquet files, and saved data sets of Hugging Face `datasets`.

Both are read by pyarrow, some hundred rows at a time.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_shared.corpora.documents import Document, Record, pieces, readable

# Rows that are Python strings at the same time.
ROWS = 256
# Sets of columns, of which the first that a table has is read.
Columns = tuple[tuple[str, ...], ...]
# `state.json` of a saved data set names its files; a larger one is something else.
STATE_BYTES_MAX = 16 << 20


def _package(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(
            f"{what} are read by the package pyarrow, which is not installed: pip install pyarrow"
        ) from None
    return pyarrow


def parquet_of(path: Path, field: str) -> Iterator[Document]:
    """The texts in column `field`, one row group after another."""
    for column, read in _parquet(path, ((field,),), text=True):
        yield from _texts(path, column[0], read)


def arrow_of(path: Path, field: str) -> Iterator[Document]:
    """The texts in column `field` of an Arrow stream, through a memory map."""
    for column, read in _arrow_stream(path, ((field,),), text=True):
        yield from _texts(path, column[0], read)


def parquet_records(path: Path, columns: Columns) -> Iterator[Record]:
    """The rows, as objects of these columns. ValueError names the file, or the row."""
    yield from _records(path, _parquet(path, columns, text=False))


def arrow_records(path: Path, columns: Columns) -> Iterator[Record]:
    """As `parquet_records`, of an Arrow stream."""
    yield from _records(path, _arrow_stream(path, columns, text=False))


def _records(path: Path, parts: Iterator[tuple[list[Any], int]]) -> Iterator[Record]:
    number = 0
    for columns, read in parts:
        names = [name for name, _ in columns]
        lists = [_values(path, name, column) for name, column in columns]
        for values in zip(*lists, strict=True):
            number += 1
            yield Record(dict(zip(names, values, strict=True)), f"{path}, row {number}", read)
            read = 0


def _parquet(path: Path, columns: Columns, *, text: bool) -> Iterator[tuple[list[Any], int]]:
    """Some rows at a time: (name, values) of each column, and bytes read for them."""
    pa = _package("parquet files")
    from pyarrow import parquet

    size = path.stat().st_size
    with readable(path):
        try:
            # Without it a whole file's column would be fetched ahead.
            file = parquet.ParquetFile(path, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is no whole parquet file: {_first_line(error)}") from None
        with file:
            names = _found(pa, file.schema_arrow, columns, path, text=text)
            rows, seen, told = max(file.metadata.num_rows, 1), 0, 0
            try:
                for batch in file.iter_batches(batch_size=ROWS, columns=list(names)):
                    seen += batch.num_rows
                    reached = size * seen // rows
                    yield [(name, batch.column(name)) for name in names], reached - told
                    told = reached
            except pa.ArrowException as error:
                raise ValueError(f"{path} cannot be read: {_first_line(error)}") from None


def _arrow_stream(path: Path, columns: Columns, *, text: bool) -> Iterator[tuple[list[Any], int]]:
    """As `_parquet`."""
    pa = _package("data sets saved on disk")
    with readable(path), pa.memory_map(str(path)) as mapped:
        told = 0
        try:
            with pa.ipc.open_stream(mapped) as stream:
                names = _found(pa, stream.schema, columns, path, text=text)
                for batch in stream:
                    for start in range(0, batch.num_rows, ROWS):
                        part, reached = batch.slice(start, ROWS), mapped.tell()
                        yield [(name, part.column(name)) for name in names], reached - told
                        told = reached
        except pa.ArrowException as error:
            raise ValueError(f"{path} is no whole Arrow stream: {_first_line(error)}") from None


def _values(path: Path, name: str, column: Any) -> list[Any]:
    try:
        found: list[Any] = column.to_pylist()
    except UnicodeDecodeError as error:
        text = f"{path}: column {name!r} is not UTF-8 ({error}): write it anew as text"
        raise ValueError(text) from None
    return found


def _texts(path: Path, column: tuple[str, Any], read: int) -> Iterator[Document]:
    for text in _values(path, *column):
        for passage in pieces(text or ""):  # a missing value is an empty document
            yield Document(passage, read)
            read = 0


def _found(pa: Any, schema: Any, columns: Columns, path: Path, *, text: bool) -> tuple[str, ...]:
    """The first set of columns that the table has; a column of `text` holds nothing else."""
    found = next((names for names in columns if set(names) <= set(schema.names)), None)
    if found is None:
        wanted = ", or ".join(" and ".join(map(repr, names)) for names in columns)
        has = ", ".join(map(repr, schema.names[:8])) or "none"
        raise ValueError(f"{path} has no column {wanted}: it has {has}")
    for name in found if text else ():
        kind = schema.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(f"{path}: column {name!r} holds {kind}, not text")
    return found


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved something in this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def saved_files(folder: Path) -> list[Path]:
    """Arrow files of a saved data set, in their order; of several splits the one named `train`."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or "train" not in splits:
            has = ", ".join(map(repr, splits)) if isinstance(splits, list) else "none"
            raise ValueError(
                f"{folder} holds several data sets and none is 'train' (it has {has}): name the "
                "folder of one of them"
            )
        folder = folder / "train"
    state = _json(folder / "state.json")
    if state.get("_indices_files"):
        raise ValueError(
            f"{folder} is a selection of another data set: call flatten_indices() before it is "
            "saved"
        )
    listed = state.get("_data_files")
    try:
        names = [str(entry["filename"]) for entry in listed]  # type: ignore[union-attr]
    except (TypeError, KeyError):
        raise ValueError(f"{folder / 'state.json'} names no _data_files") from None
    paths = [folder / name for name in names]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise ValueError(f"{folder / 'state.json'} names {path.name!r}, which is not there")
    return paths


def _json(path: Path) -> dict[str, Any]:
    with readable(path):
        if path.stat().st_size > STATE_BYTES_MAX:
            raise ValueError(f"{path} is longer than {STATE_BYTES_MAX} bytes")
        text = path.read_bytes()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object")
    return found
