"""A set-up that is wrong: what no restart mends is told as what to change, and ends the process.

The process ends with exit status 2 then, so that whoever starts it need not try for ever. Where it
may pass by itself all the same, the status is 1, as of any fault that another start may mend.
"""

import contextlib
import errno
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

# Somebody else's folder, and a disk that is mounted to be read. A full disk is neither: it passes.
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class WrongSetUp(Exception):
    """Only somebody who changes the set-up mends it; the text says what to change."""

    status = 2
    """Of the process that it ends."""


class AddressTaken(WrongSetUp):
    """Nobody can listen there."""


@contextlib.contextmanager
def writing(data: Path) -> Iterator[None]:
    """What is done here writes into a process's data folder.

    Raises WrongSetUp where that belongs to another user, or is only to be read.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        path = error.filename or data
        raise WrongSetUp(
            f"DILOCO_DATA={data}: {path} cannot be written ({_said(error).lower()}): "
            f"give the folder to the user of this process ({user(os.geteuid())}), or name another "
            "folder"
        ) from None


def cannot_listen(host: str, port: int, error: OSError, setting: str) -> AddressTaken:
    """What to do where nobody can listen; `setting`: names the port, as DILOCO_PORT."""
    if error.errno == errno.EADDRINUSE:
        free = f"set {setting} to another one, or to 0 for a free one"
        return AddressTaken(f"port {port} of {host} is taken: {free}")
    # A host that is not this machine's, or a port that only root may take.
    change = f"see {setting.replace('PORT', 'HOST')} and {setting}"
    return AddressTaken(f"cannot listen on {host}:{port} ({_said(error)}): {change}")


def _said(error: OSError) -> str:
    """What the system says, without number and path; asyncio writes the address into it, too."""
    number = error.errno or 0  # of a name that cannot be looked up it is another kind of number
    return os.strerror(number) if number in errno.errorcode else str(error.strerror)


def owner(path: Path) -> str:
    """The user who has it; or, where this process may not see it, who has the folder around it."""
    for at in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return user(at.stat().st_uid)
    return user(0)


def user(number: int) -> str:
    """As people call that user, if they do."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
