"""What parts of a syncer are given in tests."""

from pathlib import Path
from typing import Any

from diloco_shared.bus.port import Bus
from diloco_shared.checkpoints.place_threads_io import PlaceThreads
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.context import RunContext
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

NOWHERE = Path("/nonexistent")


class NamedBus(MemoryBus):
    """On a hub whose server knows who writes."""

    @property
    def named(self) -> bool:
        return True


def context(
    spec: RunSpec,
    bus: Bus,
    me: str = "s",
    *,
    data: Bus | None = None,
    shard: int = 0,
    folder: Path = NOWHERE,
    snapshots: Any = None,
    checkpoint_root: str = "",
) -> RunContext:
    """Of a run of which nothing is on a disk yet; both planes are one bus unless said."""
    store = SnapshotStore(folder / "snapshots") if snapshots is None else snapshots
    where = folder, store, checkpoint_root
    return RunContext(spec, shard, me, bus, data or bus, *where, PlaceThreads())


async def alone() -> None:
    """What a leader asks before it writes or removes, where nobody else may lead."""
