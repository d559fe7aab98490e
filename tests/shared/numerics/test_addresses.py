"""Stores past the cache: what arrives is what was sent, wherever lines begin and end."""

import numpy as np
import pytest

from diloco_shared.numerics.addresses import LINE, bytes_at, fence, store
from diloco_shared.numerics.compiled import kernel


@kernel
def stored(values: np.ndarray, out: np.ndarray) -> None:
    store(values, out)
    fence()


@kernel
def total(address: np.uint64, size: int) -> int:
    found = 0
    for byte in bytes_at(address, size):
        found += byte
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_stores_write_what_they_should_and_nothing_else(dtype: type) -> None:
    size = np.dtype(dtype).itemsize
    values = np.arange(1, 1001).astype(dtype)
    room = np.empty(2000, dtype)
    first = -room.ctypes.data % LINE // size  # where a line begins
    for skew in range(0, LINE // size, 3):
        for count in (0, 1, LINE // size - 1, LINE // size, 5 * LINE // size + 1, 900):
            room[:] = 0
            start = first + skew
            stored(values[skew : skew + count], room[start : start + count])
            expected = np.zeros_like(room)
            expected[start : start + count] = values[skew : skew + count]
            np.testing.assert_array_equal(room, expected)


def test_bytes_are_read_where_they_lie() -> None:
    data = np.arange(200, dtype=np.uint8)
    assert total(np.uint64(data.ctypes.data + 3), 150) == int(data[3:153].sum())
