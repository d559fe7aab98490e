"""Standbys and fresh machines of whole worlds: who leads next, how soon, and from what state."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_coordinator.runs.registry_io import Registry
from diloco_shared.protocol.messages import TapeRebirth, TapeRecord, TapeRound, TapeTerm
from diloco_simulator.inside.observer import Observer
from diloco_simulator.troubles import backups
from diloco_simulator.troubles.backups import Backups
from diloco_simulator.troubles.disks import Disks
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.virtual_loop import current
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.constants import ROOM
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.processes import CoordinatorApp, Host
from diloco_simulator.worlds.world import World, WorldResult, played
from diloco_syncer.history.follow_io import Follower, Purged
from diloco_syncer.history.state_search_io import Peers, StateSearch
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.snapshots.finding_io import Finder
from diloco_syncer.snapshots.snapshots_io import SnapshotStore
from diloco_syncer.status.announce import Announcer
from diloco_syncer.streams.purging_io import UpPurger

# When trouble strikes, and how long after the lease the next leader may take: two looks at the
# lease, one at the tape, a few messages of 0.1 s each; then some steps of a second to a round.
STRIKE_S, TAKEOVER_S, ROUND_S = 20.0, 3.5, 8.0
LEASE_S = 3.0
CALM = Options.calm(learners=2, quorum=1, steps=60, snapshot_every_rounds=2)


class Seen:
    """What the tapes took, and when the trouble came."""

    def __init__(self, patch: pytest.MonkeyPatch, strike: Callable[[World], object]) -> None:
        self.records: list[tuple[float, TapeRecord]] = []
        self.struck_at = 0.0
        recorded = Observer._recorded

        def plan(troubles: Troubles) -> None:
            troubles.loop.call_later(STRIKE_S, self._strike, troubles.world, strike)

        def record(observer: Observer, shard: int, message: object) -> None:
            recorded(observer, shard, message)  # type: ignore[arg-type]
            self.records.append((observer.scene.now, observer.records[shard][-1][1]))

        patch.setattr(Troubles, "plan", plan)
        patch.setattr(Observer, "_recorded", record)

    def _strike(self, world: World, strike: Callable[[World], object]) -> None:
        self.struck_at = world.loop.now
        strike(world)

    def of(self, kind: type[TapeRecord]) -> list[tuple[float, TapeRecord]]:
        return [(at, record) for at, record in self.records if isinstance(record, kind)]


def leader(world: World) -> Host:
    name = world.observer.reached.leaders[0]
    return next(machine for machine in world.syncers if machine.name == name)


def cut(world: World, machine: Host, seconds: float) -> None:
    link = world.net.link(machine.host)
    link.out = link.into = False

    def mend() -> None:
        link.out = link.into = True

    world.loop.call_later(seconds, mend)


def stands_still(world: World) -> None:
    process = leader(world).process
    assert process is not None
    process.freeze()
    world.loop.call_later(12.0, process.thaw)


TROUBLES: dict[str, Callable[[World], object]] = {
    "dies": lambda world: world.crash(leader(world), 60.0),
    "stands still": stands_still,
    "is cut off": lambda world: cut(world, leader(world), 12.0),
}


def snapshots_take(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each of them so long; whatever else is written, no longer than otherwise."""
    save, perform, saved = SnapshotStore.save, Disks._perform, list[int]()

    def noted(store: SnapshotStore, covers: int, *rest: Any) -> Path:
        saved.append(covers)
        return save(store, covers, *rest)

    def performed(disks: Disks, work: Callable[[], Any]) -> tuple[Any, float]:
        saved.clear()
        result, slow_s = perform(disks, work)
        return result, slow_s + seconds * len(saved)

    patch.setattr(SnapshotStore, "save", noted)
    patch.setattr(Disks, "_perform", performed)


@pytest.mark.parametrize("snapshot_s", [0.0, 20.0])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_standby_leads_within_a_lease_and_rounds_go_on(
    trouble: str, snapshot_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it writes a snapshot: with a large model that takes minutes, and in a world less
    than a leader's lease, unless it is said."""
    snapshots_take(monkeypatch, snapshot_s)
    seen = Seen(monkeypatch, TROUBLES[trouble])
    found = played(Case(1, CALM.changed(syncers=2)))
    assert found.violations == []
    (_, first), (at, second) = seen.of(TapeTerm)
    assert isinstance(first, TapeTerm) and isinstance(second, TapeTerm)
    assert first.leader != second.leader
    assert seen.struck_at < at < seen.struck_at + LEASE_S + TAKEOVER_S
    round_at = next(t for t, record in seen.records if t > at and isinstance(record, TapeRound))
    assert round_at < at + ROUND_S


def dies_with_a_learner(world: World) -> None:
    world.lose(world.learners[0])
    world.crash(leader(world), 60.0)


@pytest.mark.parametrize("told", [True, False])
def test_a_learner_that_dies_with_its_leader_is_told_as_lost(
    monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    """The leader that follows has never known it alive. Worlds see where nobody is told."""
    if not told:
        monkeypatch.setattr(Announcer, "_never_met", lambda self, now: [])
    Seen(monkeypatch, dies_with_a_learner)
    found = played(Case(1, CALM.changed(syncers=2)))
    broken = [v for v in found.violations if not v.startswith("I10 at ")]
    assert not broken and bool(found.violations) is not told
    assert all("tells nobody that" in v for v in found.violations)
    assert bool(found.counts["told: learner-lost"]) is told


def test_a_standby_that_dies_or_is_cut_off_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strike(world: World) -> None:
        (standby,) = (machine for machine in world.syncers if machine is not leader(world))
        world.crash(standby, 1.0)
        world.loop.call_later(6.0, cut, world, standby, 8.0)

    seen = Seen(monkeypatch, strike)
    assert played(Case(1, CALM.changed(syncers=2))).violations == []
    assert len(seen.of(TapeTerm)) == 1, "nobody took over"


# Just before a leader's second snapshot, which lets UP go of an interval.
BEFORE_A_SNAPSHOT_S = 50.0


def test_a_standby_that_catches_up_finds_what_it_needs_where_up_has_just_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UP is over half full as soon as a snapshot is written: that is no reason not to wait.

    Streams of a world have 64 MiB, which it never fills, unless it has the constants of `ROOM`.
    """
    stuck, waited = list[str](), set[bool]()
    way_on, free_to_go = StateSearch.way_on, UpPurger._free_to_go

    async def noted(search: StateSearch, follower: Follower, fault: Purged) -> Follower:
        stuck.append(str(fault))
        return await way_on(search, follower, fault)

    async def looked(purger: UpPurger) -> bool:
        free = await free_to_go(purger)
        waited.add(purger.waits)
        return free

    def strike(world: World) -> None:
        (standby,) = (machine for machine in world.syncers if machine is not leader(world))
        world.crash(standby, 1.0)

    monkeypatch.setattr(StateSearch, "way_on", noted)
    monkeypatch.setattr(UpPurger, "_free_to_go", looked)
    monkeypatch.setitem(globals(), "STRIKE_S", BEFORE_A_SNAPSHOT_S)
    Seen(monkeypatch, strike)
    options = CALM.changed(syncers=2, steps=80, snapshot_every_rounds=20)
    assert played(Case(1, options, {d.path: d.others[0] for d in ROOM})).violations == []
    assert waited == {True, False} and stuck == []


def disks(world: World, *, renamed: bool, apart_s: float = 0.0) -> None:
    """Of all syncers."""
    for n, machine in enumerate(list(world.syncers)):
        world.loop.call_later(n * apart_s, world.troubles._replace, machine, renamed)


def rebirths(
    patch: pytest.MonkeyPatch, strike: Callable[[World], object], **changes: int
) -> tuple[WorldResult, int]:
    seen = Seen(patch, strike)
    found = played(Case(3, CALM.changed(**changes)))
    assert found.violations == []
    return found, len(seen.of(TapeRebirth))


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("syncers", [1, 2])
def test_with_all_disks_at_once_the_run_begins_again_once(
    syncers: int, monkeypatch: pytest.MonkeyPatch, *, renamed: bool
) -> None:
    found, begun = rebirths(
        monkeypatch, lambda world: disks(world, renamed=renamed), syncers=syncers
    )
    assert begun == 1
    assert found.counts["begun again from what is published"] == 1


def test_of_two_shards_each_begins_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"syncers": 2, "shards": 2, "fragments": 4}
    _, begun = rebirths(monkeypatch, lambda world: disks(world, renamed=True), **changes)
    assert begun == 2


@pytest.mark.parametrize("renamed", [False, True])
def test_with_one_disk_after_another_nothing_changes_but_who_leads(
    monkeypatch: pytest.MonkeyPatch, *, renamed: bool
) -> None:
    _, begun = rebirths(
        monkeypatch, lambda world: disks(world, renamed=renamed, apart_s=15.0), syncers=2
    )
    assert begun == 0


def registry(world: World) -> Registry:
    app = world.coordinator.app
    assert isinstance(app, CoordinatorApp)
    return app.coordinator.registry


def test_a_leader_that_drains_hands_its_shard_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only syncer that can take over is the other shard's standby, which has nothing yet."""
    drained: list[str] = []

    def strike(world: World) -> None:
        name = world.observer.reached.leaders[1]
        given = registry(world).assignments
        for machine in world.syncers:
            if given[machine.name].shard == 1 and machine.name != name:
                world.crash(machine, 1000.0)
        drained.append(name)
        world.loop.call_later(40.0, drain, world, name)

    def drain(world: World, name: str) -> None:
        world.visitors.begin(asked(world, name))

    async def asked(world: World, name: str) -> None:
        await world.visitors.ask("POST", f"/members/{name}/drain")

    monkeypatch.setattr(Finder, "_others", lambda self: [])  # each is on a machine of its own
    seen = Seen(monkeypatch, strike)
    case = Case(
        1, CALM.changed(learners=2, syncers=2, shards=2, fragments=4, steps=120, safety_s=120.0)
    )
    assert played(case).violations == []
    assert seen.of(TapeRebirth) == []
    *before, last = (record for _, record in seen.of(TapeTerm) if isinstance(record, TapeTerm))
    assert drained[0] in {record.leader for record in before}
    assert last.term == 2 and last.leader != drained[0]


def needless(patch: pytest.MonkeyPatch, strike: Callable[[World], object], **changes: int) -> str:
    """What is said of a beginning again for which there was no reason."""
    seen = Seen(patch, strike)
    found = played(Case(1, CALM.changed(**changes)))
    # A hub that is put back has none of what its syncers had, where they overlook their own.
    assert len(seen.of(TapeRebirth)) == 1 + changes.get("hub_restores", 0)
    assert all(said.startswith("I6 at ") for said in found.violations), found.violations
    return " ".join(found.violations)


@pytest.mark.parametrize("put_back", [False, True])
def test_a_beginning_again_beside_a_sound_snapshot_is_seen(
    put_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A syncer that is started again overlooks its own. The hub may have been put back before."""
    monkeypatch.setattr(backups, "LOST_S", (1.0, 1.0))
    monkeypatch.setattr(backups, "TWICE", 0.0)
    if put_back:
        soon = lambda self: self.world.loop.call_later(2.0, self._begin)  # noqa: E731
        monkeypatch.setattr(Backups, "plan", soon)
    monkeypatch.setattr(Finder, "own", lambda self: (None, []))
    monkeypatch.setattr(Finder, "newer", lambda self, after, before=0.0: None)
    counts = Counter[str]()

    def strike(world: World) -> None:
        if put_back and not world.found.counts["hubs restored"]:
            world.loop.call_later(160.0, strike, world)  # it has snapshots of what followed
            return
        counts.update(world.found.counts)
        world.crash(leader(world), 1.0)

    more = {"hub_restores": 1, "steps": 480, "safety_s": 480} if put_back else {}
    said = needless(monkeypatch, strike, **more)
    assert "a sound snapshot of record " in said
    assert counts["hubs restored"] == put_back


def test_a_beginning_again_beside_who_stands_by_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not want to lead, and nobody asks it."""
    kept: list[str] = []
    fit = LeaseKeeper.fit

    def strike(world: World) -> None:
        (standby,) = (machine for machine in world.syncers if machine is not leader(world))
        kept.append(standby.name)
        world.troubles._replace(leader(world), False)

    def rests(keeper: LeaseKeeper, why_not: str) -> None:
        process = current()
        assert process is not None
        fit(keeper, why_not or "it rests" * (process.name.partition("/")[0] in kept))

    async def nobody(search: StateSearch) -> Peers:
        return Peers((), (), (), ())

    async def nothing(*_: object, **__: object) -> str:
        return "nobody is asked"

    async def no_newer(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(LeaseKeeper, "fit", rests)
    monkeypatch.setattr(StateSearch, "_peers", nobody)
    monkeypatch.setattr(StateSearch, "_newer", no_newer)
    monkeypatch.setattr(StateSearch, "_ask_for_snapshot", nothing)
    said = needless(monkeypatch, strike, syncers=2)
    assert f"{kept[0]} stands by with all of it" in said
