"""Files and names that a power cut leaves on the disk, and how much room there is for them."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# Of a file system that does not know it, and of a folder that may be written and not listed.
_NAMES_STAY_OPEN = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)

PART = ".part"  # behind the name of a file that is being written


def settle(path: Path) -> None:
    """Put what is written of a file, or the names in a folder, on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def settle_names(folder: Path) -> None:
    """Put the names in a folder on the disk, where its file system can. Raises OSError."""
    try:
        settle(folder)
    except OSError as error:
        if error.errno not in _NAMES_STAY_OPEN:
            raise


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there, unless it is there. Their names are on
    the disk when this returns: else a power cut takes all that was synced in them.

    Raises OSError; then it leaves none that was not there.
    """
    folder = folder.absolute()
    new = [one for one in (folder, *folder.parents) if not one.is_dir()]
    if new and new[-1].exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(new[-1]))
    there, made = new[-1].parent if new else folder, list[Path]()
    try:
        # Whoever made this one may have been killed before its name was on the disk.
        settle_names(there.parent)
        # Each before the next one: so that holds for no other that is there.
        for one in reversed(new):
            one.mkdir(exist_ok=True)
            made.append(one)
            settle_names(one.parent)
    except OSError:
        for one in reversed(made):
            with suppress(OSError):
                one.rmdir()
        raise


def begin_folder(folder: Path) -> None:
    """`make_folder` for a process that begins to work there. One that is there is settled as far as
    that can be: a disk that is full, or fails, keeps nobody from working.

    Raises OSError where it cannot be made.
    """
    try:
        make_folder(folder)
    except OSError:
        if not folder.is_dir():
            raise


def replace(path: Path, content: bytes | memoryview | str) -> None:
    """Write a file: whenever this is interrupted, all of the old is there or all of the new. Once
    it returns it is the new one, after a power cut as well.

    Raises OSError.
    """
    _replace(path, content, 0o666)  # less what this process's umask takes away


def replace_for_owner(path: Path, content: str, *, like: Path | None = None) -> None:
    """`replace` a file that nobody but its owner may read at any moment.

    `like`: what root writes belongs to whom this belongs to (`give`).
    """
    _replace(path, content, 0o600, like)


def give(what: Path | int, like: Path) -> None:
    """A path, or an open file, to whoever owns `like`; only root can, and for others nothing is
    done. Raises OSError."""
    if os.geteuid() == 0:
        owner = like.stat()
        os.chown(what, owner.st_uid, owner.st_gid)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """`replace` for what is written piece by piece. Where the block raises, the old file stays."""
    with _replacing(path, 0o666) as file:
        yield file


def _replace(
    path: Path, content: bytes | memoryview | str, mode: int, like: Path | None = None
) -> None:
    with _replacing(path, mode, like) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def _replacing(path: Path, mode: int, like: Path | None = None) -> Iterator[BinaryIO]:
    aside = path.with_name(path.name + PART)
    aside.unlink(missing_ok=True)  # what a dead process left has the rights that it had then
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            if like is not None:
                give(file.fileno(), like)
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)  # half a file would take room on a disk that is full
        raise
    settle_names(path.parent)


def free_bytes(folder: Path) -> int | None:
    """What an ordinary user may still write there; None where the file system does not say.

    No file can be made without an inode, however many bytes are left.
    """
    try:
        there = _statvfs(folder)
    except OSError:
        return None
    if not there.f_blocks:
        return None
    return 0 if there.f_files and not there.f_favail else there.f_bavail * there.f_frsize


def _statvfs(folder: Path) -> os.statvfs_result:
    """Of a folder, or of the nearest that is there above it."""
    try:
        return os.statvfs(folder)
    except (FileNotFoundError, NotADirectoryError):
        if folder == folder.parent:
            raise
        return _statvfs(folder.parent)
