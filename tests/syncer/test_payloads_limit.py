"""How much a syncer may hold at once follows from the run."""

from types import SimpleNamespace
from typing import Any

import pytest
from syncer.contexts import context

from diloco_shared.budget import assumed
from diloco_shared.budget.memory import payloads
from diloco_shared.protocol.messages import Blob
from diloco_shared.spec.codecs import bytes_of
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.merging.payloads_io import Payloads, PayloadsFull
from diloco_syncer.messages.inbox_io import Inbox


def spec(fragments: int, codec: str, parameters: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "r",
            "algorithm": {"fragments": fragments, "codec_up": codec, "sync_every_steps": 24},
            "model": {"factory": "m:make", "parameters": parameters},
            "budget": {"steps": 100},
        }
    )


@pytest.mark.parametrize("parameters", [10**6, 10**9, 12 * 10**9])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_initial_parameters_and_rounds_in_flight_have_room(parameters: int, codec: str) -> None:
    run = assumed(spec(24, codec, parameters), learners=4)
    limit = payloads(run)
    assert sum(bytes_of("fp32", size) for size in run.sizes) <= limit
    in_flight = run.spec.algorithm.rounds_in_flight_max * 4 * bytes_of(codec, run.largest)
    assert 2 * in_flight <= limit


def test_a_limit_that_grows_lets_more_in() -> None:
    limit = [4]
    held = Payloads(lambda: limit[0])
    held.put("a", b"1234")
    with pytest.raises(PayloadsFull, match="5 bytes more would exceed the 4 bytes"):
        held.put("b", b"12345")
    limit[0] = 9
    held.put("b", b"12345")
    assert held.bytes == 9


async def test_what_finds_no_room_is_told_as_that() -> None:
    """It is no fault of the learner's."""
    payloads, events = Payloads(lambda: 10), list[Any]()
    run: Any = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    bus = MemoryBus(MemoryBroker(), "s")
    inbox = Inbox(context(run, bus), payloads, events.append, lambda _: True)
    blob = Blob(subject="up.r.a.0.0.0.1", bytes=20, chunk_bytes=20, chunks=1, digest="0" * 32)
    manifest: Any = SimpleNamespace(blob=blob, learner="a")
    await inbox._fetch(manifest)
    assert [(e.kind, e.source) for e in events] == [("no-room", "a")]
