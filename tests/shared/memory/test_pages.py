"""Large memory: writable, zero, and gone when nobody refers to it."""

import mmap
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until

from diloco_shared.memory.pages import LARGE_BYTES, Pages, joined, pages


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
    wait_until(lambda: gone() is None)


def test_what_is_large_goes_in_a_thread(tmp_path: Path) -> None:
    """It takes long, and whoever used it last may be the event loop."""
    ended: list[int] = []

    class Noted(Pages):
        def close(self) -> None:
            super().close()
            ended.append(threading.get_ident())

    (tmp_path / "f").write_bytes(bytes(LARGE_BYTES))
    with (tmp_path / "f").open("rb") as file:
        mapped = Noted(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(mapped, np.float32)[5:]
    del mapped
    assert ended == [] and array[0] == 0.0
    del array
    wait_until(lambda: bool(ended))
    assert ended != [threading.get_ident()]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES])
def test_parts_are_joined_in_their_order(size: int) -> None:
    body = np.arange(size, dtype=np.uint32).astype(np.uint8)
    whole = joined([b"head", b"", memoryview(body), bytearray(b"tail")])
    assert bytes(whole[:4]) == b"head" and bytes(whole[-4:]) == b"tail"
    assert whole.nbytes == 8 + size and whole[4:-4] == body.data


def test_a_process_ends_although_it_still_holds_some() -> None:
    """No thread runs any more when the interpreter lets go of the last things."""
    code = f"""
from diloco_shared.memory.pages import pages
kept = [pages({LARGE_BYTES})]
kept.append(kept)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
