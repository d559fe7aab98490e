"""The audit log on disk: `audit.jsonl` in the coordinator's own folder, appended to, and rotated.

A row is on disk before its answer leaves. Where it cannot be written the log of the process says
so, and the request is answered all the same: a full disk must not keep anybody from stopping a run.
"""

import asyncio
import os
from pathlib import Path

import structlog

from diloco_coordinator.access import Asking
from diloco_coordinator.audit import ROWS_KEPT, AuditRow, Trail
from diloco_shared import ambient

log = structlog.get_logger()

FILE = "audit.jsonl"
# A row has some 250 bytes: a file holds about thirty thousand, and all of them 40 MiB.
FILE_BYTES_MAX = 8 << 20
# Beside the one that is written: audit.jsonl.1 is the newest of them.
FILES_BEFORE = 4
# Read at the start for the rows that are answered from memory: each has at most a kilobyte or so.
TAIL_BYTES = 1 << 20


class Audit:
    """Notes what requests did. `folder`: None keeps rows in memory alone."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = folder / FILE if folder is not None else None
        self.trail = Trail()
        self._writing = asyncio.Lock()  # rows lie in the order of their numbers
        if self.path is not None:
            self.trail.restore(_tail(self.path))

    async def note(self, asking: Asking, method: str, route: str, status: int) -> None:
        """Keep the row of a request that was answered, if it makes one; returns once it is kept."""
        async with self._writing:
            at, now = ambient.wall(), ambient.monotonic()
            row = self.trail.add(asking, method, route, status, at=at, now=now)
            if row is None or self.path is None:
                return
            try:
                await asyncio.to_thread(_append, self.path, row)
            except OSError as error:
                log.error("audit row not written", row=row.line.decode(), error=str(error))


def _append(path: Path, row: AuditRow) -> None:
    """Blocks. The file is its owner's only: it says who does what."""
    if path.exists() and path.stat().st_size + len(row.line) > FILE_BYTES_MAX:
        _make_room(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(file).st_size
        # What was cut off by a crash or a full disk stays a line of its own.
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        line = b"\n" * torn + row.line
        if os.write(file, line) < len(line):
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
