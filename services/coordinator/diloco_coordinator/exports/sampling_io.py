"""The process that lets an exported model write: one at a time, heard piece by piece, then ended.

The coordinator holds no arrays. As exports are made by another program, so are samples of them.
Whoever asked may go away at any moment: what the process says goes into a queue that has room for
all of it, and the process ends by itself, or when its time is over, whoever still listens.
"""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import structlog

from diloco_coordinator.exports.child_io import (
    Start,
    Words,
    environment_of,
    killed,
    line_of,
    started,
    text_of,
)
from diloco_coordinator.exports.exporting_io import ExportsBusy
from diloco_shared import ambient
from diloco_shared.process.settings import ProcessSettings
from diloco_shared.protocol.samples import (
    LINE_BYTES_MAX,
    TOKENS_MAX,
    SampleAsked,
    SampleDone,
    SampleFailed,
    SampleLine,
    parse_line,
)

log = structlog.get_logger()

COMMAND = (sys.executable, "-m", "diloco_learner.sampling")
# Seconds that one may take in all: a model is read, compiled, and writes some hundred tokens. A
# model that takes longer is too large for the coordinator's processor.
SECONDS_MAX = 180.0
# Lines of one sample: its texts, its beginning, its end, and the reason of a failure.
LINES_MAX = TOKENS_MAX + 4
# What the process needs, as modules are called; the coordinator's own image has not all of it.
NEEDED = ("diloco_learner", "jax")
NOT_HERE = (
    "the coordinator lacks {missing}, which lets models write: install what learners need beside "
    "it (pip install 'decoupled-diloco[learner]'), or sample elsewhere with 'diloco generate'"
)

Told = Callable[[SampleLine], None]


class Sampler(Protocol):
    """Lets models write. Tests bring their own."""

    def hindrance(self) -> str:
        """Why none can write on this machine, and what to do; "" if one can."""

    async def sample(self, folder: Path, asked: SampleAsked, told: Told) -> None:
        """Until it is done or has failed, which is the last that is told. Cancelled, it leaves no
        process."""


@dataclass(frozen=True, slots=True)
class ChildSampler:
    """A process for each sample."""

    environment: Mapping[str, str]
    command: Sequence[str] = COMMAND
    seconds_max: float = SECONDS_MAX
    start: Start = started

    @classmethod
    def of(cls, settings: ProcessSettings) -> "ChildSampler":
        """On this machine's processor: its devices belong to whoever trains."""
        return cls(environment_of(settings) | {"JAX_PLATFORMS": "cpu"})

    def hindrance(self) -> str:
        """See `Sampler`."""
        missing = [name for name in NEEDED if find_spec(name) is None]
        return NOT_HERE.format(missing=" and ".join(missing)) if missing else ""

    async def sample(self, folder: Path, asked: SampleAsked, told: Told) -> None:
        """See `Sampler`."""
        # So that it ends with this process, however that goes.
        command = (*self.command, str(folder), "--owner", str(os.getpid()))
        try:
            process = await self.start(command, self.environment, LINE_BYTES_MAX, True)
        except OSError as error:
            told(SampleFailed(reason=f"no process can be started for it: {error}"[:500]))
            return
        heard = _Heard(told)
        try:
            async with asyncio.timeout(self.seconds_max), asyncio.TaskGroup() as tasks:
                tasks.create_task(_ask(process, asked))
                tasks.create_task(heard.lines(process))
                tasks.create_task(heard.words.hear(process))
                tasks.create_task(process.wait())
        except TimeoutError:
            heard.fail(
                f"it took longer than {self.seconds_max:.0f} s, which is all that a sample may "
                "take here: ask for fewer tokens, or sample with 'diloco generate'"
            )
        finally:
            await killed(process)
        heard.judge(process.returncode)


async def _ask(process: Process, asked: SampleAsked) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it ended before it read, and says why
        process.stdin.write(asked.model_dump_json().encode())
        await process.stdin.drain()
        process.stdin.close()


class _Heard:
    """What one process said."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.over = False
        self.words = Words("sample")

    async def lines(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await line_of(process.stdout):
            said = parse_line(line)
            if said is None:
                log.warning("a sample said something strange", line=text_of(line))
            elif not self.over:
                self.over = isinstance(said, SampleDone | SampleFailed)
                self.told(said)

    def fail(self, reason: str) -> None:
        if not self.over:
            self.over = True
            self.told(SampleFailed(reason=reason[:500]))

    def judge(self, code: int | None) -> None:
        """Whoever listens hears an end, whatever became of the process."""
        self.fail(f"the process that wrote it {self.words.ended(code)}")


class Samples:
    """One sample at a time, of all runs: it takes the coordinator's processor."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._task: asyncio.Task[None] | None = None
        self._begun_at = 0.0

    def begin(self, folder: Path, asked: SampleAsked) -> "Sample":
        """Start one. Raises ExportsBusy."""
        if self._task is not None and not self._task.done():
            since = ambient.monotonic() - self._begun_at
            raise ExportsBusy(f"another sample is being written since {since:.0f} s: wait for it")
        self._begun_at = ambient.monotonic()
        queue: asyncio.Queue[SampleLine] = asyncio.Queue()
        self._task = asyncio.create_task(self.sampler.sample(folder, asked, _bounded(queue)))
        return Sample(queue, self._task)


def _bounded(queue: "asyncio.Queue[SampleLine]") -> Told:
    """What is beyond measure is not kept: nobody asked for so many tokens."""

    def told(line: SampleLine) -> None:
        if queue.qsize() < LINES_MAX or isinstance(line, SampleDone | SampleFailed):
            queue.put_nowait(line)

    return told


class Sample:
    """One that is being written."""

    def __init__(self, queue: "asyncio.Queue[SampleLine]", task: "asyncio.Task[None]") -> None:
        self._queue = queue
        self._task = task

    async def next(self) -> SampleLine:
        """The next line; after the last one nobody asks."""
        waiting = asyncio.ensure_future(self._queue.get())
        try:
            await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and self._queue.empty():  # it failed, by a fault of ours
                error = None if self._task.cancelled() else self._task.exception()
                log.error("a sample failed", error=repr(error))
                return SampleFailed(reason="the coordinator made a mistake; its log says which")
            return await waiting
        finally:
            waiting.cancel()

    async def lines(self) -> AsyncIterator[SampleLine]:
        """Every line up to the last. Who stops listening ends the sample."""
        try:
            while True:
                line = await self.next()
                yield line
                if isinstance(line, SampleDone | SampleFailed):
                    return
        finally:
            await self.end()

    async def end(self) -> None:
        """Nothing is left of it. May be called again: its process is ended once."""
        if not self._task.cancelling():
            self._task.cancel()
        await asyncio.wait({self._task})
