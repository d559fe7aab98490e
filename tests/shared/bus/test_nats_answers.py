"""What JetStream answers, delivers and ends pulls with, taken apart."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from pretenders import peer

from diloco_shared import ambient
from diloco_shared.bus.nats import api, streams
from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.api import NoMajority, answer_of, api_call, stored_at
from diloco_shared.bus.nats.link import ELECTION_S, MAJORITY_LOST, NatsLink, Raw
from diloco_shared.bus.nats.pulls import Delivered, delivered, unserved
from diloco_shared.bus.nats.streams import NatsStreams
from diloco_shared.bus.port import (
    BusError,
    Conflict,
    Refused,
    Stored,
    StreamFull,
    TooFewNodes,
    Unavailable,
)


def test_an_acknowledgement_says_where_a_message_is_stored() -> None:
    assert stored_at(b'{"stream": "UP", "seq": 12}', "it") == 12
    assert answer_of(b'{"purged": 3}', "it") == {"purged": 3}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (10071, Conflict),
        (10077, StreamFull),
        (10005, TooFewNodes),
        (10074, TooFewNodes),
        # While nodes of a hub exchange their leader, or are too few.
        *((code, Unavailable) for code in (10004, 10007, 10008, 10009, 10041, 10118, 10119)),
        *((code, Unavailable) for code in (10158, 10163, 10194, 10195, 10202)),
        (1, Refused),
    ],
)
def test_an_error_reply_is_one_of_ours(code: int, kind: type[BusError]) -> None:
    reply = json.dumps({"error": {"err_code": code, "description": "why"}}).encode()
    with pytest.raises(kind, match="it: why"):
        stored_at(reply, "it")


@pytest.mark.parametrize(
    ("refusal", "named"),
    [
        ("maximum account active connections exceeded", "maximum account active connections"),
        ("Authorization Violation", "Authorization Violation"),
    ],
)
async def test_why_a_server_refuses_is_said_though_later_attempts_learn_less(
    refusal: str, named: str
) -> None:
    """A server that refuses and closes at once may be heard as a connection that was reset."""
    attempts = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576}\r\n')
            await reader.readline()
            writer.write(f"-ERR '{refusal}'\r\n".encode())
            await reader.read()

    async with peer(refuse) as port:
        address = Address(f"nats://127.0.0.1:{port}")
        with pytest.raises(Unavailable, match=named):
            await NatsLink.connect(address, name="x", timeout_s=1.5)
    assert attempts > 1


def test_nodes_that_are_there_and_have_no_room_are_full() -> None:
    text = "no suitable peers for placement, insufficient storage"
    reply = json.dumps({"error": {"err_code": 10005, "description": text}}).encode()
    with pytest.raises(StreamFull, match="insufficient storage"):
        answer_of(reply, "it")


@pytest.mark.parametrize("payload", [b"", b"no json", b"[]", b"7", b'{"error": "text"}', b"{}"])
def test_what_is_no_answer_is_refused(payload: bytes) -> None:
    with pytest.raises(Refused):
        stored_at(payload, "it")


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


# --------------------------------------------------------------------------------------------------
# A hub of several nodes, one of which leads.

NO_LEADER = {
    "error": {"err_code": 10008, "description": "JetStream system temporarily unavailable"}
}
INFO = {"state": {"last_seq": 7}, "cluster": {"name": "diloco", "leader": "hub-node-2"}}


class Link(NatsLink):
    """A connection to one of several nodes, which answers from a script; None: nobody does."""

    several_nodes = True  # type: ignore[assignment]
    connected = True  # type: ignore[assignment]

    def __init__(self, *answers: dict[str, Any] | None) -> None:
        self.api = "$JS.API"
        self.leaderless_since = float("inf")
        self.answers = [*answers]
        self.asked = 0

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Raw:
        self.asked += 1
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.sleep(timeout_s)
            raise Unavailable(f"no answer on {subject}")
        return Raw(subject, json.dumps(answer).encode(), "", {})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "AGAIN_S", 0.02)
    monkeypatch.setattr(api, "API_TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("soon")
async def test_a_question_is_repeated_until_a_node_leads() -> None:
    link = Link(None, None, INFO)
    assert await api_call(link, "STREAM.INFO.S", {}, what="it") == INFO
    assert link.asked == 3


@pytest.mark.usefixtures("soon")
async def test_what_must_not_be_done_twice_is_asked_once() -> None:
    link = Link(None)
    with pytest.raises(Unavailable, match="no answer"):
        await api_call(link, "STREAM.PURGE.S", {}, what="it")
    assert link.asked == 1


@pytest.mark.usefixtures("soon")
async def test_a_stream_without_a_leader_tells_nothing() -> None:
    """Whoever has a copy answers, with a state that may be empty."""
    without = INFO | {"cluster": {"name": "diloco"}}
    with pytest.raises(NoMajority, match="it: it has no leader now"):
        await api_call(Link(without), "STREAM.INFO.S", {}, what="it")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(ambient, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


async def test_a_lost_majority_is_told_from_an_election(clock: Callable[[float], None]) -> None:
    led_before = {"message": {}}
    link = Link(*[NO_LEADER] * 2, led_before, NO_LEADER, INFO, {"purged": 1})

    async def ask(call: str) -> None:
        with pytest.raises(NoMajority):
            await api_call(link, call, {}, what="it")

    await ask("STREAM.PURGE.S")
    assert link.ails == ""
    clock(ELECTION_S + 1)
    await ask("STREAM.PURGE.S")
    assert link.ails == MAJORITY_LOST
    # One that led the stream tells of it for a while, and takes nothing.
    await api_call(link, "STREAM.MSG.GET.S", {}, what="it")
    assert link.ails == MAJORITY_LOST
    await ask("STREAM.MSG.GET.S")
    await api_call(link, "STREAM.INFO.S", {}, what="it")
    assert link.ails == MAJORITY_LOST
    await api_call(link, "STREAM.PURGE.S", {}, what="it")
    assert link.ails == ""


async def test_what_is_stored_in_a_bucket_shows_that_there_is_a_majority(
    clock: Callable[[float], None],
) -> None:
    """A stream of a run may lie on one node alone, which takes messages without the others."""
    link = Link(NO_LEADER, {"stream": "UP_run", "seq": 5}, {"stream": "KV_members", "seq": 6})
    streams = NatsStreams(link)
    with pytest.raises(NoMajority):
        await streams.append("$KV.members.a", b"")
    clock(ELECTION_S + 1)
    assert await streams.append("up.run.a", b"") == 5
    assert link.ails == MAJORITY_LOST
    assert await streams.append("$KV.members.a", b"") == 6
    assert link.ails == ""


class Copies(NatsStreams):
    """Of a stream with a copy that answers and one that leads, which is `ahead` by so many; `more`
    messages are stored whenever somebody has read."""

    def __init__(self, *, ahead: int, more: int) -> None:
        super().__init__(Link())
        self.there, self.ahead, self.more = 3, ahead, more

    async def _direct(
        self, stream: str, subject: str, seq: int, want: int, found: list[Stored]
    ) -> bool:
        found += [Stored(subject, b"", {}, n) for n in range(seq, self.there + 1)]
        self.there += self.more
        return False

    async def last_raw(self, stream: str, subject: str) -> Stored | None:
        newest = Stored(subject, b"", {}, self.there + self.ahead)
        self.there, self.ahead = self.there + min(self.ahead, 1), max(self.ahead - 1, 0)
        return newest


async def test_what_is_stored_meanwhile_does_not_prolong_a_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else whoever reads a stream that others write to without end would never be done."""
    monkeypatch.setattr(streams, "_BEHIND_S", 0.0)
    found = await Copies(ahead=0, more=5).fetch_raw("S", "s")
    assert [message.seq for message in found] == [*range(1, 9)]
    found = await Copies(ahead=2, more=0).fetch_raw("S", "s")
    assert [message.seq for message in found] == [1, 2, 3, 4, 5], "a copy that is behind"
