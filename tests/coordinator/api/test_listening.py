"""What the API's port takes before anybody has said who he is: requests that end in time."""

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from fastapi import FastAPI
from waiting import until

from diloco_coordinator.api import listening_io
from diloco_coordinator.api.listening_io import answer_on, listen, server_of
from diloco_shared.hub.certificates import for_hub, new_authority

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


def of_rsa() -> tuple[str, str]:
    """A certificate and its key, of the kind that the project makes none of."""
    key, now = rsa.generate_private_key(65537, 2048), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "api")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    clear = serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    signed = made.sign(key, hashes.SHA256()).public_bytes(pem)
    return signed.decode(), key.private_bytes(pem, form, clear).decode()


async def shown(port: int) -> str:
    """The certificate that the API shows to whoever connects now."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anybody)
    try:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(found)
    finally:
        writer.transport.abort()


async def test_a_certificate_that_is_renewed_is_shown_without_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn reads it once: on the day when that one ended nobody would have got in."""
    told, warned = list[str](), list[str]()
    says = SimpleNamespace(
        info=lambda text, **_: told.append(text), warning=lambda text, **_: warned.append(text)
    )
    monkeypatch.setattr(listening_io, "log", says)
    monkeypatch.setattr(listening_io, "LOOK_S", 0.02)
    authority = new_authority(datetime.now(UTC))
    before, after = (for_hub(authority, ["api"], datetime.now(UTC)) for _ in range(2))
    cert, key = tmp_path / "api.pem", tmp_path / "api-key.pem"
    cert.write_text(before.certificate)
    key.write_text(before.key)
    with listen("127.0.0.1", 0) as bound:
        port, serving = (
            bound.getsockname()[1],
            asyncio.create_task(answer_on(bound, FastAPI(), cert, key)),
        )
        try:
            await until(lambda: shown(port), tolerated=(ConnectionError,))
            assert await shown(port) == before.certificate
            # One file comes after the other, and whoever connects meanwhile gets in.
            cert.write_text(after.certificate)
            await until(lambda: warned)
            assert await shown(port) == before.certificate
            key.unlink()
            warned.clear()
            await until(lambda: warned)
            assert await shown(port) == before.certificate
            key.write_text(after.key)
            await until(lambda: "the certificate of the API was renewed" in told)
            assert await shown(port) == after.certificate
            other, other_key = of_rsa()
            told.clear()
            cert.write_text(other)
            key.write_text(other_key)
            await until(lambda: told)
            assert await shown(port) == other, "a context may hold one of each kind of key"
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
