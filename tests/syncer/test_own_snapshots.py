"""A standby's own snapshots: it follows while one is written, and leads without waiting for one."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from syncer.contexts import context
from syncer.recording import SPEC, Recording
from waiting import until

from diloco_shared.bus.port import StreamSpec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import AHEAD, TapeEpoch, TapeRestore, TapeSnapshot
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history import follow_io as follow
from diloco_syncer.history.follow_io import Follower, Replaced
from diloco_syncer.history.tape_io import Deposed, Tape
from diloco_syncer.leadership import candidate_io
from diloco_syncer.leadership.candidate_io import Candidate
from diloco_syncer.merging import numbers_io as numbers
from diloco_syncer.snapshots.finding_io import Finder
from diloco_syncer.snapshots.snapshots_io import BrokenOff, SnapshotStore


class Standby:
    """A follower, and the leader whose tape it executes."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.bus, self.recording = MemoryBus(MemoryBroker(), "s"), Recording()
        self.snapshots, self.leads = SnapshotStore(folder / "snapshots"), False
        finder = Finder(SPEC, 0, folder, self.snapshots, str(folder / "kept"))
        tape = Tape(self.bus, SPEC.name)
        self.follower = Follower(SPEC, self.bus, tape, finder, lambda: self.leads)
        self.told = 0  # records of the leader's tape that the bus has
        patch.setattr(follow, "payloads_of", self._payloads_of)
        self.recording.begin()

    async def _payloads_of(self, *_: object) -> dict[str, bytes]:
        return self.recording.payloads

    async def covered(self) -> None:
        """The leader has a snapshot of all that is there."""
        covers, round_ = self.recording.history.seq, self.recording.history.next_round - 1
        self.recording.append(TapeSnapshot(term=1, covers=covers, round=round_, path="x", at=3.0))
        await self.catches_up()

    async def rounds(self, count: int) -> None:
        for _ in range(count):
            self.recording.round()
        await self.catches_up()

    async def catches_up(self) -> None:
        for name, captured in subjects.run_streams(SPEC.name).items():
            await self.bus.ensure_stream(StreamSpec(name, (captured,), 1 << 30))
        for record in self.recording.tape[self.told :]:
            await self.bus.append(subjects.tape(SPEC.name, 0), encode(record))
        self.told = len(self.recording.tape)
        assert not await self.follower.catch_up()

    @property
    def executed(self) -> int:
        return self.follower.history.seq

    async def written(self) -> None:
        """What was being written is whole, or broken off."""
        if (task := self.follower.own.task) is not None:
            await until(task.done, "a snapshot's end")


@pytest.fixture
def standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standby:
    monkeypatch.setattr(numbers, "REPLACED_LOOK_S", 0.01)
    monkeypatch.setattr(numbers, "REPLACED_S", 1000.0)
    return Standby(tmp_path, monkeypatch)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """It writes no file before this is set."""
    go, real = threading.Event(), SnapshotStore._aside

    def slow(store: SnapshotStore, *args: Any) -> Any:
        assert go.wait(60)
        return real(store, *args)

    monkeypatch.setattr(SnapshotStore, "_aside", slow)
    yield go
    go.set()


async def test_a_standby_follows_while_its_snapshot_is_written(
    standby: Standby, disk: threading.Event
) -> None:
    """A snapshot of billions of parameters takes minutes, in which its leader may die."""
    await standby.covered()
    covers = standby.executed
    await standby.rounds(1)
    assert standby.executed == covers + 1 and not standby.snapshots.covers()
    assert standby.follower.own.covered == 0
    disk.set()
    await standby.written()
    assert standby.snapshots.covers() == [standby.follower.own.covered] == [covers]
    meta, _ = standby.snapshots.load(covers)
    assert meta["history"]["next_round"] == 0, "as of the record, not as of when it was written"
    assert not (await standby.follower.recovered()).uncovered


@pytest.mark.parametrize("ahead", [1, AHEAD])
async def test_whoever_goes_on_from_a_backup_of_the_hub_begins_with_a_snapshot(
    standby: Standby, ahead: int
) -> None:
    """UP was saved after the tape. It may lack what a snapshot covers that is not on the tape."""
    await standby.covered()
    await standby.written()
    assert not (await standby.follower.recovered()).uncovered
    begins = TapeEpoch(epoch=ahead, term=ahead, reason="the hub was restored", at=4.0)
    standby.recording.append(begins)
    await standby.catches_up()
    assert (await standby.follower.recovered()).uncovered == (ahead == AHEAD)
    await standby.covered()
    await standby.written()
    assert not (await standby.follower.recovered()).uncovered


async def test_what_is_replaced_before_it_is_written_takes_time_and_not_memory(
    standby: Standby, disk: threading.Event
) -> None:
    await standby.covered()
    covers = standby.executed
    (order,) = (of.arrays for of in standby.follower.own.unwritten.values())
    assert [name[0] for name in order] == sorted(name[0] for name in order), "round 0 is next"
    going = asyncio.create_task(standby.rounds(2))
    await until(lambda: standby.executed == covers + 1, "the first round")
    await asyncio.sleep(0.1)
    assert not going.done(), "both fragments would be there twice"
    disk.set()
    await asyncio.wait_for(going, 60)
    await standby.written()
    assert standby.executed == covers + 2 and standby.snapshots.covers() == [covers]


async def test_whoever_has_the_lease_waits_for_no_disk(
    standby: Standby, disk: threading.Event
) -> None:
    """It breaks its snapshot off, begins no other, and begins its term with one."""
    await standby.covered()
    going = asyncio.create_task(standby.rounds(2))
    await until(lambda: standby.executed == standby.told - 1, "the first round")
    standby.leads = True
    await asyncio.wait_for(going, 20)
    assert standby.executed == standby.told and standby.follower.own.broken.is_set()
    recovered = await standby.follower.recovered()
    assert recovered.uncovered
    disk.set()
    await standby.written()
    await standby.covered()
    assert standby.snapshots.covers() == [] and not any(standby.snapshots.folder.iterdir())
    standby.leads = False  # it was deposed before it had written any
    await standby.rounds(1)
    await standby.written()
    assert standby.snapshots.covers() == [standby.executed]


async def test_at_the_tapes_end_another_try_is_made_of_what_was_broken_off(
    standby: Standby, disk: threading.Event
) -> None:
    await standby.covered()
    standby.follower.own.break_off()
    disk.set()
    await standby.written()
    assert await standby.follower.catch_up()
    await standby.written()
    assert standby.snapshots.covers() == [standby.executed]


async def test_what_was_published_is_no_state_of_the_tape_before_it_leads(
    standby: Standby, disk: threading.Event
) -> None:
    """Whoever began again has other numbers than the record at which it stands."""
    await standby.covered()
    standby.follower.own.break_off()
    disk.set()
    await standby.written()
    reborn: Any = object()
    standby.follower.reborn = reborn
    for _ in range(2):
        assert await standby.follower.catch_up()
    await standby.written()
    assert standby.snapshots.covers() == []


async def test_a_disk_that_took_none_is_asked_again_with_the_leaders_next(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[int]()

    def full(store: SnapshotStore, covers: int, *_: object) -> None:
        tries.append(covers)
        raise OSError("no space left on device")

    monkeypatch.setattr(SnapshotStore, "save", full)
    await standby.covered()
    first = standby.executed
    await standby.written()
    await standby.rounds(1)
    assert tries == [first] and (await standby.follower.recovered()).uncovered
    await standby.covered()
    await standby.written()
    assert tries == [first, standby.executed]


async def test_what_else_ends_a_snapshot_ends_who_follows(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else looks at what the task ends with."""

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(SnapshotStore, "save", broken)
    await standby.covered()
    await standby.written()
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await standby.rounds(1)


async def test_one_is_written_at_a_time(standby: Standby, disk: threading.Event) -> None:
    await standby.covered()
    first, task = standby.executed, standby.follower.own.task
    await standby.rounds(1)
    await standby.covered()
    assert standby.follower.own.task is task
    disk.set()
    await standby.written()
    await standby.follower.catch_up()
    await standby.written()
    assert standby.snapshots.covers() == [first, standby.executed]


async def test_a_snapshot_of_before_a_restore_is_broken_off(
    standby: Standby, disk: threading.Event
) -> None:
    """All that it has is replaced at once, and would lie in memory twice."""
    await standby.covered()
    restore = TapeRestore.model_construct()
    await standby.follower.own.may_replace(restore)
    disk.set()
    await standby.written()
    assert standby.snapshots.covers() == [] and not standby.follower.own.unwritten


async def test_whoever_is_left_writes_no_more(
    standby: Standby, disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run was taken away, or it has to begin anew: what it holds shall go."""
    await standby.covered()
    keeper: Any = SimpleNamespace(leading=False)
    place = context(SPEC, standby.bus, folder=tmp_path, checkpoint_root=str(tmp_path))
    candidate = Candidate(place, keeper, lambda *_: None)

    async def cancelled(_: Follower) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(candidate, "_follow", cancelled)
    nothing: Any = None
    with pytest.raises(asyncio.CancelledError):
        await candidate._follow_on(standby.follower, nothing)
    disk.set()
    await standby.written()
    assert standby.snapshots.covers() == []


async def test_nobody_begins_anew_while_a_snapshot_is_put_in_place(
    standby: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a history that is lost with a hub that was put back: it would be the newest one here."""
    at_it, go, real = threading.Event(), threading.Event(), SnapshotStore._in_place

    def slow(store: SnapshotStore, *args: Any) -> Any:
        at_it.set()
        assert go.wait(60)
        return real(store, *args)

    monkeypatch.setattr(SnapshotStore, "_in_place", slow)
    await standby.covered()
    assert await asyncio.to_thread(at_it.wait, 60)
    keeper: Any = SimpleNamespace(leading=False)
    folder = {"folder": tmp_path, "snapshots": standby.snapshots}
    place = context(SPEC, standby.bus, checkpoint_root=str(tmp_path), **folder)
    candidate = Candidate(place, keeper, lambda *_: None)
    seen, came = list[list[int]](), [Replaced("it is another one"), None]

    async def load() -> None:
        seen.append(standby.snapshots.covers())

    async def follow(_: Follower) -> Any:
        if (why := came.pop(0)) is not None:
            asyncio.get_running_loop().call_later(0.1, go.set)
            raise why

    found: Any = SimpleNamespace(load=load, own=standby.follower.own, tape=None)
    monkeypatch.setattr(candidate, "_follower", lambda: found)
    monkeypatch.setattr(candidate, "_follow", follow)
    await candidate._stand_by()
    assert seen == [[], [standby.executed]], "it is there when the next one looks"


@pytest.mark.parametrize("put_back", [True, False])
async def test_who_lost_only_its_lease_breaks_its_snapshot_off_if_the_hub_may_be_another(
    put_back: bool, standby: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a backup the lease may be another's, and may be read before the tape."""
    keeper: Any = SimpleNamespace(leading=False, fit=lambda _: None)
    place = context(SPEC, standby.bus, folder=tmp_path, checkpoint_root=str(tmp_path))
    candidate = Candidate(place, keeper, lambda *_: None)
    broken = list[str]()

    class Leads:
        numbers = SimpleNamespace(store=None, break_off=lambda: broken.append("snapshot"))

        async def run(self) -> str:
            if put_back:
                standby.bus.broker.restart()
            raise Deposed("the lease is not ours any more")

    async def quiet() -> None:
        broken.append("waited for")

    async def tell(*_: object) -> None:
        pass

    monkeypatch.setattr(candidate_io, "Leader", lambda *_: Leads())
    monkeypatch.setattr(candidate, "_quiet", quiet)
    monkeypatch.setattr(candidate, "tell", tell)
    recovered: Any = SimpleNamespace(history=SimpleNamespace(seq=1))
    assert await candidate._lead((Tape(standby.bus, "r"), recovered)) == ""
    assert broken == (["snapshot", "waited for"] if put_back else [])


def test_what_is_broken_off_leaves_nothing_and_is_no_fault_of_the_disk(
    tmp_path: Path, disk: threading.Event
) -> None:
    recording, snapshots = Recording(), SnapshotStore(tmp_path / "snapshots")
    recording.begin()
    assert recording.store is not None
    disk.set()
    # Also during the last of its two fragments: whoever begins anew has looked at what is here.
    for looks in ([False, True], [False, False, True]):
        with pytest.raises(BrokenOff):
            snapshots.save(2, {}, recording.store.state_arrays(), partial(looks.pop, 0))
        assert not any(snapshots.folder.iterdir()) and not snapshots.room.failed and not looks
    snapshots.save(2, {}, recording.store.state_arrays())
    assert snapshots.covers() == [2]
