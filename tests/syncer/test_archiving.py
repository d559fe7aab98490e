"""What leaves a tape's stream for its archive: in which pieces, and what that takes of a memory."""

from pathlib import Path
from typing import Any

import pytest
from syncer.contexts import context
from syncer.test_tape import stream, term

from diloco_shared.bus.port import Stored, Unavailable
from diloco_shared.checkpoints import tape_archive_io
from diloco_shared.checkpoints.tape_archive_io import FRAME_BYTES, TapeArchive
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.bus import MemoryBroker, MemoryBus
from diloco_syncer.history import archiving_io as archiving
from diloco_syncer.history.archiving_io import TapeArchiver
from diloco_syncer.history.tape_io import Deposed, Tape


async def test_records_of_many_learners_leave_in_small_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long and large the tape: what is in memory at a time is a segment and a batch."""
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    archive = TapeArchive(str(tmp_path / "root"), "r")
    tape, asked = Tape(bus, "r", 0, archive), list[int | None]()
    for number in range(1, 61):
        await tape.append(term(number, "a" * 200))
    size = len((await bus.fetch(tape.stream, tape.subject))[9].payload) + FRAME_BYTES
    monkeypatch.setattr(tape_archive_io, "WRITTEN_BYTES", 20 * size)
    fetch = bus.fetch

    async def counted(*where: Any, limit: int | None = None, **more: Any) -> list[Stored]:
        asked.append(limit)
        return await fetch(*where, limit=limit, **more)

    monkeypatch.setattr(bus, "fetch", counted)
    archiver = TapeArchiver(context(spec, bus, folder=tmp_path), tape, archive)
    assert await archiver._move(50) == 3
    assert [(s.first, s.last) for s in archive.segments()] == [(1, 20), (21, 40), (41, 50)]
    assert asked
    assert all(limit is not None and limit <= archiving.BATCH_RECORDS for limit in asked)
    assert [seq for seq, _ in await tape.read()] == list(range(1, 61))
    assert await archiver._move(50) == 0


@pytest.mark.parametrize("last", [2, 9, 59])
async def test_a_segment_has_at_most_so_many_records(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiving, "SEGMENT_RECORDS", 20)
    bus = MemoryBus(MemoryBroker(), "a")
    await stream(bus)
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    archive = TapeArchive(str(tmp_path / "root"), "r")
    tape = Tape(bus, "r", 0, archive)
    for number in range(1, 61):
        await tape.append(term(number, "a"))
    await TapeArchiver(context(spec, bus, folder=tmp_path), tape, archive)._move(last)
    found = [(s.first, s.last) for s in archive.segments()]
    assert found == [(n, min(n + 19, last)) for n in range(1, last + 1, 20)]
    assert [seq for seq, _ in await tape.read()] == list(range(1, 61))


class Two:
    """Leaders of one shard's tape of 60 records: the first one stands still, the other leads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bus = folder, MemoryBus(MemoryBroker(), "a")
        self.spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})

    def archive(self) -> TapeArchive:
        return TapeArchive(str(self.folder / "root"), "r")

    async def begun(self) -> TapeArchiver:
        """The first one."""
        await stream(self.bus)
        first = Tape(self.bus, "r", 0, self.archive())
        for number in range(1, 61):
            await first.append(term(number, "a"))
        return self.archiver(first)

    async def taken_over(self) -> TapeArchiver:
        other = Tape(self.bus, "r", 0, self.archive())
        await other.read()
        await other.append(term(61, "b"))
        return self.archiver(other)

    def archiver(self, tape: Tape) -> TapeArchiver:
        assert tape.archive is not None
        return TapeArchiver(context(self.spec, self.bus, folder=self.folder), tape, tape.archive)

    async def seqs(self) -> list[int]:
        return [seq for seq, _ in await Tape(self.bus, "r", 0, self.archive()).read()]


async def test_a_purge_that_comes_after_another_leader_archived_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one had deleted the segment, since the stream had the same records."""
    two = Two(tmp_path)
    first, purge, late = await two.begun(), two.bus.purge, list[Any]()

    async def stalled(*where: Any, **more: Any) -> int:
        late.append((where, more))
        return 0

    monkeypatch.setattr(two.bus, "purge", stalled)
    first._oldest = answers(await first._oldest(50), [])  # type: ignore[method-assign]
    assert await first._move(50) == 1
    monkeypatch.setattr(two.bus, "purge", purge)
    other = await two.taken_over()
    assert await other._move(45) == 1
    ((where, more),) = late
    await purge(*where, **more)
    assert await two.seqs() == list(range(1, 62))
    assert [(s.first, s.last) for s in two.archive().segments()] == [(1, 45), (1, 50)]
    assert await other._move(58) == 1
    assert await two.seqs() == list(range(1, 62))


async def test_the_newest_archived_record_may_lie_in_any_segment(tmp_path: Path) -> None:
    """One leader archived 46 to 48 while another one's segment of 1 to 50 was there."""
    two = Two(tmp_path)
    tape = (await two.begun()).tape
    stored = await two.bus.fetch(tape.stream, tape.subject)
    for first, last in ((1, 50), (46, 48)):
        two.archive().write(stored[first - 1 : last])
    await two.bus.purge(tape.stream, tape.subject, below_seq=51)
    two.bus.broker.lose(tape.stream, 10, synced=True)
    assert await Tape(two.bus, "r", 0, two.archive()).newest() == 50


def answers(*given: Any) -> Any:
    """Gives one after the other."""
    left = list(given)

    async def answer(*_: Any) -> Any:
        return left.pop(0)

    return answer


async def test_who_has_a_successor_removes_nothing_from_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still once its segment was written."""
    two = Two(tmp_path)
    first, at = await two.begun(), list[str]()

    async def meanwhile(*given: Any) -> Any:
        at.append("written")
        await two.taken_over()
        return first.archive.write(*given[3:])

    first.agrees = True
    monkeypatch.setattr(first.threads, "within", meanwhile)
    with pytest.raises(Deposed, match="record 61"):
        await first._move(50)
    assert at == ["written"]
    assert [s.seq for s in await two.bus.fetch(first.tape.stream, first.tape.subject)] == [
        *range(1, 62)
    ]


@pytest.mark.parametrize("call", [2, 3])
async def test_a_purge_between_two_looks_at_the_stream_makes_no_lost_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The other leader's look finds nothing, or a part, of what the first one's segment has."""
    two = Two(tmp_path)
    first = await two.begun()
    stored = await two.bus.fetch(first.tape.stream, first.tape.subject, limit=50)
    first.archive.write(stored)
    other, fetch, calls = await two.taken_over(), two.bus.fetch, list[Any]()

    async def late(*where: Any, **more: Any) -> list[Stored]:
        calls.append(more)
        if len(calls) == call:
            await two.bus.purge(*where, below_seq=51)
        return await fetch(*where, **more)

    monkeypatch.setattr(two.bus, "fetch", late)
    with pytest.raises(Unavailable, match="another leader archives the tape"):
        await other._move(58)
    assert await other._move(58) == 1
    assert await two.seqs() == list(range(1, 62))


async def test_no_segment_has_a_gap_where_another_leader_archives_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads goes through them in order of their first records, and would not go back."""
    two = Two(tmp_path)
    first = await two.begun()
    stored = await two.bus.fetch(first.tape.stream, first.tape.subject, limit=50)
    other, fetch, calls = await two.taken_over(), two.bus.fetch, list[Any]()
    other.agrees = True

    async def late(*where: Any, **more: Any) -> list[Stored]:
        calls.append(more)
        if len(calls) == 2:
            first.archive.write(stored[:9])
            first.archive.write(stored[9:])
            await two.bus.purge(*where, below_seq=51)
        return await fetch(*where, **more)

    monkeypatch.setattr(two.bus, "fetch", late)
    with pytest.raises(Unavailable, match="another leader archives the tape"):
        await other._move(58)
    assert await other._move(58) == 1
    assert await two.seqs() == list(range(1, 62))


async def test_who_reads_the_stream_needs_nothing_of_the_archive(tmp_path: Path) -> None:
    bus, archive = MemoryBus(MemoryBroker(), "a"), TapeArchive(str(tmp_path), "r.1")
    await stream(bus)
    tape = Tape(bus, "r", 0, archive)
    for number in range(1, 8):
        await tape.append(term(number, "a"))
    archive.write((await bus.fetch(tape.stream, tape.subject))[:4])
    await bus.purge(tape.stream, tape.subject, below_seq=5)
    assert len(await tape.read(limit=4)) == 4 and archive._walks
    assert [seq for seq, _ in await tape.read(4)] == [5, 6, 7] and not archive._walks


async def test_who_reads_on_in_the_archive_asks_the_stream_for_its_beginning_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of the stream's records, for each batch of the archive's, was fetched and dropped."""
    bus, archive = MemoryBus(MemoryBroker(), "a"), TapeArchive(str(tmp_path), "r.1")
    await stream(bus)
    tape, asked = Tape(bus, "r", 0, archive), list[int | None]()
    for number in range(1, 13):
        await tape.append(term(number, "a"))
    stored = await bus.fetch(tape.stream, tape.subject)
    archive.write(stored[:5])
    archive.write(stored[5:9])
    await bus.purge(tape.stream, tape.subject, below_seq=8)  # what is in both is the stream's
    archive.write(
        [Stored(s.subject, b"of a history that was lost", {}, s.seq) for s in stored[7:9]]
    )
    fetch = bus.fetch

    async def counted(*where: Any, limit: int | None = None, **more: Any) -> list[Stored]:
        asked.append(limit)
        return await fetch(*where, limit=limit, **more)

    monkeypatch.setattr(bus, "fetch", counted)
    found: list[int] = []
    while batch := await tape.read(found[-1] if found else 0, limit=3):
        found += [seq for seq, _ in batch]
        asked.append(0)
    assert found == list(range(1, 13))
    assert asked == [3, 1, 0, 1, 0, 1, 3, 1, 0, 1, 3, 0, 3, 1]
