"""What JetStream answers: error replies as our exceptions, places in streams, headers."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from diloco_shared import ambient
from diloco_shared.bus.nats.link import NatsLink, Raw
from diloco_shared.bus.port import (
    BusError,
    Conflict,
    NoStream,
    Refused,
    Stored,
    StreamFull,
    TooFewNodes,
    Unavailable,
)
from diloco_shared.protocol.chunks import Buffer

API_TIMEOUT_S = 5.0
# Of a hub of several nodes: what got no answer is asked again after so many seconds, and what was
# stored under a condition, so that a repeat does no harm, is waited for no longer than this.
AGAIN_S, PATIENCE_S = 1.0, 3.0
# One node tells them by itself. If it led a stream, it goes on telling what it has of it for half a
# minute after it has lost the others: such an answer does not say that the hub keeps anything.
_TOLD_BY_ONE = ("INFO", "STREAM.INFO.", "STREAM.MSG.GET.", "STREAM.NAMES")
_REPEATABLE = (*_TOLD_BY_ONE, "CONSUMER.CREATE.")
# Streams behind key-value buckets have these names. The hub's own records are there, so that their
# copies are on as many nodes as the operator wants; those of a run may be on one.
_BUCKET = "KV_"
# What may be on its way to one reader: below nats-py's limit of 128 MB, enough for 16 chunks.
READ_BYTES_MAX = 8 << 20
NS_PER_S = 1_000_000_000

STREAM_NAME_TAKEN = 10058
NO_MESSAGE = 10037
_WRONG_LAST = {10071, 10164}
_FULL = {10077, 10047, 10023}
_NO_STREAM = 10059
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
        # Nodes that are there and have no room are none that it can be placed on, either.
        return StreamFull(text) if "insufficient storage" in text else TooFewNodes(text)
    if code == NO_MAJORITY:
        return NoMajority(f"{text} (the hub's nodes have no leader)")
    if code in _PASSING:
        return Unavailable(text)
    if code == _NO_STREAM:
        return NoStream(text)
    return ApiRefused(text, code)


async def api_call(link: NatsLink, call: str, body: dict[str, Any], *, what: str) -> dict[str, Any]:
    """One request for `<call>` of JetStream's API; raises an error reply as `failure` says.

    `what` begins the text of the exception.
    """
    reply = await _asked(link, call, json.dumps(body).encode())
    try:
        answer = answer_of(reply.payload, what)
        of_stream, nodes = call.startswith("STREAM.INFO."), answer.get("cluster")
        # Whoever has a copy tells of a stream without a leader, and its state is nobody's.
        if of_stream and nodes is not None and not nodes.get("leader"):
            raise NoMajority(f"{what}: it has no leader now")
    except NoMajority:
        link.missed_leader()
        raise
    if not call.startswith(_TOLD_BY_ONE):
        link.heard_leader()
    return answer


async def _asked(link: NatsLink, call: str, body: bytes) -> Raw:
    """The answer. Of several nodes the one that leads answers, and while none does, nobody.

    So what only reads, or may be done twice, is asked once more every second, and whichever answer
    comes first counts: a new leader is found at once, and a slow link's answer is not thrown away.
    """
    subject, left_s = f"{link.api}.{call}", API_TIMEOUT_S
    if not (link.several_nodes and call.startswith(_REPEATABLE)):
        return await link.request(subject, body, timeout_s=left_s)
    asking: set[asyncio.Task[Raw]] = set()
    trouble: BusError = Unavailable(f"no answer on {subject} within {left_s:g} s")
    until = ambient.monotonic() + left_s
    try:
        while (left_s := until - ambient.monotonic()) > 0:
            asking.add(asyncio.create_task(link.request(subject, body, timeout_s=left_s)))
            pause = min(AGAIN_S, left_s)
            done, asking = await asyncio.wait(
                asking, timeout=pause, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if (error := task.exception()) is None:
                    return task.result()
                if not isinstance(error, BusError):
                    raise error
                trouble = error
            if done:
                await asyncio.sleep(pause / 5)
        raise trouble
    finally:
        for task in asking:
            task.cancel()


def answer_of(payload: Buffer, what: str) -> dict[str, Any]:
    """An answer; raises an error reply as `failure` says, and Refused for what is no answer."""
    try:
        answer: dict[str, Any] = json.loads(bytes(payload))
        if "error" not in answer:
            return answer
        raise failure(answer["error"], what)
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"{what}: not an answer of JetStream's ({error!r})") from None


def kept_at(link: NatsLink, payload: Buffer, what: str) -> int:
    """`stored_at` of a message that was sent over `link`.

    Whether the hub has its majority shows in the acknowledgements of what is written into buckets.
    """
    try:
        answer = answer_of(payload, what)
    except NoMajority:
        link.missed_leader()
        raise
    if str(answer.get("stream")).startswith(_BUCKET):
        link.heard_leader()
    return _sequence(answer, what)


def stored_at(payload: Buffer, what: str) -> int:
    """Where in its stream a message was stored, as the acknowledgement says; raises likewise."""
    return _sequence(answer_of(payload, what), what)


def _sequence(answer: dict[str, Any], what: str) -> int:
    try:
        return int(answer["seq"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{what}: not a stream's answer ({error!r})") from None


def without_server_headers(message: Stored) -> Stored:
    """`message` as the one who appended it meant it."""
    headers = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
    return Stored(message.subject, message.payload, headers, message.seq)


def nanoseconds(moment: str) -> int:
    """Since 1970, of a moment as the server writes it: RFC 3339, UTC, up to nine decimals."""
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * NS_PER_S + int(fraction.ljust(9, "0") or "0")
