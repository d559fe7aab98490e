"""Whether a learner begins another life in a run that it has left."""

import asyncio
from pathlib import Path

import pytest

from diloco_learner.app import Learner
from diloco_learner.events import Leave
from diloco_learner.settings import Settings
from diloco_shared.process.membership import DataFolder
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


@pytest.mark.parametrize(("assigned", "again"), [("r", True), ("", False), ("other", False)])
async def test_one_that_is_assigned_elsewhere_does_not_begin_again_after_a_restore(
    tmp_path: Path, assigned: str, again: bool
) -> None:
    """It was told to leave before: nobody tells the newer life."""
    folder, bus = DataFolder(tmp_path, "a"), MemoryBus(MemoryBroker(), "a")
    app = Learner(Settings(id="a", data=tmp_path), bus, bus, folder)
    app.assigned = assigned
    async with asyncio.timeout(5.0):
        assert await app._begins_again(Leave("restored", "epoch 1"), "r") is again
    await bus.close()
    folder.release()
