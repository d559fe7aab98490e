"""Clogs and storms of whole worlds: each strikes, nothing wrong is done, and the run ends."""

import gc
import sys
from typing import Any

import pytest

from diloco_shared.bus.stream_kv import bucket_stream
from diloco_simulator.hub.bus import MemoryBus
from diloco_simulator.troubles.storms import Storms
from diloco_simulator.worlds import constants, world
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import SELDOM, Options, seldom

SHORT = Options.calm(steps=24, safety_s=30.0, learners=3, quorum=2, snapshot_every_rounds=3)


@pytest.mark.whole
def test_connections_that_clog_are_released_in_another_order() -> None:
    found = world.one(5, SHORT.changed(clogs=6, syncers=2))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["clogs"] == 6 and found.counts["released in another order"] > 1
    assert not found.counts["storms"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("strike", "what"),
    [
        (Storms._kill_hub, "the hub is killed while its disk is nearly full"),
        (Storms._strike_syncer, "a syncer's disk fills while its connections clog"),
        (Storms._elect, "the hub's nodes elect while connections clog"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_goes_on_after_each_storm(
    monkeypatch: pytest.MonkeyPatch, strike: object, what: str
) -> None:
    monkeypatch.setattr(Storms, "strike", strike)
    found = world.one(8, SHORT.changed(storms=3, syncers=2))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["storms"] == found.counts[f"storms: {what}"] > 0
    if strike is Storms._kill_hub:
        assert found.counts["tails lost"] and found.counts["partitions"]
        assert found.counts["servers of the hub ended"]
    else:
        assert found.counts["clogs"]


@pytest.mark.whole
def test_buckets_that_are_not_synced_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that is killed loses what is decided upon."""
    ensure = MemoryBus.ensure

    async def unsynced(self: MemoryBus, config: dict[str, Any]) -> None:
        bucket = config["name"].startswith(bucket_stream(""))
        await ensure(self, config | ({"persist_mode": "async"} if bucket else {}))

    monkeypatch.setattr(MemoryBus, "ensure", unsynced)
    monkeypatch.setattr(Storms, "strike", Storms._kill_hub)
    # Such a world may not end by itself. Coroutines of one that is broken off want to tidy up when
    # they are collected: here, and not in a later test.
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)
    found = world.one(8, SHORT.changed(storms=3, syncers=2))
    gc.collect()
    assert found.violations


def test_both_are_drawn_from_dice_of_their_own() -> None:
    """Kept worlds and calm ones have none, and what else a seed draws does not depend on them."""
    drawn = [seldom(seed) for seed in range(400)]
    for name in ("clogs", "storms", "in_order"):
        rate = SELDOM[name].share
        assert 0.7 * rate * 400 < sum(name in o for o in drawn) < 1.3 * rate * 400
    assert (Options.calm().clogs, Options.calm().storms) == (0, 0)
    assert not Options.calm().in_order


@pytest.mark.whole
def test_a_run_ends_whatever_later_limits_are_small() -> None:
    small = {d.path: min(d.others) for d in constants.LATER_LIMITS}
    found = world.played(Case(3, SHORT.changed(syncers=2, checkpoints=1, restores=1), small))
    assert found.violations == [] and found.rounds > 0


def test_later_limits_are_in_some_worlds() -> None:
    drawn = [constants.later(seed) for seed in range(400)]
    assert {path for values in drawn for path in values} == {d.path for d in constants.LATER_LIMITS}
    assert 0.7 * constants.LATER * 400 < sum(map(bool, drawn)) < 1.1 * constants.LATER * 400
