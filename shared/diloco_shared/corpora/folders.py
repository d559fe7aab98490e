"""Folders that one process at a time writes, whole or not at all."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Between two looks whether a lock is free, by who has something to do meanwhile. What others do who
# have it takes minutes or hours.
LOOK_S = 1.0


class Busy(ValueError):
    """Another process writes this folder."""


@contextmanager
def locked(
    folder: Path, *, wait: bool, meanwhile: Callable[[], object] | None = None
) -> Iterator[None]:
    """Hold the lock of a folder, which is a hidden file beside it.

    `wait` until whoever has it lets go, else raise Busy. The system lets go for a process that
    dies, so a wait is as long as the other one works. `meanwhile` is called each second of it, and
    what it raises ends it. Raises OSError if it cannot be made.
    """
    folder = folder.absolute()  # "." has no name
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    while (fd := _acquired(path, wait=wait and meanwhile is None)) is None:
        if not wait:
            raise Busy(f"another process is writing {folder}: wait until it is done")
        assert meanwhile is not None
        meanwhile()
        time.sleep(LOOK_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: see _acquired
        os.close(fd)


def _acquired(path: Path, *, wait: bool) -> int | None:
    """None where another one has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever held it has removed the file: then this lock is of a file that is gone.
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        os.close(fd)
