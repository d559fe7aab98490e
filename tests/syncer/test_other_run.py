"""A learner of a deleted run of the same name is not taken for one of this run (I11)."""

import asyncio
from typing import Any

from syncer.contexts import context

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat, Progress, Stamp
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import Malformed, ProgressSeen, SendBeat
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.messages.inbox_io import Inbox
from diloco_syncer.messages.outbox_io import Outbox

SPEC = RunSpec.model_validate({"name": "r", "id": "02", "budget": {"steps": 8}})


def progress(incarnation: int, run_id: str) -> bytes:
    zeros = (0,) * SPEC.algorithm.fragments
    return encode(
        Progress(
            learner="a",
            incarnation=incarnation,
            epoch=0,
            state="stepping",
            step=1,
            tokens=1,
            c_steps=zeros,
            c_tokens=zeros,
            adopted=zeros,
            adopted_at=zeros,
            loss=1.0,
            step_s=1.0,
            wait_s=0.0,
            run_id=run_id,
        )
    )


async def test_progress_of_a_deleted_run_is_refused_and_counted() -> None:
    """Its incarnation may be higher: the learner of the new run would be superseded by it."""
    broker = MemoryBroker()
    bus, events = MemoryBus(broker, "s"), list[Any]()
    inbox = Inbox(context(SPEC, bus), Payloads(lambda: 1 << 20), events.append, lambda _: True)
    listening = asyncio.create_task(inbox.progress())
    speaker = MemoryBus(broker, "a")
    while len(events) < 2:
        await speaker.publish(subjects.progress("r", "a"), progress(5, "01"))
        await speaker.publish(subjects.progress("r", "a"), progress(0, "02"))
        await asyncio.sleep(0)
    listening.cancel()
    seen = [e.progress.incarnation for e in events if isinstance(e, ProgressSeen)]
    refused = [e for e in events if isinstance(e, Malformed)]
    assert set(seen) == {0} and refused
    assert (refused[0].kind, refused[0].reason) == (
        "run",
        "speaks of a deleted run of this name",
    )


async def test_what_a_leader_sends_says_of_which_run_it_is() -> None:
    broker = MemoryBroker()
    bus, listener = MemoryBus(broker, "s"), MemoryBus(broker, "a")
    beat = Beat(
        run="r",
        epoch=0,
        term=1,
        state="running",
        reason="",
        versions=(0,),
        stamp=Stamp(round=0, steps=0, fraction=0.0, fraction_per_step=0.0),
        live=(),
    )
    async with listener.subscribe(subjects.beat("r")) as deliveries:
        await Outbox(context(SPEC, bus)).send(SendBeat(beat))
        delivery = await anext(deliveries)
    assert decode(delivery.payload, Beat).run_id == "02"
