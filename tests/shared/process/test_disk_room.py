"""A full disk is named before anything is lost by it, once, and until it is over."""

from pathlib import Path

import pytest

from diloco_shared.process.disk_room import SHORT_S, DiskRoom


@pytest.fixture
def room() -> DiskRoom:
    found = DiskRoom(Path("/kept/here"), "a checkpoint", "training goes on")
    found.needed = 1000
    return found


def attempt(room: DiskRoom, error: str = "") -> None:
    try:
        with room.writing():
            if error:
                raise OSError(error)
    except OSError as raised:
        assert str(raised) == error
    else:
        assert not error, "what fails is not swallowed"


def test_too_little_room_is_named_before_it_is_needed(room: DiskRoom) -> None:
    assert room.saw(1000, 10.0) == ""
    assert room.saw(999, 11.0) == "", "a neighbour's file may be on its way"
    reason = room.saw(999, 11.0 + SHORT_S)
    assert reason == (
        "/kept/here takes nothing more (a checkpoint needs 1 kB and 999 B are free): "
        "free disk space there; training goes on"
    )
    assert room.saw(5, 20.0) == reason, "in the same words until it is over"
    assert room.saw(1000, 21.0) == ""


def test_a_dip_is_not_named(room: DiskRoom) -> None:
    room.saw(0, 10.0)
    room.saw(5000, 10.0 + SHORT_S / 2)
    assert room.saw(0, 10.0 + SHORT_S) == ""


def test_what_fails_is_named_at_once_and_over_with_the_next_that_is_written(
    room: DiskRoom,
) -> None:
    attempt(room, "Disk quota exceeded")
    assert "Disk quota exceeded" in room.saw(10**9, 10.0)
    assert room.saw(10**9, 100.0), "free bytes are no proof: there are quotas"
    attempt(room)
    assert room.saw(10**9, 101.0) == ""


def test_what_failed_for_want_of_room_is_over_once_there_is_some(room: DiskRoom) -> None:
    attempt(room, "No space left on device")
    assert room.saw(0, 10.0)
    assert room.saw(10**9, 11.0) == ""


def test_its_own_file_is_not_taken_for_a_lack_of_room(room: DiskRoom) -> None:
    with room.writing(2000):
        assert room.saw(0, 10.0) == "" and room.saw(0, 20.0) == ""
    assert room.needed == 2000
    assert room.saw(1999, 30.0) == ""
    assert room.saw(1999, 40.0)
