"""What JetStream answers: error replies as our exceptions, places in streams, headers."""

import json
from datetime import UTC, datetime
from typing import Any

from diloco_shared.bus.nats.link import NatsLink
from diloco_shared.bus.nats.wire import WireFault, parse_headers
from diloco_shared.bus.port import (
    BusError,
    Conflict,
    Refused,
    Stored,
    StreamFull,
    TooFewNodes,
    Unavailable,
)
from diloco_shared.protocol.chunks import Buffer

API_TIMEOUT_S = 5.0
# How people are told of it.
MAJORITY_LOST = (
    "the hub has lost its majority: half of its nodes or more are away, and it keeps nothing until "
    "one of them is back"
)
# What may be on its way to one reader: below nats-py's limit of 128 MB, enough for 16 chunks.
READ_BYTES_MAX = 8 << 20
NS_PER_S = 1_000_000_000

STREAM_NOT_FOUND = 10059
STREAM_NAME_TAKEN = 10058
NO_MESSAGE = 10037
_WRONG_LAST = {10071, 10164}
_FULL = {10077, 10047, 10023}
# No peers to place it on; copies asked of a server that is the only one.
_TOO_FEW_NODES = {10005, 10074}
# What the nodes of a hub say while they have no leader for it: fewer than half of them are there.
NO_MAJORITY = 10008
# Server-side states that pass: JetStream starting or out of reach, no leader, timeouts, and more
# waiting to be stored than the server wants. In a hub of several nodes also: answers of some only,
# a node that is no part of it yet, a stream or consumer whose nodes are away, a leader that was
# exchanged meanwhile, the same message or another of its subject on the way to the other nodes,
# and nodes being exchanged.
_PASSING = {
    *(NO_MAJORITY, 10009, 10039, 10076, 10118, 10167),
    *(10004, 10007, 10041, 10119, 10158, 10163, 10194, 10195, 10202),
}


class ApiRefused(Refused):
    """An error reply that means none of the bus's other exceptions."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"{text} (JetStream error {code})")
        self.code = code


class NoMajority(Unavailable):
    """The nodes of the hub that are left cannot decide anything."""


def failure(error: dict[str, Any], what: str) -> BusError:
    """The exception that a JetStream error reply means."""
    code, text = error.get("err_code", 0), f"{what}: {error.get('description', 'unknown error')}"
    if code in _WRONG_LAST:
        return Conflict(text)
    if code in _FULL:
        return StreamFull(text)
    if code in _TOO_FEW_NODES:
        return TooFewNodes(text)
    if code == NO_MAJORITY:
        return NoMajority(f"{text} ({MAJORITY_LOST})")
    if code in _PASSING:
        return Unavailable(text)
    return ApiRefused(text, code)


async def api_call(link: NatsLink, call: str, body: dict[str, Any], *, what: str) -> dict[str, Any]:
    """One request for `<call>` of JetStream's API; raises an error reply as `failure` says.

    `what` begins the text of the exception.
    """
    reply = await link.request(
        f"{link.api}.{call}", json.dumps(body).encode(), timeout_s=API_TIMEOUT_S
    )
    try:
        answer = answer_of(reply.payload, what)
    except NoMajority:
        link.ails = MAJORITY_LOST
        raise
    link.ails = ""
    return answer


def answer_of(payload: Buffer, what: str) -> dict[str, Any]:
    """An answer; raises an error reply as `failure` says, and Refused for what is no answer."""
    try:
        answer: dict[str, Any] = json.loads(bytes(payload))
        if "error" not in answer:
            return answer
        raise failure(answer["error"], what)
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"{what}: not an answer of JetStream's ({error!r})") from None


def stored_at(payload: Buffer, what: str) -> int:
    """Where in its stream a message was stored, as the acknowledgement says; raises likewise."""
    answer = answer_of(payload, what)
    try:
        return int(answer["seq"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{what}: not a stream's answer ({error!r})") from None


def headers_of(block: bytes) -> dict[str, str]:
    """Those that a message was stored with; Refused for what are none."""
    try:
        return parse_headers(block) if block else {}
    except WireFault as error:
        raise Refused(f"headers of a stored message: {error}") from None


def without_server_headers(message: Stored) -> Stored:
    """`message` as the one who appended it meant it."""
    headers = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
    return Stored(message.subject, message.payload, headers, message.seq)


def nanoseconds(moment: str) -> int:
    """Since 1970, of a moment as the server writes it: RFC 3339, UTC, up to nine decimals."""
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * NS_PER_S + int(fraction.ljust(9, "0") or "0")
