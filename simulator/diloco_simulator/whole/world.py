"""One seeded world of whole processes: coordinator, syncers, learners, a hub, and what goes wrong.

    python -m diloco_simulator.whole.world --seeds 20

First anything may go wrong and nothing wrong may be said (safety); then all is well again, and the
run must come to its end in time (liveness). A seed is a run.
"""

import argparse
import asyncio
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from diloco_coordinator.views import cannot_go_on
from diloco_shared.edges.memory_broker import MemoryBroker
from diloco_shared.protocol import subjects
from diloco_simulator.options import Options, fresh_seed
from diloco_simulator.scenario import spec_of
from diloco_simulator.virtual_loop import Idle, VirtualLoop, play
from diloco_simulator.whole import constants
from diloco_simulator.whole.computing import TinyComputing
from diloco_simulator.whole.constants import put
from diloco_simulator.whole.far_bus import FarBus
from diloco_simulator.whole.net import Net
from diloco_simulator.whole.observer import Observer, Scene
from diloco_simulator.whole.processes import Machine, Make, Passing, coordinator, learner, syncer
from diloco_simulator.whole.rest import Rest
from diloco_simulator.whole.user import OVER, User

# Between two looks, in virtual seconds.
LOOK_S = 2.0
# A run that cannot go on says so long before, in virtual seconds.
BEYOND_S = 120.0
# Whoever led a run lets go of it within half a minute of its end, should it have died over it.
DELETED_S = 90.0
# Once all is well a run of some dozen steps of a second must be over within this time.
LIVENESS_S = 1200.0
# What a process does that others can see is this much more than the effects of its machine, by
# which rates of dying are given.
DOES = 10.0


# What members, status and beats weigh, beside the few bytes of a tiny model.
SERVICES = 100.0


@dataclass(slots=True)
class Verdict:
    """What became of one seed."""

    seed: int
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    virtual_s: float = 0.0


class World:
    """One seed's."""

    def __init__(self, seed: int, options: Options, folder: Path, loop: VirtualLoop) -> None:
        self.seed = seed
        self.options = options
        self.folder = folder
        self.loop = loop
        self.rng = Random(f"whole {seed}")
        self.found = Verdict(seed)
        self.spec = spec_of(options, seed)
        self.broker = MemoryBroker()
        self.net = Net(loop, Random(f"net {seed}"), options, self.found.counts)
        self.healed_at = math.inf
        self.scene = Scene(loop, options, self.found.counts)
        self.observer = Observer(self.scene, self.spec, self.broker)
        self.asked: list[asyncio.Task[object]] = []  # what the user still waits for
        self.coordinator = self._machine(
            "coordinator", coordinator("coordinator", folder), options.syncer_crash
        )
        dice = Random(f"user {seed}")
        self.user = User(Rest(self.coordinator), self.spec, dice, self.found.counts, self.broken)
        self.syncers = [
            self._machine(name := f"syncer-{n}", syncer(name, folder), options.syncer_crash)
            for n in range(max(options.syncers, 1) * options.shards)
        ]
        self.learners = [
            self._machine(
                name := f"learner-{n}",
                learner(name, folder, self._computing(n, name)),
                options.learner_crash,
            )
            for n in range(options.learners)
        ]

    # --- who is there --------------------------------------------------------------------------

    def _client(self, name: str, machine: str, passing: Passing | None) -> FarBus:
        return FarBus(self.broker, name, machine, self.net, passing)

    def _machine(self, name: str, make: Make, crash: float) -> Machine:
        def failed(error: BaseException | None) -> None:
            self.found.counts[f"ended by itself: {_leaf(error)}"] += 1

        machine = Machine(self.loop, name, self.folder, self._client, make, failed)
        dice = Random(f"whole {self.seed}, {name} dies")

        def before(what: str) -> None:
            if self.scene.faulty and dice.random() < crash / DOES:
                self.found.counts["crashes"] += 1
                self._crash(machine, dice.uniform(0.5, 6.0))

        machine.before = before
        return machine

    def _computing(self, n: int, name: str) -> Callable[[], TinyComputing]:
        dice = Random(f"whole {self.seed}, {name}")
        step_s = self.options.step_s / self.options.speeds[n % len(self.options.speeds)]
        trains = partial(self.observer.trains, name)
        return lambda: TinyComputing(n, dice, step_s, self.broken, trains)

    def broken(self, invariant: str, text: str) -> None:
        """A promise was not kept."""
        self.found.violations.append(f"{invariant} at {self.loop.now:.2f} s: {text}")

    # --- from beginning to end -----------------------------------------------------------------

    async def play(self) -> Verdict:
        """Safety, then liveness."""
        self.coordinator.start()
        for machine in (*self.syncers, *self.learners):
            self.loop.call_later(self.rng.uniform(0.0, 2.0), machine.start)
        self._plan(self.machines)
        await self.user.begin()
        await asyncio.sleep(self.options.safety_s)
        await self._heal()
        await self._ends()
        await self._deleted()
        for machine in self.machines:
            machine.kill()
        self.found.violations += self.observer.watch.violations
        self.found.virtual_s = self.loop.now
        return self.found

    @property
    def machines(self) -> list[Machine]:
        return [self.coordinator, *self.syncers, *self.learners]

    async def _heal(self) -> None:
        self.scene.faulty = self.broker.squeezed = False
        self.net.heal()
        for machine in self.machines:
            if machine.process is not None:
                machine.process.thaw()
        self.observer.watch.healed()
        self.healed_at = self.loop.now
        await self.user.calm(self.options.quorum)

    async def _ends(self) -> None:
        """The run comes to its end in time, and everybody leaves it."""
        step_s, view = self.options.step_s, None
        while self.loop.now < self.healed_at + LIVENESS_S * step_s:
            view = await self.user.view() or view
            if view is not None:
                well_s = self.loop.now - self.healed_at
                for text in self.user.unheeded(view, well_s, step_s):
                    self.broken("commands", text)
                if well_s > BEYOND_S and self._beyond_help(view):
                    # Nobody can have it go on; but whoever says so can be stopped.
                    self.found.counts["beyond help"] += 1
                    await self.user.desire("stop")
                if view["state"] in OVER and not view["members"]:
                    self.found.rounds = (view["status"] or {"rounds_committed": 0})[
                        "rounds_committed"
                    ]
                    return
            await asyncio.sleep(LOOK_S * step_s)
        said = "nothing" if view is None else f"{view['state']}: {view['reason']}"
        self.broken("liveness", f"no end: {said}")

    def _beyond_help(self, view: dict[str, Any]) -> bool:
        """Whether no disk and no stream has the state any more, as the product says itself."""
        happened = self.found.counts
        lost = happened["disks lost"] and happened["tails lost"]
        return bool(lost and cannot_go_on(view["syncers"]))

    async def _deleted(self) -> None:
        """What is over can be deleted, and then nothing is left of it."""
        by = self.loop.now + DELETED_S
        while not await self.user.delete():
            if self.loop.now > by:
                self.broken("liveness", f"not deleted {DELETED_S:.0f} s after its end")
                return
            await asyncio.sleep(LOOK_S)
        name = self.spec.name
        if left := [s for s in subjects.run_streams(name) if self.broker.exists(s)]:
            self.broken("deletion", f"{', '.join(left)} outlived the run")

    # --- what goes wrong -----------------------------------------------------------------------

    def _plan(self, machines: list[Machine]) -> None:
        o, at = self.options, self._at
        for _ in range(o.syncer_hangs):
            at(lambda: self._freeze(self.rng.choice(self.syncers), self.rng.uniform(2.0, 15.0)))
        for _ in range(o.learner_hangs):
            at(lambda: self._freeze(self.rng.choice(self.learners), self.rng.uniform(1.0, 12.0)))
        for _ in range(o.partitions):
            at(lambda: self._cut(self.rng.choice(machines).name))
        for _ in range(o.slow_links):
            at(lambda: self._slow(self.rng.choice(machines).name))
        for _ in range(o.blackouts):
            at(partial(self._blackout, machines))
        for _ in range(o.outages):
            at(self._outage)
        for _ in range(o.squeezes):
            at(self._squeeze)
        for _ in range(o.tails):
            at(self._lose_tails)
        for _ in range(o.replaced):
            at(lambda: self._replace(self.rng.choice(machines)))
        for _ in range(o.lost_disks):
            at(self._lose_disks)
        user = self.user
        asked = (
            (o.wishes, user.wish),
            (o.checkpoints, user.checkpoint),
            (o.restores, user.restore),
            (int(o.stop), lambda: user.desire("stop")),
        )
        for count, ask in asked:
            for _ in range(count):
                at(lambda ask=ask: self._soon(ask()))  # type: ignore[misc]

    def _at(self, strike: Callable[[], object]) -> None:
        """Some time while anything may go wrong."""
        self.loop.call_later(self.rng.uniform(3.0, self.options.safety_s), self._strike, strike)

    def _strike(self, strike: Callable[[], object]) -> None:
        if self.scene.faulty:
            strike()

    def _crash(self, machine: Machine, away_s: float) -> None:
        machine.kill()
        # Not of the process that dies, should it be its own next step that is its last.
        self.loop.call_later(away_s, machine.start, context=self.net.outside)

    def _blackout(self, machines: list[Machine]) -> None:
        for machine in machines:
            self._crash(machine, self.rng.uniform(0.5, 8.0))

    def _lose_disks(self) -> None:
        for machine in self.syncers:
            self._replace(machine)

    def _freeze(self, machine: Machine, seconds: float) -> None:
        process = machine.process
        if process is not None and not process.frozen:
            self.found.counts["hangs"] += 1
            process.freeze()
            self.loop.call_later(seconds, process.thaw)

    def _cut(self, name: str) -> None:
        self.found.counts["partitions"] += 1
        link, way = self.net.link(name), self.rng.choice(["in", "out", "both"])

        def cut(up: bool) -> None:
            if way in ("out", "both"):
                link.out = up
            if way in ("in", "both"):
                link.into = up

        cut(False)
        self.loop.call_later(self.rng.uniform(1.0, 12.0), cut, True)

    def _slow(self, name: str) -> None:
        link = self.net.link(name)
        link.slow = True
        self.loop.call_later(self.rng.uniform(2.0, 12.0), setattr, link, "slow", False)

    def _outage(self) -> None:
        self.found.counts["outages"] += 1
        self.net.away = True
        self.loop.call_later(self.rng.uniform(1.0, 10.0), setattr, self.net, "away", False)

    def _squeeze(self) -> None:
        self.found.counts["squeezes"] += 1
        self.broker.squeezed = True
        self.loop.call_later(self.rng.uniform(2.0, 20.0), setattr, self.broker, "squeezed", False)

    def _lose_tails(self) -> None:
        """A power cut at the hub: of every stream but the tape, which is synced."""
        name = self.spec.name
        streams = (subjects.up_stream(name), subjects.dn_stream(name), subjects.state_stream(name))
        lost = [
            self.broker.lose(s, self.rng.randint(0, 3)) for s in streams if self.broker.exists(s)
        ]
        self.found.counts["tails lost"] += any(lost)

    def _replace(self, machine: Machine) -> None:
        """Another machine with an empty disk in its place."""
        self.found.counts["disks lost"] += 1
        machine.wipe()
        self.loop.call_later(self.rng.uniform(0.5, 6.0), machine.start)

    def _soon(self, work: Coroutine[Any, Any, object]) -> None:
        task: asyncio.Task[object] = self.loop.create_task(work)
        self.asked.append(task)


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


def one(seed: int, options: Options | None = None) -> Verdict:
    """One seed; an exception of the product is a violation too."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    found = Verdict(seed)

    async def main() -> Verdict:
        nonlocal found
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(seed, options or drawn(seed), Path(disk), loop)
        found = world.found
        return await world.play()

    values = constants.drawn(Random(f"constants {seed}"))
    with TemporaryDirectory(prefix="diloco-whole-", dir=memory) as disk, quiet(), put(values):
        try:
            return play(main(), Random(f"threads {seed}"))
        except* (Idle, Exception) as group:
            found.violations.append(f"crash: {group.exceptions[0]!r}")
    return found


def drawn(seed: int) -> Options:
    """As in the other worlds; but where a link carries few bytes, it carries what services say to
    each other beside the payloads."""
    options = Options.drawn(seed)
    return options.changed(link_bytes_per_s=options.link_bytes_per_s * SERVICES)


def main() -> None:
    """Exit status 1 if any promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--fresh", action="store_true", help="begin where nobody has looked yet")
    args = parser.parse_args()
    if args.fresh:
        args.first = fresh_seed()
        print(f"seeds from {args.first}", flush=True)
    began, broken, virtual_s = time.monotonic(), 0, 0.0
    counts: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.seeds):
        found = one(seed)
        broken, virtual_s = broken + bool(found.violations), virtual_s + found.virtual_s
        counts += found.counts
        for violation in found.violations:
            print(f"seed {seed:>6}  {violation}", flush=True)
    for what, count in counts.most_common():
        print(f"{count:>8}  {what}")
    seconds = time.monotonic() - began
    print(f"worlds {args.seeds}  broken {broken}  {virtual_s:.0f} virtual s  ({seconds:.0f} s)")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
