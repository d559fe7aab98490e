"""Programs that a world's coordinator starts: virtual processes, with pipes to who started them.

A program ends with the process that it was started by, goes on while that one stands still, and
leaves what it wrote on the disk of its machine.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any, cast

from diloco_simulator.virtual_loop import Hosted, VirtualLoop


class _Told:
    """A program's standard input, whole once it is closed."""

    def __init__(self) -> None:
        self.said = bytearray()
        self.closed = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.said += data

    async def drain(self) -> None:
        """There is always room."""

    def close(self) -> None:
        self.closed.set()


class Program:
    """What started it sees of it: see `asyncio.subprocess.Process`."""

    pid = 0  # no system knows it

    def __init__(
        self, loop: VirtualLoop, name: str, owner: Hosted, line_bytes_max: int, asks: bool
    ) -> None:
        self.process = Hosted(loop, name, skew_s=owner.skew_s, owner=owner)
        self.stdin: Any = _Told() if asks else None
        self.stdout = asyncio.StreamReader(line_bytes_max)
        self.stderr = asyncio.StreamReader(line_bytes_max)
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    # --- in the program --------------------------------------------------------------------------

    def runs(self, work: Callable[[], Awaitable[int]]) -> None:
        """`work` returns its exit status."""
        self.process.run(self._runs(work))

    async def _runs(self, work: Callable[[], Awaitable[int]]) -> None:
        self._over(await work())

    def says(self, line: str) -> None:
        """On standard output."""
        if self.lives:
            self.stdout.feed_data(f"{line}\n".encode())

    def warns(self, line: str) -> None:
        """For its log."""
        if self.lives:
            self.stderr.feed_data(f"{line}\n".encode())

    async def told(self) -> bytes:
        """All that it was told."""
        stdin = cast(_Told, self.stdin)
        await stdin.closed.wait()
        return bytes(stdin.said)

    # --- for who started it ----------------------------------------------------------------------

    @property
    def lives(self) -> bool:
        return self.returncode is None and not self.process.killed

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """As by SIGKILL, from whoever: what it wrote stays."""
        self.process.kill()
        self._over(-signal.SIGKILL)

    def _over(self, status: int) -> None:
        if self.returncode is not None:
            return
        self.returncode = status
        owner = self.process.owner
        if owner is not None and not owner.killed:  # else both are gone
            owner.children.remove(self.process)
        self.stdout.feed_eof()
        self.stderr.feed_eof()
        self._ended.set()
