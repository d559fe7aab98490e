"""Clogs: connections to the hub stand still for a while, and are released in another order.

A clog alone loses nothing. What waits on a connection arrives at once, and in its order, when the
connection is released; what waits on another one may have been sent before, and arrives later.
"""

from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING

from diloco_simulator.hub.net import Way
from diloco_simulator.worlds.processes import Host

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# They clog one after another within so long, stand still for so long, and are released one after
# another within so long, in virtual seconds. Together that is less than what is sent waits.
BEGUN_S, HELD_S, RELEASED_S = 1.0, (1.0, 10.0), (0.2, 6.0)
# Of the directions of a machine's connections, so many clog.
SHARE = 0.6


class Clogs:
    """Of one world, with dice of their own."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.dice = Random(f"whole {world.seed}, clogs")
        self.counts = world.found.counts

    def strike(self) -> None:
        """The connections of some machines clog."""
        there = [machine for machine in self.world.machines if machine.lives]
        if there:
            self.clog(self.dice.sample(there, self.dice.randint(1, len(there))), self.dice)

    def clog(self, machines: Iterable[Host], dice: Random) -> None:
        """Some directions of these machines' connections, in an order of their own."""
        ways = [way for m in machines for bus in m.buses for way in bus.ways if not way.clogged]
        ways = [way for way in ways if dice.random() < SHARE]
        if not ways:
            return
        self.counts["clogs"] += 1
        dice.shuffle(ways)
        loop, net, released = self.world.loop, self.world.net, list[int]()

        def release(number: int, way: Way) -> None:
            if net.release(way):
                released.append(number)

        def over() -> None:
            self.counts["released in another order"] += released != sorted(released)

        held_s, released_s = BEGUN_S + dice.uniform(*HELD_S), dice.uniform(*RELEASED_S)
        begun = sorted(dice.uniform(0.0, BEGUN_S) for _ in ways)
        for number, (way, after_s) in enumerate(zip(ways, begun, strict=True)):
            loop.call_later(after_s, self._begin, way)
            loop.call_later(held_s + dice.uniform(0.0, released_s), release, number, way)
        loop.call_later(held_s + released_s, over)

    def _begin(self, way: Way) -> None:
        if self.world.scene.faulty and not way.clogged:
            self.world.net.clog(way)
