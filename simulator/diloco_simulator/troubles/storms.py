"""Storms: the hub, a disk and the network fail together, as where they share a machine or a site.

Faults that are drawn one by one seldom meet. Each storm is one strike that brings several.
"""

from random import Random
from typing import TYPE_CHECKING

from diloco_simulator.troubles.clogs import Clogs
from diloco_simulator.troubles.disks import SPELL_S
from diloco_simulator.worlds.processes import Host

if TYPE_CHECKING:
    from diloco_simulator.troubles.troubles import Troubles

# The hub is killed so long after its disk became scarce, and is back after so long, in virtual
# seconds.
KILLED_S, BACK_S = (0.5, 5.0), (0.5, 6.0)
# Its disk is nearly full for so long after it came back, in virtual seconds.
SCARCE_S = (0.0, 12.0)
# A syncer in a storm dies in half of them, after so long, in virtual seconds.
DIES, DIES_S, AWAY_S = 0.5, (0.5, 8.0), (0.5, 6.0)


class Storms:
    """Of one world, with dice of their own."""

    def __init__(self, troubles: "Troubles", clogs: Clogs) -> None:
        self.troubles, self.clogs = troubles, clogs
        self.world = world = troubles.world
        self.dice = Random(f"whole {world.seed}, storms")
        self.counts = world.found.counts

    def strike(self) -> None:
        """One of them."""
        self.dice.choice([self._kill_hub, self._kill_hub, self._strike_syncer, self._elect])()

    def _some(self) -> list[Host]:
        """One machine or more."""
        machines = self.world.machines
        return self.dice.sample(machines, self.dice.randint(1, len(machines)))

    def _begins(self, what: str) -> None:
        self.counts["storms"] += 1
        self.counts[f"storms: {what}"] += 1

    # --- the hub is killed ---------------------------------------------------------------------

    def _kill_hub(self) -> None:
        """Its disk is nearly full, or full, and some machines are cut off; then it is killed."""
        broker, dice = self.world.broker, self.dice
        if self.world.net.gone or broker.disk_full or broker.leaderless:
            return
        self._begins("the hub is killed while its disk is nearly full")
        if dice.random() < 0.5:
            broker.disk_full = True
        else:
            broker.squeezed = True
        for machine in self._some():
            self.troubles.cut(machine.host, dice)
        self.world.loop.call_later(dice.uniform(*KILLED_S), self._killed)

    def _killed(self) -> None:
        """What was on its way is lost, as are its unsynced tails and everybody's connections."""
        world, net, dice = self.world, self.world.net, self.dice
        if not world.scene.faulty or net.gone:
            return
        net.away = True
        lost, back_s = self.troubles.server_ends(), dice.uniform(*BACK_S)
        self.troubles.server_begins(lost, dice, back_s)
        if not world.options.power_cuts:
            # Where the tape loses what it had synced, nobody could know of what both have lost.
            self.troubles.lose_tails(dice)
        world.loop.call_later(back_s, self._back)

    def _back(self) -> None:
        """With little room for a while."""
        broker, net = self.world.broker, self.world.net
        if not self.world.scene.faulty:
            return
        broker.restart()
        net.away = False
        broker.squeezed = True
        self.world.loop.call_later(self.dice.uniform(*SCARCE_S), setattr, broker, "squeezed", False)

    # --- others --------------------------------------------------------------------------------

    def _strike_syncer(self) -> None:
        """A syncer's disk is full while its connections clog; it may die of that."""
        world, dice = self.world, self.dice
        if not world.syncers:
            return
        self._begins("a syncer's disk fills while its connections clog")
        machine = dice.choice(world.syncers)
        self._fill(machine)
        self.clogs.clog([machine], dice)
        if dice.random() < DIES:
            world.loop.call_later(dice.uniform(*DIES_S), self._dies, machine, dice.uniform(*AWAY_S))

    def _fill(self, machine: Host) -> None:
        until = self.world.loop.now + self.dice.uniform(*SPELL_S)
        self.world.disks.full_until[machine.host] = until

    def _dies(self, machine: Host, away_s: float) -> None:
        if self.world.scene.faulty and machine not in self.world.lost:
            self.world.crash(machine, away_s)

    def _elect(self) -> None:
        """The hub's nodes lose their leader while connections clog, and a syncer's disk is full."""
        if self.world.broker.leaderless or self.world.net.gone:
            return
        self._begins("the hub's nodes elect while connections clog")
        if self.world.syncers:
            self._fill(self.dice.choice(self.world.syncers))
        self.clogs.clog(self._some(), self.dice)
        self.troubles.elect(self.dice)
