"""What the key-value buckets say, mirrored in memory; and the few writes a coordinator makes.

Nothing lives here alone: a coordinator that dies, or a second one, loses nothing.
"""

import asyncio
import time
from collections import deque
from typing import Any, TypeVar

import structlog

from diloco_coordinator.scheduler import MemberView, RunView, schedule
from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus, BusError, StreamSpec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Assignment,
    Event,
    MemberRecord,
    Message,
    RunRecord,
    RunStatus,
)
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

M = TypeVar("M", bound=Message)

# Events kept for people: some hours of a lively run. The stream on disk is bounded likewise.
EVENTS_MAX = 20_000
EVENTS_BYTES_MAX = 64 << 20
# Between two looks at whether assignments fit, in seconds.
SCHEDULE_S = 0.3
RETRY_S = 0.5


class Registry:
    """A view of the cluster."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.members: dict[str, MemberRecord] = {}
        self.gone: dict[str, tuple[MemberRecord, float]] = {}  # record and since when
        self.runs: dict[str, RunRecord] = {}
        self.statuses: dict[str, RunStatus] = {}
        self.assigned: dict[str, str] = {}
        self.waiting: dict[str, str] = {}
        self.events: deque[tuple[int, Event]] = deque(maxlen=EVENTS_MAX)
        self.changed = asyncio.Condition()
        self.ready = False

    async def prepare(self) -> None:
        """Buckets and the event stream exist afterwards; waits for the bus."""
        while True:
            try:
                for bucket in subjects.BUCKETS:
                    await self.bus.ensure_bucket(bucket)
                await self.bus.ensure_stream(
                    StreamSpec(
                        subjects.EVENTS_STREAM,
                        (subjects.EVENTS_FILTER,),
                        EVENTS_BYTES_MAX,
                        drop_oldest=True,
                    )
                )
                await self.reload()
                self.ready = True
                return
            except BusError as error:
                log.warning("bus not ready", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def reload(self) -> None:
        """Everything there is now, before the watches begin."""
        for bucket in (
            subjects.MEMBERS,
            subjects.RUNS,
            subjects.STATUS,
            subjects.ASSIGNMENTS,
        ):
            for key, entry in (await self.bus.kv_all(bucket)).items():
                self._set(bucket, key, entry.value)

    async def watch(self, bucket: str) -> None:
        """Mirror one bucket, for ever."""
        async with self.bus.kv_watch(bucket) as entries:
            async for entry in entries:
                self._set(bucket, entry.key, entry.value)
                await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _set(self, bucket: str, key: str, value: bytes | None) -> None:
        try:
            if bucket == subjects.MEMBERS:
                self._member(key, value)
            elif bucket == subjects.RUNS:
                _put(self.runs, key, value, RunRecord)
            elif bucket == subjects.STATUS:
                _put(self.statuses, key, value, RunStatus)
            else:
                self.assigned.pop(key, None)
                if value is not None:
                    self.assigned[key] = decode(value, Assignment).run
        except WireError as error:
            log.error("unreadable record", bucket=bucket, key=key, error=str(error))

    def _member(self, key: str, value: bytes | None) -> None:
        if value is not None:
            self.members[key] = decode(value, MemberRecord)
            self.gone.pop(key, None)
        elif key in self.members:
            self.gone[key] = (self.members.pop(key), time.time())

    async def read_events(self) -> None:
        """Mirror the event stream, for ever."""
        async with self.bus.read(subjects.EVENTS_STREAM, subjects.EVENTS_FILTER) as messages:
            async for stored in messages:
                if self.events and stored.seq <= self.events[-1][0]:
                    continue  # a repeat after a reconnect
                try:
                    self.events.append((stored.seq, decode(stored.payload, Event)))
                except WireError as error:
                    log.warning("unreadable event", seq=stored.seq, error=str(error))
                    continue
                await self._notify()

    # --- scheduling ----------------------------------------------------------------------------

    def over(self, run: str) -> bool:
        """Whether nobody needs to work for a run any more."""
        status = self.statuses.get(run)
        if status is not None:
            return status.state in ("finished", "stopped")
        return self.runs[run].desired == "stopped"  # stopped before it began

    async def keep_assigned(self) -> None:
        """Write assignments that members and runs call for, for ever."""
        while True:
            try:
                await self._assign()
            except BusError as error:
                log.warning("assignments not written", error=str(error))
            await asyncio.sleep(SCHEDULE_S)

    async def _assign(self) -> None:
        members = [
            MemberView(m.id, m.role, alive=True, draining=m.draining) for m in self.members.values()
        ] + [MemberView(m.id, m.role, alive=False) for m, _ in self.gone.values()]
        runs = []
        for record in sorted(self.runs.values(), key=lambda r: (r.created_at, r.name)):
            spec = RunSpec.model_validate(record.spec)
            runs.append(
                RunView(
                    record.name,
                    spec.membership.learners_min,
                    spec.membership.learners_max,
                    self.over(record.name),
                )
            )
        plan = schedule(members, runs, self.assigned)
        self.waiting = plan.waiting
        for member, run in plan.changes.items():
            record_ = Assignment(member=member, run=run, at=time.time())
            await self.bus.kv_put(subjects.ASSIGNMENTS, member, encode(record_))
            self.assigned[member] = run

    # --- writes --------------------------------------------------------------------------------

    async def put_run(self, record: RunRecord, *, new: bool) -> None:
        """Create (Conflict if the name is taken) or replace a run's record."""
        if new:
            await self.bus.kv_create(subjects.RUNS, record.name, encode(record))
        else:
            await self.bus.kv_put(subjects.RUNS, record.name, encode(record))
        self.runs[record.name] = record

    async def delete_run(self, run: str) -> None:
        """Remove a run and everything that is kept of it on the bus."""
        for stream in subjects.run_streams(run):
            await self.bus.delete_stream(stream)
        for bucket in (subjects.SHARDS, subjects.INCARNATIONS):
            for key in await self.bus.kv_all(bucket):
                if key.startswith(f"{run}."):
                    await self.bus.kv_delete(bucket, key)
        await self.bus.purge(subjects.EVENTS_STREAM, f"ev.{run}.>")
        await self.bus.kv_delete(subjects.STATUS, run)
        await self.bus.kv_delete(subjects.RUNS, run)
        self.runs.pop(run, None)
        self.statuses.pop(run, None)

    async def tell(self, run: str, kind: str, text: str, data: dict[str, Any]) -> None:
        """Write to the event log."""
        event = Event(
            run=run or "cluster",
            kind=kind,
            source="coordinator",
            text=text[:500],
            data=data,
            at=time.time(),
        )
        await self.bus.append(subjects.event(event.run, kind), encode(event))


def _put(there: dict[str, M], key: str, value: bytes | None, kind: type[M]) -> None:
    if value is None:
        there.pop(key, None)
    else:
        there[key] = decode(value, kind)
