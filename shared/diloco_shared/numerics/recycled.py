"""Arrays whose memory is used again when nobody refers to them any more.

Fresh memory is cleared page by page by the kernel before a merge first writes to it, which takes
about a quarter of the merge's own time.
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
