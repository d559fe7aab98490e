"""Logs of children, bounded while they are written: the child appends, we cut."""

import os
from pathlib import Path

# One log file; one older file of the same size is kept beside it.
LOG_BYTES_MAX = 8 << 20


def bound(log: Path, limit: int = LOG_BYTES_MAX) -> bool:
    """Move a log that has reached `limit` bytes aside and empty it; whether it was.

    Works while a process appends to it. What is appended between copy and cut is lost: a few lines
    of millions.
    """
    if not log.exists() or log.stat().st_size < limit:
        return False
    with log.open("rb") as file:
        file.seek(-limit, os.SEEK_END)
        tail = file.read(limit)
    log.with_name(log.name + ".1").write_bytes(tail)
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
