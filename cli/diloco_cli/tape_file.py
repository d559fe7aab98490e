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
from io import BytesIO
from typing import Any, BinaryIO

import msgpack

from diloco_shared.protocol.wire import MESSAGE_BYTES_MAX

FORMATS = (".jsonl", ".msgpack")
# What has more bytes is no row, and is not read as a whole. In JSON a record has some times the
# bytes that it has on the wire: of a number up to four times, of a strange letter six times.
ROW_BYTES_MAX = 16 * MESSAGE_BYTES_MAX
_CHAIN_BYTES = 16
# Bytes that are read at a time: a few rows.
_PIECE_BYTES = 64 << 10


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


def check(data: bytes | BinaryIO, form: str) -> tuple[int, str]:
    """(sound rows in front, what is wrong with the next one): "" if the file is as written.

    `data`: a file that is open, or all that is in one. Memory: one row. Raises OSError where a file
    cannot be read on.
    """
    file = BytesIO(data) if isinstance(data, bytes) else data
    pack, chain, count, ended = _packer(form), "", 0, False
    last = "the beginning"
    for raw in _rows(file, form):
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


def _rows(file: BinaryIO, form: str) -> Iterator[bytes]:
    """Raw rows; what cannot be cut into rows any more is the last one."""
    # Not mapped: what a damaged disk or a file that shrinks does not give would end the process.
    return _lines(file) if form == ".jsonl" else _objects(file)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(ROW_BYTES_MAX):
        yield line


def _objects(file: BinaryIO) -> Iterator[bytes]:
    unpacker, pending, begin = msgpack.Unpacker(), bytearray(), 0
    while len(pending) < ROW_BYTES_MAX and (piece := file.read(_PIECE_BYTES)):
        unpacker.feed(piece)
        pending += piece
        try:
            while True:
                unpacker.skip()
                size, begin = unpacker.tell() - begin, unpacker.tell()
                yield bytes(pending[:size])
                del pending[:size]
        except msgpack.exceptions.OutOfData:
            continue
        except (ValueError, msgpack.exceptions.UnpackException):
            break
    if pending:
        yield bytes(pending)


def _parsed(raw: bytes, form: str) -> dict[str, Any] | None:
    """The row; None for what is no row as it was written, or could not be written at all."""
    try:
        row = json.loads(raw) if form == ".jsonl" else msgpack.unpackb(raw)
        named = isinstance(row, dict) and all(isinstance(k, str) for k in row)
        return row if named and _packer(form)(row) == raw else None
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
        return None
