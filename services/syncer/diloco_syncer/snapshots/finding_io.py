"""Where a syncer finds the run's state: a snapshot belongs to run and shard, whoever wrote it.

In its own folder; in those of other syncers under the same data root, which are read and never
written; in the run-wide checkpoints, each of which has what a snapshot has. What is not awaited
here is not for an event loop.
"""

import glob
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.checkpoints.place_threads_io import PlaceThreads
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.protocol.pace import ANSWER_S, stored_within_s
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints.parts_io import load, written_part
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
        return self.snapshots.newest(partial(self._state, "snapshot"))

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
                # Without a name: what is passed over goes before another one is read.
                return self._state(f"snapshot{whose}", *store.load(covers))
            except UNSOUND:
                continue  # torn, damaged, or removed meanwhile by its owner
        return None

    def _state(self, source: str, meta: dict[str, Any], arrays: dict[str, Any]) -> FoundState:
        return FoundState(meta["history"], self._store(meta, arrays), source)

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

    async def newest_checkpoint(
        self, threads: PlaceThreads, after: int, *, before: float = math.inf
    ) -> FoundState | None:
        """This shard's part of the newest sound run-wide checkpoint of between these records.

        Each is waited for by itself: there may be hundreds, and the place may hang at the first.
        Raises OSError when the place does not answer, or cannot be listed.
        """
        below, root = "", self.root
        while part := await threads.within(
            ANSWER_S, root, self.checkpoint_below, below, after, before
        ):
            below, size = part
            found = await threads.within(stored_within_s(size), root, self.checkpoint, below)
            if found is not None:
                return found
        return None

    def checkpoint_below(self, below: str, after: int, before: float) -> tuple[str, int] | None:
        """(reference, bytes to read) of the newest checkpoint before that one ("": of all) whose
        part of this shard is of between these records. Reads what describes them alone.

        Raises OSError when the place of the checkpoints cannot be listed.
        """
        for ref in reversed(RunCheckpoints(self.root).complete(self.spec.folder)):
            if below and ref >= below:
                continue
            number = parse_reference(ref)[2]
            try:
                part = written_part(self.spec, self.shard, self.root, number)
                if part is None or part[0]["seq"] >= before:
                    continue
                return None if part[0]["seq"] <= after else (ref, part[1].bytes)
            except UNSOUND as error:
                _passed_over(ref, error)
        return None

    def checkpoint(self, ref: str) -> FoundState | None:
        """This shard's part of a checkpoint; None where it is torn, damaged or gone."""
        try:
            state = load(self.spec, self.shard, ref, self.root, shelf=self.snapshots.shelf)
        except UNSOUND as error:
            _passed_over(ref, error)
            return None
        return FoundState(state.history, state.store, f"checkpoint {ref}")


def _passed_over(ref: str, error: Exception) -> None:
    log.warning("a checkpoint is passed over", checkpoint=ref, error=str(error))


def _covers(store: SnapshotStore) -> list[int]:
    """What the snapshots there cover; none where the folder cannot be read."""
    try:
        return store.covers()
    except (OSError, ValueError):
        return []
