"""`diloco up` as a user starts it, looked at from outside: processes, streams, disk, API."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from beside import AWAY as AWAY
from beside import until as until

from diloco_client import Client
from diloco_shared.bus.nats.bus import NatsBus
from storms.links import Links

LINKS = Path(__file__).with_name("links.py")


class Stack:
    """One cluster in `folder`; a context manager that stops it."""

    def __init__(
        self,
        folder: Path,
        *,
        learners: int,
        syncers: int,
        linked: Sequence[str] = (),
        link_bytes_per_s: float = 0.0,
    ) -> None:
        """`linked`: services whose link to the message server can be cut, or is slow."""
        self.folder = folder
        self.learners = [f"learner-{n}" for n in range(1, learners + 1)]
        self.syncers = [f"syncer-{n}" for n in range(1, syncers + 1)]
        options = ("--learners", str(learners), "--syncers", str(syncers), "--chaos")
        self.links: Links | None = None
        if linked:
            server = lambda: str(self.endpoint()["nats"])  # noqa: E731
            self.links = Links(linked, server, link_bytes_per_s)
        command = self._diloco("up")
        if self.links is not None:
            ports = json.dumps(self.links.ports)
            command = [sys.executable, str(LINKS), ports, *command[command.index("up") :]]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        endpoint = until("the cluster", self.endpoint)
        token = until("its token", lambda: Path(endpoint["token_file"]).read_text().strip())
        self.token = token
        self.client = Client(endpoint["url"], token)
        until("the coordinator", self.client.ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.links is not None:
            self.links.close()

    def _diloco(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "diloco_cli", *arguments, "--data", str(self.folder)]

    def endpoint(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "endpoint.json").read_text())
        return found

    def told(self, *arguments: str) -> str:
        """What a command prints; its status may say that something was found."""
        done = subprocess.run(self._diloco(*arguments), capture_output=True, text=True, check=False)
        if not done.stdout:
            raise SystemExit(f"diloco {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def diloco(self, *arguments: str) -> Any:
        """What a command prints as JSON."""
        return json.loads(self.told(*arguments, "--json"))

    # --- looking -------------------------------------------------------------------------------

    def members(self) -> dict[str, psutil.Process]:
        """Living processes by name: services by their id, `nats`, `supervisor`."""
        supervisor = psutil.Process(self.process.pid)
        found = {"supervisor": supervisor}
        for child in supervisor.children():
            try:
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
                named = "nats" if "nats-server" in child.name() else child.environ()["DILOCO_ID"]
                found[named] = child
            except (psutil.Error, KeyError):
                continue  # it ends, or is not yet what it will be
        return found

    def files(self) -> tuple[int, int]:
        """(number, bytes) of files in the data folder."""
        number = size = 0
        for path, _, names in os.walk(self.folder):
            for name in names:
                try:
                    size += os.stat(Path(path) / name).st_size
                except FileNotFoundError:
                    continue  # removed meanwhile
                number += 1
        return number, size

    async def bus(self, timeout_s: float = 10.0) -> NatsBus:
        """A connection to its message server."""
        token = await asyncio.to_thread((self.folder / "nats-token").read_text)
        address = f"nats://{self.endpoint()['nats']}"
        return await NatsBus.connect(
            address, name="bench", token=token.strip(), timeout_s=timeout_s
        )

    async def streams(self, names: list[str]) -> dict[str, int]:
        """Bytes of each stream that is there; none while the bus is away."""
        found: dict[str, int] = {}
        try:
            bus = await self.bus(timeout_s=2.0)
        except (OSError, ConnectionError, ValueError):
            return found
        except Exception as error:  # the bus's own: away
            print(f"streams not seen: {error}", flush=True)
            return found
        try:
            for name in names:
                try:
                    found[name] = (await bus.stream_info(name)).bytes
                except Exception:  # not there, or away
                    continue
        finally:
            await bus.close()
        return found
