"""What one client stores or says makes nobody else deaf: any headers, any subject (I11).

Servers take all of it, and a site with credentials may write it to its own subjects.
"""

import asyncio
from contextlib import suppress
from functools import partial

import pytest
from shared.bus.proxy import PAYLOAD, SPEC, through
from waiting import until

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Held, Unavailable
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live

# Blocks of headers that are none, or that a server alone would send.
HEADERS = [
    b"NATS/1.0\r\nStatus: 503\r\n\r\n",
    b"NATS/1.0\r\nStatus: 404\r\n\r\n",
    b"NATS/1.0\r\nStatus: 204\r\nNats-Num-Pending: 0\r\n\r\n",
    b"NATS/1.0\r\nStatus: abc\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 404 No Messages\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\n\r\n",
    b"NATS/1.0 409 \xff\xfe\r\n\r\n",
    b"NATS/1.0 abcd\r\nA: 1\r\n\r\n",
    b"HTTP/1.0\r\nA: 1\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe\xfd\r\n:\r\n\r\n",
]


async def say(server: NatsServer, *lines: bytes) -> None:
    """As a client of no library, which is let in and says these lines."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + b"".join(lines) + b"PING\r\n")
    async with asyncio.timeout(10):
        while b"PONG" not in await reader.read(1 << 16):
            pass
    writer.close()
    await writer.wait_closed()


def stored(subject: bytes, headers: bytes, payload: bytes = b"x") -> bytes:
    sizes = b"%d %d" % (len(headers), len(headers) + len(payload))
    return b"HPUB " + subject + b" " + sizes + b"\r\n" + headers + payload + b"\r\n"


async def test_headers_of_a_stored_message_are_no_status(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url, name="reads")
    await bus.ensure_stream(SPEC)
    await bus.append("s.a", b"first")
    await say(nats_server, *(stored(b"s.a", headers) for headers in HEADERS))
    await bus.append("s.a", b"last")
    expected = [b"first", *[b"x"] * len(HEADERS), b"last"]
    async with asyncio.timeout(20):
        assert [m.payload for m in await bus.fetch("S", "s.a")] == expected
        found = []
        async with bus.read("S", "s.a") as messages:
            async for message in messages:
                found.append(message.payload)
                if message.payload == b"last":
                    break
        assert found == expected
        for seq in range(2, len(HEADERS) + 2):
            await bus.purge("S", "s.a", below_seq=seq + 1)
            assert (await bus.fetch("S", "s.a", limit=1))[0].seq == seq + 1
        await say(nats_server, stored(b"s.b", HEADERS[3]))
        newest = await until(lambda: bus.last("S", "s.b"), "stored: the server answers before")
        assert newest.payload == b"x"
    await bus.close()


async def test_no_header_hides_what_a_message_takes(nats_server: NatsServer) -> None:
    """The server tells a payload's size in a header, behind those of whoever stored it."""
    size = b"Nats-Msg-Size: 1"
    hiding = [
        b"NATS/1.0\r\n" + size + b"\r\n\r\n",
        b"NATS/1.0\r\n" + size,
        b"NATS/1.0\r\nA: 1\r\nB",
        b"NATS/1.0\r\nA: %b\r\n\r\n" % (b"x" * 60_000),
        b"NATS/1.0\r\n" + b"A: 1\r\n" * 5000 + b"\r\n",
        b"NATS/1.0\r\n" + b"no header" * 5000,
        *HEADERS,
    ]
    bus = await NatsBus.connect(nats_server.url, name="reads")
    await bus.ensure_stream(SPEC)
    for headers, payload in ((h, p) for h in hiding for p in (b"", b"x" * 70_000)):
        before = (await bus.stream_info("S")).bytes
        await say(nats_server, stored(b"s.a", headers, payload))
        await until(
            partial(bus.last, "S", "s.a"), "stored: the server answers a PING before it stores"
        )
        taken = (await bus.stream_info("S")).bytes - before
        assert taken >= len(headers) + len(payload)
        found = await bus.held("S", "s.a", messages_max=1)
        assert found == {"s.a": Held(taken, 1)}, headers[:40]
        await bus.purge("S", "s.a")
    await bus.close()


async def test_headers_among_chunks_break_no_transfer(nats_server: NatsServer) -> None:
    async with through(nats_server, connections=2) as (bus, _):
        await say(nats_server, *(stored(b"s.blob", headers) for headers in HEADERS))
        blob = await put_blob(bus, "s.blob", PAYLOAD)
        await say(nats_server, *(stored(b"s.blob", headers) for headers in HEADERS))
        async with asyncio.timeout(30):
            assert bytes(await get_blob(bus, "S", blob)) == PAYLOAD
        assert bus._link.errors == 0


async def test_a_subject_that_is_no_text_makes_nobody_deaf(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url, name="reads")
    await bus.ensure_stream(SPEC)
    await bus.append("s.a", b"first")
    heard: list[bytes] = []
    async with bus.subscribe("c.*") as deliveries, bus.read("S", "s.*") as messages:

        async def hear() -> None:
            async for delivery in deliveries:
                heard.append(delivery.payload)

        hearing = asyncio.create_task(hear())
        await say(
            nats_server, b"PUB s.\xff 1\r\nx\r\n", b"PUB c.\xff 1\r\nx\r\n", b"PUB c.a 1\r\ny\r\n"
        )
        await bus.append("s.a", b"last")
        async with asyncio.timeout(4):  # without a new connection
            found = [(await anext(messages)).payload for _ in range(3)]
            assert (await bus.stream_info("S")).messages == 3
            await until(lambda: b"y" in heard)
        hearing.cancel()
    assert found == [b"first", b"x", b"last"]
    await bus.close()


async def test_a_round_trip_that_was_given_up_makes_nobody_deaf(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url, name="asks")
    await bus.ensure_stream(SPEC)
    flushing = asyncio.create_task(bus._link.flush())
    await asyncio.sleep(0)  # its ping is out
    flushing.cancel()
    with suppress(asyncio.CancelledError):
        await flushing
    async with asyncio.timeout(4):
        for _ in range(5):
            await bus.stream_info("S")
    await bus.close()


async def test_who_tries_to_read_while_nobody_answers_leaves_no_subscriptions(
    nats_server: NatsServer,
) -> None:
    bus = await NatsBus.connect(nats_server.url, name="tries")
    await bus.ensure_stream(SPEC)
    await nats_server.kill()
    async with asyncio.timeout(10):
        await until(lambda: not bus.connected)
    client = bus._link._client
    for _ in range(20):
        async with bus._link.subscribed(bus._link.new_inbox(), lambda _: None):
            with suppress(Unavailable):
                await bus._link.publish("s.a", b"")
    told = [line for line in client._pending if line.startswith(b"SUB ")]
    assert told == [] and client._pending_data_size == sum(map(len, client._pending))
    async with bus._link.subscribed("s.kept", lambda _: None):
        told = [line for line in client._pending if line.startswith(b"SUB ")]
        assert len(told) == 1
    await bus.close()
