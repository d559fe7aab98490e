"""Taking a backup of a hub, as far as no server is needed."""

import hashlib
import itertools
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
from settled import Settled

from diloco_shared import ambient
from diloco_shared.bus.port import StreamFull, StreamSpec
from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.hub import backup as hub_backup
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeEnd, TapeEpoch, TapeInit, TapeRecord, TapeTerm
from diloco_shared.protocol.records import Incarnation, RunRecord
from diloco_shared.protocol.wire import decode, decode_tape, encode
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_simulator.troubles import backups

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


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands before the day from which it counts."""
    monkeypatch.setattr(ambient, "wall", lambda: 1.0)


@pytest.mark.usefixtures("early")
async def test_every_tape_that_has_not_ended_begins_an_epoch_that_nobody_had() -> None:
    bus: Any = await hub_with("a", "b", "empty", "gone")
    for number in range(1, 5):
        await bus.append(subjects.tape("a", 0), term(3, number))
    await bus.append(subjects.tape("b", 0), term(7, 9))
    end = TapeEnd(term=9, versions=(1,), outcome="finished", reason="spent", at=2.0)
    await bus.append(subjects.tape("b", 0), encode(end))
    there = [subjects.tape_stream(run) for run in ("a", "b", "empty")]
    told, of_empty = await hub_backup._new_epochs(bus, await hub_backup._runs(bus), there)
    begun = await newest(bus, "a")
    assert isinstance(begun, TapeEpoch)
    assert (begun.epoch, begun.term) == (3 + hub_backup.AHEAD, 4 + hub_backup.AHEAD)
    assert told == f"run a, shard 0: record 5 begins epoch {begun.epoch}"
    assert isinstance(await newest(bus, "b"), TapeEnd)
    assert of_empty == f"run empty, shard 0: record 1 begins epoch {hub_backup.AHEAD}"


@pytest.mark.usefixtures("early")
async def test_shards_of_a_run_begin_the_same_epoch() -> None:
    bus: Any = await hub_with("a", shards=2)
    await bus.append(subjects.tape("a", 0), term(1, 2))
    await bus.append(subjects.tape("a", 1), term(4, 5))
    await hub_backup._new_epochs(bus, await hub_backup._runs(bus), [subjects.tape_stream("a")])
    first, second = [await newest(bus, "a", shard) for shard in (0, 1)]
    assert isinstance(first, TapeEpoch) and isinstance(second, TapeEpoch)
    assert first.epoch == second.epoch == 4 + hub_backup.AHEAD
    assert (first.term, second.term) == (2 + hub_backup.AHEAD, 5 + hub_backup.AHEAD)


async def test_a_tape_that_nobody_can_read_is_named() -> None:
    bus: Any = await hub_with("a")
    await bus.append(subjects.tape("a", 0), b"rubbish")
    with pytest.raises(hub_backup.BackupError, match="the tape of run a: "):
        await hub_backup._new_epochs(bus, await hub_backup._runs(bus), [subjects.tape_stream("a")])


async def test_a_backup_that_is_put_back_twice_leads_to_other_epochs_terms_and_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And an older one, that is put back after a newer, to later ones still."""
    begun = list[tuple[int, int, int]]()
    for hours, epoch in ((0, 3), (1, 3), (2, 1)):
        now = hub_backup.CLOCK_FROM + 300 * 86_400 + 3600 * hours
        monkeypatch.setattr(ambient, "wall", lambda now=now: float(now))
        bus: Any = await hub_with("a")
        await bus.append(subjects.tape("a", 0), term(epoch, epoch))
        life = Incarnation(learner="l", incarnation=epoch, boot="", at=1.0)
        await bus.kv_put(subjects.INCARNATIONS, "a.l", encode(life))
        await hub_backup._new_epochs(bus, await hub_backup._runs(bus), [subjects.tape_stream("a")])
        await hub_backup._new_lives(bus)
        record: Any = await newest(bus, "a")
        entry = await bus.kv_get(subjects.INCARNATIONS, "a.l")
        begun.append((record.epoch, record.term, decode(entry.value, Incarnation).incarnation))
        await bus.close()
    for earlier, later in itertools.pairwise(begun):
        # None of them begins every second, and this is an hour.
        assert all(b - a == 3600 for a, b in zip(earlier, later, strict=True))


async def test_streams_of_a_run_that_was_deleted_meanwhile_are_left_out() -> None:
    """Deleted, or submitted again under its name with another configuration."""
    bus: Any = await hub_with("same", "again")
    for name in ("same", "again"):
        spec = RunSpec.model_validate({"name": name, "budget": {"steps": 5}})
        record = RunRecord.model_validate(
            {
                "name": name,
                "spec": spec.model_dump(),
                "desired": "running",
                "quorum": 1,
                "created_at": 1.0,
            }
        )
        await bus.kv_put(subjects.RUNS, name, encode(record))
        before = spec if name == "same" else spec.model_copy(update={"seed": 7})
        init = TapeInit(
            run=name,
            config_hash=config_hash(before),
            layout=(),
            anchor_digests=(),
            subjects=(),
            learner="l",
            incarnation=0,
            at=1.0,
        )
        await bus.append(subjects.tape(name, 0), term(0, 1))
        await bus.append(subjects.tape(name, 0), encode(init))
    there = {subjects.tape_stream(name) for name in ("same", "again", "deleted")} | {
        subjects.up_stream("again"),
        subjects.dn_stream("deleted"),
        "EVENTS",
        "KV_runs",
    }
    foreign = await hub_backup._foreign(bus, await hub_backup._runs(bus), there)
    assert foreign == {"TAPE-again", "UP-again", "TAPE-deleted", "DN-deleted"}


async def test_what_is_put_back_has_no_streams_of_a_deleted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "SAVED_S", (0.0, 0.0))
    monkeypatch.setattr(backups, "LOADED_S", (0.0, 0.0))
    bus = await hub_with("a", "deleted")
    for run in ("a", "deleted"):
        await bus.append(subjects.tape(run, 0), term(0, 1))
    await bus.kv_delete(subjects.RUNS, "deleted")
    backup = await hub_backup.take(backups.MemoryStreams(bus.broker, Random(0)), tmp_path / "b")
    broker = MemoryBroker()
    empty, streams = MemoryBus(broker, "restore"), backups.MemoryStreams(broker, Random(0))
    told = await hub_backup.fill(empty, streams, backup, tmp_path / "b", nodes=1)
    assert told[0] == "TAPE-deleted is left out: it is of a run that was deleted meanwhile"
    assert broker.exists("TAPE-a") and not broker.exists("TAPE-deleted")


@pytest.mark.parametrize(("nodes", "mode"), [(1, "async"), (3, "default")])
async def test_payloads_of_one_server_are_synced_on_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, mode: str
) -> None:
    """One server may acknowledge what is in memory, since its next life is noticed."""
    monkeypatch.setattr(backups, "SAVED_S", (0.0, 0.0))
    monkeypatch.setattr(backups, "LOADED_S", (0.0, 0.0))
    bus, up = await hub_with("a"), subjects.up_stream("a")
    await bus.ensure_stream(StreamSpec(up, ("up.a.>",), 1 << 20, synced=False))
    backup = await hub_backup.take(backups.MemoryStreams(bus.broker, Random(0)), tmp_path / "b")
    broker = MemoryBroker()
    broker.nodes = nodes
    empty, streams = MemoryBus(broker, "restore"), backups.MemoryStreams(broker, Random(0))
    await hub_backup.fill(empty, streams, backup, tmp_path / "b", nodes=nodes)
    config = broker.config(up)
    assert config is not None and config["persist_mode"] == mode


async def test_a_backup_with_a_tape_that_is_full_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run begins an epoch too: the record for that finds room."""
    monkeypatch.setattr(backups, "SAVED_S", (0.0, 0.0))
    monkeypatch.setattr(backups, "LOADED_S", (0.0, 0.0))
    bus = await hub_with("a", "full")
    await bus.append(subjects.tape("full", 0), term(0, 1))
    bus.broker.narrow("TAPE-full", (await bus.stream_info("TAPE-full")).bytes)
    with pytest.raises(StreamFull):
        await bus.append(subjects.tape("full", 0), term(0, 2))
    backup = await hub_backup.take(backups.MemoryStreams(bus.broker, Random(0)), tmp_path / "b")
    broker = MemoryBroker()
    empty, streams = MemoryBus(broker, "restore"), backups.MemoryStreams(broker, Random(0))
    told = await hub_backup.fill(empty, streams, backup, tmp_path / "b", nodes=1)
    assert any(line.startswith("run full, shard 0: record 2 begins epoch") for line in told), told


async def test_a_backup_that_was_taken_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files' names first, then the manifest that promises them, and the folder's own name."""
    bus: Any = await hub_with("a")
    settled = Settled(monkeypatch)
    backup = await hub_backup.take(backups.MemoryStreams(bus.broker, Random(0)), tmp_path / "b")
    names = {stream.name for stream in backup.streams if stream.file}
    folders = [of for of in settled.calls if isinstance(of, set)]
    assert folders == [names, {hub_backup.MANIFEST, hub_backup.STREAMS}, {"b"}]
    sizes = [of for of in settled.calls if isinstance(of, int)]
    assert set(sizes) >= {stream.bytes for stream in backup.streams if stream.file}
