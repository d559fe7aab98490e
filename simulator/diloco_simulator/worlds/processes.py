"""Processes of the product under one name each: started, told to stop, frozen, killed, started
again."""

import asyncio
import shutil
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from diloco_coordinator.app import Coordinator
from diloco_coordinator.app import Settings as CoordinatorSettings
from diloco_coordinator.exports.child_io import Exporter
from diloco_coordinator.exports.sampling_io import Sampler
from diloco_learner.app import Learner
from diloco_learner.settings import Settings as LearnerSettings
from diloco_learner.training.computing_io import Computing
from diloco_shared.process.membership import DataFolder
from diloco_shared.process.stopping import until_stopped
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.virtual_loop import Hosted, VirtualLoop
from diloco_syncer.app import Settings as SyncerSettings
from diloco_syncer.app import Syncer

# A user's, for the coordinator.
TOKEN = "of the operator"
# Before a supervisor starts again what ended by itself, in virtual seconds.
RESTART_S = 1.0
# A coordinator that is told to stop gives requests so long, in virtual seconds: see
# `diloco_coordinator.api.listening_io`.
ANSWERS_S = 2.0
# Of encoded values in a syncer's memory, in multiples of the least with which a run can go on: what
# an operator gives as DILOCO_PAYLOAD_BYTES_MAX. None: nothing, so that the run's own size says it.
PAYLOADS_ROOM: float | None = None
# Asked before a process does what others can see: whether it lives to do it.
Passing = Callable[[str], bool]
# A connection to the world's hub: of its name, the machine that it is on, and what it passes.
Client = Callable[[str, str, Passing], FarBus]


class App(Protocol):
    """The product's, before it runs."""

    def run(self) -> Coroutine[Any, Any, None]: ...


# Makes what runs under a name: of a client for each plane, and the lock of its folder.
Make = Callable[[FarBus, FarBus, DataFolder], App]
# Coordinator, syncer or learner: of a name and the folder in which its own one lies.
Kind = Callable[[str, Path], Make]


class HostFolder(DataFolder):
    """Its lock has a name of a length that depends on nothing but the world: messages carry it."""

    disk = ""

    @property
    def lock(self) -> str:
        return self.disk


class Host:
    """A name, a folder, and one process at a time.

    `failed` is told what ended a process that nobody killed; `skew_s` says by how much the wall
    clock of the next process is off. On another `host` it has another link and another disk.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        folder: Path,
        client: Client,
        kind: Kind,
        failed: Callable[[BaseException | None], None] = lambda error: None,
        *,
        host: str = "",
        skew_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.loop = loop
        self.name = name
        self.host = host or name  # whose link and disk it has
        self.skew_s = skew_s
        self.folder = folder
        self.client = client
        self.kind = kind
        self.make = kind(name, folder)
        self.failed = failed
        self.before: Callable[[str], None] = lambda what: None  # may kill its process
        # Told of every process before it runs.
        self.begins: Callable[[App, Hosted], None] = lambda app, process: None
        # Told once a process is gone, and of one that has ended because it was told to: its error,
        # if there was one.
        self.over: Callable[[], None] = lambda: None
        self.stopped: Callable[[BaseException | None], None] = lambda error: None
        self.told = False  # the process that lives was told to stop
        # What its disk must have for the next process; its keys are those of whoever keeps it.
        self.kept: dict[str, Any] = {}
        self.process: Hosted | None = None
        self.app: App | None = None  # of the newest process
        self.lock: DataFolder | None = None
        self.buses: list[FarBus] = []
        self.starts = self.wiped = 0
        self.lost = False  # for good: nobody starts anything here again
        # Of all processes: what was killed must not be closed by a collection of garbage.
        self.apps: list[App] = []

    def start(self) -> None:
        """A new process, if none lives and the machine is there."""
        if self.process is not None or self.lost:
            return
        self.starts += 1
        self.told = False
        self.process = process = Hosted(
            self.loop, f"{self.name}/{self.starts}", skew_s=self.skew_s()
        )
        process.machine, process.unhandled = self, self._unhandled
        self.lock = lock = HostFolder(self.folder, self.name)
        lock.disk = f"{self.host}:{self.wiped}"
        process.before = self.before
        control, data = (
            self.client(f"{self.name}-{plane}", self.host, process.passes)
            for plane in ("control", "data")
        )
        self.buses = [control, data]
        self.app = process.app = self.make(control, data, lock)
        self.apps.append(self.app)
        self.begins(self.app, process)
        task = process.run(self._body(self.app))
        task.add_done_callback(lambda done: self._over(process, done))

    async def _body(self, app: App) -> None:
        if isinstance(app, CoordinatorApp):
            await app.run()  # its server has the signals
        else:
            await until_stopped(app.run(), once=getattr(app, "once", False))

    def _over(self, process: Hosted, task: asyncio.Task[None]) -> None:
        """It ended by itself: its supervisor starts another one, unless it wanted it to end."""
        if self.process is not process or process.killed:
            return
        error = None if task.cancelled() else task.exception()
        if self.told:
            self.kill()
            self.stopped(error)
            return
        self.failed(error)
        self.kill()
        self.loop.call_later(RESTART_S, self.start)

    def _unhandled(self) -> None:
        """A signal ends it at once."""
        self.kill()
        self.stopped(None)

    def stop(self) -> None:
        """As a supervisor does, by SIGTERM: it ends by itself some time later."""
        if self.process is not None:
            self.told = True
            self.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """As by SIGKILL: nothing more is said, and its keys run out by themselves."""
        if self.process is not None:
            self.process.kill()
        for bus in self.buses:
            bus.vanish()
        if self.lock is not None:
            self.lock.release()
        gone, self.process, self.lock = self.process, None, None
        if gone is not None:
            self.over()

    def wipe(self) -> None:
        """Its disk is empty, and its process gone."""
        self.kill()
        self.wiped += 1
        self.kept = {}
        shutil.rmtree(self.folder / self.name, ignore_errors=True)

    @property
    def lives(self) -> bool:
        return self.process is not None


class CoordinatorApp:
    """The product's coordinator, which answers requests that come by no socket."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        bus: FarBus,
        lock: DataFolder,
        exporter: Exporter | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        of_programs: dict[str, Any] = {"exporter": exporter, "sampler": sampler}
        self.coordinator = Coordinator(settings, bus, lock, TOKEN, **of_programs)
        self.listens = False
        self.answering: set[asyncio.Task[None]] = set()  # requests

    async def run(self) -> None:
        """Until it is told to stop."""
        await self.coordinator.run(self._listening())

    async def _listening(self) -> None:
        """As the product's server does; what is asked now is answered, but not for ever."""
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, told.set)
        self.listens = True
        await told.wait()
        self.listens = False
        if self.answering:
            _, late = await asyncio.wait(self.answering, timeout=ANSWERS_S)
            for task in late:
                task.cancel()
        loop.remove_signal_handler(signal.SIGTERM)


S = TypeVar("S", CoordinatorSettings, SyncerSettings, LearnerSettings)
# Where second processes of a name have their folders.
TWINS = "twins"
# By kind, without name and folder: reading what the environment says takes long.
_SETTINGS: dict[type[Any], Any] = {}


def settings_of(kind: type[S], name: str, data: Path) -> S:
    """Those of a process of that name. Checkpoints and archives have one place for all, also for a
    second process of a name, whose other files lie elsewhere."""
    if kind not in _SETTINGS:
        _SETTINGS[kind] = kind(id="nobody", data=Path(), chaos=True)
    of_all = data.parent.parent if data.parent.name == TWINS else data
    own = {"id": name, "data": data, "checkpoints": str(of_all / "checkpoints")}
    settings: S = _SETTINGS[kind].model_copy(update=own)
    return settings


def coordinator(
    name: str,
    data: Path,
    exporter: Exporter | None = None,
    sampler: Sampler | None = None,
    exports_kept: int | None = None,
) -> Make:
    """The product's coordinator. `exporter`: who takes weights out of runs, `sampler`: who lets
    them write; None: nobody does."""
    settings = settings_of(CoordinatorSettings, name, data)
    if exports_kept is not None:
        settings = settings.model_copy(update={"exports_kept": exports_kept})
    return lambda control, bulk, lock: CoordinatorApp(settings, control, lock, exporter, sampler)


def syncer(name: str, data: Path, payload_bytes_max: int | None = None) -> Make:
    """The product's syncer."""
    settings = settings_of(SyncerSettings, name, data)
    if payload_bytes_max is not None:
        settings = settings.model_copy(update={"payload_bytes_max": payload_bytes_max})
    return lambda control, bulk, lock: Syncer(settings, control, bulk, lock)


def learner(
    name: str, data: Path, computing: Callable[[], Computing], kind: type[Learner] = Learner
) -> Make:
    """The product's learner, or one that is begun otherwise; every process computes anew."""
    settings = settings_of(LearnerSettings, name, data)
    return lambda control, bulk, lock: kind(settings, control, bulk, lock, computing())
