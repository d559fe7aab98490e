"""Frames between the processes of an island, and the limits of every wait.

    [length of head, u32][length of data, u64][head: msgpack][data: values as they are]

Each process that follows has two connections to process 0: one for orders, and back on it signs of
life; another for what it gives, so that no sign of life waits behind megabytes. They are neither
encrypted nor signed: as with the collectives beside them, the network that joins the hosts of an
island is trusted, and nobody else may reach it (docs/how-to/many-hosts.md).
"""

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgpack

from diloco_learner.hosts.parts import Buffer
from diloco_shared.memory.pages import pages

# A sign of life goes out so often, in seconds.
BEAT_S = 0.5
# An order that is not taken up by then, or an answer that does not come: whatever holds that host
# holds the island. The longest that is none is a compilation.
ORDER_S_MAX = 900.0
# All are started at about the same time. Whoever comes to process 0 and hears nothing for so long
# tries again; so nobody sits in an island that never became whole.
JOIN_S = 600.0
# A process that is told to stop, or has lost another one, is given so many seconds for its last
# words: supervisors kill after ten.
LAST_WORDS_S = 6.0

_LENGTHS = struct.Struct("!IQ")
# A run's specification is the largest head.
HEAD_BYTES_MAX = 4 << 20
# A part of a tensor or of a batch. More is no frame of ours.
DATA_BYTES_MAX = 64 << 30
# Sent and received at a time: between two such pieces a wait is looked at.
PIECE_BYTES = 1 << 20


class HostLost(ConnectionError):
    """A process of the island is gone, or does not answer: the island ends, and begins again."""


class BadFrame(ConnectionError):
    """Bytes of somebody who is no process of an island."""


def head_of(*values: Any) -> bytes:
    packed: bytes = msgpack.packb(values)
    return packed


def values_of(head: Buffer) -> tuple[Any, ...]:
    """What `head_of` was given. Raises BadFrame."""
    try:
        values = msgpack.unpackb(head, use_list=False)
    except Exception as error:  # msgpack raises many kinds, all meaning the same here
        raise BadFrame(f"a frame that cannot be read: {error}") from None
    if not isinstance(values, tuple) or not values:
        raise BadFrame("a frame that says nothing")
    return values


def send(sock: socket.socket, head: bytes, data: Sequence[memoryview] = ()) -> None:
    """A whole frame; OSError also where nothing of it moves for the socket's time."""
    size = sum(part.nbytes for part in data)
    sock.sendall(_LENGTHS.pack(len(head), size) + head)
    for part in data:
        whole = part.cast("B")
        for start in range(0, len(whole), PIECE_BYTES):
            sock.sendall(whole[start : start + PIECE_BYTES])


def receive(
    sock: socket.socket, *, head_max: int = HEAD_BYTES_MAX, data_max: int = DATA_BYTES_MAX
) -> tuple[bytes, memoryview]:
    """(head, data) of the next frame.

    Raises OSError where nothing comes for the socket's time, BadFrame for what is no frame, and
    HostLost where the other side has closed.
    """
    lengths = bytearray(_LENGTHS.size)
    _fill(sock, memoryview(lengths))
    head_bytes, data_bytes = _LENGTHS.unpack(lengths)
    if head_bytes > head_max or data_bytes > data_max:
        raise BadFrame(f"a frame of {head_bytes} and {data_bytes} bytes")
    head = bytearray(head_bytes)
    _fill(sock, memoryview(head))
    data = pages(data_bytes)
    _fill(sock, data)
    return bytes(head), data


def _fill(sock: socket.socket, place: memoryview) -> None:
    at = 0
    while at < len(place):
        took = sock.recv_into(place[at : at + PIECE_BYTES])
        if not took:
            raise HostLost("its connection is closed")
        at += took


def prompt(sock: socket.socket, silence_s: float) -> tuple[socket.socket, socket.socket]:
    """The same connection twice: to read from, with a limit on silence, and to write to."""
    # An order is small, and the others wait for it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writing = sock.dup()
    sock.settimeout(silence_s)
    # Whoever compiles does not read; the kernel's own buffers take what small orders there are.
    writing.settimeout(ORDER_S_MAX)
    return sock, writing


def close(*sockets: socket.socket) -> None:
    for sock in sockets:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
