"""Processes of the product under one name each: started, stopped, frozen, killed, started again."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from diloco_learner.app import Learner
from diloco_learner.edges.computing import Computing
from diloco_learner.settings import Settings as LearnerSettings
from diloco_shared.edges.membership import DataFolder
from diloco_simulator.virtual_loop import Hosted, VirtualLoop
from diloco_simulator.whole.far_bus import FarBus
from diloco_syncer.app import Syncer
from diloco_syncer.settings import Settings as SyncerSettings

# A client of the world's hub, by name.
Client = Callable[[str], FarBus]


class App(Protocol):
    """The product's, before it runs."""

    def run(self) -> Coroutine[Any, Any, None]: ...


class Machine:
    """A name, a folder, and one process at a time."""

    def __init__(self, loop: VirtualLoop, name: str, folder: Path, client: Client) -> None:
        self.loop = loop
        self.name = name
        self.folder = folder
        self.client = client
        self.process: Hosted | None = None
        self.lock: DataFolder | None = None
        self.buses: list[FarBus] = []
        self.starts = 0

    def app(self, control: FarBus, data: FarBus, lock: DataFolder) -> App:
        """What runs here."""
        raise NotImplementedError

    def start(self) -> None:
        """A new process, if none lives."""
        if self.process is not None:
            return
        self.starts += 1
        self.process = process = Hosted(self.loop, f"{self.name}/{self.starts}")
        self.lock = lock = DataFolder(self.folder, self.name)
        control, data = (self.client(f"{self.name}-{plane}") for plane in ("control", "data"))
        self.buses = [control, data]
        task = process.run(self._body(self.app(control, data, lock)))
        task.add_done_callback(lambda done: self._over(process, done))

    async def _body(self, app: App) -> None:
        await app.run()

    def _over(self, process: Hosted, task: asyncio.Task[None]) -> None:
        """It ended by itself: its supervisor starts another one."""
        if self.process is process and not process.killed:
            self.failed(None if task.cancelled() else task.exception())
            self.kill()
            self.loop.call_later(1.0, self.start)

    def failed(self, error: BaseException | None) -> None:
        """Called with what ended a process that nobody killed."""

    def kill(self) -> None:
        """As by SIGKILL: nothing more is said, and its keys run out by themselves."""
        if self.process is not None:
            self.process.kill()
        for bus in self.buses:
            bus.disconnect()
        if self.lock is not None:
            self.lock.release()
        self.process = self.lock = None


class SyncerMachine(Machine):
    """The product's syncer."""

    def app(self, control: FarBus, data: FarBus, lock: DataFolder) -> Syncer:
        settings = SyncerSettings(id=self.name, data=self.folder)
        return Syncer(settings, control, data, lock)


class LearnerMachine(Machine):
    """The product's learner; `computing` makes what each process computes with."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        folder: Path,
        client: Client,
        computing: Callable[[], Computing],
    ) -> None:
        super().__init__(loop, name, folder, client)
        self.computing = computing

    def app(self, control: FarBus, data: FarBus, lock: DataFolder) -> Learner:
        settings = LearnerSettings(id=self.name, data=self.folder)
        return Learner(settings, control, data, lock, self.computing())
