"""A run that begins with a checkpoint of the first one, once that is deleted: it must end too.

Nobody looks at what it computes, since its tape begins in the midst; only at what becomes of it.
"""

from random import Random
from typing import TYPE_CHECKING

from diloco_shared.protocol.checkpoints import parse_reference
from diloco_simulator.whole.watched_run import WatchedRun

if TYPE_CHECKING:
    from diloco_simulator.whole.world import World

# How many worlds have one, where there is a checkpoint.
SHARE = 0.6
NAME = "sim-heir"
# It does so many steps more than the checkpoint has.
STEPS = 12


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
    steps = chosen["stamp"]["steps"] + STEPS
    budget = world.spec.budget.model_copy(update={"steps": steps, "tokens": None, "seconds": None})
    heir = Heir(world, world.spec.model_copy(update={"name": NAME, "budget": budget}), dice)
    heir.ref = chosen["ref"]
    world.found.counts["heirs"] += 1
    return heir
