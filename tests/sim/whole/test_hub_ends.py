"""The hub's server ends in worlds: everybody's connection is lost, and the run goes on after it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.troubles import troubles
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import World, WorldResult, played

CALM = Options.calm(
    steps=24, safety_s=30.0, learners=3, quorum=2, syncers=2, snapshot_every_rounds=3
)
Strike = Callable[[World], object]


@dataclass(slots=True)
class Seen:
    """Connections of those who live, right before and right after the strike."""

    before: list[FarBus] = field(default_factory=list)
    kept: list[FarBus] = field(default_factory=list)


def connected(world: World) -> list[FarBus]:
    there = [bus for machine in world.machines if machine.lives for bus in machine.buses]
    return [bus for bus in there if bus.connected]


def struck(patch: pytest.MonkeyPatch, strike: Strike, options: Options) -> tuple[WorldResult, Seen]:
    """The strike comes once the run trains."""
    seen = Seen()

    def look(world: World) -> None:
        seen.before = connected(world)
        strike(world)
        seen.kept = connected(world)

    def plan(self: Troubles) -> None:
        self.loop.call_later(8.0, look, self.world)

    patch.setattr(Troubles, "plan", plan)
    return played(Case(1, options)), seen


def outage(world: World) -> None:
    world.troubles._outage()


def restart(world: World) -> None:
    world.troubles.restarts += 1
    world.troubles._restart()


def power_cut(world: World) -> None:
    world.troubles._cut_power()


def storm(world: World) -> None:
    world.troubles.storms._killed()


def frozen(world: World) -> None:
    """A learner stands still while the server ends, and is connected again once it goes on."""
    process = world.learners[0].process
    assert process is not None
    process.freeze()
    world.loop.call_later(6.0, world.troubles.goes_on, process)
    restart(world)


@pytest.mark.whole
@pytest.mark.parametrize("strike", [outage, restart, power_cut, storm, frozen])
def test_a_run_goes_on_after_it(strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles, "SERVER_ENDS", 1.0)
    found, seen = struck(monkeypatch, strike, CALM.changed(severs=True))
    assert found.violations == [] and found.rounds > 0
    assert len(seen.before) >= 10 and seen.kept == []
    assert found.counts["servers of the hub ended"] == 1
    assert all(bus.reconnects == 1 for bus in seen.before if not bus.vanished)


@pytest.mark.whole
def test_connections_last_over_an_outage_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles, "SERVER_ENDS", 0.0)
    found, seen = struck(monkeypatch, outage, CALM.changed(severs=True))
    assert found.violations == [] and found.counts["outages"] == 1
    assert seen.kept == seen.before != [] and not found.counts["servers of the hub ended"]


@pytest.mark.whole
def test_who_loses_records_with_its_power_loses_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = list[FarBus]()

    def strike(world: World) -> None:
        """As soon as there is something to lose."""
        world.troubles._lose_records()
        if world.found.counts["power cuts"]:
            kept.extend(connected(world))
        else:
            world.loop.call_later(0.5, strike, world)

    found, _ = struck(monkeypatch, strike, CALM.changed(severs=True))
    assert found.violations == [] and found.counts["power cuts"] == 1 and kept == []


@pytest.mark.whole
def test_a_full_disk_is_healed_by_a_server_that_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(troubles, "FULL_S", (60.0, 60.0))  # longer than the trouble
    options = CALM.changed(severs=True)
    found, seen = struck(monkeypatch, lambda world: world.troubles._fill_disk(), options)
    assert found.violations == [] and found.counts["servers of the hub ended"] == 1
    assert seen.before and all(bus.reconnects == 1 for bus in seen.before if not bus.vanished)


@pytest.mark.whole
def test_a_hub_that_is_put_back_has_everybody_connect_anew() -> None:
    options = Options.calm(steps=36, syncers=2, learners=2, hub_restores=1, severs=True)
    found = played(Case(3, options))
    assert found.violations == []
    ended = found.counts["servers of the hub ended"]
    assert ended == found.counts["hubs restored"] > 0
    assert found.counts["connections broken"] >= 8 * ended


def test_every_drawn_world_has_it_and_no_older_one() -> None:
    """What kept worlds were found with stays as it was."""
    assert all(Options.drawn(seed).severs for seed in range(50))
    assert not Options.calm().severs
