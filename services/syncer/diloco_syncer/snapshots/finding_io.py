"""Where a syncer finds the run's state: a snapshot belongs to run and shard, whoever wrote it.

In its own folder; in those of other syncers under the same data root, which are read and never
written; in the run-wide checkpoints, each of which has what a snapshot has. Not for an event loop.
"""

import glob
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints.parts_io import bytes_of, load, written_part
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.snapshots.snapshots_io import SnapshotStore, folder_of

log = structlog.get_logger()

# What reading a state raises that is torn or damaged: an older one may be whole.
UNSOUND = (OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class FoundState:
    """State to go on from: `History.meta`, and the store with it."""

    history: dict[str, Any]
    store: FragmentStore
    source: str

    @property
    def seq(self) -> int:
        """The record of the tape that it covers."""
        return int(self.history["seq"])


class Finder:
    """For one syncer in one run. `data` is its own data folder, beside which others may lie."""

    def __init__(
        self,
        spec: RunSpec,
        shard: int,
        data: Path,
        snapshots: SnapshotStore,
        root: str,
        places: tuple[str, ...] = (),
    ) -> None:
        """`root`: where checkpoints of the run are; `places`: where others may be."""
        self.spec = spec
        self.shard = shard
        self.data = data
        self.snapshots = snapshots
        self.root, self.places = root, places

    def own(self) -> tuple[FoundState | None, list[str]]:
        """The newest sound snapshot of our own; and why others were passed over."""

        def state(meta: dict[str, Any], arrays: dict[str, Any]) -> FoundState:
            return FoundState(meta["history"], self._store(meta, arrays), "snapshot")

        return self.snapshots.newest(state)

    def newer(self, after: int, *, before: float = math.inf) -> FoundState | None:
        """The newest sound snapshot here of a record between these two, whoever's it is."""
        places = [(self.snapshots, ""), *((s, f" of {name}") for s, name in self._others())]
        known = [(n, store, whose) for store, whose in places for n in _covers(store)]
        for covers, store, whose in sorted(known, key=lambda k: (k[0], not k[2]), reverse=True):
            if covers >= before:
                continue
            if covers <= after:
                break
            try:
                meta, arrays = store.load(covers)
                restored = self._store(meta, arrays)
            except UNSOUND:
                continue  # torn, damaged, or removed meanwhile by its owner
            return FoundState(meta["history"], restored, f"snapshot{whose}")
        return None

    def _store(self, meta: dict[str, Any], arrays: dict[str, Any]) -> FragmentStore:
        shelf = self.snapshots.shelf
        return FragmentStore.restore(meta["store"], arrays, self.spec.algorithm, shelf)

    def _others(self) -> Iterable[tuple[SnapshotStore, str]]:
        everybody = Path(glob.escape(str(self.data.parent))) / "*"
        pattern = folder_of(everybody, glob.escape(self.spec.folder), self.shard)
        for path in sorted(glob.glob(str(pattern))):
            store = SnapshotStore(Path(path), shelf=self.snapshots.shelf)
            if store.folder != self.snapshots.folder:
                yield store, Path(path).relative_to(self.data.parent).parts[0]

    def checkpoint_bytes(self) -> int:
        """How much `checkpoint` reads at most, of all that it may have to pass over: that many of
        the newest one that can be read. They are of one run, and there may be hundreds."""
        there = RunCheckpoints(self.root).complete(self.spec.folder)
        for ref in reversed(there):
            with suppress(*UNSOUND):
                return len(there) * bytes_of(self.spec, self.shard, ref, self.root)
        return 0

    def checkpoint(self, after: int, *, before: float = math.inf) -> FoundState | None:
        """This shard's part of the newest sound run-wide checkpoint of between these records.

        Raises OSError when the place of the checkpoints cannot be listed.
        """
        for ref in reversed(RunCheckpoints(self.root).complete(self.spec.folder)):
            number = parse_reference(ref)[2]
            try:
                part = written_part(self.spec, self.shard, self.root, number)
                if part is None or part[0]["seq"] >= before:
                    continue
                if part[0]["seq"] <= after:
                    break
                state = load(self.spec, self.shard, ref, self.root, shelf=self.snapshots.shelf)
            except UNSOUND as error:
                log.warning("a checkpoint is passed over", checkpoint=ref, error=str(error))
                continue
            return FoundState(state.history, state.store, f"checkpoint {ref}")
        return None


def _covers(store: SnapshotStore) -> list[int]:
    """What the snapshots there cover; none where the folder cannot be read."""
    try:
        return store.covers()
    except (OSError, ValueError):
        return []
