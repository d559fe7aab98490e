"""A hub of a run whose streams are purged, and members that show themselves there."""

from typing import Any

from diloco_shared.bus.port import StreamSpec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import MemberRecord
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

# The stream of inner states.
STATE = subjects.state_stream("r")


def spec() -> RunSpec:
    return RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})


async def bus_with(payload: bytes = b"x", bytes_max: int = 1 << 30) -> MemoryBus:
    bus = MemoryBus(MemoryBroker(), "test")
    await bus.ensure_bucket(subjects.MEMBERS)
    await bus.ensure_stream(StreamSpec(subjects.up_stream("r"), ("up.r.>",), bytes_max))
    await bus.append("up.r.a", payload)
    return bus


async def show(
    bus: MemoryBus, name: str, state: str, tape_seq: int, run: str = "r", key: str = ""
) -> None:
    fields: dict[str, Any] = {"boot": "b", "host": "h", "pid": 1, "lock": name, "started_at": 0.0}
    record = MemberRecord(id=name, role="syncer", run=run, state=state, tape_seq=tape_seq, **fields)
    await bus.kv_put(subjects.MEMBERS, key or name, encode(record))


async def bus_with_states(limit: int = 1 << 30) -> MemoryBus:
    bus = await bus_with()
    await bus.ensure_stream(StreamSpec(STATE, ("state.r.>",), limit))
    return bus


async def states_on(bus: MemoryBus) -> list[str]:
    return [message.subject for message in await bus.fetch(STATE, "state.r.>")]
