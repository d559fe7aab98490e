"""The data folder of one machine's cluster: locked by its supervisor, and where others find it."""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco_cli.cluster import ENDING, ENDPOINT, TOKEN_FILE, own
from diloco_cli.words import CONFLICT, FAILED, CliError
from diloco_shared.durable import replace

# A demo writes about 100 MB, and a full disk stops training in the middle of it.
FREE_BYTES_MIN = 256 << 20
# The mark of a cluster whose state nobody will miss, and that state. Members that are started by
# themselves keep theirs in such a folder too, under names that they find or are given.
_THROWAWAY = "throwaway"
_STATE = ("nats", "coordinator", "syncer-*", "learner-*", "logs")
# As `diloco up` names its own members. A name that a member finds for itself is longer.
_OWN = re.compile(r"(syncer|learner)-\d{1,2}")
# In `logs`: what `diloco up --detach` would show.
DETACHED_OUT = "supervisor.out"


class Folder:
    """`take` it first, `release` it last."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = -1

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lock(self) -> str:
        """Names the lock that is held, across processes of this host."""
        stat = os.fstat(self._lock)
        return f"{socket.gethostname()}:{stat.st_dev}:{stat.st_ino}"

    @property
    def token_file(self) -> Path:
        """Where the coordinator's administrator has the token: of his own choice, or here."""
        given = os.environ.get(TOKEN_FILE, "")
        return Path(given).absolute() if given else self.path / "admin-token"

    def take(self) -> None:
        """Create and lock; CliError when it cannot be used, others may write it, so that no other
        command would believe what it says, or another instance works in it."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            own(self.path)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise unusable(self.path, error) from None
        if not _locked(self._lock):
            holder = _holder(self._lock)
            os.close(self._lock)
            raise in_use(self.path, holder)
        if free < FREE_BYTES_MIN:
            self.release()
            raise CliError(
                f"the disk of {self.path} is full: {free >> 20} MB are free and at least "
                f"{FREE_BYTES_MIN >> 20} are needed; make room, or choose another with --data"
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def begin(self, *, throwaway: bool) -> None:
        """Remove what an earlier throwaway cluster left; without `throwaway`, keep all for good.

        Never removes the state of a cluster that was not a throwaway one all its life, nor of a
        member that was started by itself: CliError where a throwaway one would mix with theirs.
        """
        mark = self.path / _THROWAWAY
        if not throwaway:
            mark.unlink(missing_ok=True)
        elif mark.exists():
            self._remove()
        elif not (self.path / "nats").exists():  # else `diloco up` has one here: go on with it
            if others := [found.name for found in self._state() if not self._untouched(found)]:
                raise CliError(
                    f"{self.path} holds {', '.join(sorted(others))} of members that no demo has "
                    "started: choose another folder with --data",
                    CONFLICT,
                )
            mark.touch()

    def _state(self) -> list[Path]:
        return [found for pattern in _STATE for found in self.path.glob(pattern)]

    def _untouched(self, found: Path) -> bool:
        """Whether it is what `take`, or a cluster that could not start, makes and nobody misses."""
        mine = found == self.logs
        return mine and all(log.name.startswith("supervisor.") for log in found.iterdir())

    def _remove(self) -> None:
        """What the throwaway cluster left; all or nothing of it where a process works in it."""
        left = [p for p in self._state() if "-" not in p.name or _OWN.fullmatch(p.name)]
        for found in left:
            if holder := supervisor_of(found):
                raise CliError(
                    f"process {holder} works in {found}, and no demo has started it: choose "
                    "another folder with --data",
                    CONFLICT,
                )
        for found in left:
            shutil.rmtree(found)
        self.logs.mkdir()

    def release(self) -> None:
        if self._lock >= 0:
            with suppress(OSError):  # the next one to end here replaces it
                (self.path / ENDING).unlink()
            os.close(self._lock)
            self._lock = -1

    def secret(self, name: str) -> str:
        """A new random secret, in a file of that name that only its owner may read."""
        value = secrets.token_hex(24)
        path = self.path / name
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(value + "\n")
        return value

    def announce(self, **endpoint: Any) -> None:
        """Tell other commands where the cluster listens, whole or not at all."""
        body = {**endpoint, "token_file": str(self.token_file), "pid": os.getpid()}
        path = self.path / ENDPOINT
        try:
            replace(path, json.dumps(body))
            path.chmod(path.stat().st_mode & ~stat.S_IWOTH)  # whatever the umask is: see `own`
        except OSError as error:
            raise unusable(self.path, error) from None

    def withdraw(self) -> None:
        """Nobody finds the cluster any more, but for whoever waits for its end."""
        with suppress(FileNotFoundError):
            (self.path / ENDPOINT).replace(self.path / ENDING)


def in_use(path: Path, holder: int | str) -> CliError:
    """What to do about a folder in which process `holder` works."""
    return CliError(
        f"another instance works in {path} (process {holder or 'unknown'}): stop it with 'diloco "
        "down', or choose another folder with --data",
        CONFLICT,
    )


def unusable(path: Path, error: OSError) -> CliError:
    """What to do about a folder that cannot be written."""
    if is_full(error):
        return CliError(f"the disk of {path} is full: make room, or choose another with --data")
    return CliError(f"the data folder {path} cannot be used: {error}", FAILED)


def is_full(error: OSError) -> bool:
    """Whether it was for want of room on a disk."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def supervisor_of(path: Path) -> int:
    """Process id of the supervisor, or member, that works in `path`; 0 when none does."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return 0 if _locked(lock, shared=True) else int(_holder(lock) or 0)
    finally:
        os.close(lock)


def _locked(lock: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _holder(lock: int) -> str:
    text = os.pread(lock, 32, 0).decode(errors="replace").strip()
    return text if text.isdigit() else ""
