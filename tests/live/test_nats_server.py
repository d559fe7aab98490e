"""The embedded server: what it refuses, and that it comes back with what it had."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.process.nats_binary import ServerError
from diloco_shared.process.nats_server import NatsServer

pytestmark = pytest.mark.live

# Starts a server and dies without stopping it.
ABANDON = """
import asyncio, os, sys
from pathlib import Path
from diloco_shared.process.nats_server import NatsServer
server = NatsServer(Path(sys.argv[1]))
asyncio.run(server.start())
print(server.pid, server.port, flush=True)
os._exit(0)
"""


async def test_another_instance_on_the_folder_is_refused(nats_server: NatsServer) -> None:
    other = NatsServer(nats_server.store_dir)
    with pytest.raises(ServerError, match=f"in use.*pid {os.getpid()}.*pid {nats_server.pid}"):
        await other.start()
    await nats_server.stop()
    await other.start()
    await other.stop()


async def test_a_port_that_answers_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is taken"):
            await server.start()
        assert not server.running
    await server.start()
    await server.stop()


async def test_a_clean_stop_ends_with_status_zero(nats_server: NatsServer) -> None:
    assert nats_server.pid is not None
    await nats_server.stop()
    assert (nats_server.returncode, nats_server.pid) == (0, None)
    await nats_server.stop()


async def test_a_killed_server_comes_back_with_its_port_and_its_data(
    nats_server: NatsServer,
) -> None:
    bus = await NatsBus.connect(nats_server.url, name="test")
    await bus.ensure_stream(StreamSpec("S", ("s.>",), 1 << 20))
    await bus.append("s.a", b"kept")
    port = nats_server.port
    await nats_server.kill()
    assert nats_server.returncode == -signal.SIGKILL
    assert await nats_server.wait() == -signal.SIGKILL
    await nats_server.start()
    assert nats_server.port == port
    found = await bus.last("S", "s.a")
    assert found is not None
    assert found.payload == b"kept"
    await bus.close()


@pytest.mark.parametrize(
    "credentials", [{"token": "secret"}, {"user": "diloco", "password": "secret"}]
)
async def test_credentials_are_demanded(tmp_path: Path, credentials: dict[str, str]) -> None:
    server = NatsServer(tmp_path, **credentials)
    await server.start()
    bus = await NatsBus.connect(server.url, name="right")
    await bus.close()
    bus = await NatsBus.connect(f"nats://{server.address}", name="right", **credentials)
    await bus.close()
    try:
        with pytest.raises(Unavailable, match="Authorization"):
            await NatsBus.connect(f"nats://wrong@{server.address}", name="wrong", timeout_s=1)
        config = tmp_path / "nats-server.conf"
        assert config.stat().st_mode & 0o777 == 0o600
    finally:
        await server.stop()
    assert "secret" not in server.log_path.read_text()


async def test_a_server_without_an_owner_is_replaced(tmp_path: Path) -> None:
    with abandoned(tmp_path) as pid:
        server = NatsServer(tmp_path)
        await server.start()
        assert server.pid != pid
        # Whoever inherited it may not have collected its exit status yet.
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
        await server.stop()


@contextmanager
def abandoned(folder: Path) -> Iterator[int]:
    done = subprocess.run(
        [sys.executable, "-c", ABANDON, str(folder)], capture_output=True, text=True, check=True
    )
    pid = int(done.stdout.splitlines()[-1].split()[0])
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("a file where a folder must be")
    server = NatsServer(tmp_path)
    with pytest.raises(ServerError, match=r"did not start: .*storage directory is not a directory"):
        await server.start()
    assert not server.running


async def test_nobody_there_is_said(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    await server.stop()
    with pytest.raises(Unavailable, match=f"no NATS server at {server.address}"):
        await NatsBus.connect(server.url, name="test", timeout_s=0.5)
    await asyncio.sleep(0)
