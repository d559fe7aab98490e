"""Takes simulated learners' processes away and brings them back, as a setting says."""

import random
from collections.abc import Sequence
from functools import partial

from diloco_simulator.learner_node import LearnerNode
from diloco_simulator.setting import Interruptions, Setting
from diloco_simulator.world import World

# Why a machine that was lent starts no process any more.
TAKEN = "the loan is over"


class Presence:
    """Of `nodes`, the first are the run's own; the rest is on loan."""

    def __init__(
        self, world: World, nodes: Sequence[LearnerNode], setting: Setting, seed: int
    ) -> None:
        self.world = world
        self.nodes = nodes
        self.setting = setting
        self.seed = seed
        self.struck = 0

    def begin(self) -> None:
        """At virtual time 0."""
        own = self.setting.learners
        for node in self.nodes[:own]:
            self._come(node)
        if (loan := self.setting.loan) is not None:
            for node in self.nodes[own:]:
                self.world.at(loan.begin_s, partial(self._come, node))
                self.world.at(loan.end_s, partial(self._take, node, loan.notice))

    def allocated_s(self, m: int, end_s: float) -> float:
        """Seconds until `end_s` that learner `m` was the run's, up or down."""
        loan = self.setting.loan
        begin_s = 0.0 if loan is None or m < self.setting.learners else loan.begin_s
        return max(0.0, min(self.nodes[m].left_at, end_s) - begin_s)

    def _come(self, node: LearnerNode) -> None:
        node.start()
        if self.setting.interruptions is not None:
            # Of its own, so that times depend on the seed and not on what else is drawn.
            rng = random.Random(f"{self.seed}/{node.name}/interruptions")
            self._strike_later(node, self.setting.interruptions, rng, 0.0)

    def _strike_later(
        self, node: LearnerNode, i: Interruptions, rng: random.Random, away_s: float
    ) -> None:
        seconds = away_s + rng.expovariate(1 / i.mtbi_s)
        self.world.after(seconds, lambda: self._strike(node, i, rng))

    def _strike(self, node: LearnerNode, i: Interruptions, rng: random.Random) -> None:
        if node.left:
            return
        away_s = rng.expovariate(1 / i.away_s) if i.away_s else 0.0
        self.struck += 1
        node.crash(away_s)
        self._strike_later(node, i, rng, away_s)

    def _take(self, node: LearnerNode, notice: bool) -> None:
        """Back to whoever lent it."""
        if node.left or (notice and node.life is not None and node.life.drain(TAKEN)):
            return
        if node.life is not None:
            node.gone(node.life, None)
        node.left, node.left_at = TAKEN, self.world.now
