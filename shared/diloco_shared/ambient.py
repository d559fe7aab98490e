"""Time and chance, as whoever runs a process tells them: the system, or a simulated world.

Everything that a world plays asks here and nowhere else; then hours of it take seconds, and a seed
plays the same world again. Sockets and child processes, which no world plays, use `time` itself.
"""

import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Ambient(Protocol):
    """What a process cannot know by itself."""

    def monotonic(self) -> float:
        """Seconds that never go back, from an arbitrary moment."""

    def wall(self) -> float:
        """Seconds since 1970, as this machine's clock has them: others' differ."""

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
