"""A member's record says that its disk is full for as long as it is, and an event twice."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from diloco_shared.durable import free_bytes
from diloco_shared.process import disk_watch
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.process.membership import Registration
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


async def test_it_is_shown_at_once_and_told_at_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_watch, "LOOK_S", 0.0)
    membership = Registration(MemoryBus(MemoryBroker(), "m"), "m", "learner", "lock")
    room = DiskRoom(tmp_path, "a checkpoint", "training goes on")
    told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def tell(kind: str, text: str) -> None:
        await told.put((kind, text))

    async with asyncio.timeout(30):
        watching = asyncio.create_task(disk_watch.watch_disk(membership, lambda: room, tell))
        room.failed = "No space left on device"
        await membership.changed.wait()
        assert "No space left on device" in membership.record.full
        assert await told.get() == ("full", membership.record.full)
        membership.changed.clear()
        room.failed = ""
        await membership.changed.wait()
        assert not membership.record.full
        assert (await told.get())[0] == "room-again"
    watching.cancel()
    assert told.empty()


async def test_a_reason_that_is_too_long_for_the_record_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_watch, "LOOK_S", 0.0)
    membership = Registration(MemoryBus(MemoryBroker(), "m"), "m", "learner", "lock")
    room, told, looks = DiskRoom(tmp_path, "a checkpoint", "x" * 600), [], asyncio.Semaphore(0)
    room.failed = "No space left on device"

    async def tell(kind: str, _: str) -> None:
        told.append(kind)

    def free(_: Path) -> int:
        looks.release()
        return 0

    monkeypatch.setattr(disk_watch, "free_bytes", free)
    async with asyncio.timeout(30):
        watching = asyncio.create_task(disk_watch.watch_disk(membership, lambda: room, tell))
        for _ in range(4):
            await looks.acquire()
    watching.cancel()
    assert told == ["full"] and len(membership.record.full) == 500


def test_what_is_free_is_that_of_the_nearest_folder_there_is(tmp_path: Path) -> None:
    there = os.statvfs(tmp_path)
    found = free_bytes(tmp_path / "not" / "yet")
    assert found is not None and 0 < found <= there.f_blocks * there.f_frsize


@pytest.mark.parametrize(
    ("more", "free"), [({}, 40960), ({"f_files": 9}, 0), ({"f_blocks": 0}, None)]
)
def test_without_inodes_nothing_is_free_and_what_is_not_said_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, int], free: int | None
) -> None:
    class Said:
        f_blocks, f_bavail, f_frsize, f_files, f_favail = 100, 10, 4096, 0, 0

    said = Said()
    for name, value in more.items():
        setattr(said, name, value)
    monkeypatch.setattr(os, "statvfs", lambda _: said)
    assert free_bytes(tmp_path) == free


def test_a_folder_that_cannot_be_listed_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark of a deleted run comes in the middle of training, and again at every start."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "glob", broken)
    with capture_logs() as said:
        disk_watch.remove(tmp_path, "ab12")
    assert [line["event"] for line in said] == ["not removed"]
