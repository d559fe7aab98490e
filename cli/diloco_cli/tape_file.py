"""An exported tape: one row per record, chained by digests, so that any change is found and placed.

A row is the record with its sequence and `chain`: a digest of the row itself and of the chain up to
it. The last row has only the number of records and the chain. `.jsonl` has a row per line,
`.msgpack` one object per row. Anything that this module would not have written byte for byte is a
fault, so that no change is too small to be one.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack

FORMATS = (".jsonl", ".msgpack")
_CHAIN_BYTES = 16


def written(records: Iterable[dict[str, Any]], form: str) -> Iterator[bytes]:
    """The file's bytes, row by row; `records` are JSON-ready and have `seq`."""
    pack, chain, count = _packer(form), "", 0
    for record in records:
        row = plain(record)
        chain = _next(chain, pack(row))
        count += 1
        yield pack({**row, "chain": chain})
    yield pack({"records": count, "chain": _next(chain, pack({"records": count}))})


def check(data: bytes, form: str) -> tuple[int, str]:
    """(sound rows in front, what is wrong with the next one): "" if the file is as written.

    Memory: the file, and one row.
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


def _rows(data: bytes, form: str) -> Iterator[bytes]:
    """Raw rows; what cannot be cut into rows any more is the last one."""
    if form == ".jsonl":
        *lines, rest = data.split(b"\n")
        yield from (line + b"\n" for line in lines)
        if rest:
            yield rest
        return
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    begin = 0
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
