"""Memory for payloads, used again: fresh pages cost more than everything else in receiving.

The kernel clears a page before it gives it away, half a CPU second per GB where this was measured,
and memory of this size goes back to it at once when it is let go. Here it waits for the next
payload of about the same size instead; nobody has to give it back by hand.
"""

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from diloco_shared.memory.pages import pages

# Memory kept for later: a round's worth of fragments of some hundred MB. More than that is let go.
IDLE_BYTES_MAX = 512 << 20
# Of larger payloads as many bytes as so many of the largest take: while one is used the next one
# comes. These are the 8 bytes a value that a learner's budget counts for a transfer. What is larger
# and comes once, as moments do, is `fresh` to whoever fetches it, and not kept.
PAYLOADS_MAX = 2
# Smaller ones are kept by the allocator itself.
_SMALL_BYTES = 1 << 20

_Block = NDArray[np.uint8]


class Buffers:
    """Hands out writable bytes; what nobody refers to any more is handed out again."""

    def __init__(self, idle_bytes_max: int = IDLE_BYTES_MAX) -> None:
        """`idle_bytes_max`: kept whatever the payloads are; more where they are larger."""
        self.idle_bytes_max = idle_bytes_max
        self.idle_bytes = 0
        # Oldest first.
        self._idle: list[_Block] = []
        self._lock = threading.RLock()  # a collection, and so `_returned`, may come in the middle

    def take(self, size: int) -> memoryview:
        """`size` bytes of any content. MemoryError when there are not so many."""
        if size < _SMALL_BYTES:
            return memoryview(bytearray(size))
        block = self._fitting(size)
        if block is None:
            # Not np.empty: it asks for huge pages, whose clearing took several times longer.
            block = np.frombuffer(pages(size), np.uint8)
        lent = block[:size]
        # Whatever is made of it, a slice or an array, refers to it: it outlives them all.
        weakref.finalize(lent, self._returned, block)
        return lent.data

    def _fitting(self, size: int) -> _Block | None:
        """A block of at least that size, but no more than a quarter larger."""
        with self._lock:
            self.idle_bytes_max = max(self.idle_bytes_max, PAYLOADS_MAX * size)
            fitting = [i for i, b in enumerate(self._idle) if size <= b.nbytes <= size * 5 // 4]
            if not fitting:
                return None
            block = self._idle.pop(min(fitting, key=lambda i: self._idle[i].nbytes))
            self.idle_bytes -= block.nbytes
            return block

    def _returned(self, block: _Block) -> None:
        with self._lock:
            self._idle.append(block)
            self.idle_bytes += block.nbytes
            while self.idle_bytes > self.idle_bytes_max:
                self.idle_bytes -= self._idle.pop(0).nbytes
