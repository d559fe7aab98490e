"""A message server of a hub, and one of a site's own: what tests of rights play against."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from live.processes import diloco_says
from waiting import until

from diloco_cli.up.stack import free_port
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import BusError, StreamSpec
from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.hub import backup as hub_backup
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.nats_binary import find_binary
from diloco_shared.protocol import subjects as s


class Hub:
    """A message server with a folder of identities, as an operator has it.

    `leaves`: by the name of a site, where its own message server is.
    """

    def __init__(self, folder: Path, pid: int, url: str, leaf_port: int = 0) -> None:
        self.folder, self.pid, self.url, self.leaf_port = folder, pid, url, leaf_port
        self.leaves: dict[str, str] = {}

    @asynccontextmanager
    async def bus(self, name: str, file: Path | None = None) -> AsyncIterator[NatsBus]:
        """A connection of the identity `name`, whose credentials are in `file`."""
        url = self.leaves.get(name, self.url)
        bus = await NatsBus.connect(url, name=name, credentials=file or self.file(name))
        try:
            yield bus
        finally:
            await bus.close()

    def file(self, name: str) -> Path:
        return self.folder / hub_folder.CREDENTIALS / name

    async def reload(self) -> None:
        assert await asyncio.to_thread(hub_folder.reload, self.folder) == ""


def _started(folder: Path, name: str) -> "subprocess.Popen[bytes]":
    (folder / "ports").mkdir()
    config = folder / name
    with config.open("a") as file:
        file.write(f'ports_file_dir: "{folder / "ports"}"\nlog_file: "{folder / "log"}"\n')
    return subprocess.Popen(
        [str(find_binary(None)), "-c", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@asynccontextmanager
async def serving(folder: Path, name: str = hub_folder.CONFIG) -> AsyncIterator[tuple[int, str]]:
    """The server of a hub's folder, with a port of its own: its process id, and its address.

    It writes into `log` of that folder, and is killed afterwards.
    """
    ports = folder / "ports"
    process = _started(folder, name)
    try:
        await until(lambda: any(p.stat().st_size for p in ports.glob("*.ports")), "its port")
        yield process.pid, json.loads(next(ports.glob("*.ports")).read_text())["nats"][0]
        assert process.poll() is None, f"the server of {folder} was started anew, or died"
    finally:
        process.kill()
        process.wait()


def encrypted(url: str) -> str:
    """The address of a server that demands TLS, which does not say so itself."""
    return f"tls://{url.partition('://')[2]}"


async def prepare(bus: NatsBus) -> None:
    """The streams of the run `r`, and all buckets."""
    await ensure_buckets(bus, (*s.BUCKETS, *s.PRIVATE_BUCKETS))
    specs = [StreamSpec(n, (f,), 64 << 20) for n, f in s.run_streams("r").items()]
    for spec in (*specs, StreamSpec(s.EVENTS_STREAM, (s.EVENTS_FILTER,), 64 << 20)):
        await bus.ensure_stream(spec)


@asynccontextmanager
async def a_leaf(hub: Hub, site: str) -> AsyncIterator[None]:
    """A message server of a site's own, as the site's operator makes it."""
    folder = hub.folder.parent / f"leaf-{site}"
    folder.mkdir()
    told = ("--credentials", str(hub.file(site)), "--hub-url", f"nats://127.0.0.1:{hub.leaf_port}")
    made = ("--to", str(folder / "leaf.conf"), "--listen", "127.0.0.1:-1")
    await asyncio.to_thread(diloco_says, "site", "leaf", *told, *made)
    async with serving(folder, "leaf.conf") as (_, hub.leaves[site]):

        async def known() -> bool:
            async with hub.bus(site) as bus:
                return (await bus.stream_info("UP-r")).messages == 0

        await until(known, "what the hub offers", tolerated=(BusError,))
        yield


@asynccontextmanager
async def a_hub(
    folder: Path, *learners: str, backup: Path | None = None, leaf: str = ""
) -> AsyncIterator[Hub]:
    """One that runs, with the streams of the run `r` and all buckets, or with a backup's.

    `leaf`: the site that has a message server of its own.
    """
    port, own = free_port(0), free_port(0)
    leaves = f"127.0.0.1:{port}" if leaf else ""
    # Who ends connections of leaves finds the server by its configuration.
    listen = f"127.0.0.1:{own if leaf else -1}"
    hub_folder.create(folder, listen=listen, store=folder / "store", leaves=leaves)
    for learner in learners:
        hub_folder.add(folder, learner, "learner")
    if backup is not None:
        await hub_backup.put_back(backup, folder / "store", of_hub=True)
    async with serving(folder) as (pid, url):
        hub = Hub(folder, pid, url, port)
        if backup is not None:
            yield hub
            return
        async with hub.bus("coordinator") as bus:
            await prepare(bus)
        async with a_leaf(hub, leaf) if leaf else AsyncExitStack():
            yield hub
