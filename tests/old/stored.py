"""What a version left behind: its streams as files of this folder, and how they are read back.

    tests/old/<version>/made.json         which code made it, and what is in it
    tests/old/<version>/<run>/streams.z   every stream and bucket, message by message
    tests/old/<version>/<run>/disk/       snapshots, run-wide checkpoints, archive, learners' own
    tests/old/<version>/messages.z        one message of each kind that was sent, also of those that
                                          no stream keeps

Nothing here uses the product, so that the same file reads and writes the data of any version.
"""

import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack

HERE = Path(__file__).parent
STREAMS, MESSAGES, MADE, DISK = "streams.z", "messages.z", "made.json", "disk"
# A message ends with a digest of this size; before it lies a map of version, name and body.
SEAL_BYTES = 8

# (sequence, subject, headers, payload)
Message = tuple[int, str, dict[str, str], bytes]


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream as the message server had it; a bucket is one as well."""

    config: dict[str, Any]
    last_seq: int
    messages: tuple[Message, ...]


def write(path: Path, content: Any) -> None:
    """One compressed file, the same bytes for the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zlib.compress(msgpack.packb(content), 9))


def read(path: Path) -> Any:
    return msgpack.unpackb(zlib.decompress(path.read_bytes()), use_list=False)


def write_streams(path: Path, streams: dict[str, Stream]) -> None:
    write(path, {name: asdict(stream) for name, stream in streams.items()})


def read_streams(path: Path) -> dict[str, Stream]:
    return {name: Stream(**fields) for name, fields in read(path).items()}


def name_of(data: bytes) -> str:
    """Of the message's kind, whichever version wrote it; "" for what is no message."""
    return str(_envelope(data).get("t", ""))


def wire_of(data: bytes) -> int:
    """The wire version that a message says it is of; 0 for what is no message."""
    return int(_envelope(data).get("v", 0))


def _envelope(data: bytes) -> dict[str, Any]:
    try:
        found = msgpack.unpackb(data[:-SEAL_BYTES])
    except (ValueError, msgpack.UnpackException):
        return {}
    return found if isinstance(found, dict) and found.keys() == {"v", "t", "b"} else {}
