"""An exported tape: one row per record, chained by digests, so that any change is found and placed.

A row is the record with its sequence and `chain`: a digest of the row itself and of the chain up to
it. The last row has only the number of records and the chain. `.jsonl` has a row per line,
`.msgpack` one object per row. Anything that this module would not have written byte for byte is a
fault, so that no change is too small to be one.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import msgpack

FORMATS = (".jsonl", ".msgpack")
_CHAIN_BYTES = 16

Content = bytes | mmap


class Rows:
    """Makes the file's bytes, row by row."""

    def __init__(self, form: str) -> None:
        self.count = 0
        self._pack, self._chain = _packer(form), ""

    def row(self, record: dict[str, Any]) -> bytes:
        """Of the next record; it is JSON-ready and has `seq`."""
        row = plain(record)
        self._chain = _next(self._chain, self._pack(row))
        self.count += 1
        return self._pack({**row, "chain": self._chain})

    def end(self) -> bytes:
        """The last row."""
        row = {"records": self.count}
        return self._pack({**row, "chain": _next(self._chain, self._pack(row))})


@contextmanager
def content(file: Path) -> Iterator[Content]:
    """What is in a file; one on a disk is never in memory as a whole. Raises OSError."""
    with file.open("rb") as opened:
        if not file.is_file() or not file.stat().st_size:
            yield opened.read()
            return
        with mmap(opened.fileno(), 0, access=ACCESS_READ) as mapped:
            yield mapped


def check(data: Content, form: str) -> tuple[int, str]:
    """(sound rows in front, what is wrong with the next one): "" if the file is as written.

    Memory: one row.
    """
    pack, chain, count, ended = _packer(form), "", 0, False
    last = "the beginning"
    for raw in _rows(data, form):
        where = f"row {count + 1}, after {last}"
        if ended:
            return count, f"{where}: something follows the end"
        row = _parsed(raw, form)
        if row is None:
            return count, f"{where}: not a row as it was written"
        said = row.pop("chain", None)
        chain = _next(chain, pack(row))
        if said != chain:
            return count, f"{where}: the digest of this row, or of its place, is another"
        ended = "seq" not in row
        if ended:
            continue
        count, last = count + 1, f"record {row['seq']}"
    return count, "" if ended else f"row {count + 1}, after {last}: the end of the file is missing"


def plain(value: Any) -> Any:
    """Floats that JSON cannot say become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _next(chain: str, row: bytes) -> str:
    return hashlib.blake2b(chain.encode() + row, digest_size=_CHAIN_BYTES).hexdigest()


def _packer(form: str) -> Callable[[dict[str, Any]], bytes]:
    return _line if form == ".jsonl" else _object


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _object(row: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(row)
    return packed


def _rows(data: Content, form: str) -> Iterator[bytes]:
    """Raw rows; what cannot be cut into rows any more is the last one."""
    begin = 0
    if form == ".jsonl":
        while begin < len(data):
            end = data.find(b"\n", begin) + 1 or len(data)
            yield data[begin:end]
            begin = end
        return
    stream = data if isinstance(data, mmap) else BytesIO(data)
    unpacker = msgpack.Unpacker(stream, max_buffer_size=max(len(data), 1))
    while begin < len(data):
        try:
            unpacker.skip()
            end = unpacker.tell()
        except (ValueError, msgpack.exceptions.UnpackException):
            end = len(data)
        yield data[begin:end]
        begin = end


def _parsed(raw: bytes, form: str) -> dict[str, Any] | None:
    """The row; None for what is no row as it was written, or could not be written at all."""
    try:
        row = json.loads(raw) if form == ".jsonl" else msgpack.unpackb(raw)
        named = isinstance(row, dict) and all(isinstance(k, str) for k in row)
        return row if named and _packer(form)(row) == raw else None
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
        return None
