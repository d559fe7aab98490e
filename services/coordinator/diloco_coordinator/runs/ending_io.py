"""Ends the runs that nobody else can end: stopped ones without a leader, ended ones unsettled."""

import structlog

from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import forced, run_id_of, shards_of
from diloco_shared import ambient
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.bus.status_key import Standing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord

log = structlog.get_logger()

# Between two looks, in seconds.
LOOK_S = 0.5


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
        for shard in range(shards_of(record)):
            key = subjects.status_key(run, shard)
            if why := registry.standings.overdue(record, shard, key, now):
                await _end(registry, record, shard, why)


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
