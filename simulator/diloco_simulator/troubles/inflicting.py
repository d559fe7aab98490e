"""Faults that a world's processes inflict on themselves, asked for by REST as in any deployment.

Killing and standing still strike the virtual process: a real signal would strike the whole world.
"""

import asyncio
import contextvars
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco_shared.process.serving import Worker
from diloco_simulator.virtual_loop import Hosted
from diloco_simulator.worlds.processes import App, CoordinatorApp, Host

if TYPE_CHECKING:
    from diloco_simulator.people.visitors import Visitors
    from diloco_simulator.worlds.world import World

# Before what killed itself is started again, in virtual seconds.
AWAY_S = 2.0
# Until a fault that was confirmed has struck, in virtual seconds: it is told first.
STRUCK_S = 5.0


def arm(world: "World", machine: Host, app: App, process: Hosted) -> None:
    """What its agent does to a process of this machine."""
    if isinstance(app, CoordinatorApp):
        agent = app.coordinator.faults
    else:
        assert isinstance(app, Worker)
        agent = app.faults

    def kill() -> None:
        world.found.counts["killed on request"] += 1
        if machine.process is process:
            world.crash(machine, AWAY_S)

    def hang(seconds: float) -> None:
        world.found.counts["hangs on request"] += 1
        process.freeze()
        # Of no process: it would stand still with this one.
        world.loop.call_later(seconds, process.thaw, context=contextvars.Context())

    agent.abilities = replace(agent.abilities, kill=kill, hang=hang)


class Inflicting:
    """One visitor's faults."""

    def __init__(self, visitors: "Visitors") -> None:
        self.visitors = visitors
        self.world = visitors.world
        # Of requests: a second one with the same key is told of the first one's fault.
        self.keys: set[str] = set()

    async def inflict(self) -> None:
        """On somebody, now or soon; what is confirmed strikes."""
        rng, world = self.visitors.rng, self.world
        kind = rng.choice(["kill", "kill", "hang", "slow", "nan"])
        # Only learners have steps to slow down, and gradients.
        of = world.machines if kind in ("kill", "hang") or not world.learners else world.learners
        machine = rng.choice(of)
        body: dict[str, Any] = {"kind": kind, "target": machine.name}
        for_s, factor = rng.uniform(0.5, 8.0), rng.uniform(1.0, 4.0)
        after_s = rng.choice([0.0, 0.0, 3.0])
        if kind in ("hang", "slow"):
            body["duration_s"] = for_s
        if kind == "slow":
            body["factor"] = factor
        if machine in world.learners and rng.random() < 0.3:
            body["at_step"] = rng.randint(0, 20)
        else:
            body["after_s"] = after_s
        before, starts, key = machine.process, machine.starts, f"{body}"
        again = key in self.keys
        self.keys.add(key)
        status, said = await self.visitors.ask(
            "POST", "/chaos", body, may=(202, 404, 409), headers={"Idempotency-Key": key}
        )
        if status != 202:
            return
        world.found.counts["faults asked for again"] += again
        world.found.counts[f"faults confirmed: {kind}"] += 1
        await self.visitors.ask("GET", "/chaos")
        if kind != "kill" or "at_step" in body or before is None or world.troubles.twins or again:
            return
        asked_at = world.loop.now
        await asyncio.sleep(body["after_s"] + STRUCK_S)
        # Who stands still meanwhile is struck when it goes on, and has words to write before that.
        still = before.frozen or before.thawed_at > asked_at
        unharmed = machine.process is before and machine.starts == starts and not still
        if unharmed and world.scene.faulty and not world.scene.options.outages:
            self.visitors.broken(f"{said['id']} is to kill {machine.name}, which lives")
