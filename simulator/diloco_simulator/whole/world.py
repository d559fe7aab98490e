"""One seeded world of whole processes: coordinator, syncers, learners, a hub, and what goes wrong.

    python -m diloco_simulator.whole.world --seeds 20

First anything may go wrong and nothing wrong may be said (safety); then all is well again, and the
run must come to its end in time (liveness). A seed is a run.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import structlog

from diloco_coordinator.edges.assigning import keep_assigned
from diloco_coordinator.edges.auth import Guard
from diloco_coordinator.edges.ending import keep_ending
from diloco_coordinator.edges.registry import MIRRORED, Registry
from diloco_coordinator.edges.runs import Runs
from diloco_coordinator.edges.sse import Streams
from diloco_shared.config import RunSpec
from diloco_shared.edges.memory_broker import MemoryBroker
from diloco_simulator.options import Options
from diloco_simulator.virtual_loop import Idle, VirtualLoop, play
from diloco_simulator.whole.computing import TinyComputing
from diloco_simulator.whole.far_bus import FarBus
from diloco_simulator.whole.observer import Observer, Scene
from diloco_simulator.whole.processes import Machine, Make, learner, syncer

RUN = "run"
# Between two looks, in virtual seconds.
LOOK_S = 0.5
# Once all is well a run of some dozen steps of a second must be over within this time.
LIVENESS_S = 600.0
# Whoever worked for it has left it within this time of its end.
LEFT_S = 60.0
SAFETY_S = 40.0
STEPS = 40


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

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = Random(f"whole {seed}")
        self.folder = folder
        self.found = Verdict(seed)
        self.broker = MemoryBroker()
        self.clients = 0
        self.delay_s = self.rng.choice([0.001, 0.01, 0.05])
        self.machines: list[Machine] = []

    def client(self, name: str) -> FarBus:
        """With dice of its own: what others draw, and when, changes nothing for it."""
        self.clients += 1
        dice = Random(f"whole {self.found.seed}, {name}, {self.clients}")
        return FarBus(self.broker, name, dice, self.delay_s)

    def broken(self, invariant: str, text: str) -> None:
        """A promise was not kept."""
        at = asyncio.get_running_loop().time()
        self.found.violations.append(f"{invariant} at {at:.2f} s: {text}")

    async def play(self) -> Verdict:
        """To the end of the run."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        bus = self.client("coordinator")
        self.registry = registry = Registry(bus)
        self.api = Runs(registry, Guard(registry, "admin"), Streams(registry), str(self.folder))
        await registry.prepare()
        for n in range(2):
            self._machine(loop, name := f"syncer-{n}", syncer(name, self.folder))
        for n in range(3):
            name = f"learner-{n}"
            computing = self._computing(n, name)
            self._machine(loop, name, learner(name, self.folder, computing))
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(registry.watch(bucket)) for bucket in MIRRORED]
            work.append(tasks.create_task(keep_assigned(registry)))
            work.append(tasks.create_task(keep_ending(registry)))
            for machine in self.machines:
                machine.start()
            await self._run()
            for machine in self.machines:
                machine.kill()
            for task in work:
                task.cancel()
        self.found.virtual_s = loop.time()
        return self.found

    def _computing(self, n: int, name: str) -> Callable[[], TinyComputing]:
        dice = Random(f"whole {self.found.seed}, {name}")
        trains = lambda loop: self.observer.trains(name, loop)  # noqa: E731
        return lambda: TinyComputing(n, dice, 1.0, self.broken, trains)

    def _machine(self, loop: VirtualLoop, name: str, make: Make) -> None:
        def failed(error: BaseException | None) -> None:
            self.found.counts[f"{name} ended: {error!r}"[:200]] += 1

        self.machines.append(Machine(loop, name, self.folder, self.client, make, failed))

    async def _run(self) -> None:
        spec = RunSpec.model_validate(
            {
                "name": RUN,
                "algorithm": {"fragments": 2, "sync_every_steps": 8, "overlap_steps": 2},
                "membership": {"learners_min": 2, "syncers": 2},
                "budget": {"steps": STEPS},
            }
        )
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.scene = Scene(loop, Options.calm(learners=3), self.found.counts)
        self.observer = Observer(self.scene, spec, self.broker)
        await self.api.begin(spec)
        while loop.time() < SAFETY_S:
            await asyncio.sleep(self.rng.uniform(2.0, 15.0))
            self._strike()
        self.scene.faulty = False
        self.observer.watch.healed()
        over_by = loop.time() + LIVENESS_S
        while not self._over():
            if loop.time() > over_by:
                self.broken("liveness", f"no end within {LIVENESS_S:.0f} s: {self._said()}")
                break
            await asyncio.sleep(LOOK_S)
        self.found.violations += self.observer.watch.violations
        status = self.registry.statuses.get(RUN)
        self.found.rounds = status.rounds_committed if status is not None else 0

    def _strike(self) -> None:
        """Something goes wrong."""
        loop, machine = asyncio.get_running_loop(), self.rng.choice(self.machines)
        seconds = self.rng.uniform(0.5, 8.0)
        process = machine.process
        if process is None or process.frozen:
            return
        if self.rng.random() < 0.5:
            self.found.counts["killed"] += 1
            machine.kill()
            loop.call_later(seconds, machine.start)
        else:
            self.found.counts["frozen"] += 1
            process.freeze()
            loop.call_later(seconds, process.thaw)

    def _over(self) -> bool:
        return self.registry.over(RUN) and RUN not in self.registry.assigned.values()

    def _said(self) -> str:
        status = self.registry.statuses.get(RUN)
        return "nothing" if status is None else f"{status.state}: {status.reason}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Thousands of lines a second of virtual processes would say nothing to anybody."""
    kept = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**kept)


def one(seed: int) -> Verdict:
    """One seed; an exception of the product is a violation too."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(prefix="diloco-whole-", dir=memory) as disk, _quiet():
        world = World(seed, Path(disk))
        try:
            return play(world.play(), Random(f"threads {seed}"))
        except* (Idle, Exception) as group:
            world.found.violations.append(f"crash: {group.exceptions[0]!r}")
    return world.found


def main() -> None:
    """Exit status 1 if any promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    args = parser.parse_args()
    began, broken, virtual_s = time.monotonic(), 0, 0.0
    for seed in range(args.first, args.first + args.seeds):
        found = one(seed)
        broken, virtual_s = broken + bool(found.violations), virtual_s + found.virtual_s
        print(f"seed {seed:>5}  {found.rounds:>4} rounds  {found.virtual_s:6.0f} s  "
              f"{dict(found.counts)}", flush=True)  # fmt: skip
        for violation in found.violations:
            print(f"    {violation}", flush=True)
    seconds = time.monotonic() - began
    print(f"worlds {args.seeds}  broken {broken}  {virtual_s:.0f} virtual s  ({seconds:.1f} s)")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
