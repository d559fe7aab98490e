"""The parser: any cut of the stream means the same, and garbage is a fault, never a crash."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.bus.nats import wire as nats_wire
from diloco_shared.bus.nats.wire import (
    Arrived,
    Event,
    Info,
    Parser,
    Ping,
    Pong,
    ServerError,
    WireFault,
    WireMessage,
    parse_headers,
    publish_head,
)


def feed(parser: Parser, data: bytes, sizes: list[int] | None = None) -> list[Event]:
    """Fill the rooms that the parser gives, `sizes` bytes at a time (the rest at once)."""
    events, at = [], 0
    steps = iter(sizes or [])
    while at < len(data):
        step = next(steps, len(data))
        taken = 0
        for room in parser.room():
            part = data[at : at + min(len(room), step - taken)]
            room[: len(part)] = part
            at += len(part)
            taken += len(part)
        events += parser.took(taken)
    return events


def nowhere(_: WireMessage) -> None:
    return None


HEAD = b"NATS/1.0\r\nA: 1\r\nB-c: x:y\r\n\r\n"
STREAM = (
    b'INFO {"max_payload": 5}\r\n'
    b"PING\r\n"
    b"MSG a.b 1 5\r\nhello\r\n"
    b"+OK\r\n"
    b"HMSG a.c 1 re.ply %d %d\r\n" % (len(HEAD), len(HEAD) + 4) + HEAD + b"a\r\nb\r\n"
    b"MSG empty 2 r 0\r\n\r\n"
    b"HMSG s 1 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n"
    b"pong\r\n"
    b"-ERR 'Permissions Violation'\r\n"
)
WHY = {"Description": "No Responders"}
MEANING = [
    Info({"max_payload": 5}),
    Ping(),
    Arrived(WireMessage("a.b", "", {}, 5), memoryview(b"hello")),
    Arrived(WireMessage("a.c", "re.ply", {"A": "1", "B-c": "x:y"}, 4), memoryview(b"a\r\nb")),
    Arrived(WireMessage("empty", "r", {}, 0), memoryview(b"")),
    Arrived(WireMessage("s", "", {"Status": "503", **WHY}, 0), memoryview(b"")),
    Pong(),
    ServerError("Permissions Violation"),
]


@given(st.lists(st.integers(1, 40), max_size=200))
def test_any_cut_of_the_stream_means_the_same(sizes: list[int]) -> None:
    assert feed(Parser(nowhere), STREAM, sizes) == MEANING


def test_payloads_are_received_where_they_are_placed() -> None:
    kept = bytearray(9)
    parser = Parser(lambda m: memoryview(kept)[2:7] if m.subject == "a.b" else None)
    events = feed(parser, STREAM, [50, 3, 1])
    assert kept == b"\0\0hello\0\0"
    assert events[3] == MEANING[3]


def test_a_large_payload_is_not_staged() -> None:
    body = bytes(range(256)) * 4096
    parser = Parser(nowhere)
    assert feed(parser, b"MSG a 1 %d\r\n" % len(body)) == []
    rooms = parser.room()
    assert len(rooms[0]) == len(body)
    rooms[0][:] = body
    rooms[1][:2] = b"\r\n"
    assert parser.took(len(body) + 2) == [
        Arrived(WireMessage("a", "", {}, len(body)), memoryview(body))
    ]


@given(
    st.dictionaries(
        st.text("abcXYZ-", min_size=1).filter(lambda s: s != "Status"),
        st.text("abc:1 ").map(str.strip),
    ),
    st.binary(max_size=50),
)
def test_what_we_publish_parses(headers: dict[str, str], payload: bytes) -> None:
    head = publish_head("a.b", "re.ply", headers, len(payload))
    # The server hands it on as HMSG with a subscription's number.
    wire = head.replace(b"HPUB a.b ", b"HMSG a.b 7 ") + payload + b"\r\n"
    (event,) = feed(Parser(nowhere), wire)
    assert event == Arrived(
        WireMessage("a.b", "re.ply", headers, len(payload)), memoryview(payload)
    )


lines = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"MSG ", b"HMSG ", b"INFO ", b"-ERR ", b"PING", b"\r\n", b"\r\n\r\n", HEAD]),
    st.integers(-5, 10**9).map(lambda n: b" %d" % n),
    st.tuples(st.sampled_from([b"MSG a 1", b"HMSG a 1 12"]), st.integers(0, 99)).map(
        lambda t: t[0] + b" %d\r\n" % t[1]
    ),
)


@given(st.lists(lines, max_size=30).map(b"".join), st.lists(st.integers(1, 9), max_size=40))
def test_garbage_is_a_fault_or_waits_for_more(data: bytes, sizes: list[int]) -> None:
    parser = Parser(nowhere)
    try:
        feed(parser, data, sizes)
    except WireFault:
        return
    assert all(len(room) for room in parser.room())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "unknown control line b'GET'"),
        (b"MSG a 1\r\n", "of 2 parts"),
        (b"MSG a 1 x\r\n", "no sizes"),
        (b"MSG a 1 -1\r\n", "no sizes"),
        (b"HMSG a 1 20 10\r\n", "20 bytes of headers in a message of 10"),
        (b"HMSG a 1 3 10\r\n", "3 bytes of headers"),
        (b"HMSG a 1 65536 70000\r\n", "65536 bytes of headers"),
        (b"MSG a 1 99999999999\r\n", "99999999999 in all"),
        (b"MSG a 1 2\r\nabc\r\n", "no end after the 2 bytes"),
        (b"INFO []\r\n", "malformed INFO"),
        (b"INFO {\r\n", "malformed INFO"),
        (b"x" * (nats_wire.HEAD_BYTES_MAX + 1), "a control line of more than"),
    ],
)
def test_faults_say_why(data: bytes, reason: str) -> None:
    with pytest.raises(WireFault, match=reason.replace("(", r"\(")):
        feed(Parser(nowhere), data)


def test_a_long_info_is_taken() -> None:
    body = {"connect_urls": ["host:4222"] * 3000}
    data = b"INFO " + json.dumps(body).encode() + b"\r\n"
    assert feed(Parser(nowhere), data, [100] * 100) == [Info(body)]


def test_a_header_named_status_is_not_the_status() -> None:
    assert parse_headers(b"NATS/1.0\r\nStatus: 503\r\n\r\n") == {}


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"HTTP/1.0 404\r\nA: 1\r\n\r\n", {"A": "1"}),
        (b"NATS/1.0 abcd\r\nA: 1\r\n\r\n", {"A": "1"}),
        (b"NATS/1.0\r\nStatus: 503\r\nA: 1\r\n\r\n", {"A": "1"}),
        (b"NATS/1.0\r\n\xff\xfe: 1\r\n\r\n", {"\ufffd\ufffd": "1"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (b"", {}),
    ],
)
def test_what_a_client_stored_as_headers_breaks_no_connection(
    block: bytes, headers: dict[str, str]
) -> None:
    """Servers keep any bytes there (I11)."""
    found = nats_wire.parse_headers(block)
    assert {k: v for k, v in found.items() if v} == headers
    assert nats_wire.status_of(found) == int(headers.get("Status", 0))


@pytest.mark.parametrize("said", ["abc", "-1", "5o3", "", "9" * 5000, "\u0663\u0663\u0663"])
def test_a_status_that_is_none_is_none(said: str) -> None:
    assert nats_wire.status_of({"Status": said}) == 0
