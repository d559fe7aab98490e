"""Rarer troubles of whole worlds: each strikes, and the run ends whatever comes together."""

from typing import Any

import pytest

from diloco_shared.budget import assumed, streams
from diloco_shared.protocol import subjects
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.people import requests, sequel
from diloco_simulator.troubles import hardships, troubles
from diloco_simulator.worlds import computing, world
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.crash_points import small
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import World
from diloco_syncer.rounds.gate import Refusals

SHORT = Options.calm(steps=24, safety_s=30.0, learners=3, quorum=2, snapshot_every_rounds=3)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((hardships, "OFTEN"), (hardships, "RARE"), (requests, "OFTEN")):
        monkeypatch.setattr(module, name, 1.0)
    monkeypatch.setattr(computing, "SCARCE", 1.0)


@pytest.mark.usefixtures("always")
def test_all_of_them_strike_and_the_run_ends() -> None:
    found = world.one(3, SHORT.changed(checkpoints=1, syncers=2))
    assert found.violations == [] and found.rounds > 0
    for what in (
        "streams narrowed",
        "the store of checkpoints away",
        "learners without a device",
        "noise to everybody",
        "two coordinators",
        "states lost",
        "two learners of a name",
        "initial parameters half sent",
        "visitors: repeats",
        "visitors: keeps_a_copy",
    ):
        assert found.counts[what], what


def test_a_run_goes_on_whenever_the_hub_exchanges_its_leader() -> None:
    """Connections and core messages stay; streams take nothing for seconds, and tell nothing or
    what they had."""
    found = world.one(4, SHORT.changed(elections=9, nodes=3, syncers=2))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["elections"] > found.counts["leaders alone"] > 0


def test_leaders_write_leases_for_learners_over_links_that_take_their_time() -> None:
    """On a hub that knows who writes. A leader asks it several times before it answers them."""
    found = world.one(5, SHORT.changed(named=True, delay_s=0.4, syncers=2))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["hubs that know who writes"]


def test_a_full_disk_of_the_hub_is_named_and_the_run_goes_on_once_it_has_room() -> None:
    """Also where nothing but a lease had to be written when it filled up."""
    options = SHORT.changed(steps=60, quorum=3, overlap_steps=1, delay_s=0.02, syncers=2)
    found = world.one(2, options.changed(full_disks=4))
    assert found.violations == [] and found.rounds > 0
    for state in (
        "the hub's disk full",
        "the hub's disk full: said by the leader",
        "the hub's disk full: found by a try",
    ):
        assert found.counts[state], state


def test_a_full_stream_is_named_and_the_run_goes_on_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here that of publications."""

    def plan(self: hardships.Hardships) -> None:
        self.world.loop.call_later(12.0, self._narrow)

    monkeypatch.setattr(hardships.Hardships, "plan", plan)
    monkeypatch.setattr(hardships, "KINDS", ("DN",))
    monkeypatch.setattr(hardships, "LEFT", (0,))
    monkeypatch.setattr(hardships, "SPELL_S", (15.0, 15.0))
    found = world.one(8, SHORT)
    assert found.violations == [] and found.rounds > 0
    assert found.counts["told: full"] and found.counts["told: room-again"]
    assert found.counts["told: no-room"] and found.counts["submitted without room"]
    assert found.counts["streams narrowed"] and found.counts["visitors: lacks_room"]


def test_a_run_ends_in_streams_that_may_not_grow_with_its_learners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its user allows what it needs with one learner, and three join."""
    plainly, ensure = World._asked, MemoryBroker.ensure
    bounds, given = set[int](), list[int]()

    def asked(self: World, spec: RunSpec) -> RunSpec:
        spec = plainly(self, spec)
        one = spec.membership.model_copy(update={"learners_min": 1})
        spec = spec.model_copy(update={"membership": one})
        bound = max(need.bytes for need in streams(assumed(spec)).values())
        bounds.add(bound)
        narrow = spec.keeping.model_copy(update={"stream_bytes_max": bound})
        return spec.model_copy(update={"keeping": narrow})

    def ensured(self: MemoryBroker, config: dict[str, Any]) -> None:
        if config["name"] in subjects.run_streams("sim"):
            given.append(config["max_bytes"])
        ensure(self, config)

    monkeypatch.setattr(World, "_asked", asked)
    monkeypatch.setattr(MemoryBroker, "ensure", ensured)
    # By the clock, with the product's own constants, the tape needs more than the least bound.
    options = Options.calm(steps=80, budget="seconds", learners=3, quorum=1)
    found = world.played(Case(3, options))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["told: no-room"]
    assert bounds == {max(given)}, "no stream was given more"


def test_a_leader_whose_clock_stood_still_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trusts its lease while another one leads: only the tape keeps it from committing."""

    def suspend(self: troubles.Troubles) -> None:
        leads = self.world.observer.reached.leaders[0]
        self._hang(next(m for m in self.world.syncers if m.name == leads), 5.0)

    def plan(self: troubles.Troubles) -> None:
        for n in range(3):
            self.loop.call_later(10.0 + 8.0 * n, suspend, self)

    monkeypatch.setattr(troubles, "SUSPENDED", 1.0)
    monkeypatch.setattr(troubles.Troubles, "plan", plan)
    found = world.one(5, SHORT.changed(syncers=2))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["machines suspended"] and found.counts["two leaders at once"]


def test_a_run_that_begins_with_a_checkpoint_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequel, "SHARE", 1.0)
    found = world.one(2, small())
    assert found.violations == [] and found.counts["heirs"] == 1


def test_bad_input_that_nobody_counts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refusals, "tell", lambda *_: [])
    found = world.one(1, SHORT.changed(garbage=0.5))
    assert any(v.startswith("I11") and "not counted" in v for v in found.violations)


@pytest.mark.parametrize("seed", [6, 7, 8])
def test_evaluations_that_take_as_long_as_many_steps_do_no_harm(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Learners step meanwhile, and some die; and the run ends once its last one is told."""
    monkeypatch.setattr(computing, "BESIDE_STEPS", 40.0)
    found = world.one(seed, SHORT)
    assert found.violations == [] and found.rounds > 0
    assert found.counts["told: evaluation"] and found.counts["learners: Evaluate"]
