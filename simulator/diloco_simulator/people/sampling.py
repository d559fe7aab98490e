"""Somebody who lets a world's exported models write, and reads what comes.

Text comes in order and without gaps, and whoever reads to the end hears that it is the end, or why
nothing more comes. Who goes away early takes the sample along. The dice are their own.
"""

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_coordinator.exports.sampling_io import SECONDS_MAX
from diloco_simulator.people.rest import NoAnswer
from diloco_simulator.worlds.sampling import VirtualSampler

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# How many come to a world, and how often two come at a time or one goes away early.
COMERS, TOGETHER, LEAVES = (2, 3, 5), 0.3, 0.3
# How long somebody listens who stays: longer than a sample may take; and who does not.
STAYS_S, LEAVES_S = SECONDS_MAX + 60.0, (0.5, 12.0)
# Tokens asked for, each a piece of text.
TOKENS = (1, 4, 12)
# Within this time nothing is left of a sample that nobody reads, and once all is well somebody is
# answered, in virtual seconds.
LEFT_S, WELL_S = 30.0, SECONDS_MAX + 60.0
# 404: the run is not there yet; 409: nothing to sample from; 422: the model cannot write; 429:
# another sample goes on.
MAY = (0, 200, 404, 409, 422, 429, 503)


class Sampling:
    """Of one world, whose coordinators let models write by `sampler`."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = Random(f"samples of somebody {world.seed}")
        self.counts = world.found.counts
        self.sampler = VirtualSampler(world)
        self.reading = 0  # how many read now

    def plan(self) -> None:
        """Draw who comes when."""
        for _ in range(self.rng.choice(COMERS)):
            at = self.world.options.safety_s * self.rng.uniform(0.3, 1.0)
            for _ in range(1 + (self.rng.random() < TOGETHER)):
                self.world.loop.call_later(at, self._come)

    def _come(self) -> None:
        if self.world.scene.faulty:
            self.world.visitors.begin(self.reads())

    async def reads(self) -> None:
        """One sample, to its end or not."""
        visitors, alone = self.world.visitors, not self.reading
        path = f"/runs/{self.world.spec.name}/samples"
        leaves = self.rng.random() < LEAVES
        seconds = self.rng.uniform(*LEAVES_S) if leaves else STAYS_S
        tokens = self.rng.choice(TOKENS)
        body = {"prompt": "once", "tokens": tokens}
        self.reading += 1
        # One of somebody who went away may end before the answer is here.
        writes = self.sampler.left()
        try:
            status, said = await visitors.rest.listen(path, "", seconds, "POST", body)
        except NoAnswer:
            return
        finally:
            self.reading -= 1
        self.counts[f"samples answered with {status}"] += 1
        if status not in MAY or (status == 429 and alone and not (writes or self.sampler.left())):
            self.broken(f"a sample is answered with {status}: {said[:200]}")
        if status == 200:
            self._judge(said, tokens, leaves)

    def _judge(self, said: str, tokens: int, leaves: bool) -> None:
        lines = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.world.found.looks["samples"] += 1
        text = [event["text"] for event in events if "text" in event]
        if text != [f" {n}" for n in range(len(text))] or not events[0].get("begun"):
            self.broken(f"a sample came as {lines}")
        if "done" in events[-1]:
            self.counts["samples read to their end"] += 1
            if len(text) != tokens:
                self.broken(f"a sample of {tokens} pieces is done after {len(text)}")
        elif "failed" in events[-1]:
            self.counts["samples that failed in the middle"] += 1
        elif leaves:
            self.counts["samples that nobody read to their end"] += 1

    async def well(self, *, exported: bool) -> None:
        """All is well: what is there can be let write, and what is not is said not to be."""
        path, until = f"/runs/{self.world.spec.name}/samples", self.world.loop.now + WELL_S
        body = {"tokens": self.rng.choice(TOKENS)}
        wanted = 200 if exported and self.sampler.known else 409
        rest, status, said = self.world.visitors.rest, 0, ""
        while status != wanted and self.world.loop.now < until:
            try:
                status, said = await rest.listen(path, "", STAYS_S, "POST", body)
            except NoAnswer:
                status, said = 0, ""
            await asyncio.sleep(1.0)
        self.world.found.looks["samples"] += 1
        if status != wanted or (status == 200 and '"done": true' not in said):
            self.broken(f"all is well, and a sample is answered with {status}: {said[-200:]}")
        self.counts["samples written once all is well"] += status == 200

    async def nothing_left(self) -> None:
        """Soon no program writes any more: nobody reads."""
        until = self.world.loop.now + LEFT_S
        while left := self.sampler.left():
            if self.world.loop.now > until:
                self.broken(f"nobody reads, and they still write: {left}")
                return
            await asyncio.sleep(1.0)

    def broken(self, text: str) -> None:
        self.world.broken("samples", text)
