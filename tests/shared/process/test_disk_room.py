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


@pytest.mark.parametrize(
    ("error", "to_do"),
    [
        ("Disk quota exceeded", "free disk space there"),
        ("host 1 (b): [Errno 28] No space left on device", "free disk space there"),
        ("host 1 (b): [Errno 13] Permission denied", "mend that"),
    ],
)
def test_only_where_room_is_short_it_is_to_be_freed(room: DiskRoom, error: str, to_do: str) -> None:
    attempt(room, error)
    said = room.saw(10**9, 10.0)
    assert error in said and f"): {to_do}; training goes on" in said


def test_of_a_bucket_only_what_fails_is_known() -> None:
    bucket = DiskRoom("gs://kept/here", "a checkpoint", "training goes on")
    bucket.needed = 1000
    assert bucket.folder is None and bucket.saw(None, 10.0) == bucket.saw(None, 20.0) == ""
    attempt(bucket, "403 Forbidden")
    said = "gs://kept/here takes nothing (403 Forbidden): mend that; training goes on"
    assert bucket.saw(None, 30.0) == said
    attempt(bucket)
    assert bucket.saw(None, 40.0) == ""


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
