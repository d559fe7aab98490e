"""Exports on the coordinator's disk, after a process that died while it wrote there."""

from pathlib import Path

import pytest

from diloco_coordinator.exports import shelf_io
from diloco_coordinator.exports.exports import Asked, ExportRecord
from diloco_coordinator.exports.shelf_io import PAST, Shelf
from diloco_shared.durable import PART


def test_half_a_record_of_what_was_removed_keeps_no_folder(tmp_path: Path) -> None:
    """Its run is deleted later, and nothing else is left of that run."""
    shelf = Shelf(tmp_path / "exports")
    record = ExportRecord(
        id="1", run="r", run_id="a", folder="r.a", begun_at=1.0, asked=Asked(), state="complete"
    )
    shelf.begin(record)
    shelf.retire(record)
    (shelf.root / record.folder / f"{PAST}{PART}").write_text("{")

    shelf.sweep()
    assert [r.id for r in shelf.past()] == ["1"]
    shelf.forget(record.folder)
    assert not (shelf.root / record.folder).exists()


def test_what_was_removed_is_not_there_again_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user was told that it is gone, and it was shown again when there was power."""
    shelf = Shelf(tmp_path / "exports")
    record = ExportRecord(
        id="1", run="r", run_id="a", folder="r.a", begun_at=1.0, asked=Asked(), state="complete"
    )
    shelf.begin(record)
    place = shelf.place(record)
    settled: list[list[str]] = []

    def settle_names(folder: Path) -> None:
        assert folder == place
        settled.append([path.name for path in folder.iterdir()])

    monkeypatch.setattr(shelf_io, "settle_names", settle_names)
    shelf.remove(record)
    assert settled == [[]] and not place.exists()
    shelf.remove(record)  # gone already
