"""The process that makes an export: started, heard, and ended with the coordinator.

The coordinator holds no arrays, and what reads a whole model must not take its memory or its event
loop. So an export is another program's work, of which this knows its arguments and its lines.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from diloco_coordinator.exports.exports import ExportRecord
from diloco_shared.process.faults import in_a_task
from diloco_shared.process.settings import ProcessSettings
from diloco_shared.process.stopping import how_ended
from diloco_shared.protocol.exports import (
    LINE_BYTES_MAX,
    ExportDone,
    ExportFailed,
    ExportMoved,
    parse_line,
)

log = structlog.get_logger()

COMMAND = (sys.executable, "-m", "diloco_learner.exporting")
# Silence in seconds after which it hangs: by itself it gives up after five minutes without a chunk.
SILENCE_S = 900.0
# It leaves the processor to whoever answers requests.
NICENESS = 10
# After its pipes are closed, or it is killed, a process is gone at once; a hung disk may hold it.
ENDING_S = 10.0

Moved = Callable[[ExportMoved], None]
# Starts a program: its command, its environment, how long a line of it may be in bytes, and whether
# it is told something. Raises OSError where there is no memory, or no room in the table of
# processes.
Start = Callable[[Sequence[str], Mapping[str, str], int, bool], Awaitable[Process]]


class ExportFault(Exception):
    """It cannot be made; the text says why and what to do."""


class Exporter(Protocol):
    """Makes exports. Tests and simulated worlds bring their own."""

    async def make(self, record: ExportRecord, to: Path, moved: Moved) -> None:
        """Until `to` is a whole folder. Raises ExportFault; cancelled, it leaves no process."""


async def started(
    command: Sequence[str], environment: Mapping[str, str], line_bytes_max: int, asks: bool
) -> Process:
    """A process on this machine: see `Start`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=dict(environment),
        stdin=PIPE if asks else DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        limit=line_bytes_max,
    )
    with suppress(OSError):  # it ended a moment ago
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    return process


@dataclass(frozen=True, slots=True)
class ChildExporter:
    """A process for each export."""

    environment: Mapping[str, str]
    command: Sequence[str] = COMMAND
    silence_s: float = SILENCE_S
    start: Start = started

    @classmethod
    def of(cls, settings: ProcessSettings, credentials: str = "") -> "ChildExporter":
        """On the bus that the coordinator is on, with `credentials` if there are any: what reads a
        run needs no right to write one."""
        return cls(environment_of(settings) | on_bus(settings, credentials))

    async def make(self, record: ExportRecord, to: Path, moved: Moved) -> None:
        """See `Exporter`."""
        process = await self._started(record, to)
        heard, hangs = _Heard(record, moved), False
        try:
            await in_a_task(self._read(process, heard))
            async with asyncio.timeout(ENDING_S):
                await process.wait()
        except* TimeoutError:
            hangs = True
        finally:
            await killed(process)
        if hangs:
            text = f"the process that made it said nothing for {self.silence_s:.0f} s: try again"
            raise ExportFault(text)
        heard.judge(process.returncode)

    async def _read(self, process: Process, heard: "_Heard") -> None:
        """All that it says, until it says no more."""
        async with asyncio.TaskGroup() as readers:
            readers.create_task(self._hear(process, heard))
            readers.create_task(heard.words.hear(process))

    async def _started(self, record: ExportRecord, to: Path) -> Process:
        asked = record.asked
        arguments = [record.run, "--run-id", record.run_id, "--to", str(to)]
        # So that it ends with this process, however that goes.
        arguments += ["--owner", str(os.getpid()), "--dtype", asked.dtype]
        if asked.version is not None:
            arguments += ["--version", str(asked.version)]
        if asked.checkpoint:
            arguments += ["--checkpoint", asked.checkpoint]
        command = (*self.command, *arguments)
        try:
            return await self.start(command, self.environment, LINE_BYTES_MAX, False)
        except OSError as error:
            raise ExportFault(f"no process can be started for it: {error}") from None

    async def _hear(self, process: Process, heard: "_Heard") -> None:
        assert process.stdout is not None
        while True:
            async with asyncio.timeout(self.silence_s):
                line = await line_of(process.stdout)
            if not line:
                return
            heard.take(line)


class _Heard:
    """What one process said."""

    def __init__(self, record: ExportRecord, moved: Moved) -> None:
        self.record = record
        self.moved = moved
        self.done = False
        self.reason = ""
        self.words = Words("export", run=record.run, id=record.id)

    def take(self, line: bytes) -> None:
        match parse_line(line):
            case ExportMoved() as said:
                self.moved(said)
            case ExportDone():
                self.done = True
            case ExportFailed() as said:
                self.reason = said.reason
            case None:
                log.warning("an export said something strange", line=text_of(line))

    def judge(self, code: int | None) -> None:
        """ExportFault unless it is done."""
        if self.done and code == 0:
            return
        if self.reason:
            raise ExportFault(self.reason)
        raise ExportFault(f"the process that made it {self.words.ended(code)}")


class Words:
    """What a process writes for people: it goes into this process's log."""

    def __init__(self, what: str, **of: str) -> None:
        """`what` and `of`: the line's event and fields there."""
        self.what, self.of = what, of
        self.last = ""

    async def hear(self, process: Process) -> None:
        """All of them."""
        assert process.stderr is not None
        while line := await line_of(process.stderr):
            self.last = text_of(line) or self.last
            log.info(self.what, **self.of, line=text_of(line))

    def ended(self, code: int | None) -> str:
        """How the process ended, and what it said last."""
        said = f", and said last: {self.last}" if self.last else ""
        return f"ended ({how_ended(code)}){said}"


# Settings that name secrets: no process that the coordinator starts inherits them.
_SECRET = ("DILOCO_NATS_", "DILOCO_TOKEN", "DILOCO_ADMIN_TOKEN")


def environment_of(settings: ProcessSettings) -> dict[str, str]:
    """Of a process that the coordinator starts: what it was told itself, but for its id and for
    all that lets it speak on the bus."""
    told = {
        "DILOCO_CHECKPOINTS": settings.checkpoint_root,
        "DILOCO_CHECKPOINT_ROOTS": settings.checkpoint_roots,
        "DILOCO_LOG": settings.log,
        "DILOCO_LOG_FORMAT": settings.log_format,
    }
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "DILOCO_ID" and not name.startswith(_SECRET)
    }
    return inherited | told


def on_bus(settings: ProcessSettings, credentials: str = "") -> dict[str, str]:
    """How such a process comes to the bus: with `credentials`, else as the coordinator does."""
    return {
        "DILOCO_NATS_URL": settings.nats_url,
        "DILOCO_NATS_TOKEN": "" if credentials else settings.nats_token,
        "DILOCO_NATS_CREDENTIALS": credentials or settings.nats_credentials,
        "DILOCO_NATS_CA": settings.nats_ca,
        "DILOCO_NATS_CLIENT_CERT": settings.nats_client_cert,
        "DILOCO_NATS_CLIENT_KEY": settings.nats_client_key,
    }


async def line_of(stream: asyncio.StreamReader) -> bytes:
    """One line; what is too long for one is cut. Empty at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(max(error.consumed, 1))


async def killed(process: Process) -> None:
    """Nothing is left of it, whoever ends this."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await process.wait()


def text_of(line: bytes) -> str:
    """For a log: so much of it as anybody reads."""
    return line.decode(errors="replace").strip()[:300]
