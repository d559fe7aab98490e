"""The tape is the fence: of two leaders only one ever commits (I7), whatever answers are lost."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from syncer.contexts import context

from diloco_shared import ambient
from diloco_shared.bus.port import Refused, Stored, StreamFull, StreamSpec, Unavailable
from diloco_shared.checkpoints.tape_archive_io import TapeArchive, archives_of, read_tape
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeEpoch, TapeTerm
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.bus import MemoryBroker, MemoryBus
from diloco_syncer.history import archiving_io as archiving
from diloco_syncer.history import tape_io as tape_module
from diloco_syncer.history.archiving_io import TapeArchiver
from diloco_syncer.history.follow_io import Follower, Replaced
from diloco_syncer.history.tape_io import Deposed, Purged, Tape, TapeReplaced
from diloco_syncer.leadership.leader_io import Leader
from diloco_syncer.snapshots.snapshots_io import SnapshotStore


def term(number: int, leader: str) -> TapeTerm:
    return TapeTerm(epoch=0, term=number, leader=leader, at=0.0)


AGAIN = TapeEpoch(epoch=1000, term=1000, reason="the hub was restored from a backup", at=5.0)


async def stream(bus: MemoryBus) -> None:
    await bus.ensure_stream(StreamSpec(subjects.tape_stream("r"), ("tape.r.>",), 1 << 20))


async def led() -> tuple[MemoryBus, Tape]:
    """The bus of a leader, and its tape, on which its term stands."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    tape = Tape(bus, "r")
    await tape.append(term(1, "a"))
    return bus, tape


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


async def put_back(bus: MemoryBus, *, lost: int, added: int) -> None:
    """Of a backup: without the newest records, and with some of its own."""
    bus.broker.lose(subjects.tape_stream("r"), lost, synced=True)
    for _ in range(added):
        await bus.append(subjects.tape("r", 0), encode(AGAIN))


@pytest.mark.parametrize(("lost", "added"), [(1, 1), (2, 1), (3, 0)])
async def test_on_a_hub_that_was_put_back_nobody_goes_on_from_what_it_has_not(
    lost: int, added: int
) -> None:
    """Also where the tape has as many records as before, so that an append would find its place."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    tape = Tape(bus, "r")
    for number in (1, 2, 3):
        await tape.append(term(number, "a"))
    await put_back(bus, lost=lost, added=added)
    for work in (tape.look_back(), tape.append(term(4, "a"))):
        which = r"record 3 on tape\.r\.0 is gone, or is another one"
        with pytest.raises(TapeReplaced, match=which):
            await work
    assert len(await Tape(bus, "r").read()) == 3 - lost + added


async def test_a_hub_that_was_put_back_may_have_more_records_than_a_leader_had_written() -> None:
    """Of a run with several shards, say, which has them all in one stream: nothing is missing."""
    bus, tape = await led()
    await put_back(bus, lost=1, added=2)
    further = r"record 2 on tape\.r\.0 is not ours: our newest is 1"
    with pytest.raises(TapeReplaced, match=further):
        await tape.look_back()
    with pytest.raises(TapeReplaced, match="or the hub was put back"):
        await tape.append(term(2, "a"))


@pytest.mark.parametrize("added", [0, 2])
async def test_who_was_appending_when_the_hub_was_put_back_knows_it(
    added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record finds another place than it expects, as when another leader is at work."""
    bus, tape = await led()
    await tape.append(term(2, "a"))

    async def goes_down(*_: object, **__: object) -> int:
        monkeypatch.undo()
        await put_back(bus, lost=1, added=added)
        raise Unavailable("the message server went away")

    monkeypatch.setattr(bus, "append", goes_down)
    with pytest.raises(TapeReplaced, match=r"record \d on .* is not ours.*was put back"):
        await tape.append(term(3, "a"))


async def test_what_is_appended_while_a_leader_looks_back_is_its_own() -> None:
    """What the look finds then is newer than what the leader had when it asked."""
    bus, tape = await led()
    bus.broker.restart()
    last, looked = bus.last, ["once"]

    async def meanwhile(stream: str, subject: str) -> Stored | None:
        if looked:
            looked.pop()
            await tape.append(term(2, "a"))
        return await last(stream, subject)

    bus.last = meanwhile  # type: ignore[method-assign]
    await tape.look_back()
    assert tape.end == 2
    await tape.look_back()
    assert tape.life == bus.life


async def test_nobody_knows_whose_a_tape_is_while_an_append_to_a_new_server_has_no_answer() -> None:
    """What is there beyond its newest record may be its own."""
    bus, tape = await led()
    await put_back(bus, lost=0, added=1)
    for since, error, why in ((1.0, Unavailable, "not known yet"), (0.0, TapeReplaced, "record 2")):
        tape.appending_since = since
        with pytest.raises(error, match=why):
            await tape.still_ours()


async def test_a_leader_whose_server_answers_late_finds_that_it_was_put_back() -> None:
    """Each answer takes as long as two heartbeats: a look waits for it."""
    bus, tape = await led()
    await put_back(bus, lost=1, added=0)
    last = bus.last

    async def late(stream: str, subject: str) -> Stored | None:
        await asyncio.sleep(0.1)
        return await last(stream, subject)

    bus.last = late  # type: ignore[method-assign]
    membership = SimpleNamespace(heartbeat_s=0.05)
    leader: Any = SimpleNamespace(tape=tape, spec=SimpleNamespace(membership=membership))
    with pytest.raises(Deposed):
        async with asyncio.timeout(10):
            await Leader._watch_tape(leader)


async def test_a_slow_answer_is_no_reason_to_excuse_silent_learners() -> None:
    """It takes two heartbeats, and half a lease is longer: else the dead would never be missed."""
    put = list[object]()

    async def late(bucket: str, key: str) -> None:
        await asyncio.sleep(0.1)

    membership = SimpleNamespace(heartbeat_s=0.05, lease_s=2.0)
    leader: Any = SimpleNamespace(
        spec=SimpleNamespace(membership=membership),
        control=SimpleNamespace(kv_get=late),
        lease=SimpleNamespace(key="r.0"),
        _put=put.append,
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await Leader._watch_bus(leader)
    assert put == []


async def test_what_was_executed_of_a_tape_that_was_put_back_is_not_gone_on_with() -> None:
    """Nor where it is longer by now: what follows would be executed on another state."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    for number in (1, 2, 3):
        await bus.append(subjects.tape("r", 0), encode(term(number, "a")))
    spec: Any = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    finder: Any = SimpleNamespace(snapshots=SimpleNamespace(shelf=None, folder=""))
    follower = Follower(spec, bus, Tape(bus, "r"), finder)
    assert not await follower.catch_up()
    assert await follower.catch_up()
    bus.broker.restart()
    assert await follower.catch_up(), "it is the same one"
    await put_back(bus, lost=1, added=1)
    await bus.append(subjects.tape("r", 0), encode(term(1001, "b")))
    with pytest.raises(Replaced, match="record 3 of the tape is another one"):
        await follower.catch_up()
    with pytest.raises(Replaced):
        await Follower(spec, bus, Tape(bus, "r"), finder).begin_again(follower.history, "")


async def test_a_server_that_was_started_anew_has_the_same_tape() -> None:
    bus, tape = await led()
    bus.broker.restart()
    await tape.look_back()
    assert await tape.append(term(2, "a")) == 2
    await bus.close()
    bus.broker.restart()
    with pytest.raises(Unavailable, match="the message server is away"):
        await tape.look_back()


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


@pytest.mark.parametrize(("said", "told", "lies"), [("", "told", "told"), ("said", "told", "said")])
def test_an_archive_lies_beside_the_checkpoints_of_its_run(
    tmp_path: Path, said: str, told: str, lies: str
) -> None:
    """Where the run says, else where the process was told; each shard's by itself."""
    keeping = {"run_checkpoint_root": str(tmp_path / said) if said else ""}
    settings = {"name": "r", "id": "ab", "budget": {"steps": 8}, "keeping": keeping}
    spec = RunSpec.model_validate({**settings, "algorithm": {"shards": 2, "fragments": 4}})
    found = archives_of(spec, str(tmp_path / told))
    assert [(a.shard, a.vault.path) for a in found] == [(0, tmp_path / lies), (1, tmp_path / lies)]


async def test_what_is_archived_is_read_where_it_lies_and_nothing_is_lost(tmp_path: Path) -> None:
    """Segments are whole or absent; a record leaves the stream once its segment is there."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    archive = TapeArchive(str(tmp_path), "r.1")
    tape = Tape(bus, "r", 0, archive)
    for number in range(1, 11):
        await tape.append(term(number, "a"))
    stored = await bus.fetch(tape.stream, tape.subject)
    archive.write(stored[:4])
    archive.write(stored[4:6])
    await bus.purge(tape.stream, tape.subject, below_seq=7)
    fresh = Tape(bus, "r", 0, archive)
    assert [seq for seq, _ in await fresh.read()] == list(range(1, 11))
    assert [seq for seq, _ in await fresh.read(after=2, limit=3)] == [3, 4, 5]
    assert [seq for seq, _ in await fresh.read(after=5, limit=3)] == [6, 7, 8]
    assert await fresh.append(term(11, "a")) == 11
    # Elsewhere, where the archive is not: a snapshot is needed.
    with pytest.raises(Purged, match="archived"):
        await Tape(bus, "r", 0, TapeArchive(str(tmp_path / "elsewhere"), "r.1")).read()
    segment = archive.segments()[0]
    archive.vault.write(segment.key, b"torn")
    with pytest.raises(Purged, match="damaged"):
        await Tape(bus, "r", 0, archive).read()


async def test_what_is_left_of_a_tape_in_its_archive_alone_is_its_end(tmp_path: Path) -> None:
    """The server lost every record that was not archived: the next one follows the archive's."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    archive = TapeArchive(str(tmp_path), "r.1")
    assert await Tape(bus, "r", 0, archive).newest() == 0
    tape = Tape(bus, "r", 0, archive)
    for number in range(1, 6):
        await tape.append(term(number, "a"))
    archive.write((await bus.fetch(tape.stream, tape.subject))[:2])
    await bus.purge(tape.stream, tape.subject, below_seq=3)
    bus.broker.lose(tape.stream, 3, synced=True)
    fresh = Tape(bus, "r", 0, archive)
    assert await fresh.newest() == 2
    assert [seq for seq, _ in await fresh.read()] == [1, 2]
    assert await fresh.append(term(3, "b")) == 3
    assert await fresh.append(term(4, "b")) == 4
    assert await Tape(bus, "r", 0, archive).newest() == 4


async def test_an_archive_of_what_a_backup_has_not_counts_no_more(tmp_path: Path) -> None:
    """The hub was put back from a backup of five records, when ten of twelve were archived."""
    bus, archive = MemoryBus(MemoryBroker(), "a"), TapeArchive(str(tmp_path), "r.1")
    await stream(bus)
    tape = Tape(bus, "r", 0, archive)
    for number in range(1, 13):
        await tape.append(term(number, "a"))
    stored = await bus.fetch(tape.stream, tape.subject)
    for first in (0, 4, 8):
        archive.write(stored[first : first + 4])
    bus.broker.lose(tape.stream, 7, synced=True)
    for number in range(13, 17):
        await bus.append(tape.subject, encode(term(number, "b")))
    await bus.purge(tape.stream, tape.subject, below_seq=3)  # as the backup had it
    fresh = Tape(bus, "r", 0, archive)
    there = [r.term for _, r in await fresh.read() if isinstance(r, TapeTerm)]
    assert there == [1, 2, 3, 4, 5, 13, 14, 15, 16]
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    archiver = TapeArchiver(context(spec, bus, folder=tmp_path), fresh, archive)
    await archiver._agree()
    assert [(s.first, s.last) for s in archive.segments()] == [(1, 4)]
    assert await Tape(bus, "r", 0, archive).read() == await fresh.read()


async def test_an_archive_counts_also_where_another_shard_has_the_first_record(
    tmp_path: Path,
) -> None:
    """The server lost all of this shard that was not archived, and nothing of the other one."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    other = Tape(bus, "r", 1, TapeArchive(str(tmp_path), "r.1", 1), shards=2)
    await other.append(term(1, "b"))
    archive = TapeArchive(str(tmp_path), "r.1")
    tape = Tape(bus, "r", 0, archive, shards=2)
    for number in range(1, 4):
        await tape.append(term(number, "a"))
    archive.write((await bus.fetch(tape.stream, tape.subject))[:2])
    await bus.purge(tape.stream, tape.subject, below_seq=4)
    bus.broker.lose(tape.stream, 1, synced=True)
    fresh = Tape(bus, "r", 0, archive, shards=2)
    assert await fresh.newest() == 3
    assert [seq for seq, _ in await fresh.read()] == [2, 3]
    assert await other.newest() == 1


async def test_behind_a_first_record_whose_answer_was_lost_comes_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tape_module, "RETRY_S", 0.001)
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    tape, lost = Tape(bus, "r"), [1]
    assert await tape.newest() == 0

    def fault(client: str, operation: str, subject: str) -> Any:
        return "lose_answer" if operation == "append" and lost and lost.pop() else "deliver"

    bus.broker.fault = fault
    async with asyncio.timeout(5):
        assert await tape.append(term(1, "a")) == 1
        assert await tape.append(term(2, "a")) == 2


@pytest.mark.parametrize("after", [0, 2, 3])
@pytest.mark.parametrize("archived", [0, 2])
async def test_a_gap_is_told_wherever_it_is(tmp_path: Path, after: int, archived: int) -> None:
    """Records 1 to 4 left the stream, and the archive has the first ones of them at most."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    tape = Tape(bus, "r", 0, TapeArchive(str(tmp_path), "r.1"))
    assert tape.archive is not None
    for number in range(1, 8):
        await tape.append(term(number, "a"))
    if archived:
        tape.archive.write((await bus.fetch(tape.stream, tape.subject))[:archived])
    await bus.purge(tape.stream, tape.subject, below_seq=5)
    with pytest.raises(Purged, match=f"record {max(after, archived) + 1} of the tape"):
        await tape.read(after=after)
    assert [seq for seq, _ in await tape.read(after=4)] == [5, 6, 7]


async def test_a_record_that_the_server_gives_no_more_is_a_gap() -> None:
    bus, tape = await led()
    await bus.append("tape.r.stray", b"no record of anybody's")
    for number in (2, 3):
        await tape.append(term(number, "a"))
    assert [seq for seq, _ in await tape.read()] == [1, 3, 4]
    bus.broker._streams[tape.stream].remove(3)
    with pytest.raises(Purged, match="record 3 of the tape was archived or is damaged"):
        await tape.read(after=1)


async def test_of_several_shards_what_others_recorded_is_no_gap(tmp_path: Path) -> None:
    bus, root = MemoryBus(MemoryBroker(), "a"), str(tmp_path)
    await stream(bus)
    ours, theirs = (Tape(bus, "r", s, TapeArchive(root, "r", s), shards=2) for s in (0, 1))
    for number in range(1, 6):
        for tape in (theirs, ours):  # odd ones are theirs
            await tape.append(term(number, "a"))
    assert ours.archive is not None and theirs.archive is not None
    stored = await bus.fetch(ours.stream, ours.subject)
    removed = [ours.archive.write(stored[n : n + 1]) for n in (0, 1)]
    await bus.purge(ours.stream, ours.subject, below_seq=5)
    assert [seq for seq, _ in await ours.read()] == [2, 4, 6, 8, 10]
    theirs.archive.write((await bus.fetch(theirs.stream, theirs.subject))[:3])
    await bus.purge(theirs.stream, theirs.subject, below_seq=6)
    assert [seq for seq, _ in await ours.read()] == [2, 4, 6, 8, 10]
    assert [seq for seq, _ in await theirs.read(after=4)] == [5, 7, 9]
    for segment in reversed(removed):
        ours.archive.vault.write(segment.key, None)
        with pytest.raises(Purged, match=f"record {segment.first} of the tape"):
            await ours.read(after=segment.first - 1)
    assert [seq for seq, _ in await ours.read(after=4)] == [6, 8, 10]


@pytest.mark.parametrize("shard", [0, 1])
async def test_a_shard_is_archived_up_to_its_oldest_snapshot_and_others_stay(
    tmp_path: Path, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiving, "RECORDS_IN_STREAM", 3)
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    await bus.ensure_bucket(subjects.MEMBERS)
    spec = RunSpec.model_validate({"name": "r", "algorithm": {"shards": 2}, "budget": {"steps": 1}})
    root = str(tmp_path / "root")
    tapes = [Tape(bus, "r", s, TapeArchive(root, "r", s)) for s in (0, 1)]
    for number in range(1, 8):
        for tape in tapes:
            await tape.append(term(number, "a"))
    snapshots = SnapshotStore(tmp_path / "snapshots")
    mine = tapes[shard]
    assert mine.archive is not None
    archiver = TapeArchiver(context(spec, bus, snapshots=snapshots), mine, mine.archive)
    assert "no snapshot" in await archiver.make_room()
    snapshots.save(7 + shard, {}, {"x": np.zeros(1)})
    snapshots.save(11 + shard, {}, {"x": np.zeros(1)})
    assert not await archiver.make_room()
    left = [s.seq for s in await bus.fetch(mine.stream, mine.subject)]
    assert left == [9 + shard, 11 + shard, 13 + shard]
    assert len(await bus.fetch(mine.stream, tapes[1 - shard].subject)) == 7
    archives = [t.archive for t in tapes if t.archive is not None]
    assert [s.seq for s in await read_tape(bus, "r", archives)] == list(range(1, 15))
    page = await read_tape(bus, "r", archives, after=4, limit=5)
    assert [s.seq for s in page] == [5, 6, 7, 8, 9]
    assert len(await Tape(bus, "r", shard, mine.archive).read()) == 7


async def test_a_mark_stays_on_the_tape_while_its_checkpoint_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other shards look for it in the stream; only a full one does not wait for them."""
    monkeypatch.setattr(archiving, "RECORDS_IN_STREAM", 0)
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    await bus.ensure_bucket(subjects.MEMBERS)
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    archive = TapeArchive(str(tmp_path / "root"), "r")
    tape = Tape(bus, "r", 0, archive)
    for number in range(1, 8):
        await tape.append(term(number, "a"))
    snapshots = SnapshotStore(tmp_path / "snapshots")
    snapshots.save(6, {}, {"x": np.zeros(1)})
    needed: list[float] = [4]
    archiver = TapeArchiver(
        context(spec, bus, snapshots=snapshots), tape, archive, lambda: needed[0]
    )
    await archiver._archive(forced=False)
    assert [s.seq for s in await bus.fetch(tape.stream, tape.subject)] == [4, 5, 6, 7]
    assert not await archiver.make_room()
    assert [s.seq for s in await bus.fetch(tape.stream, tape.subject)] == [7]


async def test_where_the_oldest_snapshot_frees_nothing_the_newest_sound_one_does(
    tmp_path: Path,
) -> None:
    """A full tape takes no record, so that oldest one would never be replaced."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    archive = TapeArchive(str(tmp_path / "root"), "r")
    tape = Tape(bus, "r", 0, archive)
    for number in range(1, 8):
        await tape.append(term(number, "a"))
    snapshots = SnapshotStore(tmp_path / "snapshots", keep=3)
    archiver = TapeArchiver(context(spec, bus, snapshots=snapshots), tape, archive)
    snapshots.save(2, {}, {"x": np.zeros(1)})
    snapshots.save(5, {}, {"x": np.ones(1)})
    torn = snapshots.save(6, {}, {"x": np.full(1, 2.0)})
    next(torn.glob("*.arrays")).write_bytes(b"torn")
    assert not await archiver.make_room()
    assert [s.seq for s in await bus.fetch(tape.stream, tape.subject)] == [3, 4, 5, 6, 7]
    assert not await archiver.make_room()
    assert [s.seq for s in await bus.fetch(tape.stream, tape.subject)] == [6, 7]
    assert "no snapshot" in await archiver.make_room()
    assert len(await tape.read()) == 7


@pytest.mark.virtual
async def test_the_archive_is_tried_again_after_trouble_and_while_standbys_are_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then not before something more may go."""
    bus = MemoryBus(MemoryBroker(), "a")
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    archive = TapeArchive(str(tmp_path / "root"), "r")
    archiver = TapeArchiver(context(spec, bus), Tape(bus, "r", 0, archive), archive)
    behind = [Unavailable("away"), OSError("full"), True, False, False]
    at: list[float] = []

    async def archived(*, forced: bool) -> bool:
        at.append(ambient.monotonic())
        came = behind.pop(0)
        if isinstance(came, Exception):
            raise came
        return came

    monkeypatch.setattr(archiver, "_archive", archived)
    working = asyncio.create_task(archiver.work())
    archiver.want()
    await asyncio.sleep(60.0)
    assert [round(b - a, 3) for a, b in pairwise(at)] == [archiving.RETRY_S] * 3
    archiver.want()
    await asyncio.sleep(60.0)
    working.cancel()
    assert not behind


class Refusing(MemoryBus):
    """Says no to a call as often as it is told to."""

    def __init__(self, broker: MemoryBroker, **times: int) -> None:
        super().__init__(broker, "a")
        self.times = times

    def _refuse(self, call: str) -> None:
        self.times[call] = self.times.get(call, 0) - 1
        if self.times[call] >= 0:
            raise Refused(f"{call}: not now")

    async def append(self, subject: str, payload: bytes, **more: Any) -> int:
        self._refuse("append")
        return await super().append(subject, payload, **more)

    async def last(self, stream: str, subject: str) -> Stored | None:
        self._refuse("last")
        return await super().last(stream, subject)


async def test_what_is_refused_is_asked_for_again_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends no leader: the next one would be refused likewise."""
    bus = Refusing(MemoryBroker(), append=3, last=2)
    await stream(bus)
    tape, seen = Tape(bus, "r"), list[str]()

    async def pause(_: float) -> None:
        seen.append(tape.progress.trouble)

    monkeypatch.setattr(tape_module, "asyncio", SimpleNamespace(sleep=pause))
    assert await tape.append(term(1, "a")) == 1
    assert seen == ["append: not now"] * 3 and not tape.progress.trouble


async def test_a_refusal_while_room_is_made_is_the_reason_that_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = MemoryBus(MemoryBroker(), "a")
    await bus.ensure_stream(StreamSpec(subjects.tape_stream("r"), ("tape.r.>",), 100))
    tape, seen = Tape(bus, "r"), list[str]()

    async def make_room() -> str:
        raise [Refused("no space"), StreamFull("no room for a segment")][len(seen)]

    async def pause(_: float) -> None:
        seen.append(tape.progress.full.partition("; ")[2])
        if len(seen) == 2:
            await bus.ensure_stream(StreamSpec(tape.stream, ("tape.r.>",), 1 << 20))

    tape.make_room = make_room
    monkeypatch.setattr(tape_module, "asyncio", SimpleNamespace(sleep=pause))
    assert await tape.append(term(1, "a" * 200)) == 1
    assert seen == ["no space", "no room for a segment"]


async def test_a_full_tape_waits_for_room_and_keeps_its_sequence(tmp_path: Path) -> None:
    bus = MemoryBus(MemoryBroker(), "a")
    await bus.ensure_stream(StreamSpec(subjects.tape_stream("r"), ("tape.r.>",), 2000))
    tape = Tape(bus, "r", 0, TapeArchive(str(tmp_path), "r"))
    written = 0

    async def make_room() -> str:
        nonlocal written
        assert tape.archive is not None
        stored = await bus.fetch(tape.stream, tape.subject)
        tape.archive.write(stored[:-1])
        written += len(stored) - 1
        await bus.purge(tape.stream, tape.subject, below_seq=stored[-1].seq)
        return ""

    tape.make_room = make_room
    for number in range(1, 31):
        assert await tape.append(term(number, "a")) == number
        assert not tape.progress.full
    assert written
    assert [seq for seq, _ in await tape.read()] == list(range(1, 31))
