"""Files of numbers are read where somebody looks, and what cannot be read is an error."""

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from diloco_shared.corpora.sequences import Tokens
from diloco_shared.corpora.token_files import TokenFile, Unreadable, token_file

NUMBERS = np.arange(5000, dtype="<u2")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    NUMBERS.tofile(tmp_path / "x.bin")
    return tmp_path / "x.bin"


def tokens_of(path: Path, *cuts: int) -> Tokens:
    """The whole file, as parts of it that follow each other."""
    whole = token_file(path, "uint16", len(NUMBERS))
    borders = [0, *cuts, len(NUMBERS)]
    parts = [whole.part(a, b) for a, b in pairwise(borders)]
    return Tokens(parts, 1 << 16, "x")


def test_what_is_looked_at_is_what_the_file_says(path: Path) -> None:
    for tokens in (tokens_of(path), tokens_of(path, 0, 7, 7, 2000)):
        np.testing.assert_array_equal(tokens[:], NUMBERS)
        np.testing.assert_array_equal(tokens[5:2100], NUMBERS[5:2100])
        np.testing.assert_array_equal(np.concatenate(list(tokens.blocks(1000))), NUMBERS)
        starts = np.array([4990, 0, 6, 1995, 7])
        found = tokens.windows(starts, 10)
        np.testing.assert_array_equal(found, NUMBERS[starts[:, None] + np.arange(10)])
        assert found.dtype == np.int32 and tokens[4999] == 4999 and len(tokens[9:9]) == 0


def test_a_file_of_another_size_is_refused(path: Path) -> None:
    np.testing.assert_array_equal(token_file(path, "uint16", 5000)[:], NUMBERS)
    with pytest.raises(ValueError, match="has 10000 bytes and should have 10002"):
        token_file(path, "uint16", 5001)
    with pytest.raises(ValueError, match="longer than when it was written"):
        token_file(path, "uint16", 4999)
    with pytest.raises(ValueError, match="cannot be read"):
        token_file(path.with_name("gone.bin"), "uint16", 1)


def test_who_reads_a_held_file_says_so_now_and_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner trains for weeks: it seemed to have used its corpus when it began."""
    now = [0.0]
    monkeypatch.setattr("diloco_shared.ambient.monotonic", lambda: now[0])
    file = token_file(path, "uint16", len(NUMBERS))

    def says() -> bool:
        os.utime(path.parent, (0, 0))
        np.testing.assert_array_equal(file.part(3, 9)[:], NUMBERS[3:9])
        return path.parent.stat().st_mtime > 0

    assert not says(), "others' files stay as they are"
    file.hold()
    assert not says()
    now[0] = 600.0
    assert [says(), says()] == [True, False]


@pytest.mark.parametrize("look", ["windows", "blocks", "slice"])
def test_a_file_that_is_made_shorter_ends_no_process(path: Path, look: str) -> None:
    """In a mapped one it would be SIGBUS, which no code hears of."""
    tokens = tokens_of(path)
    os.truncate(path, 4096)
    ends = r"x\.bin ends at byte 4096, and was longer when it was opened"
    with pytest.raises(Unreadable, match=ends):
        if look == "windows":
            tokens.windows(np.array([0, 2040]), 20)
        elif look == "blocks":
            list(tokens.blocks(1000))
        else:
            tokens[2047:2050]
    np.testing.assert_array_equal(tokens.windows(np.array([2038]), 10)[0], NUMBERS[2038:2048])


def test_a_block_that_cannot_be_read_is_an_error_that_names_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, real = tokens_of(path), os.preadv

    def failing(file: int, room: Any, at: int) -> int:
        if at <= 4096 < at + len(room[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, room, at)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(Unreadable, match=r"x\.bin cannot be read at byte 4090: Input/output error"):
        tokens.windows(np.array([0, 2045]), 20)
    assert tokens.windows(np.array([0, 2049]), 20).shape == (2, 20)


def test_what_is_read_in_pieces_is_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what is larger than a system reads at once."""
    tokens, real = tokens_of(path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, room, at: real(file, (room[0][:7],), at))
    np.testing.assert_array_equal(tokens[100:200], NUMBERS[100:200])


def test_an_open_file_is_closed_once_nobody_has_a_part_of_it(path: Path) -> None:
    def open_now() -> int:
        return sum(file.path == str(path) for file in psutil.Process().open_files())

    whole: TokenFile | None = token_file(path, "uint16", 5000)
    assert whole is not None
    part = whole.part(10, 20)
    assert open_now() == 1
    whole = None
    np.testing.assert_array_equal(part[:], NUMBERS[10:20])
    del part
    assert open_now() == 0
