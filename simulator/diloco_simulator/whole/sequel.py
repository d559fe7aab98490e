"""Later runs on the stack of a whole world: whoever worked for the one before must come to them.

Of a later run the name is the first one's, given again after that was deleted; or it has its own,
and the first of them may wait for members while the world's run is there. Some are stopped, and
around the end of some the leader dies.
"""

import asyncio
from random import Random
from typing import TYPE_CHECKING

from diloco_shared.config import RunSpec
from diloco_simulator.whole.computing import tiny
from diloco_simulator.whole.spec import spec_of
from diloco_simulator.whole.watched_run import WatchedRun

if TYPE_CHECKING:
    from diloco_simulator.whole.world import World

# They are short: their ends are what matters.
STEPS = 12
# A name that waits for members.
NEXT = "sim-next"


class Sequel:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.dice = Random(f"sequels {world.seed}")
        # Of the later ones the first may be submitted at once.
        self.specs = [self._spec(n) for n in range(world.case.sequels)]
        self.waiting: tuple[WatchedRun, asyncio.Task[None]] | None = None
        if self.specs and self.specs[0].name == NEXT:
            run = WatchedRun(world, self.specs.pop(0), self.dice)
            self.waiting = run, world.loop.create_task(self._submitted(run))

    def _spec(self, n: int) -> RunSpec:
        options = self.world.options.changed(steps=STEPS, budget="steps")
        spec = tiny(spec_of(options, self.world.seed + 1 + n))
        return spec.model_copy(update={"name": NEXT}) if self.dice.random() < 0.5 else spec

    async def _submitted(self, run: WatchedRun) -> None:
        await asyncio.sleep(self.dice.uniform(5.0, 30.0))
        await run.begin()

    async def play(self) -> None:
        """The world's run is deleted: these end in their turn."""
        counts = self.world.found.counts
        if self.waiting is not None:
            run, submitted = self.waiting
            await submitted
            counts["a run that waited"] += 1
            await self._ended(run)
        for spec in self.specs:
            run = WatchedRun(self.world, spec, self.dice)
            await run.begin()
            counts["a name again"] += spec.name == self.world.spec.name
            counts["a run after another"] += 1
            await self._ended(run)

    async def _ended(self, run: WatchedRun) -> None:
        world = self.world
        if self.dice.random() < 0.5:
            machine, at_s = self.dice.choice(world.syncers or world.learners), 25.0
            world.loop.call_later(self.dice.uniform(0.0, at_s), world.crash, machine, 2.0)
        await run.ends()
        await run.deleted()
