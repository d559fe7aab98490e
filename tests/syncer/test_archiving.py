"""What leaves a tape's stream for its archive: in which pieces, and what that takes of a memory."""

from pathlib import Path
from typing import Any

import pytest
from syncer.contexts import context
from syncer.test_tape import stream, term

from diloco_shared.bus.port import Stored
from diloco_shared.checkpoints import tape_archive_io
from diloco_shared.checkpoints.tape_archive_io import FRAME_BYTES, TapeArchive
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.bus import MemoryBroker, MemoryBus
from diloco_syncer.history import archiving_io as archiving
from diloco_syncer.history.archiving_io import TapeArchiver
from diloco_syncer.history.tape_io import Tape


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
