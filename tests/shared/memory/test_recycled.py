"""Recycled arrays: memory comes back when the last view is gone, and never before."""

import gc
import sys

import numpy as np
import pytest

from diloco_shared.memory import pages as recycled
from diloco_shared.memory.pages import LINE, SPARE_MAX, Recycled


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    pool = Recycled()
    first = pool.empty(100)
    where = address(first)
    assert first.shape == (100,) and first.dtype == np.float32 and first.flags.writeable
    del first
    gc.collect()
    assert address(pool.empty(60)) == where


def test_a_view_of_a_view_keeps_its_memory() -> None:
    pool = Recycled()
    array = pool.empty(100)
    array[:] = 7
    frozen = array[10:].view()
    frozen.flags.writeable = False
    part = frozen[5:20].reshape(3, 5)
    bytes_ = memoryview(part)
    del array, frozen, part
    gc.collect()
    other = pool.empty(100)
    other[:] = 0
    assert np.asarray(bytes_).tolist() == [[7.0] * 5] * 3


def test_the_smallest_that_fits_is_taken_and_the_largest_are_kept() -> None:
    pool = Recycled()
    arrays = [pool.empty(size) for size in (10, 40, 20, 30, 15)]
    places = {array.size: address(array) for array in arrays}
    del arrays[:]
    gc.collect()
    assert sorted(b.size for b in pool.spare) == [15, 20, 30, 40] and SPARE_MAX == 4
    assert address(pool.empty(25)) == places[30]
    assert pool.empty(50).size == 50  # none is as large


def test_arrays_begin_a_line_of_the_cache_and_payloads_after_their_header() -> None:
    pool = Recycled()
    arrays = [pool.empty(size) for size in (1, 100, 4097)]
    assert all(address(array) % LINE == 0 for array in arrays)
    for size in (0, 8, 9, 4099):
        payload = pool.payload(size, 8)
        assert payload.dtype == np.uint8 and payload.size == size
        assert (address(payload) + 8) % LINE == 0
        arrays.append(payload)  # alive, so that the next is another
    for head in range(LINE):
        assert pool.payload(1001, head).size == 1001


def test_arrays_may_die_when_the_interpreter_has_cleared_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    array = Recycled().empty(100)
    for name in [name for name in vars(recycled) if not name.startswith("__")]:
        monkeypatch.setattr(recycled, name, None)
    del array
    gc.collect()
    assert not raised
