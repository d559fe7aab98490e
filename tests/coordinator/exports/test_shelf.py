"""Exports on the coordinator's disk, after a process that died while it wrote there."""

from pathlib import Path

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
