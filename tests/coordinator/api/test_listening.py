"""What the API's port takes before anybody has said who he is: requests that end in time."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from waiting import until

from diloco_coordinator.api import listening_io
from diloco_coordinator.api.listening_io import listen, server_of

HEAD = b"POST /v1/runs HTTP/1.1\r\nHost: h\r\n"


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """The port of an API that is answered for as in production."""
    with listen("127.0.0.1", 0) as bound:
        server = server_of(app, lifespan="off")
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            await until(lambda: server.started)
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def said(port: int, *pieces: bytes) -> bytes:
    """All that is answered to these bytes, until the other side ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\nX: ",
        HEAD + b"Content-Length: 9\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        # The second request of a connection has as long, and no longer.
        b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\n",
    ],
)
async def test_a_request_that_does_not_end_is_ended(
    world: Any, monkeypatch: pytest.MonkeyPatch, words: bytes
) -> None:
    monkeypatch.setattr(listening_io, "REQUEST_S", 0.2)
    async with world.coordinator() as desk, served(desk.app) as port:
        answer = await said(port, words)  # ends by itself, or the test never does
        assert answer.count(b"HTTP/1.1 ") == words.count(b"healthz")


async def test_an_answer_may_take_longer_than_a_request(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_io, "REQUEST_S", 0.1)
    async with world.coordinator() as desk, served(desk.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        token = f"Authorization: Bearer {desk.token}\r\n\r\n".encode()
        writer.write(b"GET /v1/events/stream HTTP/1.1\r\nHost: h\r\n" + token)
        assert b" 200 " in await reader.readline()
        await asyncio.sleep(0.5)
        await world.tells("evaluation", "demo", val_loss=1.0, steps=1)
        await reader.readuntil(b"val_loss")
        writer.transport.abort()


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: 0\r\nContent-Length: 5",
    ],
)
async def test_a_body_whose_length_is_said_in_two_ways_is_refused(
    world: Any, lengths: bytes
) -> None:
    async with world.coordinator() as desk, served(desk.app) as port:
        token = f"\r\nAuthorization: Bearer {desk.token}".encode()
        body = b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"
        answer = await said(port, HEAD + lengths + token + b"\r\n\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1, "what is behind it is no request"


async def test_a_signal_ends_the_serving_and_is_not_raised_again() -> None:
    """uvicorn raises it again by itself, and kills the process before it has left the cluster."""
    again: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: again.append(number))
    try:
        with listen("127.0.0.1", 0) as bound:
            server = server_of(FastAPI())
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            await until(lambda: server.started)
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
    finally:
        signal.signal(signal.SIGTERM, before)
    assert again == []


def test_only_a_second_interruption_leaves_answers_unfinished() -> None:
    server = server_of(FastAPI())
    for number, forced in (
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
    ):
        server.handle_exit(number, None)
        assert (server.should_exit, server.force_exit) == (True, forced)
