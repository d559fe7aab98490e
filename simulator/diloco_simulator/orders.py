"""Every command of a user takes effect, or is refused, within a stated time of virtual seconds.

Judged at once, in whatever state the run is, and not after the heal: as long as every shard has a
leader that can be reached and that trusts its lease, nothing else excuses a wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco_simulator.checkers import Report
from diloco_simulator.syncer_life import SyncerLife
from diloco_simulator.syncer_node import SyncerNode
from diloco_simulator.world import World

LOOK_S = 1.0
# Where a step takes a second. A record; the last round of every fragment, with pulls in vain; what
# is asked of a disk and of learners, one of which may stay silent (PARTS_S of the syncer's
# checkpoints.py is 600).
WITHIN_S = {"pause": 30.0, "quorum": 30.0, "stop": 60.0, "checkpoint": 700.0, "restore": 180.0}

Done = Callable[[SyncerLife], bool]


@dataclass(slots=True)
class Order:
    """`excused_at`: when somebody last had a reason to wait."""

    text: str
    done: Done
    excused_at: float


class Orders:
    """Of one world; the newest of a kind replaces those before it."""

    def __init__(self, world: World, syncers: Sequence[SyncerNode], report: Report) -> None:
        self.world, self.syncers, self.report = world, syncers, report
        self.pending: dict[str, Order] = {}
        self.leaders: list[SyncerLife] = []
        self.looking = False

    def given(self, kind: str, text: str, done: Done) -> None:
        """The user asks for something; `done`: whether a leader shows that it is so."""
        self.pending[kind] = Order(text, done, self.world.now)
        if not self.looking:
            self.looking = True
            self.world.after(LOOK_S, self._look)

    def _look(self) -> None:
        leaders = self._led()
        if leaders != self.leaders:
            self.leaders = leaders
            for order in self.pending.values():
                order.excused_at = self.world.now
        for kind, order in list(self.pending.items()):
            self._judge(kind, order, leaders)
        self.looking = bool(self.pending)
        if self.looking:
            self.world.after(LOOK_S, self._look)

    def _judge(self, kind: str, order: Order, leaders: list[SyncerLife]) -> None:
        if not leaders:
            order.excused_at = self.world.now
            return
        self.report.looked("commands")
        if all(order.done(life) or life.machine.history.outcome for life in leaders):
            del self.pending[kind]
            self.world.counts[f"{kind} took effect"] += 1
            return
        waited_s = self.world.now - order.excused_at
        if waited_s > WITHIN_S[kind] * self.world.options.step_s:
            del self.pending[kind]
            states = [life.machine.announcer.state(life.now) for life in leaders]
            said = "; ".join(f"{state}: {reason}" for state, reason in states)
            self.report("commands", f"{order.text} has no effect after {waited_s:.0f} s ({said})")

    def _led(self) -> list[SyncerLife]:
        """The leader of every shard, if each has one that nothing keeps from its work."""
        found: dict[int, SyncerLife] = {}
        for node in self.syncers:
            life = node.life
            if life is not None and node.reachable and self._works(life):
                found[node.shard.number] = life
        shards = len(self.syncers[0].hub.shards)
        return [found[n] for n in sorted(found)] if len(found) == shards else []

    def _works(self, life: SyncerLife) -> bool:
        following = life.following
        trusts = following is None or not following.lease.lapsed(life.now)
        return life.machine.leading and trusts and not self.world.away
