"""Large memory: writable, zero, and gone when nobody refers to it."""

import mmap
import weakref

import numpy as np
import pytest

from diloco_shared.pages import LARGE_BYTES, pages


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1])
def test_as_many_zeros_as_asked_for(size: int) -> None:
    data = pages(size)
    assert data.nbytes == size and not data.readonly
    assert not np.frombuffer(data, np.uint8).any()
    data[:] = bytes([7]) * size
    assert bytes(data[-1:]) == bytes([7])[:size]


def test_large_memory_is_the_kernels_until_it_is_touched() -> None:
    assert isinstance(pages(LARGE_BYTES).obj, mmap.mmap)
    assert isinstance(pages(LARGE_BYTES - 1).obj, bytearray)


def test_an_array_keeps_its_memory_and_lets_it_go() -> None:
    data = pages(LARGE_BYTES)
    gone = weakref.ref(data.obj)
    array = np.frombuffer(data, np.uint8)
    del data
    array[:] = 3
    assert gone() is not None and array.sum() == 3 * LARGE_BYTES
    del array
    assert gone() is None
