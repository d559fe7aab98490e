"""What all parts of one syncer's work for one shard of a run have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_shared.spec.run import RunSpec

if TYPE_CHECKING:
    from diloco_shared.bus.port import Bus
    from diloco_shared.checkpoints.place_threads_io import PlaceThreads
    from diloco_syncer.snapshots.snapshots_io import SnapshotStore


@dataclass(frozen=True, slots=True)
class RunContext:
    """`me`: this syncer's member id. `folder`: what members keep on this machine lies in it.

    `checkpoint_root`: where this run's checkpoints and archived tape are, `checkpoint_places`:
    where those may be that it goes back to. `payload_bytes_max`: encoded contributions held in
    memory at once; None: what the run needs. `place_threads`: of the process, for whatever is done
    where checkpoints are.
    """

    spec: RunSpec
    shard: int
    me: str
    control: "Bus"
    data: "Bus"
    folder: Path
    snapshots: "SnapshotStore"
    checkpoint_root: str
    place_threads: "PlaceThreads"
    payload_bytes_max: int | None = None
    checkpoint_places: tuple[str, ...] = ()
