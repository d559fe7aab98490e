"""Disks of worlds of whole processes: slow, full, and torn where the writer dies."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from diloco_learner.recovery import checkpoint_io
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_shared.durable import free_bytes, settle
from diloco_simulator.troubles import disks
from diloco_simulator.worlds import world
from diloco_simulator.worlds.options import SELDOM, Options, seldom
from diloco_syncer.snapshots import snapshots_io

SHORT = Options.calm(steps=24, safety_s=30.0, learners=2, quorum=1, snapshot_every_rounds=3)


def test_a_full_disk_and_a_slow_one_stop_no_run() -> None:
    found = world.one(3, SHORT.changed(disk_full=1.0, disk_spells=2, disk_s=5.0))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["disk full"] and found.counts["a disk full for a while"] == 2


def test_merges_that_wait_for_a_slow_disk_are_told_and_stop_no_run() -> None:
    found = world.one(6, SHORT.changed(slow_writes=True, disk_s=25.0, fragments=3))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["told: slow-disk"] >= 1
    assert not found.counts["told: stuck"]
    drawn = [Options.drawn(seed).slow_writes for seed in range(40)]
    assert {False, True} == set(drawn) and not Options.calm().slow_writes


def test_a_file_system_that_settles_no_names_stops_no_run() -> None:
    found = world.one(7, SHORT.changed(no_names=True))
    assert found.violations == [] and found.counts["file systems that settle no names"] == 1
    drawn = ["no_names" in seldom(seed) for seed in range(400)]
    rate = SELDOM["no_names"].share
    assert 0.7 * rate * 400 < sum(drawn) < 1.3 * rate * 400 and not Options.calm().no_names


@pytest.mark.whole
@pytest.mark.parametrize("module", [checkpoint_io, snapshots_io])
def test_whoever_writes_nothing_on_such_a_file_system_is_named(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "settle_names", settle)
    found = world.one(7, SHORT.changed(no_names=True))
    assert any(v.startswith("disks at ") for v in found.violations), found.violations[:5]


@pytest.mark.whole
def test_checkpoints_that_nobody_removes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCheckpoints, "_prune", lambda self: None)
    found = world.one(7, SHORT.changed(steps=60))
    assert any("files of checkpoints" in v for v in found.violations), found.violations[:5]


def test_whoever_dies_while_it_writes_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "TORN", 0.2)
    found = world.one(4, SHORT.changed(torn=1.0))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["torn"] >= 1


def test_outside_of_a_world_disks_are_what_they_are(tmp_path: Path) -> None:
    before = os.fsync, os.statvfs
    world.one(5, Options.calm(steps=6, safety_s=8.0, learners=2, quorum=1))
    assert (os.fsync, os.statvfs) == before
    assert (free_bytes(tmp_path) or 0) > 0


def test_what_a_torn_folder_loses_is_of_its_newest_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    for number in (3, 12):
        (folder / f"snapshot-{number:012d}").mkdir(parents=True)
        (folder / f"snapshot-{number:012d}" / "meta.json").write_text("{}")
    shared = folder / "snapshot-000000000003" / "0.arrays"
    shared.write_text("values")
    os.link(shared, folder / "snapshot-000000000012" / "0.arrays")
    found = disks._written(tmp_path, folder.stat())
    assert found == [folder / "snapshot-000000000012" / "meta.json"]
