"""A run that goes back to a checkpoint at a bad moment: what was begun before ends after it."""

import asyncio
from typing import Any

import pytest

from diloco_shared.protocol.messages import TapeRebirth, TapeRecord, TapeRestore, TapeRound
from diloco_simulator.inside.observer import Observer
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import World, WorldResult, played
from diloco_syncer.history.history import History
from diloco_syncer.leadership import user_requests
from diloco_syncer.leadership.leader_io import Leader
from diloco_syncer.leadership.rebirth import chains
from diloco_syncer.merging import published_io as published

pytestmark = pytest.mark.whole

CALM = Options.calm(
    learners=2,
    quorum=1,
    steps=60,
    safety_s=60.0,
    snapshot_every_rounds=2,
    checkpoint_every_steps=6,
    restores=1,
)
# What a restore leaves beside its checkpoint takes so long: a snapshot takes less.
PLACE_S, DISK_S = 10.0, 8.0
SEEDS = (5, 7, 9)
# A run begins again after 13 s without anybody that has its state.
FULL_S = 45.0
# There is a checkpoint by then.
BACK_AT_S = 20.0


def slowly(patch: pytest.MonkeyPatch) -> None:
    """The record of a restore waits for the place of checkpoints."""
    goes_back = Leader._goes_back

    async def waits(leader: Leader, serial: int) -> None:
        await asyncio.sleep(PLACE_S)
        await goes_back(leader, serial)

    patch.setattr(Leader, "_goes_back", waits)


@pytest.mark.parametrize("heeded", [True, False])
def test_a_snapshot_of_before_counts_nothing_after(
    monkeypatch: pytest.MonkeyPatch, *, heeded: bool
) -> None:
    slowly(monkeypatch)
    if not heeded:
        covering = user_requests.covering

        def recorded(history: Any, pending: Any, done: Any, wall: float) -> Any:
            return covering(history, (), done, wall)

        monkeypatch.setattr("diloco_syncer.machine.covering", recorded)
    found = [played(Case(seed, CALM.changed(disk_s=DISK_S))) for seed in SEEDS]
    assert sum(world.counts["restored"] for world in found)
    broken = [v for world in found for v in world.violations]
    assert bool(broken) is not heeded
    assert all("a snapshot is of round" in v for v in broken)


def any_history(history: History, p: int, manifests: Any, recorded: str = "") -> Any:
    """As if it had never gone back."""
    meta = history.meta() | {"restored": None}
    return chains(History.restore(history.spec, meta), p, manifests, recorded)


class Dies:
    """The leader, with its disk, as the record of a restore is taken; its standby has no room."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.records: list[TapeRecord] = []
        self.world: World | None = None
        recorded = Observer._recorded

        def plan(troubles: Troubles) -> None:
            self.world = troubles.world
            back = troubles.world.user.restore
            troubles.loop.call_later(BACK_AT_S, lambda: troubles._ask(back()))

        def record(observer: Observer, shard: int, message: Any) -> None:
            recorded(observer, shard, message)
            self.records.append(observer.records[shard][-1][1])
            if isinstance(self.records[-1], TapeRestore):
                assert self.world is not None
                outside = self.world.net.outside
                self.world.loop.call_later(0.0, self._strike, self.world, context=outside)

        patch.setattr(Troubles, "plan", plan)
        patch.setattr(Observer, "_recorded", record)

    def _strike(self, world: World) -> None:
        name = world.observer.reached.leaders[0]
        leader = next(machine for machine in world.syncers if machine.name == name)
        leader.wipe()
        world.lose(leader)
        for machine in world.syncers:
            world.disks.full_until[machine.host] = world.loop.now + FULL_S

    def of(self, kind: type[TapeRecord]) -> list[TapeRecord]:
        return [record for record in self.records if isinstance(record, kind)]


@pytest.mark.parametrize("heeded", [True, False])
def test_a_standby_without_room_waits_rather_than_take_what_the_run_went_back_from(
    monkeypatch: pytest.MonkeyPatch, *, heeded: bool
) -> None:
    if not heeded:
        monkeypatch.setattr(published, "chains", any_history)
    seen = Dies(monkeypatch)
    found: WorldResult = played(Case(1, CALM.changed(syncers=2, safety_s=90.0)))
    assert len(seen.of(TapeRestore)) == 1
    assert bool(seen.of(TapeRebirth)) is not heeded
    if heeded:
        assert found.violations == []
        after = seen.records[seen.records.index(seen.of(TapeRestore)[0]) :]
        assert any(isinstance(r, TapeRound) for r in after), "it goes on once there is room"
    else:
        assert any("since the newest restore does not have" in v for v in found.violations)


class Refused:
    """A restore, while no syncer has room for it; then a hub that loses its disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.records: list[TapeRecord] = []
        recorded = Observer._recorded

        def plan(troubles: Troubles) -> None:
            troubles.loop.call_later(BACK_AT_S, lambda: troubles._ask(self._play(troubles.world)))

        def record(observer: Observer, shard: int, message: Any) -> None:
            recorded(observer, shard, message)
            self.records.append(observer.records[shard][-1][1])

        patch.setattr(Troubles, "plan", plan)
        patch.setattr(Observer, "_recorded", record)

    async def _play(self, world: World) -> int:
        for machine in world.syncers:
            world.disks.full_until[machine.host] = world.loop.now + FULL_S
        status = await world.user.restore()
        await asyncio.sleep(FULL_S)
        world.backups._begin()
        return status


def test_a_restore_that_was_refused_stays_so_when_the_hub_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Refused(monkeypatch)
    options = CALM.changed(syncers=2, steps=120, safety_s=150.0)
    found = played(Case(1, options))
    assert found.violations == []
    assert found.counts["told: restore-failed"] and found.counts["hubs restored"]
    assert not any(isinstance(r, TapeRestore) for r in seen.records)
