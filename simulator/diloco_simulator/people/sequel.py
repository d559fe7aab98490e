"""Later runs on the stack of a whole world: whoever worked for the one before must come to them.

Of a later run the name is the first one's, given again after that was deleted; or it has its own,
and the first of them may wait for members while the world's run is there. Some are stopped, and
around the end of some the leader dies.
"""

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.spec.run import RunSpec
from diloco_simulator.people.user import STOP
from diloco_simulator.worlds.computing import tiny
from diloco_simulator.worlds.tiny import spec_of
from diloco_simulator.worlds.watched_run import WatchedRun

if TYPE_CHECKING:
    from diloco_simulator.people.visitors import Visitors
    from diloco_simulator.worlds.world import World


# They are short: their ends are what matters.
STEPS = 12
# A name that waits for members.
NEXT = "sim-next"
# A leader dies, or the user stops the run, within this time of its submission, in virtual seconds.
LATE_S = 25.0


class Sequel:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.dice = Random(f"sequels {world.seed}")
        self.of_stops = Random(f"stops of sequels {world.seed}")
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
        world, stopping = self.world, None
        if self.dice.random() < 0.5:
            machine = self.dice.choice(world.syncers or world.learners)
            world.loop.call_later(self.dice.uniform(0.0, LATE_S), world.crash, machine, 2.0)
        elif self.of_stops.random() < 0.5:
            stopping = world.loop.create_task(self._stopped(run))
        await run.ends()
        if stopping is not None:
            stopping.cancel()  # it was over before
        await run.deleted()

    async def _stopped(self, run: WatchedRun) -> None:
        """Nobody dies: whoever leads it ends it."""
        await asyncio.sleep(self.of_stops.uniform(0.0, LATE_S))
        if await run.user.desire(STOP) // 100 == 2:
            self.world.found.counts["later runs stopped"] += 1


# --------------------------------------------------------------------------------------------------
# A second run, begun with a checkpoint of the first: made in the middle, stopped and deleted.

# Within this time a copy is gone once all is well, in virtual seconds of a step of one.
GONE_S = 200.0
LOOK_S = 1.0


class Copies:
    """One world's; there is one at a time."""

    def __init__(self, visitors: "Visitors") -> None:
        self.visitors = visitors
        self.world = visitors.world
        self.name = ""  # of one that may be there

    async def make(self) -> None:
        """Of a checkpoint that is there."""
        ask, rng = self.visitors.ask, self.visitors.rng
        _, said = await ask("GET", f"{self.visitors.run}/checkpoints", may=(200, 404))
        found = (said or {}).get("checkpoints", [])
        if not found or self.name:
            return
        self.name = f"copy-{rng.randrange(100)}"
        body = {**self.world.spec.model_dump(mode="json", exclude={"id"}), "name": self.name}
        status = await begun_with(self.visitors, rng, rng.choice(found), body)
        self.world.found.counts[f"copies answered with {status}"] += 1
        await asyncio.sleep(rng.uniform(0.0, 10.0))
        await ask("POST", f"/runs/{self.name}/stop", may=(200, 404, 409))
        await ask("DELETE", f"/runs/{self.name}", may=(204, 404, 409))

    async def remove(self) -> None:
        """Stopped and deleted, until nothing is left of it."""
        if self.name:
            await removed(self.visitors, self.name)


async def begun_with(
    visitors: "Visitors", rng: Random, chosen: dict[str, Any], body: dict[str, Any]
) -> int:
    """A run that is begun with a checkpoint: by restoring it as a new run, or by submitting one.
    `body`: the run, as it is submitted. What it is answered with."""
    if rng.random() < 0.5:
        path = f"{visitors.run}/checkpoints/{chosen['number']}/restore"
        asked, good = {"as": body["name"]}, 202
    else:
        path, asked, good = f"/checkpoints/submit?checkpoint={chosen['ref']}", body, 201
    status, _ = await visitors.ask("POST", path, asked, may=(good, 404, 409, 422))
    return status


async def removed(visitors: "Visitors", name: str) -> None:
    """A run that somebody began beside the world's own: stopped and deleted, with all of it."""
    world, path = visitors.world, f"/runs/{name}"
    until = world.loop.now + GONE_S * world.options.step_s
    while True:
        await visitors.until("POST", f"{path}/stop", may=(200, 404, 409))
        status, said = await visitors.until("DELETE", path, may=(204, 404, 409))
        left = [s for s in subjects.run_streams(name) if world.broker.exists(s)]
        # Where there was none when they asked, one may begin yet: the answer to whoever submitted
        # it was lost, and the submission is still being carried out.
        if status == 204 or (status == 404 and not left and not visitors.rest.posted):
            break
        if world.loop.now > until:
            if status == 409:
                visitors.broken(f"{name} cannot be deleted: {said['detail']}")
            break
        world.found.counts["runs begun behind their deletion"] += status == 404
        await asyncio.sleep(LOOK_S)
    if left:
        visitors.broken(f"{', '.join(left)} outlived {name}")


# --------------------------------------------------------------------------------------------------
# A run that begins with a checkpoint of the first one, once that is deleted: it must end too.
#
# Nobody looks at what it computes, since its tape begins in the midst; only at what becomes of it.

# How many worlds have one, where there is a checkpoint.
SHARE = 0.6
NAME = "sim-heir"
# It does so many steps more than the checkpoint has.
HEIR_STEPS = 12


class Heir(WatchedRun):
    """Of one world. `ref`: the checkpoint it begins with."""

    ref = ""

    async def begin(self) -> None:
        """Submit it with the checkpoint."""
        await self.user.begin(f"/checkpoints/submit?checkpoint={self.ref}")

    async def play(self) -> None:
        """From its submission to its deletion."""
        await self.begin()
        await self.ends()
        await self.deleted()


async def heir_of(world: "World") -> Heir | None:
    """One, or none."""
    dice = Random(f"heir {world.seed}")
    if dice.random() >= SHARE:
        return None
    _, said = await world.visitors.until("GET", "/checkpoints", may=(200,))
    mine = f"{world.spec.name}."
    found = [c for c in said["checkpoints"] if parse_reference(c["ref"])[1].startswith(mine)]
    if not found:
        return None
    chosen = dice.choice(found)
    steps = chosen["stamp"]["steps"] + HEIR_STEPS
    budget = world.spec.budget.model_copy(update={"steps": steps, "tokens": None, "seconds": None})
    heir = Heir(world, world.spec.model_copy(update={"name": NAME, "budget": budget}), dice)
    heir.ref = chosen["ref"]
    world.found.counts["heirs"] += 1
    return heir
