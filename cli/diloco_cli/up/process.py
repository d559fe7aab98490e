"""One supervised child process: its own group, its own log, restarted when it dies."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from diloco_cli.up.restarts import Restarts

# A log is cut to its second half when it reaches this size.
LOG_BYTES_MAX = 16 << 20
# Time to stop after SIGTERM before SIGKILL, in seconds.
STOP_S = 8.0

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: killed when the supervisor is gone, however it went (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """`run` keeps it alive until `stop`."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        told: Callable[[str], None],
    ) -> None:
        self.name = name
        self.command = command
        self.environment = environment
        self.log = log
        self.told = told
        self.restarts = Restarts()
        self.process: asyncio.subprocess.Process | None = None
        self.stopping = False

    async def run(self) -> None:
        """Start, wait, start again, until stopped."""
        while not self.stopping:
            code = await self._once()
            if self.stopping:
                return
            pause_s = self.restarts.died(time.monotonic())
            how = f"signal {-code}" if code < 0 else f"status {code}"
            self.told(f"{self.name} ended ({how}), starting again in {pause_s:.1f} s")
            if self.restarts.looping:
                self.told(f"{self.name} keeps dying: see {self.log}")
            await asyncio.sleep(pause_s)

    async def _once(self) -> int:
        self._bound_log()
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env={**os.environ, **self.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.restarts.started(time.monotonic())
        return await self.process.wait()

    def _bound_log(self) -> None:
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.write_bytes(self.log.read_bytes()[-LOG_BYTES_MAX // 2 :])

    @property
    def pid(self) -> int | None:
        alive = self.process is not None and self.process.returncode is None
        return self.process.pid if alive and self.process is not None else None

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        self.stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGCONT)  # a stopped process hears nothing else
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await process.wait()

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
