"""Who makes exports in tests: at a test's word, without a process."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from diloco_coordinator.exports.child_io import ExportFault
from diloco_coordinator.exports.exports import ExportRecord
from diloco_shared.protocol.exports import (
    ExportedFile,
    ExportedFragment,
    ExportManifest,
    ExportMoved,
)

WEIGHTS = b"weights" * 1000


CONFIG = b"{}"


def fill(to: Path, record: ExportRecord, *, known: bool = True) -> None:
    """A whole folder of an export. `known`: whether others know the model's architecture."""
    to.mkdir(parents=True)
    (to / "model.safetensors").write_bytes(WEIGHTS)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    fragment = ExportedFragment(fragment=0, version=3, round=2, steps=24, digest="0" * 32)
    manifest = ExportManifest(
        run=record.run,
        run_id=record.run_id,
        epoch=1,
        fragments=(fragment, fragment.model_copy(update={"fragment": 1, "version": 2})),
        round=2,
        steps=24,
        tokens_merged=100,
        tokens_processed=None,
        parameters=7,
        dtype=record.asked.dtype,
        config_hash="0" * 32,
        checkpoint=record.asked.checkpoint,
        spec={},
        made_at=time.time(),
        files=(
            ExportedFile(name="model.safetensors", bytes=len(WEIGHTS), sha256=digest),
            *((_config(to),) if known else ()),
        ),
    )
    (to / "diloco.json").write_text(manifest.model_dump_json(), encoding="utf-8")


def _config(to: Path) -> ExportedFile:
    (to / "config.json").write_bytes(CONFIG)
    digest = hashlib.sha256(CONFIG).hexdigest()
    return ExportedFile(name="config.json", bytes=len(CONFIG), sha256=digest)


class Maker:
    """Makes each export when `go` is set, or fails with `fault`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.fault = ""
        self.known = True
        self.asked: list[ExportRecord] = []
        self.ended: list[str] = []
        self.spoil: Callable[[Path], object] = lambda to: None

    async def make(
        self, record: ExportRecord, to: Path, moved: Callable[[ExportMoved], None]
    ) -> None:
        self.asked.append(record)
        try:
            partial = to.parent / ".files.0.partial"
            await asyncio.to_thread(partial.mkdir)
            moved(ExportMoved(stage="fetching", done=25, total=100))
            await self.go.wait()
            if self.fault:
                raise ExportFault(self.fault)
            await asyncio.to_thread(partial.rmdir)
            await asyncio.to_thread(lambda: fill(to, record, known=self.known))
            self.spoil(to)
        finally:
            self.ended.append(record.id)
