"""The audit log on disk: `audit.jsonl` in the coordinator's own folder, appended to, and rotated.

A row is on disk before its answer leaves, as long as the disk is quick enough. Rows that come while
one is written are written together after it, so requests wait for two writes at most, however many
they are. Where rows cannot be written, or not in time, the log of the process says so, and requests
are answered all the same: neither a full disk nor one that hangs may keep anybody from stopping a
run.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import structlog

from diloco_coordinator.access import Asking
from diloco_coordinator.audit import ROWS_KEPT, AuditRow, AuditTrail
from diloco_shared import ambient
from diloco_shared.durable import settle_names

log = structlog.get_logger()

FILE = "audit.jsonl"
# A row has some 250 bytes: a file holds about thirty thousand, and all of them 40 MiB.
FILE_BYTES_MAX = 8 << 20
# Beside the one that is written: audit.jsonl.1 is the newest of them.
FILES_BEFORE = 4
# Read at the start for the rows that are answered from memory: each has at most a kilobyte or so.
TAIL_BYTES = 1 << 20


# So long a request waits for its row to be on disk, in seconds: clients wait for ten.
WRITTEN_S_MAX = 3.0
# Rows that wait for the disk, of some 250 bytes each. Those beyond are in the log of the process.
WAITING_MAX = 10_000


class Audit:
    """Notes what requests did. `folder`: None keeps rows in memory alone."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = folder / FILE if folder is not None else None
        self.trail = AuditTrail()
        self._waiting: list[AuditRow] = []  # in the order of their numbers
        self._written = 0  # rows up to this number are on disk, or never will be
        self._progress = asyncio.Condition()
        self._writer: asyncio.Task[None] | None = None  # while there is something to write
        self._late = False  # said already
        if self.path is not None:
            self.trail.restore(_tail(self.path))

    async def note(self, asking: Asking, method: str, route: str, status: int) -> None:
        """Keep the row of a request that was answered, if it makes one.

        Returns once it is kept, or WRITTEN_S_MAX seconds later.
        """
        at, now = ambient.wall(), ambient.monotonic()
        row = self.trail.add(asking, method, route, status, at=at, now=now)
        if row is None or self.path is None:
            return
        if len(self._waiting) >= WAITING_MAX:
            _not_written([row], "too many rows wait for the disk")
            return
        self._waiting.append(row)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(self.path))
        try:
            async with asyncio.timeout(WRITTEN_S_MAX), self._progress:
                await self._progress.wait_for(lambda: self._written >= row.seq)
        except TimeoutError:
            if not self._late:
                self._late = True
                log.error("audit rows are late: the disk is slow or hangs", file=str(self.path))

    async def _write(self, path: Path) -> None:
        """Until nothing waits: what came meanwhile together."""
        while rows := self._waiting:
            self._waiting = []
            try:
                await asyncio.to_thread(_append, path, rows)
                self._late = False
            except OSError as error:
                _not_written(rows, str(error))
            async with self._progress:
                self._written = rows[-1].seq
                self._progress.notify_all()


def _not_written(rows: Sequence[AuditRow], why: str) -> None:
    for row in rows:
        log.error("audit row not written", row=row.line.decode(), error=why)


def _append(path: Path, rows: Sequence[AuditRow]) -> None:
    """Blocks. The file is its owner's only: it says who does what."""
    lines = b"".join(row.line for row in rows)
    if path.exists() and path.stat().st_size + len(lines) > FILE_BYTES_MAX:
        _make_room(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(file).st_size
        if not size:
            settle_names(path.parent)  # a row in a file whose name is lost is lost with it
        # What was cut off by a crash or a full disk stays a line of its own.
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        lines = b"\n" * torn + lines
        if os.write(file, lines) < len(lines):
            raise OSError("the disk is full")
        os.fsync(file)
    finally:
        os.close(file)


def _make_room(path: Path) -> None:
    """Number the files anew; the oldest goes."""
    for number in range(FILES_BEFORE, 0, -1):
        older = path.with_name(f"{FILE}.{number}")
        newer = path if number == 1 else path.with_name(f"{FILE}.{number - 1}")
        if newer.exists():
            newer.replace(older)


def _tail(path: Path) -> list[bytes]:
    """The last lines of the newest files, oldest first."""
    lines: list[bytes] = []
    for found in (path, path.with_name(f"{FILE}.1")):
        try:
            with found.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).splitlines() + lines
        except OSError:
            continue
        if len(lines) >= ROWS_KEPT:
            break
    return lines[-ROWS_KEPT:]
