"""A member's process, from its connections to their end."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client.core import Metric

from diloco_shared.process import serving
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.process.serving import Worker
from diloco_shared.process.settings import WorkerSettings
from diloco_shared.process.stopping import CLOSES_S
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_simulator.virtual_loop import play


class Idle(Worker[WorkerSettings]):
    role, kept, unfit = "learner", "kept", "unfit"

    def room(self) -> DiskRoom | None:
        return None

    async def tell(self, kind: str, text: str) -> None:
        raise AssertionError(text)

    def detail(self) -> dict[str, Any]:
        return {}

    def metrics(self) -> Iterable[Metric]:
        return ()

    async def serve_runs(self, tasks: asyncio.TaskGroup) -> None:
        await asyncio.Event().wait()


class SlowToClose(MemoryBus):
    """Waits for the server's last word for as long as it may."""

    async def close(self, within_s: float = 1000.0) -> None:
        await asyncio.sleep(max(within_s, 0.0))
        await super().close()


@pytest.mark.parametrize("silent", ["from the stop on", "once the key is given back"])
def test_to_leave_a_silent_hub_takes_one_limit_in_all(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connections, and the key before them: Docker kills ten seconds after the stop."""
    buses: list[MemoryBus] = []
    registered = asyncio.Event()

    async def main() -> float:
        broker = MemoryBroker()

        async def connection(settings: WorkerSettings, name: str, **_: Any) -> MemoryBus:
            buses.append(SlowToClose(broker, name))
            return buses[-1]

        async def run(worker: Worker[WorkerSettings]) -> None:
            worker.membership.taken = registered
            await worker.run()

        monkeypatch.setattr(serving, "connection", connection)
        monkeypatch.setattr(serving, "_run", run)
        settings = WorkerSettings(id="a", data=tmp_path)
        process = asyncio.create_task(serving.serve(settings, Idle))
        await registered.wait()
        if silent == "from the stop on":
            for bus in buses:
                bus.disconnect()
        began = asyncio.get_running_loop().time()
        process.cancel()
        await asyncio.gather(process, return_exceptions=True)
        return asyncio.get_running_loop().time() - began

    assert play(main(), Random(1)) == pytest.approx(CLOSES_S)
    assert len(buses) == 2
