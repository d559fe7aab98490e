"""Exports at work: begun when asked for or when due, watched, kept in bounds, found again.

Half an export after a restart is one that failed: its process ended with the coordinator.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import structlog
from pydantic import ValidationError

from diloco_coordinator.exports.child_io import Exporter, ExportFault
from diloco_coordinator.exports.exports import (
    CUT_OFF,
    Asked,
    ExportPace,
    ExportRecord,
    due,
    hindrance,
    surplus,
    why_unwritten,
)
from diloco_coordinator.exports.shelf_io import Shelf
from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import run_id_of
from diloco_shared import ambient
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.run_states import OVER
from diloco_shared.spec.run import Keeping, RunSpec

log = structlog.get_logger()

T = TypeVar("T")

# Between two looks at what is due and at what is left of deleted runs, in seconds.
LOOK_S = 1.0


class ExportsBusy(Exception):
    """None may begin now; the text says why."""


class Exports:
    """All exports of one coordinator. `prepare` once; `keep` must run for any to be made."""

    def __init__(
        self,
        registry: Registry,
        shelf: Shelf,
        exporter: Exporter,
        *,
        kept_max: int,
        at_once: int,
    ) -> None:
        self.registry = registry
        self.shelf = shelf
        self.exporter = exporter
        self.kept_max = kept_max
        self.at_once = at_once
        self.records: dict[str, ExportRecord] = {}  # by id, oldest first
        self.paces: dict[str, ExportPace] = {}  # of those being made
        self.making: dict[str, asyncio.Task[None]] = {}
        # Those that failed, and no disk took that yet: a restart would not know.
        self.unwritten: dict[str, ExportRecord] = {}
        # By run, the newest that is not kept any more: it was made, and is not due again.
        self.past: dict[str, ExportRecord] = {}
        self._keeping: dict[str, tuple[RunRecord, Keeping | None]] = {}
        self._hindered: dict[str, str] = {}  # run -> what was told of why none can begin
        # Run -> its id, its epoch, and the rounds that it had when it was first seen in that.
        self._epochs: dict[str, tuple[str, int, int]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        # One at a time changes what is there: a disk may hold up whoever does.
        self._changing = asyncio.Lock()

    async def keep(self) -> None:
        """For ever."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await again_and_again(self.look, "exports", LOOK_S)
        finally:
            self._tasks = None

    async def prepare(self) -> None:
        """Find again what an earlier process has left; before anybody asks."""
        if not self.shelf.any:
            return
        there, past = await asyncio.to_thread(self._found)
        self.past = {record.run_id: record for record in past}
        for record in there:
            if record.state == "running":
                record = record.failed(CUT_OFF, ambient.wall())
                await self._leave(record)
                await self._tell(record)
            self.records[record.id] = record

    def _found(self) -> tuple[list[ExportRecord], list[ExportRecord]]:
        self.shelf.sweep()
        return self.shelf.records(), self.shelf.past()

    async def _leave(self, record: ExportRecord) -> None:
        """Of one that failed there is its record, now or as soon as the disk takes it."""
        self.unwritten[record.id] = record
        if await self._disk(lambda: self._left(record), f"export {record.id}"):
            del self.unwritten[record.id]

    def _left(self, record: ExportRecord) -> bool:
        self.shelf.clean(record)
        self.shelf.save(record)
        return True

    async def _disk(self, what: Callable[[], T], doing: str) -> T | None:
        """Of what can also be done later; a disk that is full stops nothing else."""
        try:
            return await asyncio.to_thread(what)
        except OSError as error:
            log.error("not written", doing=doing, error=str(error))
            return None

    # --- looking -------------------------------------------------------------------------------

    def of(self, run_id: str) -> list[ExportRecord]:
        """Of one run, oldest first."""
        return [r for r in self.records.values() if r.run_id == run_id]

    def failing(self, run: RunRecord) -> bool:
        """Whether the newest export that ended has failed, or none can even begin."""
        ended = [r for r in self.of(run_id_of(run)) if r.state != "running"]
        return run.name in self._hindered or bool(ended and ended[-1].state == "failed")

    def pace(self, record: ExportRecord) -> ExportPace | None:
        """How far it is, while it is being made."""
        return self.paces.get(record.id)

    async def look(self) -> None:
        """What is due begins; what is of deleted runs goes; what is not written yet is."""
        async with self._changing:
            for failed in list(self.unwritten.values()):
                await self._leave(failed)
        await self._forget_deleted()
        runs = self.registry.runs
        for name in self._keeping.keys() - runs.keys():
            del self._keeping[name]
        for name in self._hindered.keys() - runs.keys():
            del self._hindered[name]
        for name in self._epochs.keys() - runs.keys():
            del self._epochs[name]
        for record in list(runs.values()):
            if self._due(record):
                await self._begin_due(record)

    async def _begin_due(self, run: RunRecord) -> None:
        """Nobody waits for its answer: what stands in its way is told to the run, once."""
        try:
            await self.begin(run, Asked(), automatic=True)
        except ExportsBusy as error:
            log.debug("no export now", run=run.name, why=str(error))
        except OSError as error:
            text = f"no export of {run.name} can begin: {why_unwritten(error)}"
            if self._hindered.get(run.name) != text:
                await self.registry.tell(run.name, "export-failed", text[:500], {})
            self._hindered[run.name] = text
        else:
            self._hindered.pop(run.name, None)

    def _due(self, record: RunRecord) -> bool:
        status, keeping = self.registry.statuses.get(record.name), self._keeping_of(record)
        if status is None or keeping is None or keeping.export_every_rounds is None:
            return False
        run_id, every = run_id_of(record), keeping.export_every_rounds
        of_run = [*self.of(run_id), *(r for r in (self.past.get(run_id),) if r is not None)]
        committed, over = status.rounds_committed, status.state in OVER
        since = self._since(record.name, run_id, status.epoch, committed)
        return due(of_run, run_id, every, committed, over, status.epoch, since)

    def _since(self, run: str, run_id: str, epoch: int, committed: int) -> int:
        """The rounds that a run had when it was first seen in this epoch."""
        known = self._epochs.get(run)
        if known is None or known[:2] != (run_id, epoch):
            known = self._epochs[run] = run_id, epoch, committed
        return known[2]

    def _keeping_of(self, record: RunRecord) -> Keeping | None:
        """As it was read last; None for what another release wrote."""
        known = self._keeping.get(record.name)
        if known is None or known[0] is not record:
            try:
                keeping = RunSpec.model_validate(record.spec).keeping
            except ValidationError:
                keeping = None
            known = self._keeping[record.name] = record, keeping
        return known[1]

    async def _forget_deleted(self) -> None:
        """A run that is deleted takes its exports along. Only its mark says that it is."""
        known = {run_id_of(r) for r in self.registry.runs.values()}
        folders = {r.run_id: r.folder for r in (*self.past.values(), *self.records.values())}
        for run_id in folders.keys() - known:
            if run_id and await self.registry.bus.kv_get(subjects.DELETED, run_id) is not None:
                for record in self.of(run_id):
                    await self.remove(record)
                self.past.pop(run_id, None)
                forget = partial(self.shelf.forget, folders[run_id])
                await self._disk(forget, f"removal of exports of {folders[run_id]}")

    # --- acting --------------------------------------------------------------------------------

    async def begin(self, run: RunRecord, asked: Asked, *, automatic: bool = False) -> ExportRecord:
        """Start one. Raises ExportsBusy, and OSError when the disk takes not even its record."""
        async with self._changing:
            why = hindrance(self.records.values(), run_id_of(run), self.at_once)
            if why or self._tasks is None:
                raise ExportsBusy(why or "the coordinator is only just starting: try again")
            spec, status = RunSpec.model_validate(run.spec), self.registry.statuses.get(run.name)
            known = (*self.records.values(), *self.past.values())
            record = ExportRecord(
                id=ambient.token(4),
                run=run.name,
                run_id=run_id_of(run),
                folder=spec.folder,
                asked=asked,
                automatic=automatic,
                rounds=status.rounds_committed if status else 0,
                final=status is not None and status.state in OVER,
                in_epoch=status.epoch if status else 0,
                serial=1 + max((r.serial for r in known), default=0),
                begun_at=ambient.wall(),
            )
            await asyncio.to_thread(self.shelf.begin, record)
            self.records[record.id], self.paces[record.id] = record, ExportPace()
            self.making[record.id] = self._tasks.create_task(self._make(record))
        return record

    async def _make(self, record: ExportRecord) -> None:
        """What becomes of it; never fails itself."""
        pace, to = self.paces[record.id], self.shelf.files(record)
        try:
            await self.exporter.make(record, to, lambda line: pace.moved(line, ambient.monotonic()))
            manifest, files = await asyncio.to_thread(self.shelf.made, record)
            ended = record.completed(manifest, files, ambient.wall())
        except ExportFault as error:
            ended = record.failed(str(error), ambient.wall())
        except (OSError, ValueError) as error:
            ended = record.failed(f"what was made is not whole: {error}", ambient.wall())
        async with self._changing:
            self.paces.pop(record.id, None)
            self.making.pop(record.id, None)
            if record.id in self.records:  # else it was removed meanwhile
                ended = await self._kept(record, ended)
                await self._end(ended)
        await self._tell(ended)

    async def _kept(self, begun: ExportRecord, ended: ExportRecord) -> ExportRecord:
        """How it ended, once its disk says so too; nobody would find again what is not written."""
        if ended.state == "complete":
            try:
                await asyncio.to_thread(self.shelf.save, ended)
                return ended
            except OSError as error:
                text = f"its record could not be written: {error}"
                ended = begun.failed(text, ambient.wall())
        await self._leave(ended)
        return ended

    async def _end(self, record: ExportRecord) -> None:
        """It is seen, and what is too many goes."""
        run = self.registry.runs.get(record.run)
        keeping = self._keeping_of(run) if run is not None else None
        most = keeping.exports if keeping is not None else None
        there = self.records | {record.id: record}
        runs = {run_id_of(r) for r in self.registry.runs.values()}
        gone = surplus(there.values(), self.kept_max, most, record.run_id, runs)
        for old in gone:
            await self._remove(old)
        if record not in gone:
            self.records[record.id] = record

    async def _tell(self, record: ExportRecord) -> None:
        if not self.registry.is_run(record.run, record.run_id):
            return  # a deleted run has no events
        if record.state == "complete":
            text = f"export {record.id} of {record.run} is complete: step {record.steps}"
        else:
            text = f"export {record.id} of {record.run} failed: {record.reason}"
        kind = "exported" if record.state == "complete" else "export-failed"
        await self.registry.tell(record.run, kind, text, {"export": record.id})

    async def remove(self, record: ExportRecord) -> None:
        """It is gone; one that is being made is ended first."""
        async with self._changing:
            await self._remove(record)

    async def _remove(self, record: ExportRecord) -> None:
        self.records.pop(record.id, None)
        self.unwritten.pop(record.id, None)
        before, leave = self.past.get(record.run_id, record), self.shelf.remove
        if not record.asked.checkpoint and record.order >= before.order:
            self.past[record.run_id], leave = record, self.shelf.retire
        if (task := self.making.pop(record.id, None)) is not None:
            task.cancel()
            await asyncio.wait({task})
            self.paces.pop(record.id, None)
        await self._disk(lambda: leave(record), f"removal of export {record.id}")
