"""Bytes to messages and back: distrust ends here.

msgpack maps with a version and the class name, and a digest behind them: one byte changed on the
way or on a disk, on the tape above all, is found and said. Strict types; a size limit before
parsing. Fields that this side does not know are passed over: a later release may have them, and
it says so by its wire version where they must not be passed over (docs/how-to/upgrade.md).
"""

import hashlib
from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError

from diloco_shared.protocol import messages, records
from diloco_shared.protocol.messages import Message, TapeRecord

WIRE_VERSION = 2
# The largest message is a version-0 manifest with its layout: 3000 tensors of 300 bytes.
MESSAGE_BYTES_MAX = 1 << 20
# Of the digest at the end: against accidents, not against malice.
SEAL_BYTES = 8
# The version and the name of the type are within so many bytes of the beginning.
NAMED_BYTES = 128

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_TAPE: TypeAdapter[TapeRecord] = TypeAdapter(TapeRecord)


class WireError(ValueError):
    """The peer sent something we cannot accept; the text says what and where."""


def encode(message: Message) -> bytes:
    """Serialise `message`; raises WireError when it exceeds MESSAGE_BYTES_MAX."""
    body = message.model_dump()
    packed: bytes = msgpack.packb({"v": WIRE_VERSION, "t": type(message).__name__, "b": body})
    data = packed + _seal(packed)
    if len(data) > MESSAGE_BYTES_MAX:
        raise WireError(f"{type(message).__name__} of {len(data)} bytes exceeds the wire limit")
    return data


def decode(data: bytes, kind: type[M]) -> M:
    """Parse `data` as a `kind`; raises WireError naming the first fault."""
    return _decode(data, kind)


def _decode(data: bytes, kind: type[M]) -> M:
    name, body = _open(data)
    if name != kind.__name__:
        raise WireError(f"expected {kind.__name__}, got {name}")
    try:
        return kind.model_validate(body, extra="ignore")
    except ValidationError as error:
        raise WireError(_first_fault(kind.__name__, error)) from None


def decode_tape(data: bytes) -> TapeRecord:
    """Parse any tape record; raises WireError."""
    name, body = _open(data)
    try:
        record = _TAPE.validate_python(body, extra="ignore")
    except ValidationError as error:
        raise WireError(_first_fault(name, error)) from None
    if type(record).__name__ != name:
        raise WireError(f"record says {name} but is a {type(record).__name__}")
    return record


def read_line(kinds: TypeAdapter[T], line: bytes) -> T | None:
    """What a process says on its standard output, in JSON; None for what is none of these kinds."""
    try:
        return kinds.validate_json(line)
    except ValidationError:
        return None


def name_of(data: bytes) -> str:
    """The name of a message's type, which stands before all that it says; "" where none is found.

    For counting: the rest is neither read nor checked.
    """
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[:NAMED_BYTES])
    try:
        for _ in range(unpacker.read_map_header()):
            key, value = unpacker.unpack(), unpacker.unpack()
            if key == "t":
                return value if isinstance(value, str) else ""
    except Exception:  # as below
        return ""
    return ""


def _open(data: bytes) -> tuple[str, Any]:
    if len(data) > MESSAGE_BYTES_MAX:
        raise WireError(f"message of {len(data)} bytes exceeds the wire limit")
    packed = data[:-SEAL_BYTES]
    if data[-SEAL_BYTES:] != _seal(packed):
        raise WireError(f"damaged: the {len(data)} bytes do not match the digest at their end")
    try:
        envelope = msgpack.unpackb(packed, use_list=False, strict_map_key=True)
    except Exception as error:  # msgpack raises many kinds, all meaning the same here
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(envelope, dict) or envelope.keys() != {"v", "t", "b"}:
        raise WireError("not an envelope of v, t and b")
    if envelope["v"] != WIRE_VERSION:
        raise WireError(
            f"wire version {envelope['v']!r}, this side speaks {WIRE_VERSION}: finish or stop "
            "the run with the release that wrote this (docs/how-to/deploy.md, 'From one release to "
            "another')"
        )
    name = envelope["t"]
    if not isinstance(name, str) or not (hasattr(messages, name) or hasattr(records, name)):
        raise WireError(f"unknown message type {str(envelope['t'])[:60]!r}")
    return envelope["t"], envelope["b"]


def _seal(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=SEAL_BYTES).digest()


def _first_fault(name: str, error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{name}.{where}: {fault['msg']}"[:500]
