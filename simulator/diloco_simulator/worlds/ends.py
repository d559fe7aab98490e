"""Short runs one after another on the product's own edges: syncers, coordinator and REST handlers.

    python -m diloco_simulator.worlds.ends --seeds 50

Two syncers, a coordinator and two learners that compute next to nothing share a bus in memory with
seeded delays; time is virtual. Every run is begun, stopped, left, deleted; some leaders are killed
around the end. Once a run's end is shown, nobody is given to it again, and within a bound nobody
works for it, it can be deleted, and the next one begins.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.api.runs_io import Runs
from diloco_coordinator.api.sse_io import EventStreams
from diloco_coordinator.runs.assigning_io import keep_assigned
from diloco_coordinator.runs.ending_io import keep_ending
from diloco_coordinator.runs.registry_io import MIRRORED, Registry
from diloco_shared.bus.port import BusError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Assignment
from diloco_shared.protocol.wire import decode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.hub.net import Net
from diloco_simulator.virtual_loop import Idle, VirtualLoop, play
from diloco_simulator.worlds.computing import TinyComputing
from diloco_simulator.worlds.options import Options, fresh_seed
from diloco_simulator.worlds.processes import Host, Kind, Passing, learner, syncer
from diloco_simulator.worlds.world import quiet

# A run is over within this time of its stop, left and deleted within this time of its end, and the
# next one has a leader within this time of its submission: leases are 3 and 5 s, and 5 s is what a
# key of a dead member lives.
OVER_S, LEFT_S, BEGIN_S = 60.0, 30.0, 30.0
# Between two looks, in virtual seconds.
LOOK_S = 0.1
# A learner's step, in virtual seconds.
STEP_S = 1.0
RUNS = 6


@dataclass(slots=True)
class Ends:
    """What became of one seed."""

    seed: int
    violations: list[str] = field(default_factory=list)
    ended: int = 0
    killed: int = 0
    took_over: int = 0
    virtual_s: float = 0.0


class Missed(Exception):
    """Something did not come about in time."""


class EndsWorld:
    """One seed's."""

    def __init__(self, seed: int, folder: Path, runs: int, loop: VirtualLoop) -> None:
        self.rng = Random(f"ends {seed}")
        self.folder, self.runs, self.loop = folder, runs, loop
        self.found = Ends(seed)
        self.broker = MemoryBroker()
        options = Options.calm(delay_s=self.rng.choice([0.001, 0.01, 0.05]))
        self.net = Net(loop, Random(f"net {seed}"), options, Counter())
        self.registry = Registry(self._client("coordinator", "coordinator", None))
        self.api = Runs(self.registry, Guard(self.registry, "admin"), EventStreams(self.registry))
        self.settled: set[str] = set()  # ids of runs whose end was shown

    def _client(self, name: str, machine: str, passing: Passing | None) -> FarBus:
        return FarBus(self.broker, name, machine, self.net, passing)

    async def play(self) -> Ends:
        """All runs, one after another."""
        await self.registry.prepare()

        def machine(name: str, kind: Kind) -> Host:
            return Host(self.loop, name, self.folder, self._client, kind)

        syncers = [machine(name, syncer) for name in ("syncer-0", "syncer-1")]
        learners = [
            machine(name, partial(learner, computing=self._computing(n)))
            for n, name in enumerate(("learner-0", "learner-1"))
        ]
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self.registry.watch(bucket)) for bucket in MIRRORED]
            work.append(tasks.create_task(keep_assigned(self.registry)))
            work.append(tasks.create_task(keep_ending(self.registry)))
            work.append(tasks.create_task(self._watch_assignments()))
            for each in (*syncers, *learners):
                each.start()
            try:
                for n in range(self.runs):
                    await self._one(f"run-{n}", syncers)
            except Missed as missed:
                self._broken(str(missed))
            for each in (*syncers, *learners):
                each.kill()
            for task in work:
                task.cancel()
        self.found.virtual_s = asyncio.get_running_loop().time()
        return self.found

    def _computing(self, n: int) -> Callable[[], TinyComputing]:
        dice = Random(f"ends {self.found.seed}, learner {n}")
        return lambda: TinyComputing(n, dice, STEP_S, lambda _, text: self._broken(text))

    def _broken(self, text: str) -> None:
        at = asyncio.get_running_loop().time()
        self.found.violations.append(f"end at {at:.2f} s: {text}")

    # --- one run -------------------------------------------------------------------------------

    async def _one(self, name: str, syncers: list[Host]) -> None:
        spec = RunSpec.model_validate(
            {
                "name": name,
                "algorithm": {"fragments": 2, "sync_every_steps": 8},
                "membership": {"learners_min": 2, "syncers": 2},
                "budget": {"steps": 1000},
            }
        )
        await self.api.begin(spec)
        await self._comes(f"{name} has no leader", BEGIN_S, lambda: bool(self._leader(name)))
        await asyncio.sleep(self.rng.uniform(0.0, 6.0))
        await self.api.update(name, "", desired="stopped")
        if self.rng.random() < 1 / 3:
            await self._kill_leader(name, syncers)
        await self._comes(f"{name} is not over", OVER_S, lambda: self.registry.over(name))
        self.settled.add(str(self.registry.runs[name].spec["id"]))
        await self._comes(f"{name} holds members", LEFT_S, lambda: self._left(name))
        await asyncio.sleep(self.rng.uniform(0.0, 3.0))
        await self._deleted(name)
        self.found.ended += 1

    async def _comes(self, missing: str, within_s: float, there: Callable[[], bool]) -> None:
        """Wait; Missed if it does not come about."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while not there():
            if loop.time() > until:
                raise Missed(f"{missing} within {within_s:.0f} s ({self._said()})")
            await asyncio.sleep(LOOK_S)

    def _said(self) -> str:
        """What a user would see."""
        r = self.registry
        shown = [f"{n}: {s.state}, settled {s.settled}" for n, s in sorted(r.statuses.items())]
        return f"{'; '.join(shown)}; assigned {sorted(r.assigned)}; waiting {r.plan.waiting}"

    def _leader(self, run: str) -> str:
        status = self.registry.statuses.get(run)
        return status.leader if status is not None else ""

    def _left(self, run: str) -> bool:
        return run not in self.registry.assigned.values() and not self.registry.working(run)

    async def _kill_leader(self, run: str, syncers: list[Host]) -> None:
        """Some time around the end; its supervisor starts it again."""
        await asyncio.sleep(self.rng.uniform(0.0, 6.0))
        leader = next((s for s in syncers if s.name == self._leader(run)), None)
        if leader is None:
            return
        self.found.killed += 1
        leader.kill()
        await asyncio.sleep(self.rng.uniform(0.3, 4.0))
        leader.start()

    async def _deleted(self, run: str) -> None:
        loop = asyncio.get_running_loop()
        until, why = loop.time() + LEFT_S, ""
        while run in self.registry.runs:
            if loop.time() > until:
                raise Missed(f"{run} is not deleted within {LEFT_S:.0f} s: {why} ({self._said()})")
            try:
                await self.api.delete(run)
            except Problem as problem:
                why = str(problem)
            except BusError as error:
                why = str(error)
            await asyncio.sleep(LOOK_S)

    async def _watch_assignments(self) -> None:
        """Nobody is given to a run whose end was shown."""
        async with self._client("watch", "watch", None).kv_watch(subjects.ASSIGNMENTS) as entries:
            async for entry in entries:
                given = None if entry.value is None else decode(entry.value, Assignment)
                if given is not None and given.run and given.run_id in self.settled:
                    self._broken(f"{given.member} is given to {given.run}, which is over")


def one(seed: int, runs: int = RUNS) -> Ends:
    """One seed; an exception of the product is a violation too."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    found = Ends(seed)

    async def main() -> Ends:
        nonlocal found
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = EndsWorld(seed, Path(disk), runs, loop)
        found = world.found
        return await world.play()

    with TemporaryDirectory(prefix="diloco-ends-", dir=memory) as disk, quiet():
        try:
            return play(main(), Random(f"threads {seed}"))
        except* (Idle, Exception) as group:
            found.violations.append(f"crash: {group.exceptions[0]!r}")
    return found


def main() -> None:
    """Exit status 1 if any run did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first one")
    parser.add_argument("--runs", type=int, default=RUNS, help="one after another in each world")
    parser.add_argument("--fresh", action="store_true", help="begin where nobody has looked yet")
    args = parser.parse_args()
    if args.fresh:
        args.first = fresh_seed()
        print(f"seeds from {args.first}", flush=True)
    began, broken, ended = time.monotonic(), 0, 0
    for seed in range(args.first, args.first + args.seeds):
        found = one(seed, args.runs)
        ended, broken = ended + found.ended, broken + bool(found.violations)
        for violation in found.violations:
            print(f"seed {seed:>6}  {violation}", flush=True)
    print(f"worlds {args.seeds}  broken {broken}  runs {ended}  ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
