"""Taking a backup of a hub, as far as no server is needed."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_shared.bus.port import StreamSpec
from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.process import hub_backup
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeEnd, TapeEpoch, TapeRecord, TapeTerm
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode_tape, encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

CONTENT = b"what the server sent"


async def test_the_connection_lives_while_a_stream_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another thread: for a large stream that takes minutes."""
    measured, seen = hub_backup._measured, set[threading.Thread]()

    class Saved:
        async def save(self, *_: object) -> dict[str, Any]:
            return {"config": {}, "state": {"messages": 1}}

    def look(path: Path) -> tuple[int, str]:
        seen.add(threading.current_thread())
        return measured(path)

    monkeypatch.setattr(hub_backup, "_measured", look)
    (tmp_path / "DN-a").write_bytes(CONTENT)
    streams: Any = Saved()
    found = await hub_backup._taken(streams, "DN-a", tmp_path / "DN-a")
    assert found is not None
    assert (found.bytes, found.sha256) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert seen and threading.current_thread() not in seen


# --- what a hub that was put back is told ---------------------------------------------------------


async def hub_with(*runs: str, shards: int = 1) -> MemoryBus:
    """One with tapes of these runs."""
    bus = MemoryBus(MemoryBroker(), "restore")
    await ensure_buckets(bus)
    for run in runs:
        record = {"name": run, "spec": {"algorithm": {"shards": shards}}, "desired": "running"}
        made = RunRecord.model_validate({**record, "quorum": 1, "created_at": 1.0})
        await bus.kv_put(subjects.RUNS, run, encode(made))
        await bus.ensure_stream(StreamSpec(subjects.tape_stream(run), (f"tape.{run}.>",), 1 << 20))
    return bus


def term(epoch: int, number: int) -> bytes:
    return encode(TapeTerm(epoch=epoch, term=number, leader="s", at=1.0))


async def newest(bus: MemoryBus, run: str, shard: int = 0) -> TapeRecord:
    last = await bus.last(subjects.tape_stream(run), subjects.tape(run, shard))
    assert last is not None
    return decode_tape(last.payload)


async def test_every_tape_that_has_not_ended_begins_an_epoch_that_nobody_had() -> None:
    bus: Any = await hub_with("a", "b", "empty", "gone")
    for number in range(1, 5):
        await bus.append(subjects.tape("a", 0), term(3, number))
    await bus.append(subjects.tape("b", 0), term(7, 9))
    end = TapeEnd(term=9, versions=(1,), outcome="finished", reason="spent", at=2.0)
    await bus.append(subjects.tape("b", 0), encode(end))
    there = [subjects.tape_stream(run) for run in ("a", "b", "empty")]
    told, of_empty = await hub_backup._new_epochs(bus, there)
    begun = await newest(bus, "a")
    assert isinstance(begun, TapeEpoch)
    assert (begun.epoch, begun.term) == (3 + hub_backup.AHEAD, 4 + hub_backup.AHEAD)
    assert told == f"run a, shard 0: record 5 begins epoch {begun.epoch}"
    assert isinstance(await newest(bus, "b"), TapeEnd)
    assert of_empty == f"run empty, shard 0: record 1 begins epoch {hub_backup.AHEAD}"


async def test_shards_of_a_run_begin_the_same_epoch() -> None:
    bus: Any = await hub_with("a", shards=2)
    await bus.append(subjects.tape("a", 0), term(1, 2))
    await bus.append(subjects.tape("a", 1), term(4, 5))
    await hub_backup._new_epochs(bus, [subjects.tape_stream("a")])
    first, second = [await newest(bus, "a", shard) for shard in (0, 1)]
    assert isinstance(first, TapeEpoch) and isinstance(second, TapeEpoch)
    assert first.epoch == second.epoch == 4 + hub_backup.AHEAD
    assert (first.term, second.term) == (2 + hub_backup.AHEAD, 5 + hub_backup.AHEAD)


async def test_a_tape_that_nobody_can_read_is_named() -> None:
    bus: Any = await hub_with("a")
    await bus.append(subjects.tape("a", 0), b"rubbish")
    with pytest.raises(hub_backup.BackupError, match="the tape of run a: "):
        await hub_backup._new_epochs(bus, [subjects.tape_stream("a")])
