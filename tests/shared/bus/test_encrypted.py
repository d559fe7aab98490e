"""Who is told to speak TLS speaks nothing else, whatever the other side says of itself."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pretenders import peer

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Unavailable


@asynccontextmanager
async def without_tls(heard: list[bytes]) -> AsyncIterator[int]:
    """The port of a server that says that it has no TLS; what it hears next."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "version": "2.15.1", "max_payload": 1 << 20}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        heard.append(await reader.read(4096))

    async with peer(greet) as port:
        yield port


@pytest.mark.parametrize("by_context", [True, False])
async def test_nothing_is_said_to_a_server_that_has_no_tls(by_context: bool) -> None:
    """Somebody on the way would only have to leave out that TLS is wanted."""
    heard: list[bytes] = []
    async with without_tls(heard) as port:
        tls = ssl.create_default_context() if by_context else None
        scheme = "nats" if by_context else "tls"
        with pytest.raises(Unavailable):
            await NatsBus.connect(
                f"{scheme}://127.0.0.1:{port}", name="x", token="secret", tls=tls, timeout_s=0.5
            )
    assert heard and not any(b"CONNECT" in said or b"secret" in said for said in heard)


async def test_whoever_wants_no_tls_is_connected_as_before() -> None:
    heard: list[bytes] = []
    async with without_tls(heard) as port:
        bus = await NatsBus.connect(f"nats://127.0.0.1:{port}", name="x", token="t", timeout_s=1)
        await bus.close()
    assert b'"auth_token": "t"' in heard[0]
