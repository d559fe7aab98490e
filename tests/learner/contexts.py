"""What parts of a learner are given in tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from diloco_learner.app import Learner
from diloco_learner.context import RunContext
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
