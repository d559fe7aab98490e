"""How far data shards are merged, told to whoever reads on where another stopped."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from syncer.contexts import alone

from diloco_shared.bus.port import Conflict, Unavailable
from diloco_shared.bus.repeating import AT_ONCE
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Place
from diloco_shared.protocol.wire import decode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history.ledger import Ledger
from diloco_syncer.messages.merged_positions_io import MergedPositions


async def told(bus: MemoryBus) -> dict[str, tuple[int, int]]:
    found = {}
    for key, entry in (await bus.kv_all(subjects.PLACES)).items():
        if entry.value is not None:
            place = decode(entry.value, Place)
            found[key] = (place.passes, place.sequences)
    return found


async def written() -> tuple[MemoryBus, Ledger, MergedPositions]:
    """Two shards' places, told once."""
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.PLACES)
    ledger = Ledger.empty(1, shards=8)
    ledger.places |= {3: (0, 7), 5: (1, 0)}
    places = MergedPositions(bus, "r", lambda: ledger, alone)
    await places.write()
    return bus, ledger, places


async def test_what_the_tape_says_is_told_and_only_what_changed_is_written() -> None:
    bus, ledger, places = await written()
    assert await told(bus) == {"r.3.0": (0, 7), "r.5.0": (1, 0)}
    revisions = {k: e.revision for k, e in (await bus.kv_all(subjects.PLACES)).items()}
    ledger.places[3] = (0, 9)
    await places.write()
    after = {k: e.revision for k, e in (await bus.kv_all(subjects.PLACES)).items()}
    assert after["r.3.0"] > revisions["r.3.0"] and after["r.5.0"] == revisions["r.5.0"]


async def test_a_later_leader_takes_back_what_its_history_does_not_hold() -> None:
    """A run that went back to a checkpoint reads again what it has forgotten; no other run does."""
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.PLACES)
    later, other = Ledger.empty(1, shards=8), Ledger.empty(1, shards=8)
    later.places |= {3: (0, 7), 5: (1, 0)}
    other.places |= {5: (2, 2)}
    await MergedPositions(bus, "r", lambda: later, alone).write()
    await MergedPositions(bus, "other", lambda: other, alone).write()
    earlier = Ledger.empty(1, shards=8)
    earlier.places |= {3: (0, 2)}
    await MergedPositions(bus, "r", lambda: earlier, alone).write()
    assert await told(bus) == {"r.3.0": (0, 2), "r.5.0": (0, 0), "other.5.0": (2, 2)}


async def test_a_run_that_goes_back_tells_the_places_of_its_checkpoint_first() -> None:
    """Its ledger is the one of before until the restore is on the tape."""
    bus, ledger, places = await written()
    places.back = {3: (0, 2)}
    await places.write()
    assert await told(bus) == {"r.3.0": (0, 2), "r.5.0": (0, 0)}
    places.back = None
    ledger.places[3] = (0, 4)
    await places.write()
    assert await told(bus) == {"r.3.0": (0, 4), "r.5.0": (1, 0)}


async def test_what_is_being_written_does_not_replace_places_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It began before the run went back."""
    bus, ledger, places = await written()
    put, held = places._put, asyncio.Event()

    async def late(shard: int, where: tuple[int, int]) -> None:
        await held.wait()
        await put(shard, where)

    monkeypatch.setattr(places, "_put", late)
    ledger.places[3] = (0, 9)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(places.write())
        await asyncio.sleep(0)
        places.back = {3: (0, 2), 5: (1, 0)}
        tasks.create_task(places.write())
        await asyncio.sleep(0)
        held.set()
    assert await told(bus) == {"r.3.0": (0, 2), "r.5.0": (1, 0)}


@pytest.mark.parametrize("late", [False, True])
async def test_a_place_whose_write_was_not_answered_is_taken_back_as_well(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, or on its way. Else whoever begins again leaves out what lies before it."""
    bus, ledger, places = await written()
    create, on_its_way = bus.kv_create, list[Any]()

    async def unanswered(*args: Any, **more: Any) -> int:
        on_its_way.append(create(*args, **more))
        if not late:
            await on_its_way.pop()
        raise Unavailable("no answer")

    ledger.places[6] = (0, 8)
    with monkeypatch.context() as patched, pytest.raises(Unavailable):
        patched.setattr(bus, "kv_create", unanswered)
        await places.write()
    places.back = {3: (0, 2)}
    for _ in range(2):  # it meets what it wrote itself, and looks
        with suppress(Conflict):
            await places.write()
    for request in on_its_way:
        with pytest.raises(Conflict):
            await request
    assert await told(bus) == {"r.3.0": (0, 2), "r.5.0": (0, 0), "r.6.0": (0, 0)}
    assert not places.unsure


async def test_many_places_are_written_some_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub far away answers after a third of a second, and may be asked for thousands."""
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.PLACES)
    ledger = Ledger.empty(1, shards=64)
    ledger.places |= dict.fromkeys(range(2 * AT_ONCE), (0, 1))
    under_way, most, create = set[str](), list[int](), bus.kv_create

    async def late(bucket: str, key: str, value: bytes, **more: Any) -> int:
        under_way.add(key)
        await asyncio.sleep(0)
        most.append(len(under_way))
        under_way.remove(key)
        return await create(bucket, key, value, **more)

    monkeypatch.setattr(bus, "kv_create", late)
    await MergedPositions(bus, "r", lambda: ledger, alone).write()
    assert len(await told(bus)) == 2 * AT_ONCE and max(most) == AT_ONCE


async def test_shards_of_the_syncer_do_not_overwrite_each_other() -> None:
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.PLACES)
    first, second = Ledger.empty(2, shards=8), Ledger.empty(2, shards=8)
    first.places |= {3: (0, 7)}
    second.places |= {3: (0, 5), 4: (0, 1)}
    for syncer, ledger in ((0, first), (1, second)):
        await MergedPositions(bus, "r", lambda ledger=ledger: ledger, alone, syncer).write()  # type: ignore[misc]
    await MergedPositions(bus, "r", lambda: first, alone, 0).write()
    assert await told(bus) == {"r.3.0": (0, 7), "r.3.1": (0, 5), "r.4.1": (0, 1)}


async def test_keys_that_are_no_places_are_left_alone() -> None:
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.PLACES)
    for key in ("r.x.0", "r.0", "r", "r..0"):
        await bus.kv_put(subjects.PLACES, key, b"anything")
    ledger = Ledger.empty(1, shards=8)
    ledger.places |= {3: (0, 7)}
    places = MergedPositions(bus, "r", lambda: ledger, alone)
    await places.write()
    assert places.written == {3: (0, 7)}


async def test_what_a_hub_that_was_put_back_does_not_hold_is_written_anew() -> None:
    bus, ledger, places = await written()
    for key in ("r.3.0", "r.5.0"):
        await bus.kv_delete(subjects.PLACES, key)
    ledger.places[3] = (0, 9)
    with pytest.raises(Conflict):
        await places.write()
    await places.write()
    assert await told(bus) == {"r.3.0": (0, 9), "r.5.0": (1, 0)}
