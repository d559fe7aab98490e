"""A member's name is for good: it lies on the volume, not on the host (I10)."""

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diloco_shared.process.membership import LOCK, DataFolder, FolderTaken


def test_a_given_name_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = DataFolder.claim(tmp_path, "syncer", "frankfurt-1")
    assert (folder.member, folder.path) == ("frankfurt-1", tmp_path / "frankfurt-1")
    folder.release()


def test_a_name_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = DataFolder.claim(tmp_path / "data", "syncer")
    assert first.member.startswith("syncer-") and socket.gethostname() not in first.member
    lock = first.lock
    (first.path / "snapshots").mkdir()
    first.release()
    # The container is made anew: another host name, the same volume.
    monkeypatch.setattr(socket, "gethostname", lambda: "0123456789ab")
    again = DataFolder.claim(tmp_path / "data", "syncer")
    assert again.member == first.member and (again.path / "snapshots").is_dir()
    assert again.lock == lock, "which proves to the cluster that the one before is dead"
    again.release()


def test_many_that_share_a_volume_each_take_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda _: DataFolder.claim(tmp_path, "learner"), range(8)))
    names = {f.member for f in first}
    assert len(names) == 8
    for folder in first:
        folder.release()
    # All of them made anew at once: the same eight.
    with ThreadPoolExecutor(8) as pool:
        second = list(pool.map(lambda _: DataFolder.claim(tmp_path, "learner"), range(8)))
    assert {f.member for f in second} == names
    for folder in second:
        folder.release()


def test_one_in_use_is_never_taken_and_a_lost_volume_is_a_new_name(tmp_path: Path) -> None:
    one, other = DataFolder.claim(tmp_path, "syncer"), DataFolder.claim(tmp_path, "syncer")
    assert one.member != other.member
    shutil.rmtree(other.path)
    other.release()
    new = DataFolder.claim(tmp_path, "syncer")
    assert new.member not in (one.member, other.member)
    new.release()
    one.release()


def test_a_folder_named_after_a_host_is_taken_over(tmp_path: Path) -> None:
    """As earlier versions named them: an upgrade keeps its snapshots."""
    old = DataFolder(tmp_path, "syncer-0a1b2c3d4e5f")
    (old.path / "snapshots").mkdir()
    old.release()
    assert (tmp_path / "syncer-0a1b2c3d4e5f" / LOCK).is_file()
    (tmp_path / "syncer-notes").mkdir()  # nobody's
    taken = DataFolder.claim(tmp_path, "syncer")
    assert taken.member == "syncer-0a1b2c3d4e5f"
    taken.release()


def test_roles_do_not_take_each_others_names(tmp_path: Path) -> None:
    DataFolder.claim(tmp_path, "learner").release()
    syncer = DataFolder.claim(tmp_path, "syncer")
    assert syncer.member.startswith("syncer-")
    syncer.release()


def test_of_the_names_that_a_site_has_each_takes_one_and_the_next_is_told_why(
    tmp_path: Path,
) -> None:
    names = ("oslo-1", "oslo-2")
    one, other = (DataFolder.claim(tmp_path, "learner", allowed=names) for _ in range(2))
    assert {one.member, other.member} == set(names)
    with pytest.raises(FolderTaken, match=r"every name of DILOCO_IDS \(oslo-1, oslo-2\)"):
        DataFolder.claim(tmp_path, "learner", allowed=names)
    # The container of the second is made anew: it goes on where it was.
    other.release()
    again = DataFolder.claim(tmp_path, "learner", allowed=names)
    assert again.member == other.member
    again.release()
    one.release()
