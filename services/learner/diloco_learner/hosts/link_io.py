"""Frames between the processes of an island, and the limits of every wait.

    [length of head, u32][length of data, u64][head: msgpack][data: values as they are]

Each process that follows has two connections to process 0: one for orders, and back on it signs of
life; another for what it gives, so that no sign of life waits behind megabytes. They are neither
encrypted nor signed: as with the collectives beside them, the network that joins the hosts of an
island is trusted, and nobody else may reach it (docs/how-to/many-hosts.md).
"""

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgpack

from diloco_learner.hosts.parts import Buffer
from diloco_learner.hosts.whole import ORDER_S_MAX, HostLost
from diloco_shared.memory.pages import pages

# All are started at about the same time: so long process 0 waits for the others, in seconds.
JOIN_S = 600.0
# Meanwhile it gives those that are there a sign of life every second or so, unless a stranger
# connects, who may take ten. Whoever hears none for so long comes again: that process 0 is gone.
GATHERING_S = 30.0
# A machine is given at least so long to acknowledge what was sent to it, in seconds: TCP sends
# again after a second or two where a switch lost something.
UNACKNOWLEDGED_S_MIN = 10.0

_LENGTHS = struct.Struct("!IQ")
# A run's specification is the largest head.
HEAD_BYTES_MAX = 4 << 20
# A part of a tensor or of a batch. More is no frame of ours.
DATA_BYTES_MAX = 64 << 30
# Sent and received at a time: between two such pieces a wait is looked at.
PIECE_BYTES = 1 << 20


class BadFrame(ConnectionError):
    """Bytes of somebody who is no process of an island."""


def head_of(*values: Any) -> bytes:
    """The head of a frame: plain values as msgpack, which `values_of` reads."""
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
    sock: socket.socket,
    *,
    head_max: int = HEAD_BYTES_MAX,
    data_max: int = DATA_BYTES_MAX,
    moved: Callable[[], object] = lambda: None,
    headed: Callable[[bytes], object] = lambda _: None,
) -> tuple[bytes, memoryview]:
    """(head, data) of the next frame; `moved` is told of every piece of it, and `headed` its head
    before its data.

    Raises OSError where nothing comes for the socket's time, BadFrame for what is no frame, and
    HostLost where the other side has closed.
    """
    lengths = bytearray(_LENGTHS.size)
    _fill(sock, memoryview(lengths), moved)
    head_bytes, data_bytes = _LENGTHS.unpack(lengths)
    if head_bytes > head_max or data_bytes > data_max:
        raise BadFrame(f"a frame of {head_bytes} and {data_bytes} bytes")
    head = bytearray(head_bytes)
    _fill(sock, memoryview(head), moved)
    headed(bytes(head))
    data = pages(data_bytes)
    _fill(sock, data, moved)
    return bytes(head), data


def _fill(sock: socket.socket, place: memoryview, moved: Callable[[], object]) -> None:
    at = 0
    while at < len(place):
        took = sock.recv_into(place[at : at + PIECE_BYTES])
        if not took:
            raise HostLost("its connection is closed")
        at += took
        moved()


def prompt(sock: socket.socket) -> tuple[socket.socket, socket.socket]:
    """The same connection twice: to read from, and to write to. Who looks for silence (`Hearing`)
    closes it long before its own limit, which whoever compiles and does not read is given."""
    # An order is small, and the others wait for it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writing = sock.dup()
    # Both have one, since what one of them waits without, the other does too.
    sock.settimeout(ORDER_S_MAX)
    writing.settimeout(ORDER_S_MAX)
    return sock, writing


def give_up_after(sock: socket.socket, silence_s: float) -> None:
    """End the connection once the other machine has acknowledged nothing of what was sent for that
    long: one that is gone closes nothing, and Linux would try again for a quarter of an hour.

    For who says little to a process that always reads: to the machine, that it computes is nothing.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it, macOS does not
        limit_ms = round(1000 * max(silence_s, UNACKNOWLEDGED_S_MIN))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def close(*sockets: socket.socket) -> None:
    for sock in sockets:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
