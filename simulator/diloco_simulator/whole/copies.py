"""A second run, begun with a checkpoint of the first: made in the middle, stopped and deleted."""

import asyncio
from typing import TYPE_CHECKING

from diloco_shared.protocol import subjects

if TYPE_CHECKING:
    from diloco_simulator.whole.visitors import Visitors

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
        """By restoring as a new run, or by submitting one with a checkpoint."""
        ask, rng = self.visitors.ask, self.visitors.rng
        _, said = await ask("GET", f"{self.visitors.run}/checkpoints", may=(200, 404))
        found = (said or {}).get("checkpoints", [])
        if not found or self.name:
            return
        self.name = f"copy-{rng.randrange(100)}"
        chosen = rng.choice(found)
        if rng.random() < 0.5:
            path = f"{self.visitors.run}/checkpoints/{chosen['number']}/restore"
            status, _ = await ask("POST", path, {"as": self.name}, may=(202, 404, 409, 422))
        else:
            body = {**self.world.spec.model_dump(mode="json", exclude={"id"}), "name": self.name}
            path = f"/checkpoints/submit?checkpoint={chosen['ref']}"
            status, _ = await ask("POST", path, body, may=(201, 404, 409, 422))
        self.world.found.counts[f"copies answered with {status}"] += 1
        await asyncio.sleep(rng.uniform(0.0, 10.0))
        await ask("POST", f"/runs/{self.name}/stop", may=(200, 404, 409))
        await ask("DELETE", f"/runs/{self.name}", may=(204, 404, 409))

    async def remove(self) -> None:
        """Stopped and deleted, until nothing is left of it."""
        if self.name:
            await removed(self.visitors, self.name)


async def removed(visitors: "Visitors", name: str) -> None:
    """A run that somebody began beside the world's own: stopped and deleted, with all of it."""
    world, path = visitors.world, f"/runs/{name}"
    until = world.loop.now + GONE_S * world.options.step_s
    while True:
        await visitors.until("POST", f"{path}/stop", may=(200, 404, 409))
        status, said = await visitors.until("DELETE", path, may=(204, 404, 409))
        if status != 409:
            break
        if world.loop.now > until:
            visitors.broken(f"{name} cannot be deleted: {said['detail']}")
            return
        await asyncio.sleep(LOOK_S)
    if left := [s for s in subjects.run_streams(name) if world.broker.exists(s)]:
        visitors.broken(f"{', '.join(left)} outlived {name}")
