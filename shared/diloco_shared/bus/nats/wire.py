"""The client side of the NATS protocol, as much of it as moving chunks needs.

Bytes are received straight to where they stay: `Parser.room` gives the places, `Parser.took` tells
how many bytes came and returns what they mean. Only control lines and headers pass a small staging
buffer. Pure: whoever owns the socket fills the places.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Longest control line together with headers: INFO of a cluster with a hundred addresses.
HEAD_BYTES_MAX = 64 * 1024
# Longest payload; the server's own limit is at most this.
PAYLOAD_BYTES_MAX = 64 << 20
# Received behind a payload in one system call: what follows it, and little of the payload after.
_AHEAD_BYTES = 4096

_VERSION = b"NATS/1.0"
# Of headers that say nothing.
_NO_HEADERS = _VERSION + b"\r\n\r\n"
# Of a consumer that sends headers alone: how the server puts the payload's size behind them.
_SIZE = b"Nats-Msg-Size: "
# What a message takes in a stream's file beside what it says: lengths, sequence, time and checksum,
# and of one with headers their length.
_FRAME, _FRAME_OF_HEADERS = 30, 4


class WireFault(ValueError):
    """The peer does not speak the protocol; the connection is useless."""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """A message, without its payload. `size` is the payload's length in bytes."""

    subject: str
    reply: str
    headers: dict[str, str]
    size: int

    @property
    def status(self) -> int:
        return status_of(self.headers)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message whose payload is complete: where `Place` wanted it, and so in `payload`."""

    message: WireMessage
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Info:
    """What the server says of itself."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ping:
    """Must be answered."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers our ping."""


@dataclass(frozen=True, slots=True)
class ServerError:
    """`-ERR`: the server says what it did not like."""

    text: str


Event = Arrived | Info | Ping | Pong | ServerError
# Where the payload of a message of that size goes; None when nobody needs to keep it.
Place = Callable[[WireMessage], memoryview | None]


def connect_line(options: dict[str, Any]) -> bytes:
    """The client's first line: who it is, and what it can do."""
    return b"CONNECT " + json.dumps(options).encode() + b"\r\n"


def sub_line(subject: str, sid: int) -> bytes:
    """Asks for messages on `subject`, wildcards allowed; they come under the number `sid`."""
    return f"SUB {subject} {sid}\r\n".encode()


def publish_line(subject: str, reply: str, payload: bytes) -> bytes:
    """A whole small message."""
    return f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"


def publish_head(subject: str, reply: str, headers: dict[str, str], size: int) -> bytes:
    """What goes before a payload of `size` bytes; CRLF goes behind it."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    block = _VERSION + b"\r\n" + lines.encode() + b"\r\n"
    line = f"HPUB {subject} {reply} {len(block)} {len(block) + size}\r\n"
    return line.encode() + block


class Parser:
    """Incremental. After a WireFault it must not be used any more."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stage = bytearray(HEAD_BYTES_MAX)
        self._view = memoryview(self._stage)
        self._start = self._end = 0
        self._message: WireMessage | None = None
        self._body = memoryview(b"")
        self._filled = 0

    def room(self) -> list[memoryview]:
        """Where the next bytes go, in order; never empty of space."""
        left = self._body[self._filled :]
        ahead = self._view[self._end : self._end + _AHEAD_BYTES]
        return [left, ahead] if len(left) else [ahead]

    @property
    def certain(self) -> int:
        """Bytes that will come whatever else does: at least 1."""
        left = len(self._body) - self._filled
        return left + 2 if left else 1

    def took(self, count: int) -> list[Event]:
        """`count` bytes were put into `room`: what they complete. Raises WireFault."""
        body = min(count, len(self._body) - self._filled)
        self._filled += body
        self._end += count - body
        events = []
        while (event := self._next()) is not None:
            events.append(event)
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._stage) - self._end < _AHEAD_BYTES:
            self._make_room()
        return events

    def _make_room(self) -> None:
        held = self._end - self._start
        if held > HEAD_BYTES_MAX - _AHEAD_BYTES:
            raise WireFault(f"a control line of more than {held} bytes")
        self._stage[:held] = self._stage[self._start : self._end]
        self._start, self._end = 0, held

    def _next(self) -> Event | None:
        """The next complete event of what was received; None when it takes more bytes."""
        while True:
            if self._message is not None:
                return self._finish(self._message)
            stop = self._stage.find(b"\r\n", self._start, self._end)
            if stop < 0:
                return None
            line = bytes(self._stage[self._start : stop])
            verb, _, rest = line.partition(b" ")
            verb = verb.upper()
            if verb in (b"MSG", b"HMSG"):
                if not self._begin(verb == b"HMSG", rest, stop + 2):
                    return None
                continue
            self._start = stop + 2
            event = _control(verb, rest)
            if event is not None:
                return event

    def _begin(self, with_headers: bool, rest: bytes, start: int) -> bool:
        """A message's line is there; whether its headers are too."""
        subject, reply, head, total = _message_line(rest, with_headers)
        if head > HEAD_BYTES_MAX - 2 * _AHEAD_BYTES or total - head > PAYLOAD_BYTES_MAX:
            raise WireFault(f"a message of {head} bytes of headers and {total} in all")
        if self._end - start < head:
            return False
        headers = parse_headers(bytes(self._stage[start : start + head])) if head else {}
        self._start = start + head
        size = total - head
        self._message = WireMessage(subject, reply, headers, size)
        place = self._place(self._message)
        self._body = memoryview(bytearray(size)) if place is None else place
        assert len(self._body) == size, "a place of another size than the payload"
        self._filled = min(size, self._end - self._start)
        self._body[: self._filled] = self._view[self._start : self._start + self._filled]
        self._start += self._filled
        return True

    def _finish(self, message: WireMessage) -> Event | None:
        if self._filled < len(self._body) or self._end - self._start < 2:
            return None
        if self._stage[self._start : self._start + 2] != b"\r\n":
            raise WireFault(f"no end after the {message.size} bytes of a message")
        self._start += 2
        arrived = Arrived(message, self._body)
        self._message, self._body, self._filled = None, memoryview(b""), 0
        return arrived


def _message_line(rest: bytes, with_headers: bool) -> tuple[str, str, int, int]:
    """subject, reply, bytes of headers, bytes in all."""
    parts = rest.decode("utf-8", "replace").split()
    numbers = 2 if with_headers else 1
    if len(parts) not in (numbers + 2, numbers + 3):
        raise WireFault(f"a message line of {len(parts)} parts: {rest[:80]!r}")
    reply = parts[2] if len(parts) == numbers + 3 else ""
    try:
        sizes = [_size(part) for part in parts[-numbers:]]
    except ValueError:
        raise WireFault(f"no sizes in a message line: {rest[:80]!r}") from None
    head, total = sizes if with_headers else (0, sizes[0])
    if head > total or (with_headers and head < len(_VERSION) + 4):
        raise WireFault(f"{head} bytes of headers in a message of {total}")
    return parts[0], reply, head, total


def _size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError
    return int(text)


def _control(verb: bytes, rest: bytes) -> Event | None:
    match verb:
        case b"PING":
            return Ping()
        case b"PONG":
            return Pong()
        case b"+OK":
            return None
        case b"-ERR":
            return ServerError(rest.decode("utf-8", "replace").strip(" '"))
        case b"INFO":
            try:
                body = json.loads(rest)
            except (ValueError, RecursionError):
                body = None
            if not isinstance(body, dict):
                raise WireFault(f"malformed INFO: {rest[:80]!r}")
            return Info(body)
    raise WireFault(f"unknown control line {verb[:20]!r}")


def status_of(headers: Mapping[str, str]) -> int:
    """The status code of a server's own message, 0 when there is none, or none that is one.

    Whoever stores a message may give it any header: what a status is about must be known from the
    subject on which it came.
    """
    said = headers.get("Status", "0")
    return int(said) if said.isascii() and said.isdigit() and len(said) == 3 else 0


def stored_bytes(subject: str, head: int, payload: int) -> int:
    """What a message with `head` bytes of headers takes of its stream's limit."""
    return _FRAME + len(subject.encode()) + (head + _FRAME_OF_HEADERS if head else 0) + payload


def stored_of_head(subject: str, block: bytes) -> int:
    """The same of a message of which a consumer sent the headers alone.

    Whoever stored it may have written a size of its own before the server's, or no end of the last
    line, with which the server's then is one.
    """
    own, _, said = block.rpartition(_SIZE)
    number = said.removesuffix(b"\r\n\r\n")
    payload = int(number) if number.isdigit() else 0
    head = len(own) + len(b"\r\n")
    return stored_bytes(subject, head if head > len(_NO_HEADERS) else 0, payload)


def head_bytes(headers: Mapping[str, str]) -> int:
    """Bytes of these headers as a client writes them; 0 where there are none."""
    lines = sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
    return lines + len(_NO_HEADERS) if headers else 0


class Headers(dict[str, str]):
    """What `parse_headers` finds in a block, and the block."""

    def __init__(self, block: bytes) -> None:
        super().__init__(parse_headers(block))
        self.block = block


def parse_headers(block: bytes) -> dict[str, str]:
    """Headers of `NATS/1.0[ status text]\\r\\nName: value\\r\\n...\\r\\n`.

    Servers keep whatever a client sends as headers, and put their own behind it. It must not break
    the connection of those who read it: what is no header is passed over, and the last of a name
    counts.
    """
    lines = block.decode("utf-8", "replace").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    # A header of that name is not the status.
    headers.pop("Status", None)
    ours = lines[0].startswith(_VERSION.decode())
    status = lines[0].split(maxsplit=2)[1:] if ours else []
    if status and status[0].isascii() and status[0].isdigit() and len(status[0]) == 3:
        headers["Status"] = status[0]
        if status[1:]:
            headers.setdefault("Description", status[1])
    return headers
