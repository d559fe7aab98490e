"""One supervised child process: its own group, its own log, restarted when it dies."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco_shared.bus.repeating import pause_after
from diloco_shared.process.stopping import dies_with_parent, how_ended

# --------------------------------------------------------------------------------------------------
# Logs of children, bounded while they are written: the child appends, we cut.

# One log file; one older file of the same size is kept beside it.
LOG_BYTES_MAX = 8 << 20


def bound(log: Path, limit: int = LOG_BYTES_MAX) -> bool:
    """Move a log that has reached `limit` bytes aside and empty it; whether it was.

    Works while a process appends to it. What is appended between copy and cut is lost: a few lines
    of millions. Where there is no room for the copy all of it is: a log must not grow without end.
    """
    if not log.exists() or log.stat().st_size < limit:
        return False
    with log.open("rb") as file:
        file.seek(-limit, os.SEEK_END)
        tail = file.read(limit)
    kept = log.with_name(log.name + ".1")
    try:
        kept.write_bytes(tail)
    except OSError:
        kept.unlink(missing_ok=True)  # half of it would take the room that others need
    os.truncate(log, 0)
    return True


def last_line(log: Path) -> str:
    """The last thing a process said; empty when it said nothing."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


# --------------------------------------------------------------------------------------------------
# When a dead process is started again: at once at first, ever later if it keeps dying.

# First and longest pause before a restart, in seconds.
PAUSE_S, PAUSE_S_MAX = 0.2, 10.0
# A process that lived this long was well: its next restart is prompt again.
WELL_S = 20.0
# Exits in a row, each soon after a start, after which people are told that it does not work.
LOOP = 5


@dataclass(slots=True)
class Restarts:
    """The history of one supervised process; it waits `pause_s` before its first restart."""

    pause_s: float = PAUSE_S
    started_at: float = 0.0
    in_a_row: int = 0
    total: int = 0

    def started(self, now: float) -> None:
        self.started_at = now

    def died(self, now: float) -> float:
        """Seconds to wait before starting it again."""
        self.total += 1
        self.in_a_row = 1 if now - self.started_at >= WELL_S else self.in_a_row + 1
        return pause_after(self.in_a_row, (self.pause_s, PAUSE_S_MAX))

    @property
    def looping(self) -> bool:
        return self.in_a_row >= LOOP


# A process ends so where another start mends nothing; what is wrong may yet be mended meanwhile.
WRONG_SET_UP = 2
# Time to stop after SIGTERM before SIGKILL, in seconds, unless one is granted more.
STOP_S = 8.0
# A process that starts has the processor first, for so long in seconds: it is awaited. Then, and
# again where the system had no time to hear of it.
SETTLE_S, SETTLE_AGAIN_S = 12.0, 0.2


class Child:
    """`run` keeps it alive until `stop`."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        told: Callable[[str], None],
        *,
        niceness: int = 0,
        pause_s: float = PAUSE_S,
        stop_s: float = STOP_S,
    ) -> None:
        """`stop_s`: so long it has to end by itself once it is told to, in seconds."""
        self.name = name
        self.command = command
        self.environment = environment
        self.log = log
        self.told = told
        self.niceness = niceness
        self.stop_s = stop_s
        self.restarts = Restarts(pause_s)
        self.process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start, wait, start again, until stopped."""
        while not self._stopping.is_set():
            code = None
            try:
                code = await self._once()
                how = how_ended(code)
            except OSError as error:  # no memory or no disk for another process
                how = str(error)
            if self._stopping.is_set():
                return
            pause_s = self.restarts.died(time.monotonic())
            self.told(f"{self.name} ended ({how}), starting again in {pause_s:.1f} s")
            if code == WRONG_SET_UP or self.restarts.looping:
                trouble = "cannot start" if code == WRONG_SET_UP else "keeps dying"
                self.told(f"{self.name} {trouble}: {last_line(self.log)} (all in {self.log})")
            try:
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _once(self) -> int:
        bound(self.log)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env=self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(),
            )
        self.restarts.started(time.monotonic())
        settled = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)
        try:
            return await self.process.wait()
        finally:
            settled.cancel()

    def _settle(self) -> None:
        """From now on it leaves the processor to others, with all its threads."""
        if self.niceness and self.pid is not None:
            os.setpriority(os.PRIO_PGRP, self.pid, self.niceness)
            # Linux may share processors out by sessions, and each child has one of its own: then
            # that is the value that counts. Systems without it have no such file.
            try:
                Path(f"/proc/{self.pid}/autogroup").write_text(str(self.niceness), "ascii")
            except BlockingIOError:  # users may do so ten times a second, all together
                asyncio.get_running_loop().call_later(SETTLE_AGAIN_S, self._settle)
            except OSError:
                pass

    @property
    def pid(self) -> int | None:
        """Of the living process; None between two lives."""
        process = self.process
        return process.pid if process is not None and process.returncode is None else None

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL; nothing of its process group is left."""
        self._stopping.set()
        process = self.process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process hears nothing else
        try:
            async with asyncio.timeout(self.stop_s):
                await process.wait()
        except TimeoutError:
            self.told(f"{self.name} did not stop within {self.stop_s:.0f} s, and is killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):  # it ended a moment ago
                os.killpg(self.process.pid, number)
