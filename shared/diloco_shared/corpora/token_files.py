"""Files of numbers, of which only what somebody looks at is read. They are never mapped.

A block that cannot be read (a bad sector, a file system that does not answer, a file that was made
shorter) is an error of the call that reads it. In a mapped file it would be a signal, SIGBUS, that
ends the process without a word.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_shared import ambient
from diloco_shared.corpora.open_files import too_many

# So many seconds after whoever reads a held file has said that it is in use, he says so again. To
# write that down takes a network file system a while. Whoever clears a learner's cache believes it
# for an hour (`data.unused`).
SAYS_S = 600.0


class Damaged(ValueError):
    """Tokens that cannot be had as they were written."""


class Unreadable(Damaged):
    """The system does not give a part of a file."""


class TokenFile:
    """Whole numbers of one type in a file; like a numpy array of one dimension that is not written
    to. Several may share an open file. Threads may read at the same time."""

    __slots__ = ("_file", "_first", "_many", "dtype", "path")

    def __init__(
        self, path: Path, dtype: "np.dtype[Any]", first: int, many: int, file: "_Open | None" = None
    ) -> None:
        """`many` numbers, of which the first begins at byte `first`. Raises OSError."""
        self.path = path
        self.dtype = dtype
        self._file = file or _Open(path)
        self._first = first
        self._many = many

    def __len__(self) -> int:
        return self._many

    @property
    def nbytes(self) -> int:
        """Of the numbers."""
        return self._many * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte behind the last number, if the file is as long as it should be."""
        return self._first + self.nbytes

    @property
    def stat(self) -> os.stat_result:
        """Of the file that is open, whatever has its name by now. Raises OSError."""
        return os.fstat(self._file.number)

    def hold(self) -> None:
        """Others can know that it is in use (`is_held`) until no part of it is open any more.

        Nothing where the file system has no such locks. Afterwards the time of its folder says when
        it was read last: a process may be killed, and start again.
        """
        self._file.said_at = ambient.monotonic()
        with suppress(OSError):
            fcntl.flock(self._file.number, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def part(self, start: int, stop: int) -> "TokenFile":
        """The numbers [start:stop], unread; 0 <= start <= stop <= len."""
        first = self._first + start * self.dtype.itemsize
        return TokenFile(self.path, self.dtype, first, stop - start, self._file)

    def __getitem__(self, place: slice) -> NDArray[Any]:
        """The numbers [a:b], read now. Raises Unreadable."""
        start, stop, step = place.indices(self._many)
        assert step == 1
        return self.rows(np.array([start]), max(stop - start, 0)).reshape(-1)

    def rows(self, starts_S: NDArray[np.int64], length: int) -> NDArray[Any]:
        """The stretches of `length` numbers that begin at these places, shape (S, length).

        Raises Unreadable.
        """
        found = np.empty((len(starts_S), length), self.dtype)
        if not found.size:
            return found
        if self._file.said_at is not None:
            self._say(self._file.said_at)
        room, each = found.view(np.uint8).reshape(-1).data, found[0].nbytes
        begins = (np.asarray(starts_S, np.int64) * self.dtype.itemsize + self._first).tolist()
        for first, at in zip(range(0, len(room), each), begins, strict=True):
            self._read(at, room[first : first + each])
        return found

    def _say(self, said_at: float) -> None:
        """That it is in use, unless that was said of late."""
        if (now := ambient.monotonic()) >= said_at + SAYS_S:
            self._file.said_at = now
            with suppress(OSError):  # it was removed, or may not be written to
                os.utime(self.path.parent)

    def _read(self, at: int, room: memoryview) -> None:
        """Fill `room` with what is at byte `at` and behind it."""
        try:
            # One call does it, but for what is larger than 2 GiB or ends too early.
            while (got := os.preadv(self._file.number, (room,), at)) < len(room):
                if not got:
                    raise Unreadable(
                        f"{self.path} ends at byte {at}, and was longer when it was opened: copy "
                        "or prepare it again"
                    )
                at, room = at + got, room[got:]
        except OSError as error:
            raise Unreadable(
                f"{self.path} cannot be read at byte {at}: {error.strerror or error}. Look at the "
                "disk or the link that it lies on, or copy the file again"
            ) from None


class _Open:
    """A file that is open for as long as somebody refers to it."""

    __slots__ = ("number", "said_at")

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.said_at: float | None = None  # of a held one: that it is in use
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def is_held(path: Path) -> bool:
    """Whether somebody, of this process or another one, holds this file: see `TokenFile.hold`.

    False where that cannot be known. For an instant it cannot be held by others meanwhile.
    """
    try:
        with path.open("r+b") as file:  # a network file system locks no other for one alone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


def token_file(path: Path, dtype: str, tokens: int) -> TokenFile:
    """The tokens of a file of nothing else, little-endian. ValueError if it has another size, or if
    it cannot be opened."""
    try:
        found = TokenFile(path, np.dtype(dtype).newbyteorder("<"), 0, tokens)
        size = found.stat.st_size
    except OSError as error:
        fault = too_many() if error.errno == errno.EMFILE else error.strerror or error
        raise ValueError(f"{path} cannot be read: {fault}") from None
    if size != found.end:
        kind = "shorter" if size < found.end else "longer"
        raise ValueError(
            f"{path} has {size} bytes and should have {found.end} ({tokens} tokens of {dtype}): it "
            f"is {kind} than when it was written. Copy or prepare it again"
        )
    return found
