"""Messages of a deleted run of the same name are refused and counted (I11)."""

import asyncio
from typing import Any

from learner.contexts import context

from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.exchange.downlink_io import Downlink
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Pull
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


def pull(round_: int, run_id: str) -> bytes:
    return encode(
        Pull(
            epoch=0,
            term=1,
            round=round_,
            fragment=0,
            participants=("a",),
            timeout_s=1.0,
            run_id=run_id,
        )
    )


async def test_what_a_leader_of_a_deleted_run_still_says_reaches_nobody() -> None:
    broker = MemoryBroker()
    bus, heard = MemoryBus(broker, "a"), list[Any]()
    spec = RunSpec.model_validate({"name": "r", "id": "02", "budget": {"steps": 1}})
    down = Downlink(context(spec, bus), AnchorBook((4,)), heard.append, lambda _: None)
    listening = asyncio.create_task(down.pulls())
    speaker = MemoryBus(broker, "s")
    while not heard:
        await speaker.publish(subjects.pull("r"), pull(1, "01"))
        await speaker.publish(subjects.pull("r"), pull(2, "02"))
        await asyncio.sleep(0)
    listening.cancel()
    assert {seen.pull.round for seen in heard} == {2}
    assert down.refused >= 1
