"""Memory for what is large: pages that nobody clears before they are used."""

import mmap

# Below this the allocator is quicker; from here on clearing would be felt: a gigabyte takes a
# second, in which no other thread of the process runs.
LARGE_BYTES = 8 << 20


def pages(size: int) -> memoryview:
    """`size` writable bytes, all zero. MemoryError when there are not so many.

    Large ones are cleared by the kernel, page by page, when they are first touched, and go back to
    it as soon as nothing refers to them.
    """
    if size < LARGE_BYTES:
        return memoryview(bytearray(size))
    try:
        return memoryview(mmap.mmap(-1, size))
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from None
