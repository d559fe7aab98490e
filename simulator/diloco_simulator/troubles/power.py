"""Machines that lose their power: their disks may forget whatever was not synced.

What fsync was called for is known exactly, since `Disks` stands in its place: of a file its bytes
then, of a folder its names then. At a power cut everything since may have come to the disk, or not:
a file may be empty, cut short or as it was; a new name may be missing, a removed one be there
again. Where a process has not synced the name of its own folder, that may be missing, with all that
is in it. A rename within a folder is one change. What is on other machines, such as the store of
checkpoints, stays.
"""

import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from diloco_coordinator.api.audit_io import FILE as AUDIT
from diloco_coordinator.exports.shelf_io import Shelf
from diloco_learner.app import Learner
from diloco_learner.work_io import CHECKPOINTS
from diloco_shared.protocol.chunks import digest_bytes
from diloco_shared.protocol.messages import TapeRebirth, TapeRecord, TapeSnapshot, TapeTerm
from diloco_simulator.checkers.polite_ends import Saved
from diloco_simulator.worlds.processes import Host
from diloco_syncer.snapshots.snapshots_io import RECEIVED, SNAPSHOTS

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# How often all machines lose it at once, and how often one does while it writes.
ALL, WRITING = 0.25, 0.5
# Of folders, so many are as they were when they were synced last, or as they are now; of the others
# each name for itself.
OLD, NEW = 0.4, 0.2
# In a coordinator's data folder.
EXPORTS = "exports"
# So long after a disk was full all is written anew that it did not take, in virtual seconds.
ROOM_S = 60.0
# Before there is power again, in virtual seconds.
AWAY_S = (0.5, 8.0)


@dataclass(slots=True)
class Synced:
    """What is on all disks for sure, by the numbers of files and folders."""

    data: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)

    def file(self, handle: int) -> None:
        """It, or the names in a folder, is put on the disk."""
        path = Path(f"/proc/self/fd/{handle}")
        number = os.fstat(handle).st_ino
        if path.is_dir():
            self.names[number] = _names(path)
        else:
            self.data[number] = path.read_bytes()  # the handle itself may be to be written only

    def all_of(self, folder: Path) -> None:
        """After a restart there is nothing that was not read from the disk."""
        self.names[folder.stat().st_ino] = _names(folder)
        for path in folder.iterdir():
            if path.is_dir():
                self.all_of(path)
            else:
                self.data[path.stat().st_ino] = path.read_bytes()


def put_back(root: Path, left: Path) -> None:
    """In the place of a folder there is what was left of it, if anything was."""
    shutil.rmtree(root)
    if left.is_dir():
        left.rename(root)


def _names(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}


class Remnants:
    """What a power cut leaves of one folder and of all below it."""

    def __init__(self, synced: Synced, root: Path, rng: Random) -> None:
        self.synced, self.root, self.rng = synced, root, rng
        self.paths = {path.stat().st_ino: path for path in sorted(root.rglob("*"))}
        self.forgotten = 0  # files and names that were there

    def put(self, to: Path) -> None:
        """As a new folder."""
        self._folder(self.root.stat().st_ino, self.root, to)

    def _folder(self, number: int, at: Path | None, to: Path) -> None:
        to.mkdir()
        now = {} if at is None else _names(at)
        for name, child in self._chosen(now, self.synced.names.get(number, {})):
            path = self.paths.get(child)
            if path.is_dir() if path is not None else child in self.synced.names:
                self._folder(child, path, to / name)
            elif path is not None or child in self.synced.data:
                (to / name).write_bytes(self._content(child, path))

    def _chosen(self, now: dict[str, int], synced: dict[str, int]) -> list[tuple[str, int]]:
        """Names of one folder, and what is under them."""
        dice = self.rng.random()
        # Of a rename both names are as before, or neither: they go by what they name.
        old = {
            number: dice < OLD or (dice >= OLD + NEW and self.rng.random() < 0.5)
            for number in sorted({*now.values(), *synced.values()})
        }
        found: dict[str, int] = {}
        for name in sorted({*now, *synced}):
            new, before = now.get(name), synced.get(name)
            decides = before if new is None else new
            assert decides is not None
            chosen = before if new != before and old[decides] else new
            self.forgotten += chosen != new
            if chosen is not None:
                found[name] = chosen
        return sorted(found.items())

    def _content(self, number: int, path: Path | None) -> bytes:
        synced = self.synced.data.get(number)
        if path is None:
            assert synced is not None
            return synced
        now = path.read_bytes()
        if now == synced:
            return now
        before = synced if synced is not None and now.startswith(synced) else b""
        kept = self.rng.choice([len(before), len(now), self.rng.randint(len(before), len(now))])
        self.forgotten += kept < len(now)
        return now[:kept]


def _told_by(tape: Iterable[tuple[int, TapeRecord]], syncer: str) -> set[str]:
    """Names of the snapshots that this syncer has told of when it led."""
    leaders: dict[int, str] = {}
    told = set[str]()
    for _, record in tape:
        if isinstance(record, TapeTerm | TapeRebirth):
            leaders[record.term] = record.leader
        elif isinstance(record, TapeSnapshot) and leaders.get(record.term) == syncer:
            told.add(record.path)
    return told


class Power:
    """Of one world, with dice of its own."""

    def __init__(self, world: "World") -> None:
        self.world, self.loop = world, world.loop
        self.rng = Random(f"power {world.seed}")
        self.counts = world.found.counts
        self.known = world.options.power_losses > 0  # whether anybody needs to know what is synced
        self.synced = Synced()
        # Folders whose own names are on the disk, by host. Each is on a disk of its own in the
        # world, and beside the others on the real one: what others sync there counts for them only.
        self.named: dict[str, int] = {}
        self.armed: set[str] = set()  # hosts that lose it in the midst of what they write next

    def plan(self) -> None:
        """Draw when somebody is without."""
        for _ in range(self.world.options.power_losses):
            self.loop.call_later(self.rng.uniform(3.0, self.world.options.safety_s), self._strike)

    def _strike(self) -> None:
        world = self.world
        if not world.scene.faulty:
            return
        dice, machine = self.rng.random(), self.rng.choice(world.machines)
        if dice < ALL:
            for one in world.machines:
                self.lose(one)
        elif dice < ALL + WRITING:
            self.armed.add(machine.host)
        else:
            self.lose(machine)

    def lose(self, machine: Host) -> None:
        """Now."""
        root = machine.folder / machine.name
        if not root.is_dir():
            return
        told = self.told(machine)
        machine.kill()
        put_back(root, self.remnants(machine))
        self.back(machine, told)

    def put(self, machine: Host, handle: int) -> None:
        """What it puts on the disk."""
        if os.path.samestat(os.fstat(handle), machine.folder.stat()):
            self.named[machine.host] = (machine.folder / machine.name).stat().st_ino
        else:
            self.synced.file(handle)

    def found(self, machine: Host) -> None:
        """All that is in its folder now is what a restart finds."""
        root = machine.folder / machine.name
        if root.is_dir():
            self.synced.all_of(root)
            self.named[machine.host] = root.stat().st_ino

    def remnants(self, machine: Host) -> Path:
        """What is left of its folder, beside it; nothing is there where its name is lost."""
        root = machine.folder / machine.name
        left = root.with_name(f".without-power-{root.name}")
        remnants = Remnants(self.synced, root, self.rng)
        if self.named.get(machine.host) != root.stat().st_ino and self._forgotten():
            remnants.forgotten = len(remnants.paths)
        else:
            remnants.put(left)
        self.counts["machines without power"] += 1
        self.counts["files that a power cut took"] += remnants.forgotten
        return left

    def _forgotten(self) -> bool:
        """Whether a name is lost that nobody has put on the disk."""
        dice = self.rng.random()
        return dice < OLD or (dice >= OLD + NEW and self.rng.random() < 0.5)

    def back(self, machine: Host, told: dict[str, bytes]) -> None:
        """Its disk is as the power cut left it: what was told as safe must be there."""
        root = machine.folder / machine.name
        self.found(machine)
        self.world.found.looks["disks"] += 1
        self.counts["files told as safe before a power cut"] += len(told)
        for name, content in told.items():
            path = root / name
            if not path.is_file() or not path.read_bytes().startswith(content):
                text = f"{machine.host} lost its power, and {name} with it, which it told as safe"
                self.world.broken("disks", text)
        self.world.start(machine, self.rng.uniform(*AWAY_S))

    # --- what was told as safe -------------------------------------------------------------------

    def told(self, machine: Host, synced: int | None = None) -> dict[str, bytes]:
        """What is in these files, by their paths in its folder. `synced`: the handle of what is
        just being put on the disk: of that nothing is told yet but what was there before."""
        root = machine.folder / machine.name
        files = [*self._snapshots(root, machine.name), *self._exports(root)]
        # Every row is there before its answer leaves, unless the disk was full. And where it was, a
        # learner's next life finds a checkpoint whose name nobody could put on the disk.
        ended_at = self.world.disks.full_until.get(machine.host, -math.inf)
        full = self.world.options.disk_full or self.loop.now < ended_at + ROOM_S
        files += () if full else (*self._checkpoint(machine), *root.glob(f"{AUDIT}*"))
        now = None if synced is None else os.fstat(synced).st_ino
        told = dict[str, bytes]()
        for path in files:
            number, content = path.stat().st_ino, path.read_bytes()
            if number == now:
                content = self.synced.data.get(number, b"")
            if content:
                told[str(path.relative_to(root))] = content
        return told

    def _checkpoint(self, machine: Host) -> list[Path]:
        """The newest that a learner has, unless it was damaged before; its next life must know of
        it."""
        work = machine.app.work if machine.lives and isinstance(machine.app, Learner) else None
        if work is None or not work.built or (newest := work.checkpoints.newest) is None:
            return []
        folder = machine.folder / machine.name / CHECKPOINTS / work.spec.folder
        named = folder.glob(f"{newest}.*")  # none where the run is deleted
        found = [path for path in named if digest_bytes(path.read_bytes()) in path.name]
        if found:
            machine.kept[work.spec.folder] = Saved(newest, None)
        return found

    def _snapshots(self, root: Path, syncer: str) -> list[Path]:
        """Those that tapes name as this one's, and that were not removed since. Of one that is just
        received from another disk nobody was told that it is here."""
        named = {
            (run, path)
            for run, observer in self.world.observers.items()
            for tape in observer.records
            for path in _told_by(tape, syncer)
        }
        runs = [path for path in (root / SNAPSHOTS).glob("*") if path.is_dir()]
        there = [(of.name.partition(".")[0], p) for of in runs for p in of.rglob("snapshot-*")]
        whole = [path for run, path in there if (run, path.name) in named]
        told = [path for path in whole if not (path.parent / RECEIVED).exists()]
        return [file for path in told for file in path.iterdir()]

    def _exports(self, root: Path) -> list[Path]:
        """Those that are shown as complete."""
        shelf, found = Shelf(root / EXPORTS), list[Path]()
        for record in shelf.records() if shelf.any else ():
            if record.state == "complete":
                found += [path for path in shelf.place(record).rglob("*") if path.is_file()]
        return found
