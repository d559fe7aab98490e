"""Numbers of lives: no two processes ever have the same one (I10)."""

import asyncio

from diloco_learner.recovery.incarnation_io import newest_boot, take_incarnation
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Incarnation
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


async def prepared(broker: MemoryBroker) -> MemoryBus:
    bus = MemoryBus(broker, "test")
    await bus.ensure_bucket(subjects.INCARNATIONS)
    return bus


async def test_they_count_up_per_run_and_learner(broker: MemoryBroker) -> None:
    bus = await prepared(broker)
    assert [await take_incarnation(bus, "r", "a", f"boot-{n}") for n in range(3)] == [0, 1, 2]
    assert await take_incarnation(bus, "r", "b", "boot") == 0
    assert await take_incarnation(bus, "s", "a", "boot") == 0


async def test_who_is_in_no_record_begins_where_a_backup_says(broker: MemoryBroker) -> None:
    """On a hub that was put back from one, somebody of that name may have lived before."""
    bus = await prepared(broker)
    first = Incarnation(learner="first", incarnation=1000, boot="", at=1.0)
    await bus.kv_put(subjects.INCARNATIONS, subjects.FIRST_LIFE, encode(first))
    assert [await take_incarnation(bus, "r", "new", f"boot-{n}") for n in range(2)] == [1000, 1001]


async def test_rivals_get_different_ones(broker: MemoryBroker) -> None:
    await prepared(broker)
    taken = await asyncio.gather(
        *(take_incarnation(MemoryBus(broker, f"p{n}"), "r", "a", f"boot-{n}") for n in range(8))
    )
    assert sorted(taken) == list(range(8))


async def test_an_unknown_outcome_costs_a_number_and_repeats_none(broker: MemoryBroker) -> None:
    bus = await prepared(broker)
    fates: list[Fate] = ["lose_answer", "lose_request"]

    def fault(client: str, operation: str, subject: str) -> Fate:
        return fates.pop(0) if operation == "append" and fates else "deliver"

    broker.fault = fault
    assert await take_incarnation(bus, "r", "a", "boot-1") == 1
    assert await take_incarnation(bus, "r", "a", "boot-2") == 2


async def test_a_process_knows_whether_another_has_taken_its_name(broker: MemoryBroker) -> None:
    """One that was silent for very long, and is told to begin anew, may."""
    bus = await prepared(broker)
    assert await newest_boot(bus, "r", "a") == ""
    await take_incarnation(bus, "r", "a", "mine")
    assert await newest_boot(bus, "r", "a") == "mine"
    await take_incarnation(bus, "r", "a", "another's")
    assert await newest_boot(bus, "r", "a") == "another's"
