"""An operator who exchanges processes once all is well, one after another, as for an upgrade.

The coordinator, whoever leads and a learner are told to stop, each when the one before is back.
Then nothing excuses what is lost at the end of one.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from diloco_learner.app import Learner
from diloco_simulator.checkers.polite_ends import Told
from diloco_simulator.people.user import OVER
from diloco_simulator.worlds.processes import CoordinatorApp, Host
from diloco_syncer.app import Syncer

if TYPE_CHECKING:
    from diloco_simulator.worlds.watched_run import WatchedRun

# Between two looks, in virtual seconds.
LOOK_S = 0.5
# A process that is not there, or not at work, after so long may never be, where a step takes one.
PATIENCE_S = 60.0
# A standby leads within so many virtual seconds of the leader's end: it looks ten times in each 3 s
# of the lease. Over links that take their time it needs so many round trips more.
TAKES_OVER_S, ROUND_TRIPS = 10.0, 12
# A new process begins so long after the end of the one before, in virtual seconds; where a standby
# is to lead, it has the time for that.
AWAY_S, LONG_AWAY_S = 1.0, 15.0


class Gone(Exception):
    """The run is over, or nobody is there to be exchanged."""


class Exchanging:
    """Of the first run of a world."""

    def __init__(self, run: "WatchedRun") -> None:
        self.run, self.world = run, run.world
        self.rng = Random(f"exchanged once all is well {run.world.seed}")
        self.step_s = run.world.options.step_s

    async def play(self) -> None:
        """One of each kind, unless the run is over before."""
        kinds = [self._coordinator, self._leader, self._learner]
        self.rng.shuffle(kinds)  # a short run is over before the last one
        try:
            await self._until(lambda: not self.world.troubles.restarts)
            for exchange in kinds:
                await exchange()
            self.world.found.counts["processes exchanged once all is well"] += 1
        except Gone:
            return
        finally:
            self.run.observer.watch.healed()

    # --- one after another ---------------------------------------------------------------------

    async def _coordinator(self) -> None:
        """While somebody asks it something that the hub must answer."""
        machine = self.world.coordinator
        await self._until(lambda: _listens(machine))
        user, quorum = self.run.user, self.world.options.quorum
        if not await user.quorum(quorum):
            return  # it waits for what the hub told it before all was well
        asking = asyncio.ensure_future(user.quorum(quorum))
        await asyncio.sleep(0)
        if self._tell(machine) is None:
            await asyncio.wait({asking})
            return
        status = await asking
        # An answer waits for its row in the audit log, and no longer than the process has to stop.
        slow = self.world.options.disk_s > 2.0
        if not status and self.world.signals.ends.near and not slow:
            self.world.broken("stops", "a coordinator that is told to stop leaves a request open")
        self.world.found.counts["requests answered at a stop"] += bool(status)
        await self._until(lambda: _listens(machine))
        await user.until_answered(lambda: user.quorum(quorum))
        await self._look()

    async def _leader(self) -> None:
        reached, shard = self.run.observer.reached, self.rng.randrange(self.world.options.shards)
        await self._until(lambda: self._leads(reached.leaders[shard]) is not None)
        name, term = reached.leaders[shard], reached.terms[shard]
        machine, stands_by = self._leads(name), self._stands_by(shard)
        assert machine is not None
        told = self._tell(machine, LONG_AWAY_S if stands_by else AWAY_S)
        if told is None:
            return
        await self._until(lambda: machine.process is not told.process)
        ended_at = self.world.loop.now
        await self._until(lambda: reached.terms[shard] > term)
        took_s = self.world.loop.now - ended_at
        if stands_by:
            self.world.found.counts["takeovers after a stop"] += 1
            if took_s > TAKES_OVER_S + 2 * ROUND_TRIPS * self.world.options.delay_s:
                text = f"{name} was told to stop, and no standby led for {took_s:.1f} s"
                self.world.broken("stops", text)

    async def _learner(self) -> None:
        await self._until(lambda: bool(self._training()))
        machine = self.rng.choice(self._training())
        if (told := self._tell(machine)) is not None:
            await self._until(lambda: machine.process is not told.process)
            await self._until(lambda: machine in self._training())

    def _tell(self, machine: Host, away_s: float = AWAY_S) -> Told | None:
        return self.world.signals.tell(machine, away_s, well=True)

    # --- who is there --------------------------------------------------------------------------

    def _leads(self, name: str) -> Host | None:
        """Whoever leads for all that is known, if it does."""
        for machine in self.world.syncers:
            app = machine.app
            if machine.name == name and machine.lives and isinstance(app, Syncer) and app.leader:
                return machine
        return None

    def _stands_by(self, shard: int) -> bool:
        """Whether somebody could lead at once: it has executed the tape. Where messages take their
        time and chunks are tiny, a standby is behind for minutes."""
        records = self.run.observer.records[shard]
        newest = records[-1][0] if records else 0
        apps = [machine.app for machine in self.world.syncers if machine.lives]
        syncers = [app for app in apps if isinstance(app, Syncer)]
        there = [a.candidate for a in syncers if a.membership.record.tape_seq >= newest]
        able = [c for c in there if c and c.leader is None and not c.keeper.lease.why_not]
        return any(c.shard == shard and c.spec.name == self.run.spec.name for c in able)

    def _training(self) -> list[Host]:
        """Learners that have taken a step."""
        return [m for m in self.world.learners if m.lives and _steps(m)]

    # --- waiting -------------------------------------------------------------------------------

    async def _until(self, there: Callable[[], bool]) -> None:
        """Raises Gone."""
        until = self.world.loop.now + PATIENCE_S * self.step_s
        while not there():
            if self.world.loop.now > until or self.run.observer.watch.ended:
                raise Gone
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        view = await self.run.look()
        if view is not None and view["state"] in OVER:
            raise Gone


def _listens(machine: Host) -> bool:
    app = machine.app
    return machine.lives and isinstance(app, CoordinatorApp) and app.listens


def _steps(machine: Host) -> bool:
    app = machine.app
    loop = app.work.train_loop if isinstance(app, Learner) and app.work is not None else None
    return loop is not None and loop.left is None and loop.exchange.counters.step > 0
