"""A leader's numbers: what needs the store waits until it is built, and keeps its order."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from syncer.contexts import context
from syncer.small_run import LAYOUT, TENSORS, drawn, first_record
from waiting import until

from diloco_shared import ambient
from diloco_shared.numerics import codec
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import (
    Capture,
    Chosen,
    Drop,
    Event,
    Install,
    InstallInit,
    InstallLoaded,
    MergeWaits,
    Publish,
    Published,
    Snapshot,
    SnapshotBrokenOff,
    SnapshotDone,
    SnapshotFailed,
    Stage,
    Staged,
    StageFailed,
    Unstage,
)
from diloco_syncer.history.history import NOT_STARTED, History
from diloco_syncer.machine import Machine
from diloco_syncer.merging import numbers_io as numbers
from diloco_syncer.merging.numbers_io import Numbers, Unwritten
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.merging.store import Fragment, FragmentStore
from diloco_syncer.rounds.norms import inspect
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 2, "sync_every_steps": 8},
        "budget": {"steps": 80},
    }
)
VALUES = drawn(np.random.default_rng(0))
NAMES = ("init.0", "init.1")


class LargeFragment(Fragment):
    """One whose end can be seen."""


class LargePayload(bytearray):
    """One whose end can be seen."""


class Loaded:
    """A checkpointer with a store that was read from a checkpoint."""

    def __init__(self, store: FragmentStore) -> None:
        self.store = store

    def install(self, serial: int) -> FragmentStore:
        return self.store


class Rig:
    """Numbers without a leader or a bus around them."""

    def __init__(self, folder: Path) -> None:
        self.history = History(SPEC)
        self.history.apply(first_record(SPEC, NAMES, VALUES), 1)
        self.payloads = Payloads(lambda: 1 << 20)
        for name, values in zip(NAMES, VALUES, strict=True):
            self.payloads.put(name, codec.encode("fp32", values))
        self.published: list[tuple[int, int, bytes]] = []
        self.events: list[Event] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.snapshots = SnapshotStore(folder)
        outbox: Any = self  # what it is used for is `publish`
        self.numbers = Numbers(
            context(SPEC, outbox, snapshots=self.snapshots),
            Machine(SPEC, self.history),
            self.payloads,
            outbox,
            outbox,
            None,
            self.spawn,
            self.events.append,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def publish(self, effect: Publish, payload: Any, *_: Any, **__: Any) -> None:
        self.published.append((effect.fragment, effect.version, bytes(payload)))

    def contribute(self, key: str) -> None:
        payload = codec.encode("fp32", VALUES[0] * np.float32(0.01))
        pieces = LAYOUT.fragments[0]
        norms_P = inspect(payload, "fp32", LAYOUT.sizes[0], pieces).norms_P
        self.payloads.put(key, payload, norms_P)

    async def done(self) -> None:
        while self.tasks:
            await asyncio.gather(*self.tasks)
            self.tasks = {task for task in self.tasks if not task.done()}

    def keyframe(self, p: int) -> Publish:
        return Publish(-1, p, 0, 1, 0, -1, (), {}, NOT_STARTED, 0)


async def test_nothing_overtakes_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, go, real = Rig(tmp_path), threading.Event(), numbers.build_store

    def slowly(*args: Any) -> Any:
        assert go.wait(60)
        return real(*args)

    monkeypatch.setattr(numbers, "build_store", slowly)
    key = "up.0"
    rig.contribute(key)
    chosen = Chosen("a", key, 1.0, 0, "fp32", LAYOUT.sizes[0])
    try:
        rig.numbers.perform(InstallInit(TENSORS, NAMES))
        for p in range(2):
            rig.numbers.perform(rig.keyframe(p))
        rig.numbers.perform(Snapshot(1, -1))
        # What comes after the effects of the record changes neither what they say nor find.
        rig.history.seq = 9
        rig.numbers.perform(Stage(0, 0, 0, (chosen,), False, 0.0))
        rig.numbers.perform(Drop(key))
        assert not rig.published and rig.numbers.store is None
        assert key in rig.payloads.held
    finally:
        go.set()
    await rig.done()
    assert rig.published == [(p, 0, codec.encode("fp32", VALUES[p])) for p in range(2)]
    assert rig.payloads.held == {} and rig.payloads.bytes == 0
    assert {type(event) for event in rig.events} == {Published, SnapshotDone, Staged}
    meta, arrays = rig.snapshots.load(1)
    assert meta["history"]["seq"] == 1, "as of the record, not as of when there was time"
    assert arrays["0.anchor"].tobytes() == VALUES[0].tobytes()


async def test_a_committed_round_is_published_as_it_was_staged(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    for n in range(2):
        key = f"up.{n}"
        rig.contribute(key)
        chosen = Chosen("a", key, 1.0, 0, "fp32", LAYOUT.sizes[0])
        rig.numbers.perform(Stage(0, n, 0, (chosen,), False, 0.0))
    await rig.done()
    # The second one is void: history began again before it was committed.
    rig.numbers.perform(Unstage(0, 1))
    payload = rig.numbers.staged[0, 0].payload
    rig.numbers.perform(Install(0, 0))
    rig.numbers.perform(Publish(0, 0, 0, 1, 1, 0, (), {}, NOT_STARTED, 0))
    await rig.done()
    assert rig.published == [(0, 1, bytes(payload))]
    assert rig.numbers.staged == rig.numbers.installed == {}
    assert rig.numbers.store is not None and rig.numbers.store.version(0) == 1


async def test_what_cannot_be_merged_is_told_and_ends_nobody(tmp_path: Path) -> None:
    """An error of a task is the end of a leader, and of the next one, which meets it as well."""
    rig = Rig(tmp_path)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    rig.contribute("up.0")
    rig.payloads.put("up.1", codec.encode("bf16", VALUES[0]), np.ones(1))
    size = LAYOUT.sizes[0]
    for n, chosen in enumerate(
        (
            Chosen("a", "up.0", 1.0, -1, "fp32", size),
            Chosen("b", "up.1", 1.0, 0, "fp32", size),
        )
    ):
        rig.numbers.perform(Stage(0, n, 0, (chosen,), False, 0.0))
    await rig.done()
    failed = [(e.round, e.learner) for e in rig.events if isinstance(e, StageFailed)]
    assert sorted(failed) == [(0, "a"), (1, "b")] and rig.numbers.staged == {}


async def test_an_error_that_names_nobody_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("who knows")

    monkeypatch.setattr(numbers, "stage_chosen", fails)
    rig = Rig(tmp_path)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    rig.contribute("up.0")
    chosen = Chosen("a", "up.0", 1.0, 0, "fp32", LAYOUT.sizes[0])
    rig.numbers.perform(Stage(0, 0, 0, (chosen,), False, 0.0))
    await rig.done()
    assert StageFailed(0, 0, "", "who knows") in rig.events


async def test_what_is_large_is_let_go_in_a_thread(tmp_path: Path) -> None:
    """The system takes back a gigabyte in some tenths of a second: not on the event loop."""
    rig = Rig(tmp_path)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    store = rig.numbers.store
    ended: list[threading.Thread] = []

    def noted(what: object) -> None:
        weakref.finalize(what, lambda: ended.append(threading.current_thread()))

    rig.contribute("up.0")
    chosen = Chosen("a", "up.0", 1.0, 0, "fp32", LAYOUT.sizes[0])
    rig.numbers.perform(Stage(0, 0, 0, (chosen,), False, 0.0))
    await rig.done()
    assert store is not None
    before = LargeFragment(*(getattr(store.fragments[0], f.name) for f in fields(Fragment)))
    noted(before)
    store.fragments[0] = before
    payload: Any = LargePayload(b"x")
    noted(payload)
    rig.payloads.put("up.9", payload)
    del before, payload
    rig.numbers.perform(Install(0, 0))
    rig.numbers.perform(Drop("up.9"))
    await rig.done()
    assert len(ended) == 2 and threading.main_thread() not in ended
    loaded: Any = Loaded(store)
    rig.numbers.checkpointer = loaded
    noted(other := FragmentStore(store.layout, store.algorithm, {}))
    rig.numbers.store = other
    del other
    rig.numbers.perform(InstallLoaded(1))
    await rig.done()
    assert len(ended) == 3 and threading.main_thread() not in ended
    assert rig.numbers.store is store


def _disk_that_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No snapshot is written before this is set."""
    go, real = threading.Event(), SnapshotStore.save

    def save(store: SnapshotStore, *args: Any) -> Any:
        assert go.wait(60)
        return real(store, *args)

    monkeypatch.setattr(SnapshotStore, "save", save)
    return go


async def test_a_slow_snapshot_takes_time_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what rounds replace before it is written, one fragment is in memory twice."""
    monkeypatch.setattr(numbers, "REPLACED_LOOK_S", 0.01)
    rig, go = Rig(tmp_path), _disk_that_waits(monkeypatch)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    rig.history.next_round = 1
    try:
        rig.numbers.perform(Snapshot(1, -1))
        arrays = rig.numbers.unwritten[Snapshot].arrays
        soonest_first = [name.partition(".")[0] for name in arrays]
        assert soonest_first == sorted(soonest_first, reverse=True), "round 1 is of fragment 1"
        await asyncio.wait_for(numbers.may_replace(rig.numbers.unwritten, 1), 5)
        await asyncio.wait_for(numbers.may_replace(rig.numbers.unwritten, 1), 5)
        waits = asyncio.create_task(numbers.may_replace(rig.numbers.unwritten, 0))
        await asyncio.sleep(0.1)
        assert not waits.done()
    finally:
        go.set()
    await asyncio.wait_for(waits, 5)
    await rig.done()
    assert not rig.numbers.unwritten[Snapshot].arrays


async def test_a_snapshot_whose_leader_ends_while_it_is_written_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes on with what it was given."""
    rig, go, begun = Rig(tmp_path), threading.Event(), threading.Event()
    real = SnapshotStore._file

    def slow(store: SnapshotStore, *args: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return real(store, *args)

    monkeypatch.setattr(SnapshotStore, "_file", slow)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    rig.numbers.perform(Snapshot(1, -1))
    assert await asyncio.to_thread(begun.wait, 60)
    (writing,) = (task for task in rig.tasks if not task.done())
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    go.set()
    await until(lambda: bool(rig.snapshots.covers()), "its snapshot")
    _, there = rig.snapshots.load(1)
    assert {name.partition(".")[0] for name in there} == {"0", "1"}


async def test_a_run_that_goes_back_waits_for_nothing_that_is_written_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is obsolete. The snapshot is broken off, so that the next may begin."""
    rig, go = Rig(tmp_path), threading.Event()
    real, begun = SnapshotStore._aside, threading.Event()

    def slow(store: SnapshotStore, *args: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return real(store, *args)

    monkeypatch.setattr(SnapshotStore, "_aside", slow)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    store = rig.numbers.store
    assert store is not None
    loaded: Any = Loaded(store)
    rig.numbers.checkpointer = loaded
    try:
        rig.numbers.perform(Snapshot(1, -1))
        assert await asyncio.to_thread(begun.wait, 60)
        await numbers.may_replace(rig.numbers.unwritten, 0)
        rig.numbers.perform(InstallLoaded(1))
        for fragment in (0, 1):
            await asyncio.wait_for(numbers.may_replace(rig.numbers.unwritten, fragment), 5)
    finally:
        go.set()
    await rig.done()
    assert rig.events == [SnapshotBrokenOff()] and rig.snapshots.covers() == []
    rig.numbers.perform(Snapshot(2, -1))
    await rig.done()
    assert rig.snapshots.covers() == [2]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_slow_bucket_of_checkpoints_takes_time_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What a checkpoint of the run writes is in memory for minutes, and rounds go on."""
    monkeypatch.setattr(numbers, "REPLACED_LOOK_S", 0.01)
    rig, go = Rig(tmp_path), asyncio.Event()

    async def capture(effect: Capture, history: Any, store: Any, arrays: dict[str, Any]) -> None:
        await go.wait()
        if not fails:
            arrays.clear()

    rig.numbers.checkpointer = SimpleNamespace(capture=capture)  # type: ignore[assignment]
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    rig.numbers.perform(Capture(1, 1, "asked for", 0.0))
    rig.numbers.perform(Snapshot(1, -1))
    await until(lambda: not rig.numbers.unwritten[Snapshot].arrays, "its snapshot")
    await asyncio.wait_for(numbers.may_replace(rig.numbers.unwritten, 1), 5)
    waits = asyncio.create_task(numbers.may_replace(rig.numbers.unwritten, 0))
    await asyncio.sleep(0.1)
    assert not waits.done()
    go.set()
    await asyncio.wait_for(waits, 5)
    await rig.done()
    assert not rig.numbers.unwritten[Capture].arrays


def test_what_is_still_being_written_is_awaited_however_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fragment of 8 GB takes minutes on a slow disk: four of them may be all that memory has."""
    clock = [0.0]
    monkeypatch.setattr(ambient, "monotonic", lambda: clock[0])
    small = Unwritten({f"{p}.master": np.zeros(4, np.float32) for p in range(3)})
    looks = (
        (29, False, True),
        (40, True, True),
        (69, False, True),
        (71, False, False),
        (500, True, True),
        (531, False, False),
    )
    for at, written, moves in looks:
        clock[0] = at
        if written:
            small.arrays.popitem()
        assert small.moves is moves, at
    # At 10 MB/s its 8 GB take 800 s.
    values = np.broadcast_to(np.float32(0), (10**9,))
    large = Unwritten({"0.master": values, "0.anchor": values, "1.master": values})
    clock[0] += 1599
    assert large.moves
    clock[0] += 2
    assert not large.moves


async def test_waits_for_a_slow_disk_are_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "REPLACED_LOOK_S", 0.01)
    monkeypatch.setattr(numbers, "WAITS_SAID_S", 0.0)
    rig, go = Rig(tmp_path), _disk_that_waits(monkeypatch)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    try:
        rig.numbers.perform(Snapshot(1, -1))
        await asyncio.wait_for(rig.numbers._may_replace(1), 5)
        assert not rig.events, "it waited for nothing"
        waits = asyncio.create_task(rig.numbers._may_replace(0))
        await until(lambda: rig.numbers.waited_s["snapshots"] > 0, "a look at the disk")
    finally:
        go.set()
    await asyncio.wait_for(waits, 5)
    told = [e for e in rig.events if isinstance(e, MergeWaits)]
    assert {e.place for e in told[:-1]} == {"the disk of snapshots"}
    assert (told[-1].fragment, told[-1].place) == (0, "")
    waited = rig.numbers.waited_s
    assert waited["snapshots"] == told[-1].seconds > 0 == waited["checkpoints"]
    await rig.done()


async def test_a_disk_of_snapshots_that_hangs_stops_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "REPLACED_S", 0.0)
    rig, go = Rig(tmp_path), _disk_that_waits(monkeypatch)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    try:
        rig.numbers.perform(Snapshot(1, -1))
        for fragment in (1, 0):
            await asyncio.wait_for(numbers.may_replace(rig.numbers.unwritten, fragment), 5)
        assert rig.numbers.unwritten[Snapshot].arrays, "nothing is written yet"
        assert rig.numbers.unwritten[Snapshot].replaced == {0, 1}
    finally:
        go.set()
    await rig.done()
    assert not rig.numbers.unwritten[Snapshot].arrays


async def test_a_snapshot_that_fails_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(store: SnapshotStore, *args: Any) -> Any:
        raise OSError("no space left on device")

    rig = Rig(tmp_path)
    monkeypatch.setattr(SnapshotStore, "save", full)
    rig.numbers.perform(InstallInit(TENSORS, NAMES))
    await rig.done()
    rig.numbers.perform(Snapshot(1, -1))
    for p in range(2):
        await asyncio.wait_for(numbers.may_replace(rig.numbers.unwritten, p), 5)
    await rig.done()
    assert not rig.numbers.unwritten[Snapshot].arrays
    assert [type(event) for event in rig.events] == [SnapshotFailed]
