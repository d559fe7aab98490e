"""Ends the runs that nobody else can end: stopped ones without a leader, ended ones unsettled.

And removes those that are deleted, with all that is kept of them.
"""

from collections.abc import AsyncIterator
from contextlib import suppress

import structlog

from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import forced, run_id_of, shards_of
from diloco_shared import ambient
from diloco_shared.bus.port import Conflict, NoStream
from diloco_shared.bus.repeating import again_and_again, some_at_once
from diloco_shared.bus.status_key import Standing
from diloco_shared.bus.stored_records import readable
from diloco_shared.process.disk_watch import MARK_S
from diloco_shared.protocol import subjects
from diloco_shared.protocol.pace import LAST_EVALUATION
from diloco_shared.protocol.records import Deleted, RunRecord
from diloco_shared.protocol.wire import encode

log = structlog.get_logger()

# Between two looks, in seconds.
LOOK_S = 0.5
# And between two for streams that were made again, in seconds.
LEFTOVERS_LOOK_S = 10.0
# A run that has gone is looked after for so long, in seconds: members hear of it within a lease,
# and those that a bad link keeps from hearing have no run by then.
WATCHED_S = 300.0


async def keep_ending(registry: Registry) -> None:
    """For ever."""
    await again_and_again(lambda: end_overdue(registry), "ends of runs", LOOK_S)


async def end_overdue(registry: Registry) -> None:
    """One look, and what follows from it."""
    now = ambient.monotonic()
    if not registry.bus.connected:
        registry.standings.listening_since = now  # leaders may live on, and nobody here hears it
        return
    for run in list(registry.runs):
        record = registry.runs.get(run)
        if record is None:
            continue  # deleted while another was being ended
        registry.standings.watch_stop(record, now)
        if registry.over(run):
            continue
        evaluated = _is_evaluated(registry, run)
        for shard in range(shards_of(record)):
            key = subjects.status_key(run, shard)
            if why := registry.standings.overdue(record, shard, key, now, evaluated=evaluated):
                await _end(registry, record, shard, why)


def _is_evaluated(registry: Registry, run: str) -> bool:
    """Whether a living learner says that it makes a run's last evaluation."""
    shown = "learner", run, LAST_EVALUATION
    return any((r.role, r.run, r.reason) == shown for r in registry.roll.living.values())


async def _end(registry: Registry, record: RunRecord, shard: int, why: str) -> None:
    standing = Standing(registry.bus, record.name, run_id_of(record), shard)
    there = await standing.read()
    if there is not None and there != registry.standings.at(standing.key):
        return  # its leader spoke, and the mirror has yet to hear it: the next look judges anew
    end = forced(record, shard, there, why, ambient.wall())
    if refused := await standing.write(end):
        log.info("run not ended", run=record.name, reason=refused)
        return
    if end.forced:
        await registry.tell(record.name, "end-forced", f"run {record.name} {end.reason}", {})


# --- deletion -----------------------------------------------------------------------------------

# Buckets whose keys begin with the name of a run. Statuses are apart.
OF_RUNS = subjects.SHARDS, subjects.PLACES, subjects.INCARNATIONS, subjects.LEASES


async def delete_run(registry: Registry, run: str, run_id: str) -> None:
    """Remove a run and everything that is kept of it; may be repeated, wherever it ended. Conflict
    where its record changed meanwhile.

    On the bus at once; on the disks of those that worked for it, when they see the mark.
    """
    if not registry.is_run(run, run_id):
        return
    record = registry.runs[run]
    if record.phase != "deleting":
        # Before anything is gone: without its status it would look like one to begin with.
        await registry.update_run(record.model_copy(update={"phase": "deleting"}))
    async for _ in _deletion(registry, record):
        if not registry.is_run(run, run_id):
            return  # another coordinator was faster, and the name may be another run's by now
    await registry.remove_run(run, run_id)


async def _deletion(registry: Registry, record: RunRecord) -> AsyncIterator[None]:
    """Step by step, but for the record, which is the last to go."""
    run, bus = record.name, registry.bus
    if run_id := run_id_of(record):
        mark = encode(Deleted(run=run, at=ambient.wall()))
        # The last writer may win: whoever writes it says the same, and nobody takes it back.
        await bus.kv_put(subjects.DELETED, run_id, mark, ttl_s=MARK_S)
        yield
    for member, assignment in list(registry.assignments.items()):
        if assignment.run == run:
            with suppress(Conflict):
                await registry.assign(member, "")
            yield
    for bucket in OF_RUNS:
        # All have ended when it raises: a late one could meet a later run's key.
        keys = list(await bus.kv_all(bucket, f"{run}.>"))
        await some_at_once(bus.kv_delete(bucket, key) for key in keys)
        yield
    await bus.purge(subjects.EVENTS_STREAM, f"ev.{run}.>")
    yield
    for shard in range(shards_of(record)):
        await bus.kv_delete(subjects.STATUS, subjects.status_key(run, shard))
        yield
    # Late: a syncer that has not heard yet that it is to leave makes those that are missing.
    for stream in subjects.run_streams(run):
        await bus.delete_stream(stream)
        yield


# --- what was made again ------------------------------------------------------------------------


async def keep_removed(registry: Registry) -> None:
    """For ever."""
    leftovers = Leftovers(registry)
    await again_and_again(leftovers.look, "streams of deleted runs", LEFTOVERS_LOOK_S)


class Leftovers:
    """Of one coordinator: streams and keys that were made once more while their run was deleted.

    A syncer that has not heard yet that it is to leave makes streams that are missing, and so does
    another coordinator in the middle of a submission. A learner that hears late of its assignment
    begins a life. Nobody else would ever remove what they leave.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        # Run that has gone, and its id -> end of its watch, monotonic. While its mark is kept.
        self.until: dict[tuple[str, str], float] = {}
        self.begun = False  # whether those are known that had gone before the first look

    async def look(self) -> None:
        """One look, and what follows from it. Raises BusError."""
        now = ambient.monotonic()
        # The marks are asked, and not what this coordinator saw: a run may come and go between two
        # looks, and one that is only gone may have been lost by the hub, and this is all of it.
        marks = await self._marks()
        self.until = {
            place: self.until[place] if place in self.until else now + self._watched_s(mark)
            for place, mark in marks.items()
        }
        self.begun = True
        runs = self.registry.runs
        for run in sorted(run for (run, _), end in self.until.items() if now < end):
            if run not in runs:
                await self._remove(run)

    async def _marks(self) -> dict[tuple[str, str], Deleted]:
        """Of runs that are deleted, and not still being deleted. Raises BusError."""
        found = {}
        for run_id, entry in (await self.registry.bus.kv_all(subjects.DELETED)).items():
            mark = readable(entry.value, Deleted)
            if mark is not None and not self.registry.is_run(mark.run, run_id):
                found[mark.run, run_id] = mark
        return found

    def _watched_s(self, mark: Deleted) -> float:
        """For how long from now, in seconds. Of those that had gone before the first look, deleted
        by an earlier life of the coordinator or by another one, the mark says when that was."""
        if self.begun:
            return WATCHED_S
        # Whose clock was ahead had deleted it at most just now.
        return min(mark.at + WATCHED_S - ambient.wall(), WATCHED_S)

    async def _remove(self, run: str) -> None:
        bus = self.registry.bus
        for stream in subjects.run_streams(run):
            try:
                await bus.stream_info(stream)
            except NoStream:
                continue
            # Asked anew each time: another run of that name makes its record before its streams.
            if await bus.kv_get(subjects.RUNS, run) is not None:
                return
            await bus.delete_stream(stream)
            text = f"{stream} was there again after its run had been deleted: it is removed"
            await self.registry.tell("", "left-over", text, {"stream": stream})
        for bucket in OF_RUNS:
            for key, entry in (await bus.kv_all(bucket, f"{run}.>")).items():
                if await bus.kv_get(subjects.RUNS, run) is not None:
                    return
                # Somebody works for a run of that name by now: it is that run's key.
                with suppress(Conflict):
                    await bus.kv_delete(bucket, key, revision=entry.revision)
                log.info("a key of a deleted run removed", bucket=bucket, key=key)
