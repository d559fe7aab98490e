"""One seeded world of whole processes: coordinator, syncers, learners, a hub, and what goes wrong.

First anything may go wrong and nothing wrong may be said (safety); then all is well again, and the
run must come to its end in time (liveness). A seed is a run.
"""

import asyncio
import gc
import logging
import math
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import fastapi.dependencies.models
import structlog

from diloco_learner.training.train import TrainLoop
from diloco_shared.bus.port import Stored
from diloco_shared.bus.stored_records import readable
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.islands import IslandWatch
from diloco_simulator.checkers.promises import Report
from diloco_simulator.checkers.watch import RunWatch
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.data_bus import DataBus, DataTroubles
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.hub.net import Net
from diloco_simulator.inside.counted import Counted
from diloco_simulator.inside.fetches import Fetches
from diloco_simulator.inside.leaders import SeenLeaders
from diloco_simulator.inside.learners import Trained, going_back
from diloco_simulator.inside.leases import Trust
from diloco_simulator.inside.observer import Observer, Scene
from diloco_simulator.inside.rebirths import SeenRebirths
from diloco_simulator.inside.states import SeenStates
from diloco_simulator.islands.computing import IslandComputing, IslandLearner
from diloco_simulator.islands.processes import Island
from diloco_simulator.people.exchanging import Exchanging
from diloco_simulator.people.exporting import Exporting, by_itself
from diloco_simulator.people.heeding import Heeding
from diloco_simulator.people.sequel import Sequel, heir_of
from diloco_simulator.people.visitors import Visitors, asked_first
from diloco_simulator.troubles.backups import Backups
from diloco_simulator.troubles.chance import Chance
from diloco_simulator.troubles.disks import Disks
from diloco_simulator.troubles.hardships import Hardships
from diloco_simulator.troubles.inflicting import arm
from diloco_simulator.troubles.islands import IslandTroubles
from diloco_simulator.troubles.lies import Lies
from diloco_simulator.troubles.power import Power
from diloco_simulator.troubles.signals import Signals
from diloco_simulator.troubles.spoiling import Spoiling
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.virtual_loop import Hosted, Idle, VirtualLoop, current, play
from diloco_simulator.worlds import processes
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.computing import TinyComputing, in_shards, scarce, tiny
from diloco_simulator.worlds.constants import put
from diloco_simulator.worlds.limit import Circling, limited
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.processes import (
    TWINS,
    App,
    Host,
    Kind,
    Make,
    Passing,
    coordinator,
    learner,
    syncer,
)
from diloco_simulator.worlds.tiny import payloads_least, spec_of
from diloco_simulator.worlds.watched_run import WatchedRun

# Where disks of simulated machines are, if there is such a folder: syncing real ones takes long.
MEMORY = Path("/dev/shm")
# Between two looks at whether the run has begun, in virtual seconds.
LOOK_S = 2.0
# Until a round is over that is waited for, where troubles do not come while the run begins.
BEGUN_S = 150.0
# What a process does that others can see is this much more than the effects of its machine, by
# which rates of dying are given.
DOES = 3.0


@dataclass(slots=True)
class WorldResult:
    """What became of one seed."""

    seed: int
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)  # checks made, by promise
    # What processes did that others can see, by role: each is a place to die.
    passings: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    virtual_s: float = 0.0


class World:
    """One case's."""

    def __init__(self, case: Case, folder: Path, loop: VirtualLoop) -> None:
        self.case = case
        self.seed = seed = case.seed
        self.options = options = case.options
        self.folder = folder
        self.loop = loop
        self.rng = Random(f"whole {seed}")
        self.found = WorldResult(seed)
        self.broker = MemoryBroker()
        self.broker.named, self.broker.nodes = options.named, options.nodes
        self.found.counts["hubs that know who writes"] += options.named
        self.net = Net(loop, Random(f"net {seed}"), options, self.found.counts)
        self.healed_at = math.inf
        self.scene = Scene(loop, options, self.found.counts)
        self.observers: dict[str, Observer] = {}  # by the names of runs
        self.begun: list[WatchedRun] = []
        self.connections: list[FarBus] = []  # of all processes, whatever became of them
        self.broker.on_store = self._stored
        self.of_links = Chance(self.scene, Random(f"links {seed}"))
        self.spoiling = Spoiling(self.scene, Random(f"spoilt {seed}"), options.spoilt)
        self.disks = Disks(self, Random(f"disks {seed}"))
        self.exporting = Exporting(self) if case.exports else None
        self.made: list[Island] = []
        self.islands = IslandWatch(
            Report(self.broken, self.found.looks),
            self.found.counts,
            lambda: loop.now,
            partial(loop.call_later, context=self.net.outside),
        )
        self.coordinator = self._machine("coordinator", self._coordinator(), folder)
        self.run = WatchedRun(
            self,
            self._asked(spec_of(options, seed)),
            Random(f"user {seed}"),
        )
        self.spec, self.user, self.observer = self.run.spec, self.run.user, self.run.observer
        of = ("lies", "lies about marks", "lies about bases")
        self.lies = Lies(self.observer, self.spec, *(Random(f"{name} {seed}") for name in of))
        self.syncers = [
            self._machine(f"syncer-{n}", self._syncer(), folder)
            for n in range(max(options.syncers, 1) * options.shards)
        ]
        self.learners = [
            self._machine(f"learner-{n}", self._learner(n), folder) for n in range(options.learners)
        ]
        self.lost: list[Host] = []  # for good
        self.twins = 0  # second processes of a name
        self.troubles = Troubles(self)
        self.signals = Signals(self)
        self.power = Power(self)
        self.of_islands = IslandTroubles(self)
        self.backups = Backups(self)
        self.visitors = Visitors(self)
        self.hardships = Hardships(self)
        self.rebirths = SeenRebirths(self)

    def _asked(self, spec: RunSpec) -> RunSpec:
        """The run of the tiny model, as its user submits it."""
        spec = tiny(spec)
        if self.case.asks:
            spec = asked_first(spec)
        if self.case.exports:
            spec = by_itself(spec, self.seed)
        if self.options.data_shards:
            spec = in_shards(spec, self.options.data_shards)
        return scarce(spec, self.seed) if self.case.hardships else spec

    # --- who is there --------------------------------------------------------------------------

    @property
    def machines(self) -> list[Host]:
        """Those that are there, or will be again."""
        return [self.coordinator, *self.syncers, *self.learners]

    def _client(self, name: str, host: str, passing: Passing | None) -> FarBus:
        hub = (self.broker, name, host, self.net, passing)
        troubles = DataTroubles(self.options, self.of_links, self.lies.sent, self.spoiling)
        bus = FarBus(*hub) if name.endswith("-control") else DataBus(*hub, troubles)
        self.connections.append(bus)
        return bus

    def _machine(self, name: str, kind: Kind, folder: Path, host: str = "") -> Host:
        def failed(error: BaseException | None) -> None:
            if isinstance(app := machine.app, IslandLearner) and app.computing.leading.ends:
                self.found.counts["islands ended"] += 1
                return
            self.broken("processes", f"{host or name} ends by itself: {_leaf(error)}")

        dice, o = Random(f"whole {self.seed}, {host or name} dies"), self.options
        machine = Host(
            self.loop,
            name,
            folder,
            self._client,
            kind,
            failed,
            host=host,
            skew_s=lambda: dice.uniform(-o.wall_skew_s, o.wall_skew_s),
        )
        chance, passings = dice.random, self.found.passings
        rate = (o.learner_crash if name.startswith("learner") else o.syncer_crash) / DOES

        whose, at = o.dies_at

        def before(what: str) -> None:
            role = self.observer.reached.role(machine.name)
            passings[role] = n = passings[role] + 1
            last = n == at and role == whose
            if last or (self.scene.faulty and chance() < rate):
                self.found.counts["crashes"] += 1
                self.observer.reached.dies(machine.name, what)
                self.crash(machine, dice.uniform(0.5, 6.0))

        machine.before = before
        machine.begins = partial(self._begins, machine)
        return machine

    def _begins(self, machine: Host, app: App, process: Hosted) -> None:
        arm(self, machine, app, process)
        if isinstance(app, IslandLearner):
            leading = app.computing.leading
            leading.island.begins(machine, leading, process)

    def _coordinator(self) -> Kind:
        if (exporting := self.exporting) is None:
            return coordinator
        return partial(
            coordinator,
            exporter=exporting.exporter,
            sampler=exporting.sampling.sampler.of_product,
            exports_kept=exporting.kept_max,
        )

    def _syncer(self) -> Kind:
        """Told how much it may hold, in worlds that draw that."""
        if (room := processes.PAYLOADS_ROOM) is None:
            return syncer
        least = payloads_least(self.spec, self.options.learners)
        return partial(syncer, payload_bytes_max=int(room * least))

    def _learner(self, n: int) -> Kind:
        """One that computes as the n-th, whatever its name."""

        def kind(name: str, data: Path) -> Make:
            dice = Random(f"whole {self.seed}, {name}")
            step_s = self.options.step_s / self.options.speeds[n % len(self.options.speeds)]
            of_it = n, dice, step_s, self.broken, partial(self._trains, name)
            hosts = self.options.hosts[n % len(self.options.hosts)] if self.options.hosts else 1
            if hosts == 1:
                return learner(name, data, lambda: TinyComputing(*of_it))
            island = Island(
                self.loop,
                Random(f"island {self.seed}, {len(self.made)} {name}"),
                self.islands,
                name,
                n,
                hosts,
                self.options.host_silence_s,
                self._client if self.options.carriers else None,
            )
            self.made.append(island)
            return learner(name, data, lambda: IslandComputing(island, *of_it), IslandLearner)

        return kind

    # --- what is seen --------------------------------------------------------------------------

    def _stored(self, stream: str, message: Stored) -> None:
        if self.options.carriers:
            self.islands.chunk(message)
        for observer in self.observers.values():
            observer.stored(stream, message)
            self.rebirths.stored(observer, stream, message)

    def watch_of(self, run: str) -> RunWatch | None:
        """None: nobody looks at it."""
        observer = self.observers.get(run)
        return None if observer is None else observer.watch

    def _there(self, spec: RunSpec) -> bool:
        """Whether the hub has this run: one who stood still may begin with a deleted one whose name
        another run has by now, and leaves it soon."""
        runs = bucket_stream(subjects.RUNS)
        if not self.broker.exists(runs):
            return True  # the hub is being put back
        newest = self.broker.last(runs, f"{subjects.KEYS}.{subjects.RUNS}.{spec.name}")
        record = None if newest is None else readable(newest.payload, RunRecord)
        return record is not None and record.spec.get("id", "") == spec.id

    def forgives(self) -> None:
        """A process goes on whose clock stood still (`RunWatch.forgives`)."""
        for observer in self.observers.values():
            if observer.watch is not None:
                observer.watch.forgives()

    def _trains(self, learner: str, loop: TrainLoop, step_s: float) -> None:
        watch = self.watch_of(loop.spec.name)
        if watch is not None and self._there(loop.spec):
            self.signals.trains(current(), Trained(watch, learner, loop, step_s))
        self.lies.trains(loop)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Until the end of the block what processes decide and hold is seen."""
        with ExitStack() as looks:
            looks.enter_context(Counted(self.lies).used())
            looks.enter_context(Fetches(self.found.counts).used())
            looks.enter_context(SeenLeaders(self.scene, self.broker, self.watch_of).used())
            looks.enter_context(SeenStates(self.watch_of).used())
            looks.enter_context(self.rebirths.used())
            looks.enter_context(Trust(self.watch_of).used())
            looks.enter_context(going_back(self.watch_of))
            if self.exporting is not None:
                looks.enter_context(self.exporting.sampling.sampler.used())
            yield

    # --- who comes and goes --------------------------------------------------------------------

    def crash(self, machine: Host, away_s: float) -> None:
        """It dies, and is started again some time later."""
        machine.kill()
        self.start(machine, away_s)

    def start(self, machine: Host, after_s: float) -> None:
        """Unless it is lost by then."""

        def start() -> None:
            if machine not in self.lost:
                machine.start()

        # Not of the process that dies, should it be its own next step that is its last.
        self.loop.call_later(after_s, start, context=self.net.outside)

    def twin(self, machine: Host) -> Host:
        """Another host's, of the same name; somebody must kill it."""
        # Each has a disk of its own: a folder that is in use ends a process at once.
        self.twins += 1
        folder = self.folder / TWINS / str(self.twins)
        return self._machine(machine.name, machine.kind, folder, f"{machine.name}-twin")

    def renamed(self, machine: Host, number: int) -> Host:
        """In its place, with a name that nobody had, and an empty disk."""
        new = self._machine(f"{machine.name}-new-{number}", machine.kind, self.folder)
        for kept in (self.syncers, self.learners):
            if machine in kept:
                kept[kept.index(machine)] = new
        self._lost(machine)
        return new

    def lose(self, machine: Host) -> None:
        """It never comes back."""
        machine.kill()
        self._lost(machine)
        for kept in (self.syncers, self.learners):
            if machine in kept:
                kept.remove(machine)

    def _lost(self, machine: Host) -> None:
        self.lost.append(machine)
        machine.lost = True

    def broken(self, invariant: str, text: str) -> None:
        """A promise was not kept."""
        self.found.violations.append(f"{invariant} at {self.loop.now:.2f} s: {text}")

    # --- from beginning to end -----------------------------------------------------------------

    async def play(self) -> None:
        """Safety, then liveness."""
        self.coordinator.start()
        for machine in (*self.syncers, *self.learners):
            self.start(machine, self.rng.uniform(0.0, 2.0))
        sequel = Sequel(self)
        if self.case.hardships:
            self.hardships.begin()
        await self.run.begin()
        if not self.case.early:
            await self._begun()
        self.troubles.plan()
        self.signals.plan()
        self.power.plan()
        self.of_islands.plan()
        self.backups.plan()
        if self.case.visitors:
            self.visitors.plan()
        if self.exporting is not None:
            self.exporting.plan()
        if self.case.hardships:
            self.hardships.plan()
        self.disks.plan()
        self.lies.begin()
        await asyncio.sleep(self.options.safety_s)
        await self._heal()
        await self.run.ends()
        await self.visitors.gone()
        if self.exporting is not None:
            await self.exporting.settled(self.run)
        await self.run.deleted()
        await sequel.play()
        if self.case.hardships and (heir := await heir_of(self)) is not None:
            await heir.play()
        if self.exporting is not None:
            await self.exporting.nothing_left()
        for machine in self.machines:
            machine.kill()
            self._lost(machine)  # one that died just before would come back

    def judged(self) -> None:
        """What all have found, the earliest first: what comes later may follow from it."""
        for run in self.begun:
            self.found.violations += run.observer.watch.violations
            self.found.looks += run.observer.watch.report.looks
        self.found.violations.sort(key=_when)
        self.found.virtual_s = self.loop.now

    async def _begun(self) -> None:
        """Until a round is over, or it takes too long, since rates of dying hold from the start."""
        for _ in range(int(BEGUN_S / LOOK_S)):
            if self.observer.watch.rounds:
                return
            await asyncio.sleep(LOOK_S)

    async def _heal(self) -> None:
        await self.backups.over()
        self.scene.faulty = self.broker.squeezed = False
        if self.broker.leaderless:
            self.broker.elected()
        if self.broker.disk_full or self.broker.unwritten:
            self.broker.restart()
            if self.options.severs:
                self.troubles.server_ends()  # and all are connected again where it heals
        self.net.heal()
        self.troubles.heal()
        self.of_islands.heal()
        self.hardships.heal()
        self.lies.heal()
        self.visitors.heal()
        for observer in self.observers.values():
            observer.watch.healed()
        self.healed_at = self.loop.now
        await self.troubles.answered()
        if self.options.wishes:
            self.run.well()
            await Heeding(self.run).play()
        if self.options.told_to_stop:
            self.run.well()
            await Exchanging(self.run).play()
        await self.user.calm(self.options.quorum)


def _when(violation: str) -> float:
    """In virtual seconds, if it says so."""
    said = re.search(r" at ([0-9.]+) s: ", violation)
    return math.inf if said is None else float(said[1])


def _fell(world: World, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback raised: of the simulator, or of the product beside its tasks."""
    error = context.get("exception")
    if context.get("handle") is not None and error is not None:
        world.broken("callbacks", f"{context['message']}: {_where(error)}"[:300])


def _leaf(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:100]


@contextmanager
def quiet() -> Iterator[None]:
    """Thousands of lines a second of virtual processes would say nothing to anybody."""
    kept = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**kept)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: what coroutines of dead processes do when they are closed
    would come at a moment that depends on what was played before.

    What is there before, which is that of libraries above all, is never looked at again: to look
    at it before each world would take a fifth of the world's own time."""
    _forget_handlers()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _forget_handlers() -> None:
    """FastAPI remembers each handler that it has looked at, and each knows its whole world."""
    for known in vars(fastapi.dependencies.models).values():
        if hasattr(known, "cache_clear"):
            known.cache_clear()


def one(seed: int, options: Options | None = None) -> WorldResult:
    """What a seed has drawn, or these options in its world."""
    return played(Case.drawn(seed, options))


def played(case: Case) -> WorldResult:
    """One world; an exception of the product is a violation too."""
    memory = MEMORY if MEMORY.is_dir() else None
    found = WorldResult(case.seed)

    async def main() -> None:
        nonlocal found
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(case, Path(disk), loop)
        found = world.found
        loop.set_exception_handler(partial(_fell, world))
        try:
            with world.disks.used(), world.watched():
                await world.play()
        finally:
            world.judged()

    folder = TemporaryDirectory(prefix="diloco-whole-", dir=memory)
    try:
        with folder as disk, quiet(), put(case.constants), uncollected(), limited():
            try:
                play(main(), Random(f"threads {case.seed}"))
            except* (Idle, Exception) as group:
                found.violations.append(f"crash: {_where(group)}")
    except Circling as circling:
        found.violations.append(f"crash: {circling!r}")
    return found


def _where(error: BaseException) -> str:
    """What was raised first, and where."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error!r} at {place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
