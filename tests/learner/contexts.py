"""What parts of a learner are given in tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from diloco_learner.app import Learner
from diloco_learner.context import RunContext
from diloco_learner.data.batches_io import Batches
from diloco_learner.data.corpus import load
from diloco_learner.data.leasing_io import Leases
from diloco_learner.data.shards import ShardCut
from diloco_learner.exchange.uplink_io import Uplink
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_learner.settings import Settings
from diloco_learner.training.computing_io import Computing
from diloco_shared.bus.port import Bus
from diloco_shared.process.membership import DataFolder
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

NOWHERE = Path("/nonexistent")


def context(spec: RunSpec, bus: Bus, me: str = "a", incarnation: int = 1) -> RunContext:
    """Of a learner that keeps nothing on a disk; both planes are one bus."""
    return RunContext(spec, me, "boot", bus, bus, NOWHERE, "", incarnation)


def uplink(broker: MemoryBroker, spec: RunSpec, folder: Path, sizes: tuple[int, ...]) -> Uplink:
    """Of a learner with nothing to tell, whose fragments have these `sizes`."""
    batches = Batches(ShardCut(load(spec.data).train, 8, 8, 0), 2)

    async def tell(kind: str, text: str, data: dict[str, Any]) -> None:
        raise AssertionError("nothing to tell here")

    place = context(spec, MemoryBus(broker, "a"))
    leases = Leases(place, batches, tuple, tell)
    return Uplink(place, sizes, LocalCheckpoints(folder, 2), leases, print)


@asynccontextmanager
async def learner(
    broker: MemoryBroker,
    tmp_path: Path,
    name: str,
    computing: Computing | None = None,
    *,
    data_root: str = "/",
    factories: str = "",
    duty_cycle: float = 1.0,
) -> AsyncIterator[tuple[Learner, "asyncio.Task[None]"]]:
    """A whole learner but for the process, until the end of the block. It may read any file."""
    folder = DataFolder(tmp_path, name)
    settings = Settings(
        id=name,
        data=tmp_path,
        chaos=True,
        data_root=data_root,
        factories=factories,
        duty_cycle=duty_cycle,
    )
    control, data = MemoryBus(broker, f"{name}-control"), MemoryBus(broker, f"{name}-data")
    app = Learner(settings, control, data, folder, computing)
    task = asyncio.create_task(app.run())
    try:
        yield app, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await app.membership.leave()
        await control.close()
        await data.close()
        folder.release()
