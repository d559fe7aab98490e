"""One run of a whole world, from its submission to its deletion, and what must come of it."""

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_coordinator.runs.reasons import cannot_go_on
from diloco_shared import ambient
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers import at_the_end
from diloco_simulator.inside.observer import Observer
from diloco_simulator.people.orders import Tapes
from diloco_simulator.people.rest import RestCalls
from diloco_simulator.people.user import OVER, STOP, User
from diloco_simulator.worlds.leavings import left_of

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# Between two looks, in virtual seconds.
LOOK_S = 2.0
# A run that cannot go on says so long before, in virtual seconds, where a step takes one.
BEYOND_S = 120.0
# Whoever led a run lets go of it within half a minute of its end, should it have died over it.
DELETED_S = 90.0
# A coordinator looks every ten seconds for streams that were made again, and answers may be lost.
LEFTOVERS_S = 60.0
# Once all is well a run of some dozen steps of a second must be over within this time.
LIVENESS_S = 1200.0


class WatchedRun:
    """Of `world`; from now on what the hub takes of it is looked at."""

    def __init__(self, world: "World", spec: RunSpec, dice: Random) -> None:
        self.world = world
        self.spec = spec
        self.observer = Observer(world.scene, spec, world.broker)
        self.observer.islands = world.islands
        self.user = User(
            RestCalls(world.coordinator),
            spec,
            dice,
            world.found.counts,
            world.broken,
            Tapes(self.observer),
        )
        self.stopped = False  # because it lacks something
        self.well_since = self.led_since = 0.0  # since then all shards had a leader at every look
        self.led = False  # at the newest one
        self.lives = list[Any]()  # then: the processes of syncers

    async def begin(self) -> None:
        """Submit it."""
        self.world.begun.append(self)
        self.world.observers[self.spec.name] = self.observer
        if not self.world.scene.faulty:
            self.observer.watch.healed()
        await self.user.begin()

    async def ends(self) -> None:
        """It comes to its end in time, and everybody leaves it."""
        world, view = self.world, None
        self.well()
        since, step_s = self.well_since, world.options.step_s
        while world.loop.now < since + LIVENESS_S * step_s:
            view = await self.look() or view
            if view is not None:
                if world.loop.now - since > BEYOND_S * step_s:
                    await self._beyond(view)
                # A syncer that never comes back may keep its part of a run that was ended by force.
                there = set(view["members"]) - self._lost()
                if view["state"] in OVER and not there:
                    status = view["status"] or {"rounds_committed": 0}
                    world.found.rounds += status["rounds_committed"]
                    at_the_end.look(self.observer)
                    return
            await asyncio.sleep(LOOK_S * step_s)
        said = "nothing" if view is None else f"{view['state']}: {view['reason']}"
        world.broken("liveness", f"no end of {self.spec.name}: {said}")

    def well(self) -> None:
        """From now on what is ordered has its time."""
        self.well_since = self.led_since = self.world.loop.now

    async def look(self) -> dict[str, Any] | None:
        """The run as its user sees it, and whether what was ordered is so. None: no answer."""
        if (view := await self.user.view()) is None:
            return None
        now, over = self.world.loop.now, view["state"] in OVER
        if over and view["status"] and view["status"]["forced"]:
            self._forced()
        elif not over:
            self.led = self._led(view)
            # Whoever led is shown as leading for as long as its key lives.
            before, self.lives = self.lives, [machine.process for machine in self.world.syncers]
            self.led_since = self.led_since if self.led and self.lives == before else now
        for text in self.user.unheeded(view, now - self.well_since, now - self.led_since):
            self.world.broken("commands", text)
        await self.world.visitors.begin_again(view)
        return view

    def _forced(self) -> None:
        """The coordinator ended it: only where some shard had no leader since it was to stop."""
        asked, led_s = self.user.orders.get("desired"), self.world.loop.now - self.led_since
        if asked is None or asked.order.text != STOP or not self.led:  # when it was looked at last
            return
        if ambient.monotonic() - asked.at < led_s:
            self.world.broken("commands", "a run is ended by force, and every shard had a leader")

    def _led(self, view: dict[str, Any]) -> bool:
        """Whether every shard has a leader."""
        leading = {s["shard"] for s in view["syncers"] if s["state"] == "leading"}
        return len(leading) == self.world.options.shards

    async def _beyond(self, view: dict[str, Any]) -> None:
        """Where nobody can have the run go on, it says so and can be stopped."""
        why = self._lacks(view) or self._gone(view)
        if not why or view["state"] in OVER or self.stopped:
            return
        self.world.found.counts[f"without {why}"] += 1
        if not view["reason"]:
            self.world.broken("liveness", f"{view['state']} without {why}, and no word of it")
        self.stopped = await self.user.desire("stop") // 100 == 2

    def _lacks(self, view: dict[str, Any]) -> str:
        """Who is missing for good; "" where all that a run needs is there.

        A shard's syncers keep its state: where all of them are lost nobody takes their place, as
        long as they may come back.
        """
        world, lost = self.world, self._lost()
        shown = {s["shard"] for s in view["syncers"]}
        there = {s["shard"] for s in view["syncers"] if s["id"] not in lost}
        if len(world.syncers) < world.options.shards or shown - there:
            return "a syncer"
        return "learners" if len(world.learners) < self.spec.membership.learners_min else ""

    def _lost(self) -> set[str]:
        """Names that nobody has any more; that of a second process its first one still has."""
        world = self.world
        return {m.name for m in world.lost} - {m.name for m in world.machines}

    def _gone(self, view: dict[str, Any]) -> str:
        """Whether no disk and no stream has the state any more, as the product says itself."""
        lost = self.world.found.counts["tails lost"]
        return "a state" if lost and cannot_go_on(view["syncers"]) else ""

    async def deleted(self) -> None:
        """What is over can be deleted, and then nothing is left of it."""
        world = self.world
        by = world.loop.now + DELETED_S
        while not await self.user.delete():
            if world.found.counts["hubs restored"]:
                # Its end need not be in the backup: it goes on then, and must be ended once more.
                await self.user.desire("stop")
            if world.loop.now > by:
                world.broken("liveness", f"not deleted {DELETED_S:.0f} s after its end")
                return
            await asyncio.sleep(LOOK_S)
        name = self.spec.name
        # Somebody may have made a stream again who had not heard yet: a coordinator looks for that.
        # Files go as soon as whoever has them hears of it.
        by = world.loop.now + LEFTOVERS_S
        while left := left_of(world, name):
            if world.loop.now > by:
                break
            await asyncio.sleep(LOOK_S)
        world.found.looks["deletion"] += 1
        if left:
            world.broken("deletion", f"{', '.join(left)} outlived the run")
