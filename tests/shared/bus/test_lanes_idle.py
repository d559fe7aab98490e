"""Data lanes between payloads: kept open, seen to be alive, and closed when nobody needs them."""

import asyncio
from typing import Any

import pytest
from pretenders import peer
from shared.bus.proxy import PAYLOAD, through
from waiting import until

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats import lanes
from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.lane_socket import LaneSocket
from diloco_shared.bus.nats.wire import Pong
from diloco_shared.bus.port import Traffic
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live


async def test_what_broke_while_idle_is_not_used(nats_server: NatsServer) -> None:
    async with through(nats_server) as (bus, proxy):
        blob = await put_blob(bus, "s.a", PAYLOAD)
        await nats_server.kill()
        await nats_server.start()
        await until(lambda: bus.connected)
        connections = proxy.connections
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        assert proxy.connections == connections + 1


async def test_idle_connections_answer_pings_and_stay_open(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "TEND_S", 0.01)
    pings, housekeeping = 0, LaneSocket._housekeeping

    def count(lane: LaneSocket, event: Any) -> bool:
        nonlocal pings
        pings += isinstance(event, Pong)
        return housekeeping(lane, event)

    monkeypatch.setattr(LaneSocket, "_housekeeping", count)
    async with through(nats_server, connections=2) as (bus, proxy):
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=100_000)
        # More than may be unanswered: the server's answers are seen.
        seen = pings
        await until(lambda: pings > seen + 40)
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        assert proxy.connections == 1 + 2


async def test_a_server_is_answered_on_an_idle_connection(nats_server: NatsServer) -> None:
    """Against a peer that asks whenever the test says so."""
    asked: asyncio.Queue[bytes] = asyncio.Queue()
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def ask() -> None:
            while line := await asked.get():
                writer.write(line)

        writer.write(b'INFO {"max_payload": 1048576}\r\n')
        asking = asyncio.create_task(ask())
        async for line in reader:
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
            elif line == b"PONG\r\n":
                answers.put_nowait(line)
        asking.cancel()

    async with peer(serve) as port:
        address = Address(f"nats://127.0.0.1:{port}")
        lane = await asyncio.to_thread(LaneSocket.open, address, "idle", Traffic())
        for _ in range(3):
            asked.put_nowait(b"PING\r\n")
            while answers.empty():
                assert lane.tend()
                await asyncio.sleep(0)
            assert await answers.get() == b"PONG\r\n"
        lane.abort()
        assert not lane.tend()


async def test_idle_connections_to_a_silent_server_are_closed(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "TEND_S", 0.01)
    async with through(nats_server) as (bus, proxy):
        blob = await put_blob(bus, "s.a", PAYLOAD)
        nats_server.pause()
        await until(lambda: not bus._lanes._idle)
        nats_server.resume()
        connections = proxy.connections
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        assert proxy.connections == connections + 1


async def test_connections_idle_for_long_are_closed(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "TEND_S", 0.01)
    async with through(nats_server, connections=3) as (bus, _):
        await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=100_000)
        await until(lambda: len(bus._lanes._idle) == 3)
        monkeypatch.setattr(lanes, "IDLE_S", 0.0)
        await until(lambda: not bus._lanes._idle)
