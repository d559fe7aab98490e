"""Worlds in which syncers come back on empty disks or under new names: no run is lost by that."""

from pathlib import Path

import pytest

from diloco_shared.protocol.messages import TapeRebirth
from diloco_simulator.options import Options
from diloco_simulator.scenario import Scenario

# In seconds: after some snapshots, and long before the end.
STRIKE_S = 30.0


def played(
    folder: Path, seed: int, *, renamed: bool, apart_s: float = 0.0, **options: int
) -> list[TapeRebirth]:
    """A calm world in which only that happens; the rebirths on its tapes."""
    calm = Options.calm(steps=60, snapshot_every_rounds=2, **options)
    scenario = Scenario(seed, calm, folder)
    for n, node in enumerate(scenario.syncers):

        def strike(node=node) -> None:  # type: ignore[no-untyped-def]
            node.on_an_empty_disk(1.0, renamed=renamed)
            scenario.hub.processes["syncer"] = tuple(s.process for s in scenario.syncers)

        scenario.world.at(STRIKE_S + n * apart_s, strike)
    verdict = scenario.run()
    assert verdict.violations == []
    assert scenario.watch.ended == "finished"
    tapes = (record for shard in scenario.hub.shards for record in shard.tape)
    return [record for record in tapes if isinstance(record, TapeRebirth)]


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("syncers", [1, 2, 3])
def test_all_at_once_begins_again_once(tmp_path: Path, syncers: int, *, renamed: bool) -> None:
    (record,) = played(tmp_path, 3, renamed=renamed, syncers=syncers)
    assert record.epoch == 1


def test_of_two_shards_each_begins_again_by_itself(tmp_path: Path) -> None:
    records = played(tmp_path, 4, renamed=True, syncers=2, shards=2, fragments=4)
    assert len(records) == 2


@pytest.mark.parametrize("renamed", [False, True])
def test_one_by_one_changes_nothing_but_who_leads(tmp_path: Path, *, renamed: bool) -> None:
    assert played(tmp_path, 5, renamed=renamed, apart_s=15.0, syncers=2) == []


def test_a_checkpoint_of_the_run_is_as_good_as_a_snapshot(tmp_path: Path) -> None:
    """As long as UP has what came after it."""
    calm = Options.calm(steps=60, syncers=2, snapshot_every_rounds=2, lost_disks=0)
    scenario = Scenario(6, calm, tmp_path)
    world = scenario.world
    world.at(12.0, scenario.user.checkpoint)

    def strike() -> None:
        for node in scenario.syncers:
            node.on_an_empty_disk(1.0, renamed=True)
        scenario.hub.processes["syncer"] = tuple(s.process for s in scenario.syncers)

    def purge_held() -> None:
        # UP keeps all: whoever would purge it is made to wait.
        for node in scenario.syncers:
            if node.life is not None:
                node.life._purge_up = lambda last_round: None  # type: ignore[method-assign]
        world.after(0.5, purge_held)

    purge_held()
    world.at(STRIKE_S, strike)
    assert scenario.run().violations == []
    kinds = [type(record) for shard in scenario.hub.shards for record in shard.tape]
    assert TapeRebirth not in kinds
