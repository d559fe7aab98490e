"""Data lanes against a real server: whatever happens to the connections, the payload gets there."""

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from pretenders import peer
from shared.bus.proxy import PAYLOAD, SPEC, through
from waiting import until

from diloco_shared.bus.blobs import BlobIncomplete, GaveUp, get_blob, put_blob
from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.lane_socket import LaneBroken, LaneSocket
from diloco_shared.bus.nats.lanes import FETCHES_MAX, SENDS_MAX
from diloco_shared.bus.port import Refused, TransferProgress, Unavailable
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live


@pytest.mark.parametrize("connections", [1, 3])
async def test_a_payload_goes_over_that_many_connections(
    nats_server: NatsServer, connections: int
) -> None:
    async with through(nats_server, connections=connections) as (bus, proxy):
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=100_000)
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        assert (await bus.stream_info("S")).messages == blob.chunks == 30
        # The second payload takes the connections of the first.
        assert proxy.connections == 1 + connections
        assert bus.reconnects == 0


async def test_what_crosses_the_sockets_is_counted(nats_server: NatsServer) -> None:
    async with through(nats_server, connections=2) as (bus, proxy):
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=100_000)
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        t = bus.traffic
        await until(lambda: (t.socket_bytes_out, t.socket_bytes_in) == (proxy.up, proxy.down))
        # The payload, and a few hundred bytes of protocol with every chunk and every answer.
        assert 0 < t.socket_bytes_out - len(PAYLOAD) < 500 * blob.chunks + 5000
        assert 0 < t.socket_bytes_in - len(PAYLOAD) < 900 * blob.chunks + 12_000
        assert t.bytes_out >= len(PAYLOAD) <= t.bytes_in


@pytest.mark.parametrize("connections", [1, 2])
async def test_cut_connections_lose_and_double_nothing(
    nats_server: NatsServer, connections: int
) -> None:
    async with through(nats_server, connections=connections) as (bus, proxy):
        proxy.cut_after = 700_000
        progress = TransferProgress()
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=100_000, progress=progress)
        assert proxy.cuts > 3
        assert progress.took == dict.fromkeys(range(blob.chunks), bus.life), (
            "one life of the server"
        )
        assert bus.life and not progress.doubtful()
        assert (await bus.stream_info("S")).messages == blob.chunks
        cuts = proxy.cuts
        assert await get_blob(bus, "S", blob, timeout_s=30) == PAYLOAD
        assert proxy.cuts > cuts


class Grudging:
    """A budget that denies every other request and remembers what it granted."""

    def __init__(self) -> None:
        self.granted = self.asked = 0

    def take(self, size: int) -> float:
        self.asked += 1
        if self.asked % 2:
            return 0.001
        self.granted += size
        return 0.0


async def test_budgets_are_asked_for_every_chunk(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with through(nats_server) as (bus, _):
        up, down = Grudging(), Grudging()
        monkeypatch.setattr(bus.lanes, "_up", up)
        monkeypatch.setattr(bus.lanes, "_down", down)
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=100_000)
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        assert up.granted == len(PAYLOAD)
        assert down.granted == 100_000 * blob.chunks


class Nothing:
    """A budget that grants nothing."""

    def take(self, size: int) -> float:
        return 1.0


@pytest.mark.parametrize("way", ["sent", "fetched"])
async def test_one_way_holds_up_nothing_that_goes_the_other(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A learner that catches up has every fragment to fetch, and its contributions to send."""
    async with through(nats_server) as (bus, _):
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=500_000)
        monkeypatch.setattr(bus.lanes, "_down" if way == "sent" else "_up", Nothing())
        works: list[asyncio.Task[object]] = []
        for n in range(max(FETCHES_MAX, SENDS_MAX)):
            work = get_blob(bus, "S", blob) if way == "sent" else put_blob(bus, f"s.{n}", PAYLOAD)
            works.append(asyncio.create_task(work))
        turns = bus._lanes._fetches if way == "sent" else bus._lanes._sends
        await until(turns.locked)
        if way == "sent":
            await put_blob(bus, "s.b", PAYLOAD, deadline_s=20)
        else:
            assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


async def test_a_payload_goes_within_a_budget(nats_server: NatsServer) -> None:
    # Far above what the test needs: only that it arrives is looked at.
    budget = {"uplink_bytes_per_s": 20e6, "downlink_bytes_per_s": 20e6}
    async with through(nats_server, **budget) as (bus, _):
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=100_000)
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD


async def test_chunks_above_the_servers_limit_are_refused(nats_server: NatsServer) -> None:
    async with through(nats_server) as (bus, _):
        with pytest.raises(Refused, match="chunks of 3000000 bytes exceed the server's limit"):
            await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=3_000_000)


async def test_chunks_that_were_purged_are_named(nats_server: NatsServer) -> None:
    async with through(nats_server) as (bus, _):
        blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=500_000)
        await bus.purge("S", "s.a", below_seq=4)
        with pytest.raises(BlobIncomplete, match=r"no good chunks \[0, 1, 2\] of 6"):
            await get_blob(bus, "S", blob, timeout_s=0.5)


async def test_a_closed_bus_carries_nothing_more(nats_server: NatsServer) -> None:
    async with through(nats_server) as (bus, _):
        nats_server.pause()
        putting = asyncio.create_task(put_blob(bus, "s.a", PAYLOAD))
        await asyncio.sleep(0)
        await bus.close()
        with pytest.raises(Unavailable, match="closed"):
            await putting
        nats_server.resume()
        with pytest.raises(Unavailable, match="closed"):
            await put_blob(bus, "s.a", PAYLOAD)


class BusyServer(NatsServer):
    """Takes only a few messages that wait to be stored, and says 429 to the others."""

    def _config(self) -> str:
        config = json.loads(super()._config())
        config["jetstream"]["max_buffered_msgs"] = 2
        return json.dumps(config)


async def test_a_server_that_has_too_much_waiting_gets_less(tmp_path: Path) -> None:
    server = BusyServer(tmp_path / "nats", name="test")
    await server.start()
    try:
        async with through(server, connections=4) as (bus, _):
            blob = await put_blob(bus, "s.a", PAYLOAD, chunk_bytes=10_000)
            assert (await bus.stream_info("S")).messages == blob.chunks
            assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
    finally:
        await server.stop()


# --- being let in ---------------------------------------------------------------------------------


class TlsServer(NatsServer):
    """Demands TLS."""

    def _config(self) -> str:
        files = {"cert_file": str(self.store_dir / "cert"), "key_file": str(self.store_dir / "key")}
        return json.dumps(json.loads(super()._config()) | {"tls": files})


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path / "tls"
    folder.mkdir()
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    command += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


async def test_lanes_are_encrypted_when_the_server_wants_it(certificate: Path) -> None:
    server = TlsServer(certificate, user="learner", password="secret")
    await server.start()
    trusting = ssl.create_default_context(cafile=str(certificate / "cert"))
    bus = await NatsBus.connect(server.url, name="tls", tls=trusting)
    try:
        await bus.ensure_stream(SPEC)
        blob = await put_blob(bus, "s.a", PAYLOAD)
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        # A certificate that nobody vouches for: no credentials are sent.
        with pytest.raises(LaneBroken, match="certificate verify failed"):
            LaneSocket.open(Address(server.url), "stranger", bus.traffic)
    finally:
        await bus.close()
        await server.stop()


async def test_an_address_that_wants_tls_never_goes_without(nats_server: NatsServer) -> None:
    async with through(nats_server) as (bus, _):
        with pytest.raises(LaneBroken, match="does not let us in"):
            LaneSocket.open(Address(f"tls://{nats_server.address}"), "tls", bus.traffic)


@pytest.mark.parametrize(
    ("credentials", "given"),
    [
        ({"token": "t0ken"}, {"token": "t0ken"}),
        ({"user": "u", "password": "p"}, {"user": "u", "password": "p"}),
        ({"token": "t0ken"}, {}),
        ({"user": "u", "password": "p"}, {}),
    ],
)
async def test_credentials_are_shown(
    tmp_path: Path, credentials: dict[str, str], given: dict[str, str]
) -> None:
    server = NatsServer(tmp_path / "nats", **credentials)  # type: ignore[arg-type]
    await server.start()
    # Either apart, or in the URL.
    url = f"nats://{server.address}" if given else server.url
    bus = await NatsBus.connect(url, name="known", **given)  # type: ignore[arg-type]
    try:
        await bus.ensure_stream(SPEC)
        blob = await put_blob(bus, "s.a", PAYLOAD)
        assert await get_blob(bus, "S", blob, timeout_s=20) == PAYLOAD
        with pytest.raises(LaneBroken, match="Authorization Violation"):
            LaneSocket.open(Address(f"nats://{server.address}"), "stranger", bus.traffic)
    finally:
        await bus.close()
        await server.stop()


async def test_what_is_no_nats_server_is_given_up_with_a_reason(nats_server: NatsServer) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        await reader.read()

    async with peer(greet) as port, through(nats_server) as (bus, _):
        bus._lanes._address = Address(f"nats://127.0.0.1:{port}")
        with pytest.raises(GaveUp, match=r"0 of 6 chunks stored.*unknown control line b'SSH"):
            await put_blob(bus, "s.a", PAYLOAD, deadline_s=0.5)
