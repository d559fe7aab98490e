"""An operator who takes backups of a world's hub, and puts one back when the hub has lost its disk.

Backups are taken and put back by the product's own code, while everybody goes on; only files of a
server are this one's own. What came after the newest backup is lost, and that is what the operator
must expect: what the user ordered meanwhile, too. The dice are their own.
"""

import asyncio
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_shared.bus.port import BusError, Unavailable
from diloco_shared.hub import backup as hub_backup
from diloco_shared.protocol import subjects
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# While a stream is saved others go on, and the disk is lost so long after a backup was taken, in
# virtual seconds.
SAVED_S, LOST_S = (0.0, 1.5), (0.0, 25.0)
# Until there is another disk; and what it takes to put a stream back, in virtual seconds.
DISK_S, LOADED_S = (1.0, 20.0), (0.0, 0.5)
# One hub in three is lost again, so long after it came back, in virtual seconds. Syncers may have
# snapshots of what followed by then, and the newest backup is the same.
TWICE, LOST_AGAIN_S = 1 / 3, (20.0, 120.0)
# Within this time the coordinator has read anew what it shows, in virtual seconds.
SHOWN_S = 10.0
# A backup that could not be taken is taken again so much later, in virtual seconds.
AGAIN_S = 2.0


class MemoryStreams:
    """See `hub_backup.Streams`."""

    def __init__(
        self, broker: MemoryBroker, dice: Random, loaded: Callable[[str], None] = lambda name: None
    ) -> None:
        """`loaded` is told of every stream that was put back."""
        self.broker, self.dice, self.loaded = broker, dice, loaded

    async def names(self) -> list[str]:
        if self.broker.leaderless:
            raise Unavailable("the hub's nodes have no leader")
        return self.broker.names()

    async def config_of(self, stream: str) -> dict[str, Any] | None:
        return self.broker.config(stream)

    async def save(self, stream: str, file: Path) -> dict[str, Any] | None:
        """Write a stream to a file, in SAVED_S seconds; what describes it. None: there is none."""
        await asyncio.sleep(self.dice.uniform(*SAVED_S))
        if (config := self.broker.config(stream)) is None:
            return None
        await asyncio.to_thread(file.write_bytes, pickle.dumps(self.broker.saved(stream)))
        info = self.broker.info(stream)
        return {
            "config": config,
            "state": {"messages": info.messages, "last_seq": info.last_seq},
        }

    async def load(self, stream: str, file: Path, about: dict[str, Any]) -> None:
        await asyncio.sleep(self.dice.uniform(*LOADED_S))
        saved = pickle.loads(await asyncio.to_thread(file.read_bytes))
        self.broker.load(saved, about["config"])
        self.loaded(stream)

    async def make(self, config: dict[str, Any]) -> None:
        self.broker.ensure(config)

    async def copied(self, stream: str) -> bool:
        return True


class Backups:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = Random(f"backups {world.seed}")
        self.counts = world.found.counts
        self.taken = 0
        self.put_back_at = -math.inf  # when the hub was, the newest time
        self.restoring: asyncio.Task[None] | None = None

    def plan(self) -> None:
        """Draw when a backup is taken, and when it is needed."""
        for _ in range(self.world.options.hub_restores):
            at = self.rng.uniform(5.0, 0.8 * self.world.options.safety_s)
            self.world.loop.call_later(at, self._begin)

    def _begin(self) -> None:
        if self.restoring is None and self.world.scene.faulty:
            self.restoring = self.world.loop.create_task(self._taken_and_needed())

    async def over(self) -> None:
        """Whatever was begun is done, and the coordinator shows what the hub has now."""
        if self.restoring is not None:
            await self.restoring
            await asyncio.sleep(SHOWN_S)

    async def _taken_and_needed(self) -> None:
        folder = await self._take()
        await asyncio.sleep(self.rng.uniform(*LOST_S))
        await self._restore(folder)
        if self.rng.random() < TWICE:
            await asyncio.sleep(self.rng.uniform(*LOST_AGAIN_S))
            if self.world.scene.faulty:
                await self._restore(folder)
                self.counts["hubs restored twice"] += 1

    async def _take(self) -> Path:
        streams = MemoryStreams(self.world.broker, self.rng)
        while True:
            self.taken += 1
            folder = self.world.folder / "backups" / str(self.taken)
            try:
                await hub_backup.take(streams, folder)
            except Unavailable:
                await asyncio.sleep(AGAIN_S)
            else:
                self.counts["backups of the hub"] += 1
                return folder

    async def _restore(self, folder: Path) -> None:
        """The hub is gone with its disk, until a backup is put back on an empty one."""
        world, broker = self.world, self.world.broker
        world.net.gone = True
        lost = world.troubles.server_ends() if world.options.severs else []
        world.net.lives += 1
        await asyncio.sleep(self.rng.uniform(*DISK_S))
        streams = MemoryStreams(broker, self.rng, self._loaded)
        bus = MemoryBus(broker, "restore")
        while True:
            broker.wipe()
            try:
                backup = hub_backup.read(folder)
                await hub_backup.fill(bus, streams, backup, folder, nodes=broker.nodes)
                break
            except BusError:  # no room, or no leader, meanwhile: an operator begins again
                await asyncio.sleep(AGAIN_S)
        # What was ordered since may be lost, and what is asked now is answered by what was.
        world.user.orders.clear()
        world.observer.put_back()
        self.put_back_at = world.loop.now
        self.counts["hubs restored"] += 1
        self.counts["hubs of several nodes restored"] += broker.nodes > 1
        world.net.lives += 1
        world.net.gone = False
        world.troubles.server_begins(lost, self.rng)

    def _loaded(self, stream: str) -> None:
        for run, observer in self.world.observers.items():
            if stream == subjects.tape_stream(run):
                observer.lost()
