"""What a simulated syncer machine keeps: the product's own snapshot files, some of them torn."""

import random
import shutil
from pathlib import Path
from typing import Any

from diloco_syncer.edges.snapshots import META, SnapshotStore

Held = tuple[dict[str, Any], dict[str, Any]]  # meta and arrays


class Disk:
    """Keeps nothing: for processes that never start again."""

    def save(self, meta: dict[str, Any], arrays: dict[str, Any]) -> None:
        """A complete snapshot."""

    def tear(self, meta: dict[str, Any], arrays: dict[str, Any], rng: random.Random) -> None:
        """One whose writer dies meanwhile."""

    def newest(self) -> tuple[Held | None, int]:
        """The newest sound one, and how many newer ones were passed over."""
        return None, 0

    def covers(self) -> int:
        """Tape sequence of the newest, sound or not; 0 for none."""
        return 0

    def count(self) -> int:
        """Whole snapshots kept."""
        return 0

    def give(self, to: "Disk") -> None:
        """The newest one, file by file, to another machine, which refuses what is torn."""

    def wipe(self) -> None:
        """A fresh disk."""


class FileDisk(Disk):
    """Real files in `folder`, which nobody else uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = SnapshotStore(folder / "run")
        self.torn = 0  # in the place of whole ones, since the last of those

    def save(self, meta: dict[str, Any], arrays: dict[str, Any]) -> None:
        self.torn = 0
        self.store.save(meta["history"]["seq"], meta, arrays)

    def tear(self, meta: dict[str, Any], arrays: dict[str, Any], rng: random.Random) -> None:
        """Half of it lies aside, or in its place without what was not written yet.

        The latter no sound file system does; it must be survived all the same.
        """
        whole = SnapshotStore(self.folder / "whole").save(meta["history"]["seq"], meta, arrays)
        arrays_files = sorted(path.name for path in whole.iterdir() if path.name != META)
        one = rng.choice(arrays_files)
        for name in rng.choice([(one,), (META,), (one, META)]):
            half = whole / name
            half.write_bytes(half.read_bytes()[: rng.randrange(half.stat().st_size)])
        name = whole.name
        if rng.random() < 0.5:
            name = name.replace("snapshot-", ".writing-")
        else:
            self.torn += 1
        self.store.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.store.folder / name, ignore_errors=True)
        whole.rename(self.store.folder / name)

    def newest(self) -> tuple[Held | None, int]:
        found, faults = self.store.newest()
        return found, len(faults)

    def covers(self) -> int:
        return max(self.store.covers(), default=0)

    def count(self) -> int:
        return len(self.store.covers()) - self.torn

    def give(self, to: Disk) -> None:
        assert isinstance(to, FileDisk)
        found = self.store.newest_meta()
        if found is None:
            return
        covers, meta = found
        try:
            for listed in to.store.missing(meta):
                path = self.store.file(covers, listed.digest)
                assert path is not None
                to.store.receive(listed, path.read_bytes())
        except ValueError:
            return  # a torn one: what came of it stays for the next
        to.store.adopt(covers, meta)

    def wipe(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.torn = 0
