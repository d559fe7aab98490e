"""The embedded server: what it refuses, and that it comes back with what it had."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from live.processes import diloco_says
from pretenders import peer
from waiting import until

from diloco_shared.bus.nats.access import TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.hub_config import ACCOUNTS
from diloco_shared.bus.port import BusError, StreamSpec, Unavailable
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub import nats_server as nats_server_module
from diloco_shared.hub import watch as hub_watch
from diloco_shared.hub.nats_binary import BinaryError, find_binary
from diloco_shared.hub.nats_server import NatsServer, free_port
from diloco_shared.hub.nodes import nodes_at
from diloco_shared.hub.watch import answers
from diloco_shared.process import keep_hub

pytestmark = pytest.mark.live

# Starts a server and dies without stopping it.
ABANDON = """
import asyncio, os, sys
from pathlib import Path
from diloco_shared.hub.nats_server import NatsServer
server = NatsServer(Path(sys.argv[1]))
asyncio.run(server.start())
print(server.pid, server.port, flush=True)
os._exit(0)
"""


async def test_another_instance_on_the_folder_is_refused(nats_server: NatsServer) -> None:
    other = NatsServer(nats_server.store_dir)
    with pytest.raises(BinaryError, match=f"in use.*pid {os.getpid()}.*pid {nats_server.pid}"):
        await other.start()
    await nats_server.stop()
    await other.start()
    await other.stop()


async def test_a_port_that_answers_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with pytest.raises(BinaryError, match=f"port {port} on 127.0.0.1 is taken"):
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
    with pytest.raises(BinaryError, match=r"did not start: .*storage directory is not a directory"):
        await server.start()
    assert not server.running


# Letters beyond ASCII, and what the server's configuration language has to escape.
NAMES = ["j\u00fcrgen", 'a "b" \\ \u65e5\u672c \U0001f600']


@pytest.mark.parametrize("name", NAMES)
async def test_its_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    server = NatsServer(tmp_path / name)
    await server.start()
    await server.stop()
    assert server.returncode == 0
    assert (tmp_path / name / "jetstream").is_dir()


@pytest.mark.parametrize("name", NAMES)
def test_a_hubs_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    hub, leaf = tmp_path / name, tmp_path / name / "leaf.conf"
    nodes = nodes_at(["a", "b", "c"])
    hub_folder.create(hub, listen="0.0.0.0:4222", store=hub / "store", nodes=nodes)
    assert list(hub_folder.stores_of(hub).values()) == [hub / "store" / n.name for n in nodes]
    credentials = hub_folder.add(hub, "rome", "learner")
    told = ("--credentials", str(credentials), "--hub-url", "tls://a:7422", "--to", str(leaf))
    diloco_says("site", "leaf", *told, "--ca", str(hub / hub_folder.AUTHORITY))
    for config in (leaf, *(hub / node.name / hub_folder.CONFIG for node in nodes)):
        subprocess.run([str(find_binary(None)), "-t", "-c", str(config)], check=True)


async def test_nobody_there_is_said(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    await server.stop()
    with pytest.raises(Unavailable, match=f"no NATS server at {server.address}"):
        await NatsBus.connect(server.url, name="test", timeout_s=0.5)
    await asyncio.sleep(0)


def stands_still(pid: int) -> bool:
    """Each thread stops by itself: one of them may answer for a moment after the signal."""
    states = (
        path.read_text().rpartition(")")[2] for path in Path(f"/proc/{pid}/task").glob("*/stat")
    )
    return all(state.split()[0] == "T" for state in states)


async def test_one_that_stands_still_is_started_anew(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its connections, takes new ones, and answers nothing: as one that holds a lock."""
    monkeypatch.setattr(hub_watch, "SILENT_S", 0.2)
    monkeypatch.setattr(nats_server_module, "answers", partial(answers, timeout_s=1.0))
    assert not await asyncio.to_thread(nats_server.ails)
    assert nats_server.pid is not None
    os.kill(nats_server.pid, signal.SIGSTOP)
    await until(
        partial(stands_still, nats_server.pid), "each thread stands still", tolerated=(OSError,)
    )
    assert not await asyncio.to_thread(nats_server.ails), "a moment is not long"
    assert "answered nothing" in await asyncio.to_thread(nats_server.ails)
    await nats_server.terminate(timeout_s=0.5)
    await nats_server.start()
    assert not await asyncio.to_thread(nats_server.ails)


def keeper_of(
    port: int, monitor: int, store: Path, config: Path, begins: Sequence[str] = ()
) -> psutil.Popen:
    """As the image of Compose runs it, in a hurry. `begins`: a program that starts the server."""
    code = (
        "import sys; from diloco_shared.hub import watch as hub_watch; "
        "from diloco_shared.process import keep_hub; "
        "hub_watch.SILENT_S = 0.5; keep_hub.LOOK_S = 0.2; keep_hub.ENDS_S = 0.5; "
        "hub_watch.UNANSWERED_S = 5.0; "
        "sys.exit(keep_hub.main(sys.argv[1:]))"
    )
    where = ["--at", f"127.0.0.1:{port}", "--monitor", f"127.0.0.1:{monitor}"]
    where += ["--reload", str(config.parent / ACCOUNTS)]
    server = [*begins, str(find_binary()), "-c", str(config)]
    with (store / "keeper.log").open("wb") as log:
        return psutil.Popen([sys.executable, "-c", code, *where, str(store), *server], stderr=log)


async def revoked_is_out(folder: Path, port: int) -> None:
    """Nobody tells the server: its keeper sees that the list is another."""
    key, certificate = folder.parent / "key", folder.parent / "certificate"
    shutil.copy(folder / hub_folder.CREDENTIALS / "reader", key)
    shutil.copy(hub_folder.certificate_of(folder, "reader"), certificate)
    tls = TlsFiles.named(str(folder / hub_folder.AUTHORITY), str(certificate), "")

    async def comes_in() -> bool:
        try:
            bus = await NatsBus.connect(
                f"tls://127.0.0.1:{port}", name="reader", credentials=key, tls=tls, timeout_s=2.0
            )
        except BusError:
            return False
        await bus.close()
        return True

    async def is_out() -> bool:
        return not await comes_in()

    assert await comes_in()
    hub_folder.revoke(folder, "reader")
    await until(is_out)


@pytest.mark.parametrize(
    "closed",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["open", "with TLS and credentials"],
)
async def test_the_keeper_starts_anew_what_answers_nothing(closed: bool, tmp_path: Path) -> None:
    """Told to end, it ends the server too."""
    port, monitor = free_port("127.0.0.1"), free_port("127.0.0.1")
    config = tmp_path / "nats.conf"
    if closed:
        hub_folder.create(
            tmp_path / "hub",
            listen=f"127.0.0.1:{port}",
            store=tmp_path,
            hosts=("127.0.0.1",),
            mutual_tls=True,
            monitor=f"127.0.0.1:{monitor}",
        )
        config = tmp_path / "hub" / hub_folder.CONFIG
    else:
        config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{tmp_path}" }}\n')
    keeper = keeper_of(port, monitor, tmp_path, config)

    def well() -> bool:
        at = ("127.0.0.1", monitor)
        return listens(port) and answers("127.0.0.1", port, timeout_s=1.0, monitor=at)

    try:
        await until(lambda: bool(keeper.children()) and well())
        (first,) = keeper.children()
        if closed:
            await revoked_is_out(config.parent, port)
        # Once the keeper has seen it answer: one that never did may read its store for hours.
        await asyncio.sleep(3 * keep_hub.FILES_S)
        first.suspend()
        assert not await asyncio.to_thread(well)
        await until(lambda: any(child != first for child in keeper.children()))
        await until(well)
        (second,) = keeper.children()
        keeper.terminate()
        assert await asyncio.to_thread(keeper.wait, 30) == 0
        assert not second.is_running()
    finally:
        for process in (*(keeper.children() if keeper.is_running() else ()), keeper):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(keeper.wait, 30)


# Stands still before it is the server, the first time.
HANGS = 'if mkdir "$0" 2> /dev/null; then kill -STOP $$; fi; exec "$@"'


async def test_the_keeper_starts_anew_what_hangs_before_it_listens(tmp_path: Path) -> None:
    """Nothing answers at its port by then, and nothing would for ever."""
    port, monitor = free_port("127.0.0.1"), free_port("127.0.0.1")
    config = tmp_path / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{tmp_path}" }}\n')
    hangs = ("sh", "-c", HANGS, str(tmp_path / "hung"))
    keeper = keeper_of(port, monitor, tmp_path, config, hangs)
    try:
        await until((tmp_path / "hung").exists)
        await until(lambda: listens(port) and answers("127.0.0.1", port, timeout_s=1.0) is True)
        assert b"answered nothing about its streams" in (tmp_path / "keeper.log").read_bytes()
    finally:
        for process in (*(keeper.children() if keeper.is_running() else ()), keeper):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(keeper.wait, 30)


async def test_the_keeper_says_that_nobody_is_shut_out_while_the_list_cannot_be_read(
    tmp_path: Path,
) -> None:
    """The server goes on with the list of before, and would have said so in its log alone."""
    port, monitor = free_port("127.0.0.1"), free_port("127.0.0.1")
    hub = tmp_path / "hub"
    hub_folder.create(
        hub,
        listen=f"127.0.0.1:{port}",
        store=tmp_path,
        hosts=("127.0.0.1",),
        mutual_tls=True,
        monitor=f"127.0.0.1:{monitor}",
    )
    keeper = keeper_of(port, monitor, tmp_path, hub / hub_folder.CONFIG)
    log, accounts = tmp_path / "keeper.log", str(hub / ACCOUNTS)

    def reads() -> str:
        return hub_watch.loaded_at(("127.0.0.1", monitor), port)

    try:
        await until(lambda: listens(port) and bool(reads()))
        before = reads()
        assert f"UTC: it starts with {keep_hub._digests([accounts])}\n" in log.read_text()
        (hub / ACCOUNTS).write_text("accounts { nobody closes this")
        await until(lambda: keep_hub.UNREAD in log.read_text())
        assert reads() == before and "it has read" not in log.read_text()
        await revoked_is_out(hub, port)  # which writes the list anew
        assert reads() != before
        assert log.read_text().count(keep_hub.UNREAD) == 1
        read = f"UTC: it has read {keep_hub._digests([accounts])}\n"
        await until(lambda: read in log.read_text())
        assert log.read_text().count("it has read") == 1
    finally:
        for process in (*(keeper.children() if keeper.is_running() else ()), keeper):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(keeper.wait, 30)


async def test_a_closed_server_is_asked_at_its_monitoring_alone(tmp_path: Path) -> None:
    """What of a suspended one shows above, and what nobody can tell: then it is left alone."""
    port, monitor, other = free_port("127.0.0.1"), free_port("127.0.0.1"), free_port("127.0.0.1")
    said: list[bytes] = []
    greeted: list[str] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + said[0])
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeted.append("somebody")
        writer.write(b'INFO {"server_id":"OURS","tls_required":true}\r\n')
        await reader.read()

    def asked(at: int | None, listened: bool = False) -> bool | None:
        where = None if at is None else ("127.0.0.1", at)
        return answers("127.0.0.1", port, timeout_s=2.0, monitor=where, listened=listened)

    async with peer(greet, port), peer(listen, monitor):
        for body, expected in (
            (b'{"server_id":"OURS","streams":4}', True),
            (b'{"server_id":"OURS","disabled":true}', False),
            (b'{"server_id":"ANOTHER","disabled":true}', True),
            (b"no JSON", False),
        ):
            said[:] = [body]
            assert await asyncio.to_thread(asked, monitor) == expected, body
        assert await asyncio.to_thread(asked, None)
        assert await asyncio.to_thread(asked, other)
        # Its monitoring says that it wants TLS: it would log a connection without.
        greeted.clear()
        for more, expected in (("", True), (',"disabled":true', False)):
            text = f'{{"server_id":"OURS","port":{port},"tls_required":true{more}}}'
            said[:] = [text.encode()]
            assert await asyncio.to_thread(asked, monitor, True) == expected
        assert not greeted


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
