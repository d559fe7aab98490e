"""Process 0 of an island in a whole world: the product's learner, which computes with the others.

Its connections to them are `processes.Leading`; its trainer tells them every piece of work first.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from diloco_learner.app import Learner
from diloco_learner.data.batches_io import Batches
from diloco_learner.events import Leave
from diloco_learner.hosts.computing_io import unless_lost
from diloco_learner.hosts.held_anchors import Holder
from diloco_learner.hosts.receiving_io import fetched_by_all
from diloco_learner.training.computing_io import Built, Check, go_on
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.train import TrainLoop
from diloco_shared.spec.run import RunSpec
from diloco_simulator.islands.carrying import SHARED_MIN
from diloco_simulator.islands.processes import Island, Leading
from diloco_simulator.islands.trainer import LeadingTrainer
from diloco_simulator.islands.waiting import carried
from diloco_simulator.worlds.computing import TinyComputing

T = TypeVar("T")


class IslandComputing(TinyComputing):
    """What a learner of several hosts computes with; a new one with every process 0."""

    def __init__(self, island: Island, *of_one_host: Any) -> None:
        super().__init__(*of_one_host)
        self.leading = Leading(island)
        self.holder: Holder | None = None
        self.tell: Any = None  # an event

    def build(self, spec: RunSpec, check: Check = go_on, *, begun: bool = False) -> Built:
        built = super().build(spec, check, begun=begun)
        batches: Batches = built.batches
        self._close()
        trainer = LeadingTrainer(spec, self.learner, self.leading.work(), self.report)
        self.holder = trainer.holder
        return Built(trainer, batches, built.held_out)

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """Raises HostLost once another process is gone: by the product's own rule."""
        work = super().train(loop, mailbox)
        training = asyncio.get_running_loop().create_task(work)
        return await unless_lost(training, self.leading, self.tell)

    async def shown(self, loop: TrainLoop) -> None:
        await carried(partial(self.trains, loop, self.step_s))

    async def turn(self, turns: Any) -> Any:
        """A turn may wait for the other hosts."""
        return await carried(partial(next, turns, None))

    async def beside(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self.beside_s)
        return await carried(work)

    @property
    def lost(self) -> str:
        return self.leading.lost

    async def over(self, within_s: float | None = None) -> None:
        self._close()
        if not self.leading.lost:
            self.leading.end_work()

    def _close(self) -> None:
        """As the product's."""
        if self.holder is not None:
            self.holder.close()
        self.holder = None


class IslandLearner(Learner):
    """Process 0: the product's learner, once all hosts are there."""

    computing: IslandComputing
    once = True  # of several signals the first one counts: see `diloco_learner.__main__`

    async def run(self) -> None:
        self.computing.tell = self.tell
        leading = self.computing.leading
        if leading.carries:
            fetched_by_all(self.data, leading.carriers, SHARED_MIN)
        try:
            await leading.gather()
            await super().run()
        finally:
            leading.bye()
