"""The keeper of a message server: what it makes of a disk that takes nothing."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_shared.process import keep_hub
from diloco_shared.process.hub_watch import NO_SPACE, ROOM_BYTES, HubWatch


@pytest.mark.parametrize(
    ("files", "inodes", "why"), [(9, 0, ""), (9, 1, "room again"), (0, 0, "room again")]
)
def test_without_inodes_there_is_no_room_for_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, inodes: int, why: str
) -> None:
    """Some file systems count none, and have room."""
    room = {"f_bavail": ROOM_BYTES >> 12, "f_frsize": 1 << 12}
    said = SimpleNamespace(f_blocks=1 << 20, f_files=files, f_favail=inodes, **room)
    watch = HubWatch()
    watch.said(NO_SPACE)
    monkeypatch.setattr(os, "statvfs", lambda _: said)
    found = watch.look(0.0, answers=True, free_bytes=keep_hub._free(str(tmp_path)))
    assert why in found and bool(found) == bool(why)


def test_of_a_disk_that_is_away_nothing_is_free(tmp_path: Path) -> None:
    assert keep_hub._free(str(tmp_path)) > 0
    assert keep_hub._free(str(tmp_path / "not" / "there")) == 0


class FullDisk:
    """Takes nothing at first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.taken: list[bytes] = []

    def write(self, line: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.taken.append(line)

    def flush(self) -> None:
        pass


def test_a_server_whose_log_finds_no_room_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would wait for its full pipe; what it says is heard also while it is lost."""
    disk, watch = FullDisk(2), HubWatch()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=disk))
    keep_hub._pass_on([b"one\n", b"[ERR] " + NO_SPACE, b"three\n"], watch)
    assert disk.taken == [b"three\n"] and watch.no_space


def test_the_keeper_outlives_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(1)
    monkeypatch.setattr(sys, "stderr", disk)
    keep_hub._say("it is lost")
    assert not disk.failures
