"""A calm deployment in virtual time: a hub, a coordinator, one syncer and learners, of the product.

Nothing goes wrong by itself, and what threads do takes no time: whoever is equally fast stays in
step for ever.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from diloco_learner.training.computing_io import Computing
from diloco_shared.bus.port import Stored
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.hub.net import Net
from diloco_simulator.inside.observer import Observer, Scene
from diloco_simulator.people.rest import NoAnswer, RestCalls
from diloco_simulator.virtual_loop import VirtualLoop
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.processes import Host, Passing, coordinator, learner, syncer
from diloco_syncer.app import Syncer
from diloco_syncer.leadership.leader_io import Leader

# Between two looks at what is waited for, in virtual seconds.
LOOK_S = 0.5
# Until everybody has come in a deployment in which nothing goes wrong, in virtual seconds.
THERE_S = 300.0


class Cluster:
    """For one run. `ended` lists processes that ended by themselves, which none should."""

    def __init__(
        self,
        spec: RunSpec,
        loop: VirtualLoop,
        folder: Path,
        learners: Mapping[str, Callable[[], Computing]],
        one_way_s: float,
        stored: Callable[[str, Stored], None],
    ) -> None:
        """`learners` have names, and what a process of theirs computes with; `one_way_s`: from
        any of them to the hub; `stored` is told of what streams take."""
        options = Options.calm(learners=len(learners), delay_s=one_way_s)
        self.spec = spec
        self.loop = loop
        self.folder = folder
        self.broker = MemoryBroker()
        self.broker.on_store = self._stored
        self.stored = stored
        self.scene = Scene(loop, options)
        self.observer = Observer(self.scene, spec, self.broker, numbers=False)
        self.net = Net(loop, Random(), options, self.scene.counts)
        self.net.heal()
        self.ended: list[str] = []
        self.coordinator = self._machine("coordinator", coordinator)
        self.syncer = self._machine("syncer", syncer)
        self.learners = {
            name: self._machine(name, lambda name, data, made=made: learner(name, data, made))
            for name, made in learners.items()
        }
        self.rest = RestCalls(self.coordinator)

    def _client(self, name: str, host: str, passing: Passing) -> FarBus:
        return FarBus(self.broker, name, host, self.net)

    def _machine(self, name: str, kind: Any) -> Host:
        def failed(error: BaseException | None) -> None:
            self.ended.append(f"{name}: {error!r}")

        return Host(self.loop, name, self.folder, self._client, kind, failed)

    def _stored(self, stream: str, message: Stored) -> None:
        self.observer.stored(stream, message)
        self.stored(stream, message)

    @property
    def leader(self) -> Leader | None:
        """Of the run, while it is led."""
        app = self.syncer.app
        return app.leader if isinstance(app, Syncer) else None

    # --- by REST -------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What is said. RuntimeError for a refusal."""
        status, said = await self.rest.ask(method, path, body)
        if status >= 400:
            raise RuntimeError(f"{method} {path}: {status} {said}")
        return said

    async def begin(self, there: list[str]) -> None:
        """Start the services and the learners `there`, and submit the run once all of them wait
        for one."""
        self.coordinator.start()
        self.syncer.start()
        for name in there:
            self.learners[name].start()
        by = self.loop.now + THERE_S
        while not await self._waits({"syncer", *there}):
            if self.loop.now > by:
                raise RuntimeError(f"not everybody came within {THERE_S:.0f} virtual s")
            await asyncio.sleep(LOOK_S)
        await self.ask("POST", "/runs", self.spec.model_dump(mode="json", exclude={"id"}))

    async def _waits(self, names: set[str]) -> bool:
        try:
            said = await self.ask("GET", "/members")
        except NoAnswer:
            return False
        return names <= {member["id"] for member in said["members"]}

    def end(self) -> None:
        """Of every process."""
        for machine in (self.coordinator, self.syncer, *self.learners.values()):
            machine.kill()
