"""The whole stack of one machine: nats-server, coordinator, syncer, learners, supervised.

State lies in one data folder; `endpoint.json` there tells every other command where it listens.
"""

import asyncio
import fcntl
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from diloco_cli.faults import CliError
from diloco_cli.up.process import Child
from diloco_shared.edges.faults import Abilities, FaultAgent
from diloco_shared.edges.membership import Membership
from diloco_shared.edges.nats_binary import ServerError
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.edges.nats_server import NatsServer

ENDPOINT = "endpoint.json"
# Messages kept for the live view.
MESSAGES_MAX = 200


class Stack:
    """`run` starts everything and keeps it alive until cancelled."""

    def __init__(self, data: Path, *, learners: int, port: int, chaos: bool, threads: int) -> None:
        self.data = data.absolute()
        self.learners = learners
        self.port = port
        self.chaos = chaos
        self.threads = threads
        self.messages: deque[str] = deque(maxlen=MESSAGES_MAX)
        self.children: list[Child] = []
        self.nats = NatsServer(self.data / "nats")
        self.nats_restarts = 0
        self.killing: asyncio.Task[None] | None = None
        self.up = asyncio.Event()
        self._lock = -1

    def told(self, text: str) -> None:
        self.messages.append(f"{time.strftime('%H:%M:%S')} {text}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def run(self) -> None:
        """Until cancelled; everything is stopped on the way out. CliError says what is amiss."""
        self._take_folder()
        self._check_port()
        (self.data / "logs").mkdir(exist_ok=True)
        try:
            await self.nats.start()
        except (ServerError, OSError) as error:
            raise CliError(f"the message server does not start: {error}") from None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_nats())
                tasks.create_task(self._be_member())
                self._spawn(tasks)
                self._write_endpoint()
                self.up.set()
        finally:
            await self._stop()

    def _take_folder(self) -> None:
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.data / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CliError(f"the data folder {self.data} cannot be used: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            self._lock = -1
            raise CliError(
                f"another instance works in {self.data} (process {holder}): stop it with "
                "'diloco down', or choose another folder with --data"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _check_port(self) -> None:
        """Refuse a taken port before anything is started; 0 chooses a free one."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                raise CliError(
                    f"port {self.port} is taken: stop what listens there, or choose another with "
                    "--port (0 for any)"
                ) from None
            self.port = probe.getsockname()[1]

    # --- processes -----------------------------------------------------------------------------

    def _spawn(self, tasks: asyncio.TaskGroup) -> None:
        shared = {
            "DILOCO_NATS_URL": self.nats.url,
            "DILOCO_DATA": str(self.data),
            "DILOCO_CHAOS": "1" if self.chaos else "0",
            "DILOCO_HOST": "127.0.0.1",
            "DILOCO_PORT": str(self.port),
            "DILOCO_CACHE": str(self.data / "compiled"),
        }
        self._child(tasks, "coordinator", "diloco_coordinator", shared)
        self._child(tasks, "syncer-1", "diloco_syncer", {**shared, "OMP_NUM_THREADS": "1"})
        for n in range(1, self.learners + 1):
            threads = {"DILOCO_THREADS": str(self.threads)}
            self._child(tasks, f"learner-{n}", "diloco_learner", {**shared, **threads})

    def _child(
        self, tasks: asyncio.TaskGroup, name: str, module: str, environment: dict[str, str]
    ) -> None:
        child = Child(
            name,
            [sys.executable, "-m", module],
            {**environment, "DILOCO_ID": name},
            self.data / "logs" / f"{name}.log",
            self.told,
        )
        self.children.append(child)
        tasks.create_task(child.run())

    async def _keep_nats(self) -> None:
        """Start the server again whenever it dies, on the same port and store."""
        while True:
            code = await self.nats.wait()
            self.nats_restarts += 1
            self.told(f"nats ended ({code}), starting again")
            await asyncio.sleep(0.2)
            try:
                await self.nats.start()
            except (ServerError, OSError) as error:
                self.told(f"nats does not start: {error}")
                await asyncio.sleep(2.0)

    async def _be_member(self) -> None:
        """A member of role supervisor, and the one who can harm the message server."""
        bus = await NatsBus.connect(self.nats.url, name="supervisor")
        membership = Membership(bus, "supervisor", "supervisor", f"{self.data}:{os.getpid()}")
        loop = asyncio.get_running_loop()

        def kill() -> None:
            self.killing = loop.create_task(self.nats.kill())

        def hang(seconds: float) -> None:
            self.nats.pause()
            loop.call_later(seconds, self.nats.resume)

        faults = FaultAgent(
            bus, "nats", enabled=self.chaos, abilities=Abilities(kill=kill, hang=hang)
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_registered(membership))
                tasks.create_task(faults.serve())
        finally:
            await bus.close()

    def _write_endpoint(self) -> None:
        body = {
            "url": self.url,
            "token_file": str(self.data / "admin-token"),
            "pid": os.getpid(),
            "nats": self.nats.address,
        }
        aside = self.data / (ENDPOINT + ".new")
        aside.write_text(json.dumps(body), encoding="utf-8")
        aside.rename(self.data / ENDPOINT)

    async def _stop(self) -> None:
        """Learners first, the message server last."""
        (self.data / ENDPOINT).unlink(missing_ok=True)
        await asyncio.gather(*(child.stop() for child in reversed(self.children)))
        await self.nats.stop()
        if self._lock >= 0:
            os.close(self._lock)


async def _registered(membership: Membership) -> None:
    """The buckets are the coordinator's to make: wait for them by trying."""
    await membership.register()
    await membership.keep()


async def started(stack: Stack, ready: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait until the coordinator answers; CliError after `timeout_s`."""
    await stack.up.wait()
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(ready):
        if time.monotonic() > deadline:
            raise CliError(f"the coordinator does not answer: see {stack.data}/logs")
        await asyncio.sleep(0.2)
