"""Time and chance, as whoever runs a process tells them: the system, or a simulated world.

Everything that a world plays asks here and nowhere else; then hours of it take seconds, and a seed
plays the same world again. Sockets and child processes, which no world plays, use `time` itself.
"""

import os
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

# Where the system does not tell, a process was started when it came here.
_IMPORTED_AT = time.monotonic()


class Ambient(Protocol):
    """What a process cannot know by itself."""

    def monotonic(self) -> float:
        """Seconds that never go back, from an arbitrary moment."""

    def wall(self) -> float:
        """Seconds since 1970, as this machine's clock has them: others' differ."""

    def started(self) -> float:
        """When this process was started, by `monotonic`."""

    def token(self, size: int) -> str:
        """`size` random bytes in hex that nobody can guess."""

    def unique(self) -> str:
        """32 hex digits that nobody else has."""


class System:
    """The machine's own."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def started(self) -> float:
        """`man proc`: field 22 of stat."""
        try:
            fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            after_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot_s
        except (OSError, ValueError, IndexError, AttributeError):
            return _IMPORTED_AT
        return time.monotonic() - max(age_s, 0.0)

    def token(self, size: int) -> str:
        return secrets.token_hex(size)

    def unique(self) -> str:
        return uuid.uuid4().hex


_ambient: Ambient = System()


def monotonic() -> float:
    """Seconds that never go back, from an arbitrary moment."""
    return _ambient.monotonic()


def wall() -> float:
    """Seconds since 1970, as this machine's clock has them: others' differ."""
    return _ambient.wall()


def started() -> float:
    """When this process was started, by `monotonic`."""
    return _ambient.started()


def token(size: int) -> str:
    """`size` random bytes in hex that nobody can guess."""
    return _ambient.token(size)


def unique() -> str:
    """32 hex digits that nobody else has."""
    return _ambient.unique()


@contextmanager
def using(ambient: Ambient) -> Iterator[None]:
    """Until the end of the block everybody in this process is told this instead."""
    global _ambient
    kept, _ambient = _ambient, ambient
    try:
        yield
    finally:
        _ambient = kept
