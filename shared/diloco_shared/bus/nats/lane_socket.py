"""One NATS connection used by one thread: for moving chunks with as few copies as can be.

Payloads go out of the caller's buffer by `sendmsg` and come in by `recvmsg_into` straight to where
they stay. There is no reconnecting here: a connection that fails raises LaneBroken, and whoever
uses it opens another and repeats what was not answered.
"""

import secrets
import select
import socket
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import Any

from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.wire import (
    Event,
    Info,
    Parser,
    Ping,
    Place,
    Pong,
    ServerError,
    WireFault,
    WireMessage,
    connect_line,
    sub_line,
)
from diloco_shared.bus.port import Traffic, Unavailable

# A server that does not take a connection within this is not there now.
CONNECT_S = 3.0
# Bytes given to the kernel in one call: more gains nothing, less costs calls.
_PART_BYTES = 1 << 20
# Buffers in one call; the kernel's limit is 1024.
_PARTS_MAX = 16
# TLS encrypts in pieces of 16 KiB anyway, and must be given the same piece again when it is full.
_TLS_PART_BYTES = 64 * 1024
# While a payload comes, a thread is woken when this much of it is there: every waking costs.
_WAKE_BYTES = 256 * 1024
# Of the pings on an idle connection so many may be unanswered: other connections full of fragments
# delay answers by seconds. More, and its server or the link is gone without a word.
_PINGS_MAX = 5


class LaneBroken(Unavailable):
    """The connection is gone, or the peer does not speak the protocol."""


class LaneSocket:
    """An open connection. Not for several threads at a time, save `abort`."""

    def __init__(self, sock: socket.socket, traffic: Traffic) -> None:
        self._sock: Any = sock
        self._traffic = traffic
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._parser = Parser(self._placed)
        self._place: Place | None = None
        self._poll = select.poll()
        self._wake_bytes = 1
        self.payload_bytes_max = 0
        self.life = ""  # of the server: see `bus.Bus.life`
        self.broken = False
        self._unanswered = 0  # pings
        self.inbox = ""  # answers of all that is asked on this connection come below this subject

    @classmethod
    def open(
        cls, address: Address, name: str, traffic: Traffic, *, server: int = 0
    ) -> "LaneSocket":
        """Connect to that server of `address` and be let in within CONNECT_S a step.

        Raises LaneBroken.
        """
        host, port = address.endpoints()[server]
        try:
            sock = socket.create_connection((host, port), CONNECT_S)
        except OSError as error:
            raise LaneBroken(f"no NATS server at {host}:{port}: {error}") from None
        lane = cls(sock, traffic)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lane._greet(address, host, name)
        except (OSError, ValueError) as error:
            lane.abort()
            raise LaneBroken(f"{host}:{port} does not let us in: {error}") from None
        except BaseException:
            lane.abort()
            raise
        return lane

    def _greet(self, address: Address, host: str, name: str) -> None:
        until = time.monotonic() + CONNECT_S
        self._sock.setblocking(False)
        self._poll.register(self._sock)
        info = self._await(Info, until).body
        context = address.context(bool(info.get("tls_required")))
        if context is not None:
            # The certificate is checked before credentials leave this process.
            self._sock.settimeout(CONNECT_S)
            self._sock = context.wrap_socket(self._sock, server_hostname=host)
            self._sock.setblocking(False)
        self.payload_bytes_max = int(info.get("max_payload", 1 << 20))
        self.life = str(info.get("server_id", ""))
        options = {"verbose": False, "pedantic": False, "lang": "python", "version": "1",
                   "protocol": 1, "name": name, "headers": True,
                   "no_responders": True}  # fmt: skip
        self.inbox = f"{address.inbox()}.{secrets.token_hex(11)}"
        self.send(connect_line(options | address.login(info)), b"PING\r\n")
        self._await(Pong, time.monotonic() + CONNECT_S)  # a step of its own, after TLS
        self.send(sub_line(f"{self.inbox}.>", 1))

    def _await(self, kind: type[Any], until: float) -> Any:
        while (left_s := until - time.monotonic()) > 0:
            self.wait(left_s)
            for event in self.receive():
                if isinstance(event, kind):
                    return event
        raise LaneBroken(f"no {kind.__name__} within {CONNECT_S:g} s")

    # --- out ----------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._waiting_bytes

    def send(self, *parts: bytes | memoryview) -> None:
        """Hand over; what the kernel does not take now goes with the next `wait`."""
        for part in parts:
            if len(part):
                self._waiting.append(memoryview(part))
                self._waiting_bytes += len(part)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                sent = self._push()
                self._traffic.crossed_socket(out=sent)
                self._waiting_bytes -= sent
                while sent:
                    part = self._waiting[0]
                    if sent < len(part):
                        self._waiting[0] = part[sent:]
                        break
                    sent -= len(part)
                    self._waiting.popleft()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise self._broke(f"sending: {error}") from None

    def _push(self) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.send(self._waiting[0][:_TLS_PART_BYTES])
        parts, size = [], 0
        for part in self._waiting:
            parts.append(part[: _PART_BYTES - size])
            size += len(parts[-1])
            if size >= _PART_BYTES or len(parts) == _PARTS_MAX:
                break
        return int(self._sock.sendmsg(parts))

    # --- in -----------------------------------------------------------------------------------

    def place_with(self, place: Place | None) -> None:
        """`place` says from now on where payloads go; None keeps none of them."""
        self._place = place

    def _placed(self, message: WireMessage) -> memoryview | None:
        return None if self._place is None else self._place(message)

    def wait(self, timeout_s: float) -> bool:
        """Until something came or went, at most `timeout_s`; whether there is something to read."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        self._wake_at(min(_WAKE_BYTES, self._parser.certain))
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._waiting else 0))
        found = self._poll.poll(max(0.0, timeout_s) * 1000)
        events = found[0][1] if found else 0
        if events & select.POLLOUT:
            self._flush()
        return bool(events & ~select.POLLOUT)

    def _wake_at(self, size: int) -> None:
        """Be woken to read when that many bytes are there (plain TCP; TLS has its own records)."""
        if size != self._wake_bytes and not isinstance(self._sock, ssl.SSLSocket):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._wake_bytes = size

    def receive(self) -> list[Event]:
        """What one read brings; pings are answered here. Raises LaneBroken."""
        room = self._parser.room()
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                count = self._sock.recv_into(room[0])
            else:
                count = self._sock.recvmsg_into(room)[0]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return []
        except OSError as error:
            raise self._broke(f"receiving: {error}") from None
        if count == 0:
            raise self._broke("the server closed the connection")
        self._traffic.crossed_socket(into=count)
        try:
            events = self._parser.took(count)
        except WireFault as error:
            raise self._broke(str(error)) from None
        return [event for event in events if not self._housekeeping(event)]

    def _housekeeping(self, event: Event) -> bool:
        if isinstance(event, Ping):
            self.send(b"PONG\r\n")
            return True
        if isinstance(event, Pong):
            self._unanswered = 0
        if isinstance(event, ServerError):
            raise self._broke(f"the server says: {event.text}")
        return False

    def alive(self) -> bool:
        """Whether a connection that lay idle can be used; answers what came meanwhile."""
        try:
            while not self.broken and self.wait(0):
                self.receive()
        except LaneBroken:
            return False
        return not self.broken

    def tend(self) -> bool:
        """Keep a connection that lies idle: answer pings, and see that its own are answered.

        Call it every few seconds; waits for nothing. False: the connection is no good.
        """
        if not self.alive() or self._unanswered == _PINGS_MAX:
            return False
        self._unanswered += 1
        try:
            self.send(b"PING\r\n")
        except LaneBroken:
            return False
        return True

    # --- end ----------------------------------------------------------------------------------

    def _broke(self, reason: str) -> LaneBroken:
        self.abort()
        return LaneBroken(reason)

    def abort(self) -> None:
        """Close at once; what is unsent is dropped. Not an error when closed already."""
        self.broken = True
        # Else the kernel would go on sending up to megabytes nobody wants any more.
        with suppress(OSError):
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, (1).to_bytes(4, "little") + bytes(4)
            )
        self._sock.close()
