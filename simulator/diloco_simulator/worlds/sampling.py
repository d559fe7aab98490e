"""Samples of a whole world: a program that lets an exported model write, as a coordinator's child.

Who starts, hears and ends it is the product's. What it writes is no model's, since tiny models have
no words: every piece of text tells its number, so that whoever reads sees what is missing. Its
troubles have dice of their own.
"""

import asyncio
import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_coordinator.api import samples_io
from diloco_coordinator.exports.sampling_io import COMMAND, SECONDS_MAX, ChildSampler
from diloco_shared.protocol.samples import (
    SampleAsked,
    SampleBegun,
    SampleDone,
    SampleFailed,
    SampleLine,
    SampleText,
)
from diloco_simulator.checkers.exports import WEIGHTS
from diloco_simulator.virtual_loop import Hosted, current
from diloco_simulator.worlds.programs import Program

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# What a sample meets, by how often, in a world of faults.
NOT_STARTED, FAILS, DIES, HANGS, CHATTERS = 0.1, 0.1, 0.15, 0.1, 0.2
# How often a world's model passes for one that others know: only such a one is let write.
KNOWN = 0.7
# Until the model is there, and before each piece of text, in virtual seconds.
READ_S, PIECE_S = (0.5, 8.0), (0.0, 2.0)
# As long as one that hangs hangs: longer than it may.
HANGS_S = 2 * SECONDS_MAX


class VirtualSampler:
    """What all coordinators of a world start, one sample after the other."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = Random(f"samples {world.seed}")
        self.counts = world.found.counts
        # What was killed must not be closed by a collection of garbage: it would tidy up.
        self.programs: list[_Sample] = []
        self.known = Random(f"known models {world.seed}").random() < KNOWN
        self.of_product = ChildSampler({}, start=self._start)

    async def _start(
        self, command: Sequence[str], environment: Mapping[str, str], size: int, asks: bool
    ) -> Any:
        """In the place of `child_io.started`."""
        process = current()
        if process is None or self.strikes(NOT_STARTED):
            raise OSError(errno.ENOMEM, "no memory")
        self.counts["samples begun"] += 1
        program = _Sample(self, process, Path(command[len(COMMAND)]), size)
        self.programs.append(program)
        program.runs(program.writes)
        return program

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block, perhaps, whatever has weights can be let write."""
        kept = samples_io.CONFIG
        if self.known:
            samples_io.CONFIG = WEIGHTS
        try:
            yield
        finally:
            samples_io.CONFIG = kept

    def strikes(self, often: float) -> bool:
        """Whether this happens now."""
        return self.world.scene.faulty and self.rng.random() < often

    def left(self) -> list[str]:
        """Those that still write."""
        return [p.process.name for p in self.programs if p.lives]


class _Sample(Program):
    """The process of one sample."""

    def __init__(
        self, sampler: VirtualSampler, owner: Hosted, folder: Path, line_bytes_max: int
    ) -> None:
        self.sampler = sampler
        self.folder = folder
        name = f"{owner.name}/sample-{len(sampler.programs)}"
        super().__init__(sampler.world.loop, name, owner, line_bytes_max, asks=True)

    async def writes(self) -> int:
        """Its exit status, once it has written what it was asked for."""
        asked = SampleAsked.model_validate_json(await self.told())
        rng, strikes = self.sampler.rng, self.sampler.strikes
        await asyncio.sleep(rng.uniform(*READ_S))
        if strikes(FAILS) or not self.folder.is_dir():
            self._say(SampleFailed(reason="the model cannot be read"))
            return 1
        self._say(SampleBegun())
        dies = rng.randrange(asked.tokens) if strikes(DIES) else -1
        hangs = rng.randrange(asked.tokens) if strikes(HANGS) else -1
        for number in range(asked.tokens):
            if number == dies:
                self.warns("killed")
                self.kill()
                return 1
            if strikes(CHATTERS):
                self.says("careful")
                self.warns("careful")
            await asyncio.sleep(HANGS_S if number == hangs else rng.uniform(*PIECE_S))
            self._say(SampleText(text=f" {number}"))
        self._say(SampleDone(pieces=asked.tokens))
        return 0

    def _say(self, line: SampleLine) -> None:
        self.says(line.model_dump_json())
