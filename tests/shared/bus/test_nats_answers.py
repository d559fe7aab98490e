"""What JetStream answers, delivers and ends pulls with, taken apart."""

import json
from typing import Any

import pytest

from diloco_shared.bus.nats.api import answer_of, headers_of, stored_at
from diloco_shared.bus.nats.pulls import Delivered, delivered, unserved
from diloco_shared.bus.port import BusError, Conflict, Refused, StreamFull, Unavailable


def test_an_acknowledgement_says_where_a_message_is_stored() -> None:
    assert stored_at(b'{"stream": "UP", "seq": 12}', "it") == 12
    assert answer_of(b'{"purged": 3}', "it") == {"purged": 3}


@pytest.mark.parametrize(
    ("code", "kind"), [(10071, Conflict), (10077, StreamFull), (10008, Unavailable), (1, Refused)]
)
def test_an_error_reply_is_one_of_ours(code: int, kind: type[BusError]) -> None:
    reply = json.dumps({"error": {"err_code": code, "description": "why"}}).encode()
    with pytest.raises(kind, match="it: why"):
        stored_at(reply, "it")


@pytest.mark.parametrize("payload", [b"", b"no json", b"[]", b"7", b'{"error": "text"}', b"{}"])
def test_what_is_no_answer_is_refused(payload: bytes) -> None:
    with pytest.raises(Refused):
        stored_at(payload, "it")


def test_headers_of_a_stored_message() -> None:
    assert headers_of(b"") == {}
    assert headers_of(b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n") == {"KV-Operation": "DEL"}
    with pytest.raises(Refused):
        headers_of(b"HTTP/1.1\r\nA: b\r\n\r\n")


@pytest.mark.parametrize(
    "reply", ["$JS.ACK.UP.r1.1.42.7.1700.5", "$JS.ACK.hub.ACC.UP.r1.1.42.7.1700.5.x"]
)
def test_a_delivery_says_its_place(reply: str) -> None:
    assert delivered(reply) == Delivered(seq=42, number=7, pending=5, stored_at=1700)


@pytest.mark.parametrize("reply", ["", "_INBOX.a.b", "$JS.ACK.UP.r1.1.x.7.1700.5"])
def test_what_is_no_delivery_ends_the_pull(reply: str) -> None:
    with pytest.raises(Unavailable):
        delivered(reply)


@pytest.mark.parametrize(
    ("status", "headers", "left"),
    [
        (408, {"Nats-Pending-Messages": "3"}, 3),
        (409, {"Nats-Pending-Messages": "0"}, 0),
        (409, {}, None),
        (404, {"Nats-Pending-Messages": "3"}, None),
    ],
)
def test_the_end_of_a_pull_tells_what_does_not_come(
    status: int, headers: dict[str, Any], left: int | None
) -> None:
    if left is not None:
        assert unserved(status, headers) == left
        return
    with pytest.raises(Unavailable):
        unserved(status, headers)
