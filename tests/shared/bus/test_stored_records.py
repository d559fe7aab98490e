"""Reading and writing records of buckets and streams, those that nobody can read among them."""

import os

import pytest

from diloco_shared.bus.port import Conflict, Stored
from diloco_shared.bus.stored_records import (
    event_now,
    messages_of,
    readable_at,
    record_at,
    records_in,
    write_if,
)
from diloco_shared.protocol.records import Event, Incarnation, Place
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

BUCKET = "places"


def place(shard: int) -> Place:
    return Place(shard=shard, passes=0, sequences=7)


async def bucket() -> MemoryBus:
    """Two records of run r, one of run s, and two that are no places."""
    bus = MemoryBus(MemoryBroker(), "a")
    await bus.ensure_bucket(BUCKET)
    for key, shard in (("r.0", 0), ("r.1", 1), ("s.0", 0)):
        await bus.kv_put(BUCKET, key, encode(place(shard)))
    await bus.kv_put(BUCKET, "r.2", b"damaged")
    life = Incarnation(learner="a", incarnation=0, boot="", at=0.0)
    await bus.kv_put(BUCKET, "r.3", encode(life))
    return bus


async def test_a_record_is_there_or_not_or_cannot_be_read() -> None:
    bus = await bucket()
    found = await record_at(bus, BUCKET, "r.1", Place)
    assert found == (place(1), 2)
    assert await record_at(bus, BUCKET, "r.9", Place) is None
    with pytest.raises(WireError):
        await record_at(bus, BUCKET, "r.2", Place)
    assert await readable_at(bus, BUCKET, "r.1", Place) == place(1)
    assert await readable_at(bus, BUCKET, "r.2", Place) is None
    await bus.kv_delete(BUCKET, "r.1")
    assert await record_at(bus, BUCKET, "r.1", Place) is None


async def test_records_of_a_bucket_are_those_that_can_be_read() -> None:
    bus = await bucket()
    found = await records_in(bus, BUCKET, Place, under="r.")
    assert {key: record.shard for key, (record, _) in found.items()} == {"r.0": 0, "r.1": 1}
    assert set(await records_in(bus, BUCKET, Place)) == {"r.0", "r.1", "s.0"}


async def test_records_of_one_run_are_read_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub has the records of all runs in one bucket, and one run may have a million."""
    bus, asked = await bucket(), list[str]()
    fetched = bus.fetch_raw

    async def noted(stream: str, subject: str, *, start_seq: int = 1) -> list[Stored]:
        asked.append(subject)
        return await fetched(stream, subject, start_seq=start_seq)

    monkeypatch.setattr(bus, "fetch_raw", noted)
    await records_in(bus, BUCKET, Place, under="r.")
    await records_in(bus, BUCKET, Place)
    assert asked == ["$KV.places.r.>", "$KV.places.>"]


async def test_who_is_strict_hears_of_one_that_cannot_be_read() -> None:
    bus = await bucket()
    with pytest.raises(WireError):
        await records_in(bus, BUCKET, Place, under="r.", strict=True)
    assert set(await records_in(bus, BUCKET, Place, under="s.", strict=True)) == {"s.0"}


async def test_a_write_succeeds_only_where_nobody_wrote_meanwhile() -> None:
    bus = await bucket()
    first = await write_if(bus, BUCKET, "new", b"1", 0)
    with pytest.raises(Conflict):
        await write_if(bus, BUCKET, "new", b"2", 0)
    second = await write_if(bus, BUCKET, "new", b"2", first)
    with pytest.raises(Conflict):
        await write_if(bus, BUCKET, "new", b"3", first)
    assert second > first


def test_what_is_no_message_of_the_kind_is_left_out() -> None:
    stored = [Stored("s", data, {}, n) for n, data in enumerate((encode(place(3)), b"", b"x"))]
    assert messages_of(stored, Place) == [place(3)]


def test_an_event_about_a_file_whose_name_is_no_utf_8_is_told() -> None:
    """What is for programs, too: else whoever writes it would end, and that may be a leader."""
    path = os.fsdecode(b"/caf\xe9.txt")
    data = {"path": path, "of": {path: (path, [path, 1])}, "bytes": 3}
    event = event_now("r", "unfit", "a", "x" * 490 + path, data)
    told = decode(encode(event), Event)
    assert told.text == event.text == "x" * 490 + "/caf?.txt"
    there = "/caf?.txt"
    assert told.data == {"path": there, "of": {there: (there, (there, 1))}, "bytes": 3}
