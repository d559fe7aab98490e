"""The tape is the fence: of two leaders only one ever commits (I7), whatever answers are lost."""

from collections.abc import Callable

import pytest

from diloco_shared.edges.bus import StreamSpec
from diloco_shared.edges.memory_bus import MemoryBroker, MemoryBus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeTerm
from diloco_syncer.edges import tape as tape_module
from diloco_syncer.edges.tape import Deposed, Tape


def term(number: int, leader: str) -> TapeTerm:
    return TapeTerm(epoch=0, term=number, leader=leader, at=0.0)


async def stream(bus: MemoryBus) -> None:
    await bus.ensure_stream(StreamSpec(subjects.tape_stream("r"), ("tape.r.>",), 1 << 20))


async def test_a_deposed_leader_cannot_append() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "a")
    await stream(bus)
    old, new = Tape(bus, "r"), Tape(MemoryBus(broker, "b"), "r")
    await old.append(term(1, "old"))
    await new.read()
    await new.append(term(2, "new"))
    with pytest.raises(Deposed, match="another leader"):
        await old.append(term(3, "old"))
    records = [record for _, record in await new.read()]
    assert [r.leader for r in records if isinstance(r, TapeTerm)] == ["old", "new"]


@pytest.mark.parametrize("lost", ["lose_request", "lose_answer"])
async def test_an_append_with_a_lost_answer_is_there_exactly_once(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape_module, "RETRY_S", 0.0)
    losses = iter([lost])

    def fault(client: str, operation: str, subject: str) -> str:
        return next(losses, "deliver") if operation == "append" else "deliver"

    judge: Callable[[str, str, str], str] = fault
    bus = MemoryBus(MemoryBroker(fault=judge), "a")  # type: ignore[arg-type]
    await stream(bus)
    tape = Tape(bus, "r")
    first = await tape.append(term(1, "a"))
    second = await tape.append(term(2, "a"))
    assert second > first
    assert [seq for seq, _ in await Tape(bus, "r").read()] == [first, second]
