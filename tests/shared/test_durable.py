"""Files are replaced as a whole, and secret ones are nobody else's at any moment."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from settled import FAILS, UNKNOWN, Settled, settles_no_names

from diloco_shared.durable import (
    begin_folder,
    make_folder,
    replace,
    replace_for_owner,
    replacing,
    settle,
)


def test_it_is_replaced_by_bytes_and_by_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace(path, b"one")
    replace(path, "größer")
    assert path.read_text("utf-8") == "größer"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    replace(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]  # the disk has its room again


def test_why_a_write_failed_is_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it failed before there was anything to remove."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        with pytest.raises(OSError, match="No space"):
            replace(tmp_path / "a", b"new")


def test_what_is_written_piece_by_piece_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for pieces in ([b"one ", b"two"], [b"three"]):
        with replacing(path) as file:
            for piece in pieces:
                file.write(piece)
        assert path.read_bytes() == b"".join(pieces)
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"four")
        raise KeyError("what comes next")
    assert path.read_bytes() == b"three"
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("write", [replace, replace_for_owner])
def test_a_file_and_then_its_name_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    """Else a power cut brings a token back that was replaced, or somebody who was revoked."""
    settled = Settled(monkeypatch)
    write(tmp_path / "a.json", "four")
    assert settled.calls == [4, {"a.json"}]


@pytest.mark.parametrize("number", [*UNKNOWN, FAILS])
def test_a_file_system_that_settles_no_names_takes_files_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patched:
        settles_no_names(patched, number)
        if number == FAILS:
            with pytest.raises(OSError, match="Input/output"):
                replace(tmp_path / "a", b"new")
        else:
            replace(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_its_rights_are_those_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_secret_is_its_owners_alone_whatever_lay_there(tmp_path: Path) -> None:
    left = tmp_path / "secret.part"
    left.write_text("half of an old one")
    left.chmod(0o666)
    (tmp_path / "secret").write_text("old")
    replace_for_owner(tmp_path / "secret", "new")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "secret").read_text() == "new" and not left.exists()


def test_folders_and_files_settle_and_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    settle(tmp_path)
    settle(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="nothing"):
        settle(tmp_path / "nothing")


def test_a_folder_is_made_with_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the names of those above it, else all that is synced in it goes with them."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    for place in (Path(), here):
        settled = Settled(monkeypatch)
        make_folder(place / "a" / "b")
        assert settled.calls == [{"here"}, {"a"}, {"b"}], "each before there is anything in it"
        make_folder(place / "a" / "b" / "c")
        assert settled.calls[3:] == [{"b"}, {"c"}]
        shutil.rmtree("a")


def test_a_folder_that_is_there_is_settled_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it may have been killed before its name was on the disk."""
    (tmp_path / "a").mkdir()
    settled = Settled(monkeypatch)
    make_folder(tmp_path / "a")
    assert settled.calls == [{"a"}]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file")


def test_a_disk_that_fails_keeps_nobody_from_a_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = Settled(monkeypatch)
    begin_folder(tmp_path / "a")
    assert settled.calls[-1] == {"a"}
    FullAfter(monkeypatch, os, "fsync", 0)
    begin_folder(tmp_path / "a")
    with pytest.raises(OSError, match="No space"):
        begin_folder(tmp_path / "b")
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


class FullAfter:
    """A disk that takes so many more folders, by what it cannot do then."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any, call: str, takes: int) -> None:
        self.does, self.takes = getattr(module, call), takes
        patch.setattr(module, call, self)

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.takes -= 1
        if self.takes < 0:
            raise OSError(28, "No space left on device")
        return self.does(*given, **more)


@pytest.mark.parametrize("call", ["fsync", "mkdir"])
@pytest.mark.parametrize("takes", range(3))
def test_a_full_disk_leaves_no_half_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, takes: int
) -> None:
    """Whoever finds it there would take it for whole, and for settled."""
    with monkeypatch.context() as patched:
        FullAfter(patched, os, call, takes)
        with pytest.raises(OSError, match="No space"):
            make_folder(tmp_path / "a" / "b" / "c" / "d")
    assert not [*tmp_path.iterdir()]
