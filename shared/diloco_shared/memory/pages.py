"""Memory for what is large: pages that nobody clears before they are used.

    buffer = pages(1 << 30)                               # anonymous, writable
    array = np.frombuffer(Pages(fd, size, access=...))    # of a file

What is as large goes back to the system in a thread of its own: that takes some tenths of a second
for a gigabyte, and longer for a file that is not written out yet. Whoever happens to be the last to
use it, an event loop perhaps, need not wait for that.
"""

import _thread
import mmap
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Below this the allocator is quicker; from here on clearing would be felt: a gigabyte takes a
# second, in which no other thread of the process runs.
LARGE_BYTES = 8 << 20


class Pages(mmap.mmap):
    """As `mmap.mmap`; it ends by itself when nothing refers to it or to views of it any more."""

    def __del__(self) -> None:
        if self.closed or len(self) < LARGE_BYTES or sys.is_finalizing():
            return
        # Not `threading`, whose `start` waits until the thread runs: here there may be no time for
        # it, and where the process ends it would wait for ever.
        with suppress(RuntimeError):
            _thread.start_new_thread(self.close, ())


def pages(size: int) -> memoryview:
    """`size` writable bytes, all zero. MemoryError when there are not so many.

    Large ones are cleared by the kernel, page by page, when they are first touched, and go back to
    it as soon as nothing refers to them.
    """
    if size < LARGE_BYTES:
        return memoryview(bytearray(size))
    try:
        return memoryview(Pages(-1, size))
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from None


def fill(place: memoryview, data: bytes | bytearray | memoryview) -> None:
    """Copy `data` to `place`, which is as long. Other threads run meanwhile.

    A memoryview that is assigned to, or bytes that are joined, hold the interpreter until all is
    copied: half a second for a gigabyte.
    """
    if len(place):
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(data, np.uint8))


def joined(parts: Sequence[bytes | bytearray | memoryview]) -> memoryview:
    """The bytes of all parts, one after the other."""
    sizes = [memoryview(part).nbytes for part in parts]
    whole, at = pages(sum(sizes)), 0
    for part, size in zip(parts, sizes, strict=True):
        fill(whole[at : at + size], part)
        at += size
    return whole


# --------------------------------------------------------------------------------------------------
# Arrays whose memory is used again when nobody refers to them any more.
#
# Fresh memory is cleared page by page by the kernel before a merge first writes to it, which takes
# about a quarter of the merge's own time.

Values = NDArray[np.float32]

# Buffers kept out of use: what a committed round sets free (master, momentum, old anchor, the
# payload of its publication), which is what the next one needs.
SPARE_MAX = 4
LINE = 64  # bytes; arrays begin where a line of the cache does


class Recycled:
    """fp32 arrays of any size; thread-safe."""

    def __init__(self) -> None:
        self.spare: list[Values] = []
        self.lock = threading.RLock()  # an array may be collected while the lock is held

    def empty(self, size: int) -> Values:
        """An array of shape (size,), whatever it holds; writable, its own."""
        with self.lock:
            fitting = [buffer for buffer in self.spare if buffer.size >= size]
            buffer = min(fitting, key=lambda b: b.size, default=None)
            if buffer is not None:
                self.spare = [other for other in self.spare if other is not buffer]
        if buffer is None:
            room = np.empty(size + LINE // 4, np.float32)
            buffer = room[-room.ctypes.data % LINE // 4 :][:size]
        return np.asarray(_Lent(self, buffer, size))

    def payload(self, size: int, head: int) -> NDArray[np.uint8]:
        """The same for so many bytes, of which those after the `head` begin a line."""
        room = self.empty((size + LINE) // 4 + 1).view(np.uint8)
        return room[-head % LINE :][:size]

    def give_back(self, buffer: Values, spare_max: int = SPARE_MAX) -> None:
        """Keep a buffer for later; the `spare_max` largest ones stay."""
        # A parameter: arrays also die when the interpreter ends and has cleared this module.
        with self.lock:
            spare = sorted([*self.spare, buffer], key=lambda b: b.size)
            self.spare = spare[-spare_max:]


class _Lent:
    """The owner of an array and all its views: it dies when the last of them does."""

    __slots__ = ("__array_interface__", "buffer", "pool")

    def __init__(self, pool: Recycled, buffer: Values, size: int) -> None:
        self.pool, self.buffer = pool, buffer
        self.__array_interface__: dict[str, Any] = buffer[:size].__array_interface__

    def __del__(self) -> None:
        self.pool.give_back(self.buffer)
