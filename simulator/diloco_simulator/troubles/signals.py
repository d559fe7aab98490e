"""Supervisors that tell their processes to stop, as SIGTERM does, and start them again later.

Whoever does not end in the time that it is given is killed. Some supervisors do not wait for that.
"""

import math
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from diloco_simulator.checkers.polite_ends import NEAR_S, PoliteEnds, Told
from diloco_simulator.checkers.promises import Report
from diloco_simulator.virtual_loop import Hosted
from diloco_simulator.worlds.processes import Host

if TYPE_CHECKING:
    from diloco_simulator.inside.learners import Trained
    from diloco_simulator.worlds.world import World

# What supervisors give a process, in seconds, as `diloco up` does; a learner gets so much more than
# its DILOCO_STOP_S, as from Docker where nothing is set.
GIVEN_S, MORE_S = 8.0, 4.0
# Some supervisors are impatient: one kills what it told to stop, another tells it once more.
KILLS, AGAIN = 0.25, 0.15
# After so long, in virtual seconds: most processes end within a second.
IMPATIENT_S = (0.0, 1.5)
# Before it is started again, in virtual seconds.
AWAY_S = (0.2, 8.0)


class Signals:
    """Of one world, with dice of their own."""

    def __init__(self, world: "World") -> None:
        self.world, self.loop = world, world.loop
        self.rng = Random(f"told to stop {world.seed}")
        self.counts = world.found.counts
        self.ends = PoliteEnds(
            Report(world.broken, world.found.looks),
            world.broker,
            self._count,
            self._slow_s,
            near=world.options.delay_s <= NEAR_S and world.options.link_bytes_per_s == math.inf,
        )

    def _count(self, what: str) -> None:
        self.counts[what] += 1

    def _slow_s(self, machine: Host, since: float) -> float | None:
        """How long a checkpoint that is under way at `since`, or begun later, takes at most on the
        disk of this machine; None where it may fail."""
        world, o = self.world, self.world.options
        if since - o.disk_s >= world.healed_at:  # what is under way was begun after that
            return 0.0
        fails = o.disk_full or machine.host in world.disks.full_until or o.torn or o.hosts
        return None if fails else o.disk_s

    def trains(self, process: Hosted | None, trained: "Trained") -> None:
        """A learner's process begins to train."""
        if process is not None:
            self.ends.trains(process, trained)

    # --- what goes wrong -----------------------------------------------------------------------

    def plan(self) -> None:
        """Draw when somebody is told to stop."""
        for _ in range(self.world.options.told_to_stop):
            at = self.rng.uniform(3.0, self.world.options.safety_s)
            self.loop.call_later(at, self._strike)

    def _strike(self) -> None:
        if not self.world.scene.faulty:
            return
        machine = self.rng.choice(self.world.machines)
        away_s, impatience = self.rng.uniform(*AWAY_S), self.rng.random()
        soon_s = self.rng.uniform(*IMPATIENT_S)
        if (told := self.tell(machine, away_s)) is None:
            return
        if impatience < KILLS:
            self.loop.call_later(soon_s, self._kill, told, away_s)
        elif impatience < KILLS + AGAIN:
            self.loop.call_later(soon_s, self._again, told)

    def tell(self, machine: Host, away_s: float, *, well: bool = False) -> Told | None:
        """One process is told; it is started again so long after its end. None where none lives
        that could hear it. `well`: nothing goes wrong meanwhile."""
        process = machine.process
        if process is None or process.frozen or machine.told:
            return None
        role = self.world.observer.reached.role(machine.name)
        self.counts[f"told to stop: {role}"] += 1
        told = Told(machine, process, self.loop.now, self._given_s(machine), well)
        machine.stopped = partial(self._stopped, told, away_s)
        machine.stop()
        outside = self.world.net.outside
        self.loop.call_later(told.limit_s, self._late, told, away_s, context=outside)
        return told

    def _given_s(self, machine: Host) -> float:
        stop_s: float | None = getattr(getattr(machine.app, "settings", None), "stop_s", None)
        return GIVEN_S if stop_s is None else stop_s + MORE_S

    def _stopped(self, told: Told, away_s: float, error: BaseException | None) -> None:
        """It has ended by itself."""
        ended_early = getattr(getattr(told.process.app, "computing", None), "lost", "")
        fault = "" if error is None or ended_early else f"{type(error).__name__}: {error}"[:200]
        self.ends.ended(told, fault)
        self.world.start(told.machine, away_s)

    def _late(self, told: Told, away_s: float) -> None:
        if told.machine.process is told.process:
            self.counts["told to stop: killed after its time"] += 1
            self.ends.late(told)
            self.world.crash(told.machine, away_s)

    def _kill(self, told: Told, away_s: float) -> None:
        if told.machine.process is told.process:
            self.counts["told to stop: killed before its end"] += 1
            self.world.crash(told.machine, away_s)

    def _again(self, told: Told) -> None:
        if told.machine.process is told.process:
            self.counts["told to stop: told twice"] += 1
            told.machine.stop()
