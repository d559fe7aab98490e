"""Takes simulated learners' processes away and brings them back, as a setting says."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

from diloco_simulator.experiments.cluster import Cluster
from diloco_simulator.experiments.setting import Interruptions, Setting


class Presence:
    """Of a cluster's learners, the first are the run's own; the rest is on loan."""

    def __init__(self, cluster: Cluster, setting: Setting, seed: int) -> None:
        self.cluster = cluster
        self.names = list(cluster.learners)
        self.setting = setting
        self.seed = seed
        self.began_s = 0.0  # on the loop's clock, as all other times here are not
        self.struck = 0
        self.training: set[int] = set()
        self.left_s: dict[int, float] = {}  # for good
        self.over_s = 0.0  # when somebody trained last
        self.draining: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """The run is submitted."""
        self.began_s = self.cluster.loop.now
        own = self.setting.learners
        for m in range(own):
            self._may_be_struck(m)
        if (loan := self.setting.loan) is not None:
            for m in range(own, len(self.names)):
                self._after(loan.begin_s, partial(self._come, m))
                self._after(loan.end_s, partial(self._take, m, loan.notice))

    @property
    def now(self) -> float:
        """Virtual seconds since the run was submitted."""
        return self.cluster.loop.now - self.began_s

    def allocated_s(self, m: int, end_s: float) -> float:
        """Seconds until `end_s` that learner `m` was the run's, up or down."""
        loan = self.setting.loan
        begin_s = 0.0 if loan is None or m < self.setting.learners else loan.begin_s
        return max(0.0, min(self.left_s.get(m, end_s), end_s) - begin_s)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self.cluster.loop.call_later(seconds, act, context=self.cluster.net.outside)

    # --- as learners say -----------------------------------------------------------------------

    def trains(self, m: int) -> None:
        """A process of it has recovered."""
        self.training.add(m)

    def leaves(self, m: int) -> None:
        """It has done all that it will do for the run."""
        self._gone(m)
        self.left_s.setdefault(m, self.now)

    def _gone(self, m: int) -> None:
        if m in self.training:
            self.training.remove(m)
            self.over_s = self.now

    # --- who comes and goes --------------------------------------------------------------------

    def _come(self, m: int) -> None:
        self.cluster.learners[self.names[m]].start()
        self._may_be_struck(m)

    def _may_be_struck(self, m: int) -> None:
        if self.setting.interruptions is not None:
            # Of its own, so that times depend on the seed and not on what else is drawn.
            rng = random.Random(f"{self.seed}/{self.names[m]}/interruptions")
            self._strike_later(m, self.setting.interruptions, rng, 0.0)

    def _strike_later(self, m: int, i: Interruptions, rng: random.Random, away_s: float) -> None:
        self._after(away_s + rng.expovariate(1 / i.mtbi_s), partial(self._strike, m, i, rng))

    def _strike(self, m: int, i: Interruptions, rng: random.Random) -> None:
        if m in self.left_s:
            return
        away_s = rng.expovariate(1 / i.away_s) if i.away_s else 0.0
        self.struck += 1
        self._kill(m)
        self._after(away_s, partial(self._again, m))
        self._strike_later(m, i, rng, away_s)

    def _again(self, m: int) -> None:
        if m not in self.left_s:
            self.cluster.learners[self.names[m]].start()

    def _kill(self, m: int) -> None:
        self.cluster.learners[self.names[m]].kill()
        self._gone(m)

    def _take(self, m: int, notice: bool) -> None:
        """Back to whoever lent it."""
        if m in self.left_s:
            return
        if notice and m in self.training:
            drain = self.cluster.ask("POST", f"/members/{self.names[m]}/drain")
            task = self.cluster.loop.create_task(drain)
            self.draining.add(task)
            task.add_done_callback(self.draining.discard)
            return
        self._kill(m)
        self.left_s[m] = self.now
