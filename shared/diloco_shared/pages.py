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
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

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
