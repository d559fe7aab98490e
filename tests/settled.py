"""What a process has put on the disk, so that a power cut leaves it."""

import os
import stat

import pytest


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
