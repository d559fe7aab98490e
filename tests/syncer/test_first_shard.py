"""A shard's leader looks at what the first one shows, while it has to know."""

import asyncio

from diloco_shared.protocol import subjects
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints.first_shard_io import watch_marks
from diloco_syncer.events import Event, MarkShown
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.status.status import status


async def test_the_mark_that_the_first_shard_shows_is_told_while_somebody_asks() -> None:
    algorithm = {"fragments": 4, "shards": 2, "sync_every_steps": 8}
    spec = RunSpec.model_validate({"name": "r", "algorithm": algorithm, "budget": {"steps": 1}})
    bus, told, asked = MemoryBus(MemoryBroker(), "s"), asyncio.Queue[Event](), list[bool]()
    await bus.ensure_bucket(subjects.STATUS)
    shown = status(Machine(spec, History(spec)), 0.0, 0.0, bytes_up=0, bytes_down=0)
    for shard, number in ((0, 3), (1, 9)):
        value = encode(shown.model_copy(update={"shard": shard, "checkpoint": number}))
        await bus.kv_put(subjects.STATUS, subjects.status_key("r", shard), value)

    def ask() -> bool:
        asked.append(told.empty())
        return len(asked) > 1

    watching = asyncio.create_task(watch_marks(bus, spec, ask, told.put_nowait))
    assert await told.get() == MarkShown(3)
    assert len(asked) == 2, "the first time nobody had to know"
    watching.cancel()
