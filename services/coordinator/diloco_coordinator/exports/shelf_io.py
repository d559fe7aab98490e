"""Exports on the coordinator's disk.

    <data>/<coordinator>/exports/<run's folder>/<id>/record.json     what is known of it
                                                    /files/          once it is complete
                                               /past.json   the newest that was removed

A record is written before its process starts: what is half made after a restart is known as such.
`past.json` keeps the record of a removed export, which would else be due again after a restart.
Not for an event loop: every method waits for the disk.
"""

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from diloco_coordinator.exports.exports import ExportRecord
from diloco_shared.durable import PART, make_folder, replace, settle_names
from diloco_shared.protocol.exports import MANIFEST, ExportedFile, ExportManifest

log = structlog.get_logger()

RECORD, FILES, PAST = "record.json", "files", "past.json"
# A record with all its files is some hundred kilobytes; more is none of ours.
RECORD_BYTES_MAX = 8 << 20


class Shelf:
    """All exports of one coordinator."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def any(self) -> bool:
        """Whether anything was ever kept there."""
        return self.root.is_dir()

    def records(self) -> list[ExportRecord]:
        """Every record that can be read, oldest first."""
        return self._read(f"*/*/{RECORD}")

    def past(self) -> list[ExportRecord]:
        """Of each run the newest that is not kept any more, where one was removed; oldest first."""
        return self._read(f"*/{PAST}")

    def _read(self, pattern: str) -> list[ExportRecord]:
        found = []
        for path in self.root.glob(pattern):
            try:
                if path.stat().st_size <= RECORD_BYTES_MAX:
                    found.append(ExportRecord.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as error:
                log.error("unreadable record of an export", path=str(path), error=str(error))
        return sorted(found, key=lambda r: r.order)

    def place(self, record: ExportRecord) -> Path:
        """The folder of one export. Its names are ids: none leads elsewhere."""
        return self.root / record.folder / record.id

    def files(self, record: ExportRecord) -> Path:
        """Where its files are, or will be."""
        return self.place(record) / FILES

    def there(self, record: ExportRecord) -> bool:
        """Whether nobody removed it."""
        return self.place(record).is_dir()

    def sweep(self) -> None:
        """What has no record goes: whoever began it, or removed it, was cut off half way. Half a
        record of what was removed goes too: it would keep a run's folder for ever."""
        for half in self.root.glob(f"*/{PAST}{PART}"):
            half.unlink()
        for place in self.root.glob("*/*"):
            if place.is_dir() and not (place / RECORD).exists():
                log.info("the rest of an export is removed", path=str(place))
                shutil.rmtree(place, ignore_errors=True)
        for folder in self.root.glob("*"):
            with suppress(OSError):  # there are others in it
                folder.rmdir()

    def begin(self, record: ExportRecord) -> None:
        """Its folder and its record. Raises OSError; then nothing is left of them."""
        try:
            make_folder(self.place(record))
            self.save(record)
        except OSError:
            self.remove(record)
            raise

    def save(self, record: ExportRecord) -> None:
        """Replace its record, at one stroke. Raises OSError."""
        replace(self.place(record) / RECORD, record.model_dump_json(indent=1))

    def clean(self, record: ExportRecord) -> None:
        """Nothing is left of its files, finished or not."""
        for path in self.place(record).iterdir() if self.there(record) else ():
            if path.name != RECORD:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self, record: ExportRecord) -> None:
        """The export is gone; and its run's folder, with the last of them."""
        with suppress(FileNotFoundError):
            (self.place(record) / RECORD).unlink()  # the first: half an export is none
        with suppress(OSError):  # the rest goes also from a disk that takes nothing more
            settle_names(self.place(record))  # else a power cut brings it back
        shutil.rmtree(self.place(record), ignore_errors=True)
        with suppress(OSError):
            (self.root / record.folder).rmdir()

    def retire(self, record: ExportRecord) -> None:
        """`remove` it, and keep its record as the one of its run that was removed last."""
        try:
            self._mark(record)
        except OSError:  # the disk is full, say, and has room afterwards
            self.remove(record)
            self._mark(record)
        else:
            self.remove(record)

    def _mark(self, record: ExportRecord) -> None:
        folder = self.root / record.folder
        make_folder(folder)
        replace(folder / PAST, record.model_copy(update={"files": ()}).model_dump_json(indent=1))

    def forget(self, folder: str) -> None:
        """The run of this folder is deleted, and its exports are: nothing else is left of it."""
        with suppress(FileNotFoundError):
            (self.root / folder / PAST).unlink()
        with suppress(OSError):
            (self.root / folder).rmdir()

    def made(self, record: ExportRecord) -> tuple[ExportManifest, tuple[ExportedFile, ...]]:
        """What its process has made: the manifest, and every file with its digest.

        Raises OSError, and ValueError where a file is not there as the manifest says.
        """
        folder = self.files(record)
        body = (folder / MANIFEST).read_bytes()
        manifest = ExportManifest.model_validate_json(body)
        for file in manifest.files:
            size = (folder / file.name).stat().st_size
            if size != file.bytes:
                raise ValueError(f"{file.name} has {size} bytes, and was made with {file.bytes}")
        own = ExportedFile(name=MANIFEST, bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        return manifest, (*manifest.files, own)
