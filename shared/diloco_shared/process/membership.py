"""A process's place in the cluster: its locked data folder, its key in `members`, its assignment.

Two processes never live under one id (I10): the key is created only when it is free, expires when
its process falls silent, and is taken over at once only by a process that holds the same folder's
lock, which proves that the old one is dead.
"""

import asyncio
import errno
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from diloco_shared import VERSION, ambient
from diloco_shared.bus.port import Bus, Conflict
from diloco_shared.bus.repeating import left_undone, until_done
from diloco_shared.bus.stored_records import readable, write_if
from diloco_shared.durable import begin_folder
from diloco_shared.process.health import anonymous_bytes
from diloco_shared.process.set_up import WrongSetUp, writing
from diloco_shared.process.stopping import CLOSES_S
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import sendable
from diloco_shared.protocol.records import Assignment, MemberRecord, boot_of
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

# Lifetime of a member's key without refresh, and how often it is refreshed: two may be lost.
TTL_S = 5.0
REFRESH_S = 1.5
# In each member's data folder.
LOCK = "lock"


class FolderTaken(WrongSetUp):
    """Another process works in this data folder.

    It may end by itself: one that hangs in a call of its file system was given up, or its node is
    cut off, and the same learner was started elsewhere. So another start may mend this.
    """

    status = 1


class DataFolder:
    """`<data>/<id>/`, locked for the life of the process.

    The lock is flock(2): processes that share a data folder must share a kernel, or a file system
    that carries such locks between its hosts, as NFSv4 does.
    """

    def __init__(self, data: Path, member: str) -> None:
        self.member = member
        """Raises FolderTaken, and WrongSetUp where this user may not write there."""
        self.path = data / member
        with writing(data):
            begin_folder(self.path)  # or a power cut takes all that is synced in it
            self._file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, 32).decode(errors="replace").strip()
            os.close(self._file)
            if error.errno not in (errno.EAGAIN, errno.EACCES):  # nobody has it
                text = (
                    f"{self.path / LOCK} cannot be locked ({os.strerror(error.errno or 0)}): the "
                    "data folder must lie on a file system with flock (Lustre has it with the "
                    "mount option flock)"
                )
                raise OSError(error.errno, text) from None
            raise FolderTaken(
                f"{self.path} is in use by process {holder or 'unknown'}: stop it, or give this "
                "one another id or data folder"
            ) from None
        os.ftruncate(self._file, 0)
        with suppress(OSError):  # for people: a full disk keeps nobody from working
            os.pwrite(self._file, str(own_pid()).encode(), 0)

    @classmethod
    def claim(
        cls, data: Path, role: str, given: str = "", allowed: Sequence[str] = ()
    ) -> "DataFolder":
        """The folder of the id that is `given`; else one of this role that nobody has locked.

        A name is for good: it lies on the data volume, so that a container that is made anew goes
        on under the name, and with the files, of the one before, whatever its host is called. Of
        those that are free the one used last comes first. Where none is free there is a new one;
        where only some names are `allowed`, the first of them that is free, or FolderTaken.
        """
        if given:
            return cls(data, given)
        for name in sorted(allowed, key=lambda name: _used_at(data / name), reverse=True):
            with suppress(FolderTaken):
                return cls(data, name)
        if allowed:
            raise FolderTaken(
                f"every name of DILOCO_IDS ({', '.join(allowed)}) is in use by another process: "
                "give this site another name at the hub, and in DILOCO_IDS, or start fewer "
                "learners; where others on this machine know more names, give all the same list"
            )
        known = [path.parent for path in data.glob(f"{role}-*/{LOCK}")]
        for folder in sorted(known, key=_used_at, reverse=True):
            with suppress(FolderTaken):
                return cls(data, folder.name)
        while True:
            # Whoever is started beside this one may take it before it is locked: then another.
            with suppress(FolderTaken):
                return cls(data, f"{role}-{ambient.token(4)}")

    @property
    def lock(self) -> str:
        """Names this lock across all processes that it holds off: those of this kernel."""
        stat = os.fstat(self._file)
        return f"{_kernel()}:{stat.st_dev}:{stat.st_ino}"

    def release(self) -> None:
        os.close(self._file)


def own_pid() -> int:
    """As people look for it."""
    return os.getpid()


def own_host() -> str:
    """As people look for it."""
    return socket.gethostname()


def _used_at(folder: Path) -> float:
    """When it was last claimed; 0 if it is gone."""
    try:
        return (folder / LOCK).stat().st_mtime
    except OSError:
        return 0.0


def _kernel() -> str:
    """Containers of one machine share it, whatever their hosts are called."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


class Registration:
    """Registers a member, keeps it alive, and reads what it is assigned to."""

    def __init__(self, bus: Bus, member: str, role: str, lock: str, *, address: str = "") -> None:
        self.bus = bus
        self.changed = asyncio.Event()
        self.taken = asyncio.Event()  # the key, by this process
        self.writing = asyncio.Lock()
        self.revision = 0  # of the key, as written last; 0: unknown
        self.run_id, self.shard = "", 0  # of the run that `assignments` told last
        self.anew = False  # that came once more while it was worked for: see `worked_for`
        self.record = MemberRecord.model_validate(
            {
                "id": member,
                "role": role,
                "boot": boot_of(VERSION, ambient.unique()),
                "host": own_host(),
                "pid": own_pid(),
                "lock": lock,
                "started_at": ambient.wall(),
                "address": address,
            }
        )

    @property
    def key(self) -> str:
        """In MEMBERS."""
        return subjects.member_key(self.record.id, self.record.role, named=self.bus.named)

    async def register(self) -> None:
        """Take the key; waits while another living process has it or the bus is away.

        The coordinator makes the bucket when it starts.
        """

        async def take() -> None:
            if not await self._take():
                raise Conflict(
                    "another living process has this id: stop it, or give this one another "
                    "DILOCO_ID; hosts that share a data folder need a file system with flock "
                    "between them, or a folder each"
                )

        pauses = (REFRESH_S / 3, REFRESH_S / 3)
        await until_done(take, f"registering {self.record.id}", pauses=pauses)

    async def _take(self) -> bool:
        self.update(memory_bytes=anonymous_bytes())
        self.taken.clear()
        key, value = self.key, encode(self.record)
        known, self.revision = self.revision, 0  # until it is known what became of it
        if known and await self._wrote(key, value, known):
            return True  # at once: over a slow link, to look first would take too long
        entry = await self.bus.kv_get(subjects.MEMBERS, key)
        there = entry if entry is not None and entry.value is not None else None
        if there is not None and not self._ours(there.value):
            return False
        return await self._wrote(key, value, 0 if there is None else there.revision)

    async def _wrote(self, key: str, value: bytes, known: int) -> bool:
        try:
            self.revision = await write_if(
                self.bus, subjects.MEMBERS, key, value, known, ttl_s=TTL_S
            )
        except Conflict:
            return False
        self.taken.set()
        return True

    async def regained(self) -> None:
        """Wait until the key is this process's: while `keep` runs, no other living one has it."""
        self.taken.clear()
        await self.taken.wait()

    def _ours(self, value: bytes | None) -> bool:
        there = readable(value, MemberRecord)
        if there is None:
            return True  # nobody can be living under a record that nobody can read
        return there.boot == self.record.boot or there.lock == self.record.lock

    async def keep(self) -> None:
        """Refresh for ever, at once when the state changes; a key that expired is taken again."""
        began = ambient.monotonic()
        while True:
            # Counted from the last one's beginning: on a slow link its answer takes a while.
            with suppress(TimeoutError):
                async with asyncio.timeout(began + REFRESH_S - ambient.monotonic()):
                    await self.changed.wait()
            self.changed.clear()
            began = ambient.monotonic()
            await self.refresh()

    async def refresh(self) -> None:
        """Write the record now; logged, not raised, when the bus is away."""
        # One at a time: of two, one would find the key changed under it.
        async with self.writing:
            with left_undone("refreshing"):
                if not await self._take():
                    log.error("another process took this id", id=self.record.id)

    def update(self, **fields: Any) -> None:
        """Change what the next refresh shows; at once what a person would look for."""
        shown = {name: sendable(v) if isinstance(v, str) else v for name, v in fields.items()}
        before, self.record = self.record, self.record.model_copy(update=shown)
        if (self.record.state, self.record.full) != (before.state, before.full):
            self.changed.set()

    async def leave(self) -> None:
        """Give the key back, if it is still ours, and the hub answers in time: else it expires."""
        with left_undone("leaving"), suppress(TimeoutError):
            async with asyncio.timeout(CLOSES_S):
                await self._give_back()

    async def _give_back(self) -> None:
        entry = await self.bus.kv_get(subjects.MEMBERS, self.key)
        if entry is not None and entry.value is not None and self._ours(entry.value):
            with suppress(Conflict):  # another process has it by now
                place = subjects.MEMBERS, self.key
                await self.bus.kv_delete(*place, revision=entry.revision)

    async def assignments(self) -> AsyncIterator[str]:
        """The run this member works for, at first and at every change; "" for none.

        A run that was deleted and submitted again is a change, and so is another shard; `run_id`
        and `shard` are of the newest told. The same is told again to who works for nothing, once
        the server has begun a new life: on a hub that was put back, a run that was over may go on.
        Who works for it is asked to look again afterwards, by `worked_for`.
        """
        last: Assignment | None = None
        async with self.bus.kv_watch(subjects.ASSIGNMENTS, self.record.id) as entries:
            async for entry in entries:
                assigned = Assignment(member=self.record.id, run="", at=0.0)
                if entry.value is not None:
                    try:
                        assigned = decode(entry.value, Assignment)
                    except WireError as error:
                        log.error("unreadable assignment", error=str(error))
                        continue
                assigned = assigned.model_copy(update={"at": 0.0})
                if assigned != last or (entry.anew and assigned.run and not self.record.run):
                    self.run_id, self.shard = assigned.run_id, assigned.shard
                    last, self.anew = assigned, False
                    yield assigned.run
                elif entry.anew and assigned.run:
                    self.anew = True

    def worked_for(self) -> bool:
        """The work for what `assignments` told last is over. Whether it may have to go on after
        all: the same came meanwhile, from a server that had begun a new life."""
        found, self.anew = self.anew, False
        return found
