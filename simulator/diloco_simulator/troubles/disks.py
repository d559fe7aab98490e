"""The disks of a whole world: slow, full once or for a while, and torn where the writer dies.

The files are real and lie under the world's folder; whoever syncs one asks these. Nothing is ever
synced for real: nobody will read it after a power cut.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_coordinator.exports.shelf_io import RECORD
from diloco_shared.checkpoints.vault_io import Vault, VaultError
from diloco_simulator.troubles.chance import Chance
from diloco_simulator.troubles.power import put_back
from diloco_simulator.virtual_loop import Died, current
from diloco_simulator.worlds.processes import Host
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

T = TypeVar("T")

# Options say how often a snapshot meets a fault. It syncs a handful of files and folders, and there
# are a few snapshots before a world is healed: each sync meets so much of the rate.
FULL, TORN = 0.4, 0.1
# A disk that is full for a while is so for so long, in virtual seconds.
SPELL_S = (5.0, 40.0)
# What is free on a disk that is not full: more than anybody needs.
BLOCKS, BLOCK_BYTES = 1 << 30, 4096


class Disks:
    """Of one world."""

    def __init__(self, world: "World", rng: Random) -> None:
        self.world = world
        self.rng = rng
        self.options = world.options
        self.chance = Chance(world.scene, rng)
        self.full_until: dict[str, float] = {}  # by host
        self.store_away_until = 0.0  # where checkpoints and archives are, for everybody
        self.working = self.synced = False  # the thread's work that is done now
        self.storing = False  # an object is put where checkpoints are: on no disk of these
        self.names: dict[int, set[tuple[str, int]]] = {}  # of folders, when they were synced last
        # A folder, what is left of it, and what is to be done once that is so.
        self.torn: tuple[Path, Path, Callable[[], None]] | None = None

    def plan(self) -> None:
        """Draw when a disk is full for a while."""
        if self.options.no_names:
            self.world.found.counts["file systems that settle no names"] += 1
        for _ in range(self.options.disk_spells):
            at = self.rng.uniform(3.0, self.options.safety_s)
            self.world.loop.call_later(at, self._spell)

    def _spell(self) -> None:
        world = self.world
        if not world.scene.faulty or not world.syncers:
            return
        # A leader's is what matters most; a learner's says so too.
        machine = self.rng.choice([*world.syncers, *world.syncers, *world.learners])
        world.found.counts["a disk full for a while"] += 1
        self.full_until[machine.host] = world.loop.now + self.rng.uniform(*SPELL_S)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block whoever syncs or writes asks these disks."""
        kept = os.fsync, os.statvfs, Vault.write, Vault.read, Vault.keys, Vault.pieces
        loop = self.world.loop
        save = SnapshotStore.save
        if self.options.slow_writes:
            SnapshotStore.save = _kept(save)  # type: ignore[method-assign]
        os.fsync, os.statvfs = self._sync, self._there  # type: ignore[assignment]
        Vault.write = _asking(self, Vault.write)  # type: ignore[method-assign]
        reading = Vault.read, Vault.keys, Vault.pieces
        Vault.read, Vault.keys, Vault.pieces = (_reaching(self, f) for f in reading)  # type: ignore
        loop.perform = self._perform
        try:
            yield
        finally:
            SnapshotStore.save = save  # type: ignore[method-assign]
            os.fsync, os.statvfs, Vault.write, Vault.read, Vault.keys, Vault.pieces = kept  # type: ignore

    # --- a thread's work -----------------------------------------------------------------------

    def _perform(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What wrote to a disk takes some time more."""
        self.working, self.synced = True, False
        try:
            result = work()
        except Died:
            self._left()
            raise
        except OSError as error:
            if self.options.no_names and error.errno == errno.EINVAL:
                self.world.broken("disks", f"a file system that settles no names: {error}")
            raise
        finally:
            self.working = False
        slow = self.synced and self.world.scene.faulty
        return result, self.rng.uniform(0.05, 1.0) * self.options.disk_s if slow else 0.0

    def _left(self) -> None:
        """The dead tidy nothing up: what they left is there again."""
        assert self.torn is not None
        (folder, left, then), self.torn = self.torn, None
        put_back(folder, left)
        then()

    def machine(self) -> Host | None:
        """Whose process does what is done now."""
        process, world = current(), self.world
        process = process.owner or process if process is not None else None
        machines = (*world.machines, *world.troubles.twins)
        return next((m for m in machines if process is not None and m.process is process), None)

    def _begins(self) -> Host | None:
        """Whose process is being started: it makes its folder before anything can trouble it."""
        return next((m for m in self.world.machines if m.lives and m.lock is None), None)

    # --- files ---------------------------------------------------------------------------------

    def _sync(self, handle: int) -> None:
        """In the place of fsync. A file system that knows none of a folder keeps its names all the
        same, as soon as they are there."""
        if self.storing:
            return
        machine, power = self.machine(), self.world.power
        self.synced = True
        if machine is None:
            if power.known and (begins := self._begins()) is not None:
                power.put(begins, handle)
            return
        if self._full(machine) or self.chance(FULL * self.options.disk_full, "disk full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.working and self.chance.scene.faulty:
            self._tear(machine, handle)
            self._lose_power(machine, handle)
        if power.known:
            power.put(machine, handle)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            self.names[os.fstat(handle).st_ino] = _names(handle)
            if self.options.no_names:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _full(self, machine: Host) -> bool:
        until = self.full_until.get(machine.host, 0.0)
        return self.world.scene.faulty and self.world.loop.now < until

    def _tear(self, machine: Host, handle: int) -> None:
        """Now and then the writer dies, and what it wrote last is half there."""
        if self.rng.random() >= TORN * self.options.torn:
            return
        folder = machine.folder / machine.name
        files = _written(folder, os.fstat(handle))
        if not files or not self._news(handle):
            return
        file = self.rng.choice(files)
        os.truncate(file, self.rng.randrange(file.stat().st_size))
        self.world.found.counts["torn"] += 1
        left = folder.with_name(f".torn-{folder.name}")
        shutil.copytree(folder, left)
        self.torn = folder, left, partial(self.world.power.found, machine)
        machine.kept.clear()
        if machine in self.world.machines:
            self.world.crash(machine, self.rng.uniform(0.5, 6.0))
        else:
            machine.kill()
        raise Died

    def _news(self, handle: int) -> bool:
        """Whether some of it is not on the disk yet: a folder may be put there once more."""
        about = os.fstat(handle)
        old = self.names.get(about.st_ino, set())
        return not stat.S_ISDIR(about.st_mode) or not _names(handle) <= old

    def _lose_power(self, machine: Host, handle: int) -> None:
        """The machine of the writer may be to lose its power just now."""
        power = self.world.power
        if machine.host not in power.armed:
            return
        power.armed.discard(machine.host)
        if power.rng.random() < 0.5:
            power.put(machine, handle)
        told, left = power.told(machine, handle), power.remnants(machine)
        machine.kill()
        self.torn = machine.folder / machine.name, left, partial(power.back, machine, told)
        raise Died

    def _there(self, path: Any) -> os.statvfs_result:
        """In the place of statvfs: always the same, whatever machine this is played on."""
        machine = self.machine()
        free = 0 if machine is not None and self._full(machine) else BLOCKS
        return os.statvfs_result(
            (BLOCK_BYTES, BLOCK_BYTES, BLOCKS, free, free, BLOCKS, BLOCKS, BLOCKS, 0, 255)
        )

    def stores(self, key: str) -> None:
        """A checkpoint's object is about to be stored. Raises VaultError."""
        self.synced = True
        self.reaches(key)
        if self.chance(FULL * self.options.disk_full, "checkpoint not written"):
            raise VaultError(f"{key}: {os.strerror(errno.ENOSPC)}")

    def reaches(self, key: str) -> None:
        """Raises VaultError while the store is away."""
        if self.world.scene.faulty and self.world.loop.now < self.store_away_until:
            self.world.found.counts["the store of checkpoints not reached"] += 1
            raise VaultError(f"{key}: {os.strerror(errno.EHOSTUNREACH)}")


def _kept(save: Callable[..., Path]) -> Callable[..., Path]:
    """What is written is let go by whoever hears that it is: what a thread does takes no time here,
    and merges would never wait for it."""

    def saved(
        store: SnapshotStore, covers: int, meta: Any, arrays: dict[str, Any], *how: Any
    ) -> Path:
        return save(store, covers, meta, dict(arrays), *how)

    return saved


def _asking(disks: Disks, write: Callable[..., None]) -> Callable[..., None]:
    def asking(vault: Vault, key: str, data: bytes | None) -> None:
        disks.stores(key)
        disks.storing = True
        try:
            write(vault, key, data)
        finally:
            disks.storing = False

    return asking


def _reaching(disks: Disks, read: Callable[..., T]) -> Callable[..., T]:
    def reaching(vault: Vault, key: str = "", *more: Any, **named: Any) -> T:
        disks.reaches(key)
        return read(vault, key, *more, **named)

    return reaching


def _names(folder: int) -> set[tuple[str, int]]:
    """Of a folder that is open, with what they name."""
    with os.scandir(folder) as entries:
        return {(entry.name, entry.inode()) for entry in entries}


def _written(folder: Path, synced: os.stat_result) -> list[Path]:
    """Files that are being synced; of a folder, those of the newest in it that no other shares."""
    paths = sorted(folder.rglob("*"))
    same = [path for path in paths if os.path.samestat(path.stat(), synced)]
    if same and next(same[0].rglob(RECORD), None) is not None:
        return []  # a name beside exports, or one's record, is new: their files were whole before
    if same and stat.S_ISDIR(synced.st_mode):
        files = [p for p in paths if same[0] in p.parents and p.is_file() and _alone(p)]
        newest = max((_number(p.relative_to(same[0])) for p in files), default=0)
        same = [p for p in files if _number(p.relative_to(same[0])) == newest]
    # The record of an export lay there, whole, before its files were begun.
    return [p for p in same if p.is_file() and p.stat().st_size and p.name != RECORD]


def _alone(path: Path) -> bool:
    """Whether the file has no other name."""
    return path.stat().st_nlink == 1


def _number(path: Path) -> int:
    """Of a snapshot or a checkpoint; 0 for what is aside."""
    return int("".join(filter(str.isdigit, path.parts[0].partition(".")[0])) or 0)
