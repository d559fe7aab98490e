"""Machines of worlds that lose their power: nothing that they told as safe is lost with it.

And what must be synced is not, in one place of the product after another: the world must name it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_coordinator.api import audit_io
from diloco_learner.recovery import checkpoint_io
from diloco_shared.process import membership
from diloco_simulator.troubles import power
from diloco_simulator.troubles.power import Power, Remnants, Synced
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import SELDOM, Options, seldom
from diloco_simulator.worlds.world import World, WorldResult, played
from diloco_syncer.merging import anchor_files_io
from diloco_syncer.snapshots import snapshots_io

CALM = Options.calm(
    learners=2, quorum=1, steps=36, safety_s=30.0, snapshot_every_rounds=3, power_losses=1
)
Break = Callable[[pytest.MonkeyPatch], None]


def everybody(world: World) -> None:
    for machine in world.machines:
        world.power.lose(machine)


def who_writes_next(world: World) -> None:
    world.power.armed |= {machine.host for machine in world.machines}


def struck(
    patch: pytest.MonkeyPatch, *strikes: Callable[[World], None], **cast: Any
) -> WorldResult:
    """These strike, eight virtual seconds after one another."""

    def plan(self: Power) -> None:
        for n, strike in enumerate(strikes):
            self.loop.call_later(12.0 + 8.0 * n, strike, self.world)

    patch.setattr(Power, "plan", plan)
    return played(Case(1, CALM, **cast))


def test_whoever_loses_its_power_goes_on_with_what_it_told_as_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(power, "OLD", 1.0)  # all that was not synced is lost
    found = struck(monkeypatch, everybody, who_writes_next, exports=True)
    assert found.violations == [] and found.rounds > 0 and found.looks["disks"] >= 4
    for state in (
        "machines without power",
        "files that a power cut took",
        "files told as safe before a power cut",
    ):
        assert found.counts[state], state


def test_some_seeds_have_machines_without_power() -> None:
    """From dice of their own, and none in a calm world."""
    drawn = ["power_losses" in seldom(seed) for seed in range(400)]
    rate = SELDOM["power_losses"].share
    assert 0.7 * rate * 400 < sum(drawn) < 1.3 * rate * 400
    assert not Options.calm().power_losses


# --------------------------------------------------------------------------------------------------
# What a disk forgets.


def put(path: Path, content: str, synced: Synced | None = None) -> None:
    path.write_text(content)
    if synced is not None:
        sync(path, synced)


def sync(path: Path, synced: Synced) -> None:
    handle = os.open(path, os.O_RDONLY)
    synced.file(handle)
    os.close(handle)


def left(root: Path, synced: Synced, to: Path) -> list[dict[str, str]]:
    """What may be left of the files of a folder, by many dice."""
    found = list[dict[str, str]]()
    for n in range(60):
        Remnants(synced, root, Random(n)).put(to / f"{n}")
        one = {path.name: path.read_text() for path in (to / f"{n}").rglob("*") if path.is_file()}
        found += [one] if one not in found else []
    return sorted(found, key=str)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_what_was_synced_stays_with_its_name(root: Path, tmp_path: Path) -> None:
    synced = Synced()
    put(root / "a", "whole", synced)
    sync(root, synced)
    assert left(root, synced, tmp_path) == [{"a": "whole"}]


def test_a_file_whose_name_was_not_synced_may_be_missing(root: Path, tmp_path: Path) -> None:
    synced = Synced()
    put(root / "a", "whole", synced)
    assert left(root, synced, tmp_path) == [{"a": "whole"}, {}]


def test_what_was_not_synced_of_a_file_may_be_cut_off(root: Path, tmp_path: Path) -> None:
    synced = Synced()
    put(root / "a", "w", synced)
    sync(root, synced)
    put(root / "a", "why")
    assert left(root, synced, tmp_path) == [{"a": "w"}, {"a": "wh"}, {"a": "why"}]


def test_of_a_rename_there_is_the_old_name_or_the_new_one(root: Path, tmp_path: Path) -> None:
    synced = Synced()
    put(root / "a", "old", synced)
    put(root / "b", "new", synced)
    sync(root, synced)
    (root / "b").rename(root / "a")
    assert left(root, synced, tmp_path) == [{"a": "new"}, {"a": "old", "b": "new"}]


def test_a_folder_whose_name_was_not_synced_takes_all_with_it(root: Path, tmp_path: Path) -> None:
    synced = Synced()
    (root / "folder").mkdir()
    put(root / "folder" / "a", "whole", synced)
    sync(root / "folder", synced)
    assert left(root, synced, tmp_path) == [{"a": "whole"}, {}]


# --------------------------------------------------------------------------------------------------
# What is not synced.


def nothing(*_: Any) -> None:
    """Is put on the disk."""


def only_made(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def of_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_io, "os", SimpleNamespace(fsync=nothing))


def of_names_of_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_io, "settle_names", nothing)


def of_folders_of_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_io, "begin_folder", only_made)


def of_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots_io, "settle", nothing)
    patch.setattr(snapshots_io, "settle_names", nothing)


def of_folders_of_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots_io, "make_folder", only_made)
    patch.setattr(anchor_files_io, "make_folder", only_made)


def of_own_folders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "begin_folder", only_made)


def of_the_audit_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(audit_io, "settle_names", nothing)


FAULTS: dict[str, tuple[Break, str]] = {
    "checkpoints": (of_checkpoints, ".safetensors"),
    "names of checkpoints": (of_names_of_checkpoints, ".safetensors"),
    "folders of checkpoints": (of_folders_of_checkpoints, ".safetensors"),
    "snapshots": (of_snapshots, "snapshot-"),
    "folders of snapshots": (of_folders_of_snapshots, "snapshot-"),
    "the audit log": (of_the_audit_log, "audit.jsonl"),
    "own folders": (of_own_folders, "audit.jsonl"),
}


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_synced_is_missed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, what = FAULTS[fault]
    breaks(monkeypatch)
    monkeypatch.setattr(power, "OLD", 1.0)
    found = struck(monkeypatch, everybody, everybody)
    disks = [v for v in found.violations if v.startswith("disks at ")]
    assert any(what in v for v in disks), found.violations[:5]
