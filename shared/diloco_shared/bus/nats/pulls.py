"""JetStream's pull consumers: made, asked, heard and forgotten. For readers and for lanes."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from diloco_shared.bus.nats.api import NS_PER_S, api_call
from diloco_shared.bus.nats.link import NatsLink
from diloco_shared.bus.port import BusError, Unavailable

# A pull is renewed by the server's expiry; heartbeats in between show that it lives. Of several
# nodes another one than ours may have the consumer, and die while our connection stays: nothing
# but the heartbeats tells.
EXPIRES_S, HEARTBEAT_S, HEARTBEAT_OF_NODES_S = 30, 3, 1
# Heartbeats missed: the consumer, or the connection, is of no use.
MISSED_MAX = 3
# The server forgets the consumer of a reader that vanished.
INACTIVE_S = 60
IDLE = 100  # the status of a heartbeat


class Delivered(NamedTuple):
    """A message's place in its stream and among its consumer's, how many follow, and its time."""

    seq: int
    number: int
    pending: int
    stored_at: int  # nanoseconds since 1970


async def open_consumer(
    link: NatsLink,
    stream: str,
    subject: str,
    *,
    name: str,
    start_seq: int,
    headers_only: bool = False,
) -> int:
    """A consumer in the server's memory, without acknowledgements: how many messages it has."""
    config = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": start_seq,
        "ack_policy": "none",
        "filter_subject": subject,
        "inactive_threshold": INACTIVE_S * NS_PER_S,
        "mem_storage": True,
        # Whatever copies the stream has: a reader that hears nothing makes another one, also where
        # a copied one would have another leader by now, since that does not know who waits.
        "num_replicas": 1,
        "headers_only": headers_only,
    }
    answer = await api_call(
        link,
        f"CONSUMER.CREATE.{stream}.{name}",
        {"stream_name": stream, "config": config},
        what=f"reading {subject} from {stream}",
    )
    return int(answer.get("num_pending", 0))


async def forget_consumer(link: NatsLink, stream: str, name: str) -> None:
    """The server is told, if it listens."""
    with suppress(BusError):
        await link.publish(f"{link.api}.CONSUMER.DELETE.{stream}.{name}", b"")


def heartbeat_s(link: NatsLink) -> int:
    """Seconds between two heartbeats."""
    return HEARTBEAT_OF_NODES_S if link.several_nodes else HEARTBEAT_S


def pull(api: str, consumer: str, count: int, beat_s: int, **limits: int) -> tuple[str, bytes]:
    """(subject, body) of the request, below `api`, for messages of `<stream>.<name>`.

    `beat_s`: seconds between two heartbeats.
    """
    body = {
        "batch": count,
        "expires": EXPIRES_S * NS_PER_S,
        "idle_heartbeat": beat_s * NS_PER_S,
        **limits,
    }
    return f"{api}.CONSUMER.MSG.NEXT.{consumer}", json.dumps(body).encode()


def delivered(reply: str) -> Delivered:
    """What a delivery's reply subject says; Unavailable when it is none."""
    # $JS.ACK.[domain.account.]stream.consumer.tries.stream_seq.consumer_seq.time.pending[.x]
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7
    try:
        seq, number, at, pending = (int(token) for token in tokens[first : first + 4])
        return Delivered(seq, number, pending, at)
    except (ValueError, IndexError):
        raise Unavailable(f"not a delivery: {reply}") from None


def unserved(status: int, headers: Mapping[str, str]) -> int:
    """How many messages will not come after all, as the end of a pull says.

    Raises Unavailable for any other status: it ends the reading.
    """
    if status in (408, 409) and "Nats-Pending-Messages" in headers:
        return int(headers["Nats-Pending-Messages"])
    raise Unavailable(f"the server ended the reading (status {status})")
