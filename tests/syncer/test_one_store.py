"""A syncer holds the run's numbers once: what is replaced or not taken is let go of."""

import asyncio
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from syncer.contexts import alone, context
from syncer.small_run import LAYOUT, drawn, first_record

from diloco_shared.protocol.messages import Restored
from diloco_shared.protocol.records import Restore, ShardLease
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints import checkpointing_io as checkpointing
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.events import Event, InstallLoaded, Loaded
from diloco_syncer.history.follow_io import Damaged, Follower, Purged, Recovered
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import RestoredState
from diloco_syncer.history.state_search_io import StateSearch
from diloco_syncer.history.tape_io import Deposed, Tape, TapeReplaced
from diloco_syncer.leadership.candidate_io import Candidate
from diloco_syncer.leadership.leader_io import Leader
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.snapshots.finding_io import FoundState

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 2, "sync_every_steps": 8},
        "budget": {"steps": 80},
    }
)
VALUES = drawn(np.random.default_rng(0))


def store() -> FragmentStore:
    return FragmentStore.init(LAYOUT, SPEC.algorithm, VALUES)


def history() -> History:
    found = History(SPEC)
    found.apply(first_record(SPEC, ("init.0", "init.1"), VALUES), 1)
    return found


class Nowhere:
    """A follower's finder that knows of nothing."""

    snapshots: Any = None

    def newer(self, after: int, *, before: float = 0) -> FoundState | None:
        return None


class Finding(StateSearch):
    """It finds at once what `newer` gives."""

    newer: Follower

    async def _newer(self, after: int, *, checkpoints: bool = False) -> Follower | None:
        return self.newer


class Keeper:
    """A lease that is of no matter here."""

    lease = SimpleNamespace(me="s1")


def follower() -> Follower:
    bus, nowhere = MemoryBus(MemoryBroker(), "s"), Nowhere()
    found = Follower(SPEC, bus, Tape(bus, "r"), nowhere)  # type: ignore[arg-type]
    found.history, found.store = history(), store()
    return found


@pytest.mark.parametrize("kind", [Purged, Damaged])
async def test_a_follower_that_is_left_behind_keeps_no_store(kind: type[Purged]) -> None:
    keeper: Any = Keeper()
    anything: Any = None
    stuck = Finding(context(SPEC, anything), keeper, follower, lambda *_: None, anything)
    stuck.newer, left = follower(), follower()
    gone = weakref.ref(left.store)
    assert await stuck.way_on(left, kind("gone")) is stuck.newer
    assert gone() is None and stuck.newer.store is not None
    assert left.own.broken.is_set() and not stuck.newer.own.broken.is_set()


async def test_it_keeps_none_either_while_another_is_loaded() -> None:
    left = follower()

    class Looking(Finding):
        async def _newer(self, after: int, *, checkpoints: bool = False) -> Follower | None:
            assert left.store is None
            return await super()._newer(after, checkpoints=checkpoints)

    keeper: Any = Keeper()
    anything: Any = None
    stuck = Looking(context(SPEC, anything), keeper, follower, lambda *_: None, anything)
    stuck.newer = follower()
    await stuck.way_on(left, Purged("gone"))


async def test_a_leader_that_goes_back_lets_go_of_what_it_began_with(tmp_path: Path) -> None:
    bus, keeper = MemoryBus(MemoryBroker(), "s"), Keeper()
    began: Any = Recovered(history(), store(), (0, 0), [])
    before = weakref.ref(began.store)
    lease: Any = keeper
    leader = Leader(
        context(SPEC, bus, "s1", folder=tmp_path, checkpoint_root=str(tmp_path)),
        Tape(bus, "r"),
        lease,
        began,
        lambda seq: None,
    )
    assert leader.numbers.store is before()
    state: Any = RestoredState(None, "", {}, store())  # type: ignore[arg-type]
    leader.checkpointer.loaded[1] = state
    held: list[object] = []
    leader.numbers._let_go = held.extend  # type: ignore[method-assign]
    leader.numbers.perform(InstallLoaded(1))
    assert leader.numbers.store is state.store
    held.clear()
    gc.collect()
    assert before() is None


async def test_leases_are_set_back_once_more_when_its_places_are_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that looked for data before took the further one of lease and place."""
    bus, lease = MemoryBus(MemoryBroker(), "s"), Keeper()
    anything: Any = lease
    leader = Leader(
        context(SPEC, bus, "s1", folder=tmp_path, checkpoint_root=str(tmp_path)),
        Tape(bus, "r"),
        anything,
        Recovered(history(), store(), (0, 0), []),
        lambda seq: None,
    )
    done: list[Any] = []

    async def write() -> None:
        done.append("places")

    async def lease_from(leases: Any, *, beyond: bool) -> None:
        done.append((leases, beyond))

    monkeypatch.setattr(leader.merged_positions, "write", write)
    monkeypatch.setattr(leader.checkpointer, "lease_from", lease_from)
    kept = (ShardLease(shard=1, holder="", incarnation=-1, sequences=4, passes=0),)
    leader.checkpointer.loaded[1] = RestoredState(None, "", {}, store(), kept)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as leader.tasks:
        leader._perform(InstallLoaded(1))
    assert done == ["places", (kept, True)]


@pytest.mark.parametrize("merged", [False, True])
async def test_a_successor_sets_them_back_too_where_nothing_was_merged_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, merged: bool
) -> None:
    """Who led before may have ended in between."""
    bus, anything = MemoryBus(MemoryBroker(), "s"), cast(Any, Keeper())
    known = history()
    known.restored = Restored(epoch=1, serial=1, source="r.ab/000001")
    if merged:
        known.last_merged[0]["a"] = (0, 1, -1)
    leader = Leader(
        context(SPEC, bus, "s1", folder=tmp_path, checkpoint_root=str(tmp_path)),
        Tape(bus, "r"),
        anything,
        Recovered(known, store(), (0, 0), []),
        lambda seq: None,
    )
    assert leader._restored_lately is not merged
    kept = (ShardLease(shard=1, holder="", incarnation=-1, sequences=4, passes=0),)
    done: list[Any] = []

    async def leases_of(source: str) -> Any:
        if source != "r.ab/000001":
            raise ValueError("there is no such checkpoint")
        return kept

    async def gone_back(leases: Any) -> None:
        done.append(leases)

    monkeypatch.setattr(leader.checkpointer, "leases_of", leases_of)
    monkeypatch.setattr(leader, "_gone_back", gone_back)
    await leader._set_back_again()
    known.restored = Restored(epoch=1, serial=1, source="r.ab/000002")  # removed since
    await leader._set_back_again()
    assert done == [kept]


async def test_a_leader_that_is_deposed_keeps_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever frames the exception that ended it still holds."""
    bus, ended = MemoryBus(MemoryBroker(), "s"), list[Leader]()
    keeper: Any = SimpleNamespace(lease=SimpleNamespace(me="s1"), fit=lambda why: None)

    async def run(self: Leader) -> str:
        ended.append(self)
        raise BaseExceptionGroup("", [Deposed("another leads")])

    monkeypatch.setattr(Leader, "run", run)
    standby = Candidate(
        context(SPEC, bus, "s1", folder=tmp_path, checkpoint_root=str(tmp_path)),
        keeper,
        lambda *_: None,
    )
    gone = weakref.ref(began := store())
    place = Tape(bus, "r"), Recovered(history(), began, (0, 0), [])
    del began
    assert await standby._lead(place) == ""
    assert len(ended) == 1 and gone() is None


@pytest.mark.parametrize("lost", [False, True])
async def test_a_leader_whose_hub_was_put_back_writes_no_more_of_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Whoever is only deposed has a snapshot of the run, and writes it to its end."""
    bus, ended = MemoryBus(MemoryBroker(), "s"), list[Leader]()
    keeper: Any = SimpleNamespace(lease=SimpleNamespace(me="s1"), fit=lambda why: None)

    async def run(self: Leader) -> str:
        ended.append(self)
        why = "record 3 is gone"
        raise BaseExceptionGroup("", [TapeReplaced(why) if lost else Deposed(why)])

    monkeypatch.setattr(Leader, "run", run)
    place = context(SPEC, bus, "s1", folder=tmp_path, checkpoint_root=str(tmp_path))
    standby = Candidate(place, keeper, lambda *_: None)
    assert await standby._lead((Tape(bus, "r"), Recovered(history(), store(), (0, 0), []))) == ""
    assert ended[0].numbers.broken.is_set() is lost


async def test_a_leader_that_is_told_to_end_while_it_is_deposed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of tasks that ends for a fault hides a cancellation that comes meanwhile."""
    bus, told = MemoryBus(MemoryBroker(), "s"), list[str]()
    keeper: Any = SimpleNamespace(lease=SimpleNamespace(me="s1"), fit=told.append)
    ends, may_end = asyncio.Event(), asyncio.Event()

    async def last_words() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.set()
            await may_end.wait()

    async def run(self: Leader) -> str:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(last_words())
            await asyncio.sleep(0)
            raise Deposed("another leads")

    monkeypatch.setattr(Leader, "run", run)
    standby = Candidate(
        context(SPEC, bus, "s1", folder=tmp_path, checkpoint_root=str(tmp_path)),
        keeper,
        lambda *_: None,
    )
    place = Tape(bus, "r"), Recovered(history(), store(), (0, 0), [])
    leading = asyncio.create_task(standby._lead(place))
    await ends.wait()
    leading.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await leading
    assert told == [], "it does not stand by"


async def test_what_was_loaded_in_vain_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    bus = MemoryBus(MemoryBroker(), "s")
    checkpointer = Checkpointer(
        context(SPEC, bus, folder=tmp_path, checkpoint_root=str(tmp_path)), events.append, alone
    )
    wish = Restore(serial=3, source="r/000001")

    class Manifest:
        run = "r"

    def loaded(*_: Any, **__: Any) -> RestoredState:
        return RestoredState(Manifest(), "d", {}, store())  # type: ignore[arg-type]

    monkeypatch.setattr(checkpointing, "bytes_of", lambda *_: 0)
    monkeypatch.setattr(checkpointing, "load", loaded)
    await checkpointer.load(wish)
    (event,) = events
    assert isinstance(event, Loaded) and event.restore == wish
    gone = weakref.ref(checkpointer.loaded[3].store)
    checkpointer.unload(3)
    checkpointer.unload(3)  # nothing is there any more
    async with asyncio.timeout(60):
        while gone() is not None:  # noqa: ASYNC110 - the thread that loaded it has it for a moment
            await asyncio.sleep(0)
