"""A cluster of real processes beside a bench, and what it waits for."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from diloco_cli.up.stack import free_port
from diloco_client import ApiError, Client, Unreachable
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.hub.nats_server import NatsServer

# What a look may come to while processes start, or are away.
AWAY = (ApiError, Unreachable, OSError, LookupError, TypeError, ValueError)
# Starting many processes on few busy cores takes its time, in seconds.
PATIENCE_S = 240.0
# Of processes that share a core with others.
ONE_THREAD = {
    "DILOCO_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def until(
    what: str,
    look: Callable[[], Any],
    patience_s: float = PATIENCE_S,
    *,
    look_s: float = 0.2,
    away: tuple[type[Exception], ...] = AWAY,
    fails: type[BaseException] = SystemExit,
) -> Any:
    """The first true value of `look`, where `away` is no value. Raises `fails`, which names `what`,
    when patience ends."""
    deadline, trouble = time.monotonic() + patience_s, ""
    while time.monotonic() < deadline:
        try:
            if value := look():
                return value
        except away as error:
            trouble = f" ({type(error).__name__}: {error})"
        time.sleep(look_s)
    raise fails(f"never came: {what}{trouble}")


class Processes:
    """Of modules of the product. What is started is stopped, and what ends by itself is a fault."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        core: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`core`: of those that are started on no other one; None: not pinned."""
        self.folder, self.environment = folder, dict(environment)
        self.core, self.patience_s = core, patience_s
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, core: int | None = None) -> None:
        core = self.core if core is None else core
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*pinned, sys.executable, "-m", module],
                env={**self.environment, "DILOCO_ID": name},
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def said(self, name: str) -> str:
        """The last line of its log."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return lines[-1][:500] if lines else "it said nothing"

    async def until(
        self,
        what: str,
        look: Callable[[], Any],
        patience_s: float | None = None,
        *,
        look_s: float = 0.2,
    ) -> Any:
        """The first true value; errors of a coordinator that is starting count as false."""
        deadline, trouble = time.monotonic() + (patience_s or self.patience_s), ""
        while time.monotonic() < deadline:
            for name, process in self.running.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended: {self.said(name)}")
            try:
                if value := await asyncio.to_thread(look):
                    return value
            except Exception as error:
                trouble = f" ({error})"
            await asyncio.sleep(look_s)
        raise SystemExit(f"never came: {what}{trouble}")

    async def members(self, client: Client, count: int) -> None:
        """Until so many are there."""
        await self.until("members", lambda: sum(m["alive"] for m in client.members()) >= count)

    @asynccontextmanager
    async def cluster(self, begin: Callable[[], None]) -> AsyncIterator[tuple[Client, NatsBus]]:
        """A message server, a coordinator that answers, and what `begin` starts beside it."""
        nats = NatsServer(self.folder / "nats", token="bench", dies_with_owner=True)
        port = free_port(0)
        await nats.start()
        self.environment |= {
            "DILOCO_NATS_URL": nats.url,
            "DILOCO_DATA": str(self.folder),
            "DILOCO_HOST": "127.0.0.1",
            "DILOCO_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        try:
            self.start("coordinator", "diloco_coordinator")
            begin()
            token = await self.until("a token", (self.folder / "admin-token").read_text)
            bus = await NatsBus.connect(nats.url, name="bench")
            with Client(f"http://127.0.0.1:{port}", token.strip()) as client:
                await self.until("the coordinator", client.ready)
                yield client, bus
            await bus.close()
        finally:
            self.stop()
            await nats.stop()


def alone(folder: Path, core: int | None, patience_s: float) -> Processes:
    """Each with a thread for its computation; they find what others of them compiled."""
    own = {**os.environ, "DILOCO_CACHE": str(folder / "compiled"), **ONE_THREAD}
    return Processes(folder, own, core, patience_s)
