"""Named arrays as blobs: the bytes are the format's own, and nothing is handed on in one piece."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from diloco_shared.numerics import arrays
from diloco_shared.numerics.arrays import DTYPES, SafetensorsBlob, pack, places, unpack

RNG = np.random.default_rng(4)
ARRAYS: dict[str, Any] = {
    "7.master": RNG.standard_normal((3, 5)).astype(np.float32),
    "7.outer.0": RNG.standard_normal(11).astype(np.float32),
    "count": np.array(7, np.int32),
    "none": np.empty((0, 4), np.float32),
    'a "name" of Ü': RNG.integers(0, 9, 3).astype(np.uint8),
    "small": RNG.standard_normal(5).astype(ml_dtypes.bfloat16),
}


def whole(blob: SafetensorsBlob) -> bytes:
    return b"".join(blob.pieces())


@pytest.mark.parametrize("names", [list(ARRAYS), ["count"], ["7.outer.0", "7.master"], []])
def test_the_bytes_are_those_of_safetensors(names: list[str]) -> None:
    """Whatever release wrote a checkpoint reads one of this one, and the other way round."""
    some = {name: ARRAYS[name] for name in names}
    blob = SafetensorsBlob.of(some)
    assert whole(blob) == save(some) and len(blob) == len(save(some))


def test_all_types_are_laid_out_as_safetensors_does() -> None:
    some = {f"{n}": np.ones(3, dtype) for n, dtype in enumerate(reversed(DTYPES.values()))}
    assert whole(SafetensorsBlob.of(some)) == save(some)


def test_an_array_that_does_not_lie_in_one_piece_is_as_it_reads() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert whole(SafetensorsBlob.of({"a": values.T})) == save({"a": np.ascontiguousarray(values.T)})


def test_nothing_is_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever copies or hashes one holds up all other threads."""
    monkeypatch.setattr(arrays, "PIECE_BYTES", 16)
    blob = SafetensorsBlob.of({"a": ARRAYS["7.master"], "b": ARRAYS["7.outer.0"]})
    assert max(len(piece) for piece in [*blob.pieces()][1:]) == 16
    assert whole(blob) == save({"a": ARRAYS["7.master"], "b": ARRAYS["7.outer.0"]})


def test_a_blob_is_made_of_references_and_read_as_views() -> None:
    values = np.zeros(4, np.float32)
    data = bytearray(whole(blob := SafetensorsBlob.of({"a": values})))
    assert blob.arrays[0] is values
    found = unpack(data)["a"]
    data[-4:] = np.float32(3).tobytes()
    assert found[3] == 3


@pytest.mark.parametrize("blob_bytes", [1, 70, 1 << 20])
def test_every_array_is_in_one_blob(blob_bytes: int) -> None:
    found: dict[str, Any] = {}
    for blob in pack(ARRAYS, blob_bytes):
        part = unpack(whole(blob))
        assert len(part) == 1 or sum(a.nbytes for a in part.values()) <= blob_bytes
        assert not part.keys() & found.keys()
        found |= part
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in ARRAYS.items()
    }


def test_what_others_write_is_read() -> None:
    data = save(ARRAYS, metadata={"made": "elsewhere"})
    found = unpack(data)
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], ARRAYS[name]) for name in ARRAYS)


def test_the_beginning_says_where_everything_lies() -> None:
    data = save(ARRAYS)
    head = 8 + int.from_bytes(data[:8], "little")
    there = places(data[:head], len(data))
    values = ARRAYS["7.master"]
    place = there["7.master"]
    assert data[place.first : place.end] == values.tobytes() and place.shape == values.shape


def blob_of(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        b"rubbish and more of it",
        (1 << 40).to_bytes(8, "little") + b"{}",
        blob_of([]),
        blob_of({"a": ONE}, bytes(7)),
        blob_of({"a": ONE}, bytes(9)),
        blob_of({"a": {**ONE, "shape": [3]}}, bytes(8)),
        blob_of({"a": {**ONE, "shape": [-2]}}, bytes(8)),
        blob_of({"a": {**ONE, "data_offsets": [4, 12]}}, bytes(12)),
        blob_of({"a": ONE, "b": ONE}, bytes(8)),
        blob_of({"a": {**ONE, "dtype": "F33"}}, bytes(8)),
        blob_of({"a": {**ONE, "data_offsets": "08"}}, bytes(8)),
    ],
)
def test_what_is_no_blob_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a blob of arrays"):
        unpack(data)
