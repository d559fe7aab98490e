"""What a user orders once all is well, one after another: a pause, in it a checkpoint, its end,
another quorum, and in some worlds the way back to a checkpoint.

What was ordered before has its time first. Then nothing hides that an order is ignored: no fault is
in its way, and none that follows takes its place.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_shared.protocol.messages import TapeCheckpoint, TapeRecord, TapeRestore
from diloco_simulator.inside.learners import SeenLife
from diloco_simulator.people.orders import Checkpoint, Restore
from diloco_simulator.people.user import OVER, WITHIN_S

if TYPE_CHECKING:
    from diloco_simulator.worlds.watched_run import WatchedRun

# A run that is led now and then alone has no more time than this to go back.
BACK_S = 400.0
# Between two looks, in virtual seconds.
LOOK_S = 1.0
# A run that has no leader of each shard after so long may never have one, where a step takes one.
PATIENCE_S = 120.0
# In a pause rounds that were open are closed, and steps that were begun end; then nothing happens
# for as long: so many virtual seconds and steps.
SETTLES, RESTS = (10.0, 5.0), (5.0, 3.0)
# In so many worlds the run goes back in the end.
GOES_BACK = 0.5


class Over(Exception):
    """Nobody can take an order: the run is over, or nobody leads it."""


class Heeding:
    """Of the first run of a world."""

    def __init__(self, run: "WatchedRun") -> None:
        self.run = run
        self.world, self.user, self.watch = run.world, run.user, run.observer.watch
        self.rng = Random(f"orders once all is well {run.world.seed}")
        self.step_s = run.world.options.step_s
        self.goes_back = Random(f"back once all is well {run.world.seed}").random() < GOES_BACK

    async def play(self) -> None:
        """Until all of them were heeded, or the run is over."""
        try:
            self.user.expects(self.run.observer.checkpoint)
            await self._settled()
            await self._orders(lambda: self.user.desire("pause"))
            await self._rests()
            # Refused where one is being made.
            number, asked_at = 0, self.world.loop.now
            if await self.user.until_answered(self.user.checkpoint) // 100 == 2:
                number = self._number()
                await self._settled()
            await self._orders(lambda: self.user.desire("resume"))
            now = self.user.tapes.quorum(self.run.spec)
            others = {*range(1, self.run.spec.membership.learners_min + 1)} - {now}
            if others:
                other = self.rng.choice(sorted(others))
                await self._orders(lambda: self.user.quorum(other))
            if number:
                await self._kept(number, asked_at)
            if self.goes_back:
                await self._back()
            self.world.found.counts["orders once all is well"] += 1
        except Over:
            return
        finally:
            # How soon everybody is merged counts from here: a pause keeps all of them waiting.
            self.watch.healed()

    async def _orders(self, ask: Callable[[], Awaitable[int]]) -> None:
        if await self.user.until_answered(ask) // 100 != 2:
            raise Over  # since the last look
        await self._settled()

    async def _settled(self) -> None:
        """What was ordered is so, or breaks its promise, and the run is led. Raises Over."""
        until = self.world.loop.now + PATIENCE_S * self.step_s
        await self._look()
        while self.user.awaits or not self.run.led:
            if self.world.loop.now > until:
                raise Over
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> dict[str, Any] | None:
        view = await self.run.look()
        if view is not None and view["state"] in OVER:
            raise Over
        return view

    # --- a checkpoint, and the way back ----------------------------------------------------------

    def _number(self) -> int:
        asked = self.user.orders.get("checkpoint")
        return asked.order.number if asked and isinstance(asked.order, Checkpoint) else 0

    async def _kept(self, number: int, asked_at: float) -> None:
        """What was ordered is kept: nothing is in its way that could make it fail."""
        until = self.world.loop.now + PATIENCE_S * self.step_s
        while self.world.loop.now < until:
            # What a leader had begun before another one took its place is given up.
            if self.run.led_since > asked_at:
                return
            for record in self._records(0):
                if isinstance(record, TapeCheckpoint) and record.number == number:
                    if record.outcome == "failed":
                        said = f"checkpoint {number} fails though all is well: {record.reason}"
                        self.world.broken("commands", said)
                    if record.outcome != "begun":
                        self.watch.report.looked("commands")
                        return
            await asyncio.sleep(LOOK_S)
            await self._look()

    def _records(self, shard: int) -> list[TapeRecord]:
        return [record for _, record in self.run.observer.records[shard]]

    async def _back(self) -> None:
        """The run goes back: to give that up is no way to fulfil it, once all is well."""
        if await self.user.restore(PATIENCE_S) // 100 != 2:
            return  # since the last look it was ended, or nothing was kept
        asked = self.user.orders["restore"]
        assert isinstance(asked.order, Restore)
        serial, text, asked_at = asked.order.serial, asked.order.text, self.world.loop.now
        while not all(self._went(n, serial) for n in range(self.world.options.shards)):
            view = await self._look()
            shown = view is not None and view["status"] and view["status"]["restores"] >= serial
            went = any(self._went(n, serial) for n in range(self.world.options.shards))
            waited_s = self.world.loop.now - max(asked_at, self.run.led_since)
            if (shown and not went) or waited_s > WITHIN_S["restore"]:
                why = "given up" if shown else f"not so after {waited_s:.0f} s"
                self.world.broken("commands", f"{text} is accepted, and {why}, though all is well")
                return
            if self.world.loop.now - asked_at > BACK_S * self.step_s:
                raise Over
            await asyncio.sleep(LOOK_S)
        self.watch.report.looked("commands")
        self.world.found.counts["went back once all is well"] += 1

    def _went(self, shard: int, serial: int) -> bool:
        records = self._records(shard)
        return any(isinstance(r, TapeRestore) and r.serial >= serial for r in records)

    async def _rests(self) -> None:
        """A paused run begins no round, and its learners take no step."""
        began_at = self.world.loop.now
        await self._wait(*SETTLES)
        pulled = len(self.run.observer.reached.pulled)
        lives = [life for life in self._lives() if life.gives and life.able_at < began_at]
        steps = [life.loop.exchange.counters.step for life in lives]
        await self._wait(*RESTS)
        if self.run.led_since > began_at:
            return  # whoever leads next shows it later
        more = len(self.run.observer.reached.pulled) - pulled
        view = await self.run.look()
        if view is None or view["state"] != "paused":
            said = "nothing" if view is None else f"{view['state']}: {view['reason']}"
            self.world.broken("commands", f"a paused run shows {said}")
        if more:
            self.world.broken("commands", f"a paused run begins {more} rounds")
        for life, before in zip(lives, steps, strict=True):
            if taken := life.loop.exchange.counters.step - before:
                learner = life.loop.exchange.learner
                self.world.broken("commands", f"{learner} takes {taken} steps in a pause")

    async def _wait(self, seconds: float, steps: float) -> None:
        await asyncio.sleep(seconds + steps * self.step_s)
        await self._look()

    def _lives(self) -> list[SeenLife]:
        found = self.watch.of[0].members.lives.values()
        return [life for life in found if isinstance(life, SeenLife)]
