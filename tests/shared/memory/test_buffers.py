"""Buffers come back when nobody refers to them, and never before."""

import gc

import numpy as np

from diloco_shared.memory.buffers_io import Buffers

MIB = 1 << 20


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.take(4 * MIB)
    first[:] = b"\x07" * (4 * MIB)
    array = np.frombuffer(first, np.float32)[1:]
    part = first[MIB : 2 * MIB]
    del first
    gc.collect()
    assert buffers.idle_bytes == 0
    assert bytes(part[:1]) == b"\x07"
    del array
    gc.collect()
    assert buffers.idle_bytes == 0
    del part
    gc.collect()
    assert buffers.idle_bytes == 4 * MIB
    again = buffers.take(4 * MIB - 5)
    assert (buffers.idle_bytes, len(again), bytes(again[-1:])) == (0, 4 * MIB - 5, b"\x07")


def test_two_users_never_share() -> None:
    buffers = Buffers()
    one, two = buffers.take(2 * MIB), buffers.take(2 * MIB)
    one[:1], two[:1] = b"a", b"b"
    del one
    three = buffers.take(2 * MIB)
    three[:1] = b"c"
    assert bytes(two[:1]) == b"b"


def test_what_is_kept_is_bounded_and_the_oldest_goes() -> None:
    buffers = Buffers(idle_bytes_max=7 * MIB)
    lent = [buffers.take(size * MIB) for size in (2, 3, 1, 3)]
    while lent:
        del lent[0]
    assert buffers.idle_bytes == 7 * MIB
    # The one of 2 MiB is gone; much larger ones than needed are not taken for it.
    assert len(buffers.take(2 * MIB)) == 2 * MIB
    # It is back, and the oldest one of 3 MiB went for it.
    assert buffers.idle_bytes == 7 * MIB + 2 * MIB - 3 * MIB


def test_of_payloads_above_the_limit_two_are_kept() -> None:
    """Each takes a second of a processor where its pages are cleared anew."""
    buffers = Buffers(idle_bytes_max=5 * MIB)
    lent = [buffers.take(6 * MIB) for _ in range(3)]
    lent[0][:1] = lent[1][:1] = lent[2][:1] = b"\x07"
    lent.clear()
    assert buffers.idle_bytes == 2 * 6 * MIB
    again = [buffers.take(6 * MIB) for _ in range(3)]
    assert [bytes(one[:1]) for one in again] == [b"\x07", b"\x07", b"\0"]
