"""What a process has put on the disk, so that a power cut leaves it."""

import errno
import os
import stat

import pytest

# What an `fsync` of a folder says: of file systems that do not know it, and of a disk that fails.
UNKNOWN, FAILS = (errno.EINVAL, errno.ENOTSUP), errno.EIO


def settles_no_names(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """From now on the file system takes an `fsync` of files, and says `number` of folders."""
    sync = os.fsync

    def of_files_alone(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", of_files_alone)


class Settled:
    """Every `fsync` from now on, in order: of a file its size, of a folder the names that it had
    at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int | set[str]] = []
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._seen)

    def _seen(self, handle: int) -> None:
        self._sync(handle)
        about = os.fstat(handle)
        of_folder = stat.S_ISDIR(about.st_mode)
        self.calls.append(set(os.listdir(handle)) if of_folder else about.st_size)
