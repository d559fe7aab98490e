"""A place of checkpoints that hangs takes nothing from the merge: not one thread, in any term."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from syncer.contexts import alone, context
from waiting import PATIENCE_S, until

from diloco_shared.bus.port import Stored
from diloco_shared.checkpoints import place_threads_io as place_threads
from diloco_shared.checkpoints.tape_archive_io import TapeArchive
from diloco_shared.checkpoints.vault_io import Vault, VaultError
from diloco_shared.protocol import pace
from diloco_shared.protocol.records import Restore
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints import checkpointing_io as checkpointing
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.checkpoints.parts_io import written_part
from diloco_syncer.context import RunContext
from diloco_syncer.events import Capture, Loaded, NumberFound, Sealed
from diloco_syncer.history.archiving_io import TapeArchiver
from diloco_syncer.history.tape_io import Tape, Unread
from diloco_syncer.merging import numbers_io as numbers

SPEC = RunSpec.model_validate({"name": "r", "id": "ab", "budget": {"steps": 80}})


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Set once the place answers."""
    monkeypatch.setattr(place_threads, "LEFT_S", 0.0)
    event = Event()
    yield event
    event.set()


@pytest.fixture
def place(tmp_path: Path) -> RunContext:
    bus = MemoryBus(MemoryBroker(), "s")
    return context(SPEC, bus, folder=tmp_path, checkpoint_root=str(tmp_path / "kept"))


async def left_behind(work: Any, begun: Event) -> None:
    """A term ends while this is under way."""
    task = asyncio.create_task(work)
    await until(begun.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_terms_whose_calls_hang_leave_every_thread_to_the_merge(
    place: RunContext, answers: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told = Event(), list[Any]()

    def hangs(*_: Any) -> int:
        begun.set()
        answers.wait()
        return 0

    monkeypatch.setattr(checkpointing, "newest_there", hangs)
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        await left_behind(Checkpointer(place, told.append, alone).look(), begun)
        for _ in range(2):  # terms
            maker = Checkpointer(place, told.append, alone)
            await maker.look()
            history = {"checkpoint": 1, "sizes_P": [1]}
            await maker.capture(Capture(1, 1, "asked for", 1.0), history, {}, {"0.x": np.ones(1)})
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(lambda: "merged") == "merged"
    (first, failed, *_) = told
    assert first == NumberFound(0) and len(told) == 4
    assert isinstance(failed, Sealed) and "an earlier call is not over" in failed.fault


async def test_a_part_that_is_given_up_is_never_there(
    place: RunContext, answers: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays are let go, and its thread writes on once the place answers: a part of what is
    left would pass for a whole one."""
    monkeypatch.setattr(checkpointing, "stored_within_s", lambda _: 0.05)
    begun, plainly, told = Event(), Vault.write_pieces, list[Any]()

    def write_pieces(self: Vault, *what: Any) -> None:
        begun.set()
        answers.wait()
        plainly(self, *what)

    monkeypatch.setattr(Vault, "write_pieces", write_pieces)
    maker = Checkpointer(place, told.append, alone)
    arrays = {f"{p}.{kind}": np.ones(2) for p in range(3) for kind in ("anchor", "momentum")}
    history = {"checkpoint": 1, "sizes_P": [1]}
    capture = maker.capture(Capture(1, 1, "asked for", 1.0), history, {}, arrays)
    await numbers._written(lambda: capture, arrays)
    (failed,) = told
    assert isinstance(failed, Sealed) and "did not answer within" in failed.fault
    assert begun.is_set() and not arrays
    answers.set()
    await until(lambda: not any(place.place_threads._calls.values()))
    assert written_part(SPEC, 0, place.checkpoint_root, 1) is None


async def test_a_restore_whose_place_hangs_fails_after_its_time(
    place: RunContext, answers: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds wait for it: without a limit the run would stand still for good."""
    for module in (place_threads, pace):
        monkeypatch.setattr(module, "ANSWER_S", 0.05)
    monkeypatch.setattr(checkpointing, "bytes_of", lambda *_: 0)
    monkeypatch.setattr(checkpointing, "load", lambda *_, **__: answers.wait())
    told = list[Any]()
    await Checkpointer(place, told.append, alone).load(Restore(source="r.ab/000001", serial=1))
    (failed,) = told
    assert isinstance(failed, Loaded) and "did not answer within" in failed.fault


async def test_an_archive_that_hangs_is_told_and_looked_through_once_it_answers(
    place: RunContext, answers: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left behind may be written all the same: the archive would have it twice."""
    archive, begun = TapeArchive(place.checkpoint_root, SPEC.folder), Event()
    tape = Tape(place.control, "r", 0, archive, threads=place.place_threads)
    archiver = TapeArchiver(place, tape, archive)
    archiver.agrees = True
    record = Stored(tape.subject, b"x", {}, 5)

    async def fetched(*_: Any, **__: Any) -> list[Stored]:
        return [record]

    def hangs(*_: Any) -> None:
        begun.set()
        answers.wait()

    monkeypatch.setattr(place.control, "fetch", fetched)
    monkeypatch.setattr(archive, "write", hangs)
    await left_behind(archiver._move(5), begun)
    assert not archiver.agrees
    with pytest.raises(VaultError, match="an earlier call is not over"):
        await archiver._move(5)
    with pytest.raises(Unread, match="an earlier call is not over"):
        await tape.read()
