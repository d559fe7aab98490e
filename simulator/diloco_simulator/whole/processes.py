"""Processes of the product under one name each: started, stopped, frozen, killed, started again."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from diloco_coordinator.app import Coordinator
from diloco_coordinator.settings import Settings as CoordinatorSettings
from diloco_learner.app import Learner
from diloco_learner.edges.computing import Computing
from diloco_learner.settings import Settings as LearnerSettings
from diloco_shared.edges.membership import DataFolder
from diloco_simulator.virtual_loop import Hosted, VirtualLoop
from diloco_simulator.whole.far_bus import FarBus
from diloco_syncer.app import Syncer
from diloco_syncer.settings import Settings as SyncerSettings

# A user's, for the coordinator.
TOKEN = "of the operator"
# Before a supervisor starts again what ended by itself, in virtual seconds.
RESTART_S = 1.0
# Something that is awaited before a process does what others can see.
Passing = Callable[[str], Awaitable[None]]
# A connection to the world's hub: of its name, the machine that it is on, and what it passes.
Client = Callable[[str, str, Passing], FarBus]


class App(Protocol):
    """The product's, before it runs."""

    def run(self) -> Coroutine[Any, Any, None]: ...


# Makes what runs under a name: of a client for each plane, and the lock of its folder.
Make = Callable[[FarBus, FarBus, DataFolder], App]


class Machine:
    """A name, a folder, and one process at a time.

    `failed` is told what ended a process that nobody killed.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        folder: Path,
        client: Client,
        make: Make,
        failed: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.loop = loop
        self.name = name
        self.folder = folder
        self.client = client
        self.make = make
        self.failed = failed
        self.before: Callable[[str], None] = lambda what: None  # may kill its process
        self.process: Hosted | None = None
        self.app: App | None = None  # of the newest process
        self.lock: DataFolder | None = None
        self.buses: list[FarBus] = []
        self.starts = 0

    def start(self) -> None:
        """A new process, if none lives."""
        if self.process is not None:
            return
        self.starts += 1
        self.process = process = Hosted(self.loop, f"{self.name}/{self.starts}")
        self.lock = lock = DataFolder(self.folder, self.name)
        process.before = self.before
        control, data = (
            self.client(f"{self.name}-{plane}", self.name, _passing(process))
            for plane in ("control", "data")
        )
        self.buses = [control, data]
        self.app = self.make(control, data, lock)
        task = process.run(self._body(self.app))
        task.add_done_callback(lambda done: self._over(process, done))

    async def _body(self, app: App) -> None:
        await app.run()

    def _over(self, process: Hosted, task: asyncio.Task[None]) -> None:
        """It ended by itself: its supervisor starts another one."""
        if self.process is process and not process.killed:
            self.failed(None if task.cancelled() else task.exception())
            self.kill()
            self.loop.call_later(RESTART_S, self.start)

    def kill(self) -> None:
        """As by SIGKILL: nothing more is said, and its keys run out by themselves."""
        if self.process is not None:
            self.process.kill()
        for bus in self.buses:
            bus.disconnect()
        if self.lock is not None:
            self.lock.release()
        self.process = self.lock = None

    def wipe(self) -> None:
        """Its disk is empty, and its process gone."""
        self.kill()
        shutil.rmtree(self.folder / self.name, ignore_errors=True)

    @property
    def lives(self) -> bool:
        return self.process is not None


def _passing(process: Hosted) -> Passing:
    async def passing(what: str) -> None:
        if not process.passes(what):
            await asyncio.Event().wait()

    return passing


class CoordinatorApp:
    """The product's coordinator, which answers requests that come by no socket."""

    def __init__(self, settings: CoordinatorSettings, bus: FarBus, lock: DataFolder) -> None:
        self.coordinator = Coordinator(settings, bus, lock, TOKEN)

    async def run(self) -> None:
        """For ever."""
        await self.coordinator.run(_for_ever())


async def _for_ever() -> None:
    await asyncio.Event().wait()


def coordinator(name: str, data: Path) -> Make:
    """The product's coordinator."""
    settings = CoordinatorSettings(id=name, data=data)
    return lambda control, bulk, lock: CoordinatorApp(settings, control, lock)


def syncer(name: str, data: Path) -> Make:
    """The product's syncer."""
    settings = SyncerSettings(id=name, data=data)
    return lambda control, bulk, lock: Syncer(settings, control, bulk, lock)


def learner(name: str, data: Path, computing: Callable[[], Computing]) -> Make:
    """The product's learner; every process computes with something new."""
    settings = LearnerSettings(id=name, data=data)
    return lambda control, bulk, lock: Learner(settings, control, bulk, lock, computing())
