"""Plain TCP over the link: the bound that everything else is compared with.

The hub serves; the site asks for `size` bytes either way over connections that stay open.
"""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

_HEAD = struct.Struct("!cQ")
_BLOCK = 1 << 20
# A transfer that stands still so long is broken.
_STILL_S = 30.0
# Room for a second of datagrams while the other side does something else.
_DATAGRAM_BUFFER = 16 << 20
# Datagrams lost on the way back or still under way are waited for so long.
_SETTLE_S = 1.0


class Server:
    """TCP and UDP on the hub's side, in threads of this process; ends with it."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.datagrams = 0
        self._udp = _datagram_socket()
        self._udp.bind((host, self.port))
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._echo, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()

    def _echo(self) -> None:
        while True:
            data, sender = self._udp.recvfrom(2048)
            self._udp.sendto(data, sender)


def _datagram_socket() -> socket.socket:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # SO_RCVBUFFORCE, which Python does not name: above the limit for ordinary users.
    udp.setsockopt(socket.SOL_SOCKET, 33, _DATAGRAM_BUFFER)
    return udp


def _serve(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    block = memoryview(bytearray(_BLOCK))
    head = bytearray(_HEAD.size)
    with connection:
        while _receive(connection, memoryview(head), len(head)):
            way, size = _HEAD.unpack(head)
            if way == b"u":
                _receive(connection, block, size)
                connection.sendall(b"k")
            else:
                _send(connection, block, size)


def _receive(connection: socket.socket, block: memoryview, size: int) -> bool:
    """Read `size` bytes into `block`, over and over; False when the other side is gone."""
    left = size
    while left:
        at = 0 if size > len(block) else size - left
        count = connection.recv_into(block[at:], min(left, len(block) - at))
        if not count:
            return False
        left -= count
    return True


def _send(connection: socket.socket, block: memoryview, size: int) -> None:
    while size:
        part = block[: min(size, len(block))]
        connection.sendall(part)
        size -= len(part)


class Connections:
    """`count` connections of the site to the hub."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._sockets = [socket.create_connection((host, port), _STILL_S) for _ in range(count)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, way: str, size: int) -> float:
        """Seconds to move `size` bytes over all connections; `way` is put or get."""
        share = size // len(self._sockets)
        began = time.monotonic()
        list(self._pool.map(lambda s: _move(s, way, share), self._sockets))
        return time.monotonic() - began

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._pool.shutdown()


def _move(connection: socket.socket, way: str, size: int) -> None:
    block = memoryview(bytearray(_BLOCK))
    if way == "put":
        connection.sendall(_HEAD.pack(b"u", size))
        _send(connection, block, size)
        _receive(connection, block, 1)
    else:
        connection.sendall(_HEAD.pack(b"d", size))
        _receive(connection, block, size)


def round_trip_s(host: str, port: int, tries: int) -> list[float]:
    """Seconds of each of `tries` one-byte questions and answers."""
    connections = Connections(host, port, 1)
    found = [connections.move("put", 1) for _ in range(tries)]
    connections.close()
    return found


def datagrams_lost(host: str, port: int, count: int, per_s: int) -> float:
    """Share of `count` small datagrams that do not come back from an echo, sent at `per_s`."""
    returned = bytearray(count)
    with _datagram_socket() as udp:
        udp.connect((host, port))
        udp.settimeout(_SETTLE_S)

        def listen() -> None:
            try:
                while True:
                    returned[struct.unpack("!I", udp.recv(2048))[0]] = 1
            except TimeoutError:
                return

        listener = threading.Thread(target=listen)
        listener.start()
        began = time.monotonic()
        for number in range(count):
            udp.send(struct.pack("!I", number))
            ahead_s = number / per_s - (time.monotonic() - began)
            if ahead_s > 0.002:
                time.sleep(ahead_s)
        listener.join()
    return 1 - sum(returned) / count
