"""A run that is over, and whose learner could not hear it from the leader of each shard."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from learner.contexts import context
from learner.test_leaders import beat

from diloco_learner.exchange import downlink_io as downlink
from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.exchange.downlink_io import Downlink
from diloco_learner.exchange.leaders import Leaders
from diloco_shared.bus import repeating
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


@pytest.mark.parametrize(
    ("told", "settled", "untold"),
    [
        ((), (0, 1), False),  # nobody has ended by what is heard
        ((1,), (), False),
        ((1,), (1,), False),  # the other one goes on
        ((1,), (0,), True),
        ((0, 1), (0, 1), False),  # both leaders tell it themselves: the learner ends as they say
    ],
)
async def test_an_end_that_a_leader_told_while_a_learner_stood_still(
    broker: MemoryBroker,
    syncer: Any,
    monkeypatch: pytest.MonkeyPatch,
    told: tuple[int, ...],
    settled: tuple[int, ...],
    untold: bool,
) -> None:
    """The leader of one of two shards had left by then. The other one waited for the learner, which
    waited for a word of the first."""
    looks = 0

    async def shown(control: Any, run: str, run_id: str, shard: int) -> Any:
        nonlocal looks
        looks += 1
        return SimpleNamespace(settled=shard in settled)

    async def slept(seconds: float) -> None:
        nonlocal looks
        looks += 1
        await real(0)

    real = asyncio.sleep
    monkeypatch.setattr(downlink, "shown", shown)
    monkeypatch.setattr(repeating.asyncio, "sleep", slept)
    place = context(syncer.spec, MemoryBus(broker, "learner"), "b")
    down = Downlink(place, AnchorBook((4,) * 3), print, print)
    down.leaders = Leaders("b", 2)
    for shard in (0, 1):
        state = "finished" if shard in told else "running"
        down.leaders.beat(beat(shard, (1, 1), state=state))
    heeding = asyncio.create_task(down.untold_end())
    while looks < 6 and not heeding.done():
        await real(0)
    assert heeding.done() == untold
    heeding.cancel()
