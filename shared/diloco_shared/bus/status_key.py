"""The key that says where a run, or one syncer shard of it, stands: written by compare-and-set.

Its leader writes it, and the coordinator once there is no leader left to end a run.
"""

from functools import partial

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, Conflict
from diloco_shared.bus.repeating import against_others
from diloco_shared.bus.run_streams import exists
from diloco_shared.bus.stored_records import readable, readable_at, write_if
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunStatus
from diloco_shared.protocol.run_states import keeps, over
from diloco_shared.protocol.wire import encode

log = structlog.get_logger()

# A status of a later term that nobody renews is one of a term that the tape has lost: who holds the
# lease replaces it, after this many seconds by its own clock (a leader renews twice a second).
SILENT_S = 30.0


async def shown(control: Bus, run: str, run_id: str, shard: int = 0) -> RunStatus | None:
    """What is shown of a run, or one of its shards, now; None: nothing. Raises BusError."""
    key = subjects.status_key(run, shard)
    status = await readable_at(control, subjects.STATUS, key, RunStatus)
    return status if status is not None and status.run_id in ("", run_id) else None


class Standing:
    """One writer's view of one key. Every call raises BusError."""

    def __init__(self, control: Bus, run: str, run_id: str, shard: int = 0) -> None:
        self.control = control
        self.run, self.run_id = run, run_id
        self.key = subjects.status_key(run, shard)
        self.revision: int | None = None  # 0: there is no key; None: not read yet
        self.there: RunStatus | None = None  # of this run
        self.foreign = False  # it is of another run of this name
        self.seen = -1  # the newest revision that was read or written here
        self.seen_at = 0.0  # since when that is known

    async def read(self) -> RunStatus | None:
        """What is shown of this run now."""
        entry = await self.control.kv_get(subjects.STATUS, self.key)
        self.revision, self.there, self.foreign = 0, None, False
        if entry is not None and entry.value is not None:
            self.revision = entry.revision
            # Nobody decides upon what nobody can read: it may be replaced.
            found = readable(entry.value, RunStatus)
            self.foreign = found is not None and found.run_id not in ("", self.run_id)
            self.there = None if self.foreign else found
        self._saw()
        return self.there

    def _saw(self) -> None:
        if self.revision is not None and self.revision != self.seen:
            self.seen, self.seen_at = self.revision, ambient.monotonic()

    async def write(self, status: RunStatus) -> str:
        """Show this; why it must not be shown, or "". Once somebody else wrote, look again."""
        try:  # a second writer is deposed, or the coordinator: neither goes on
            return await against_others(partial(self._written, status))
        except Conflict:
            return "others write it without end"

    async def _written(self, status: RunStatus) -> str:
        """Why it must not be shown, or ""; Conflict if somebody else wrote since the last look."""
        if self.revision is None:
            await self.read()
        if why := await self._why_not(status):
            self.revision = None
        else:
            await self._set(status)
        return why

    async def _why_not(self, status: RunStatus) -> str:
        # Where nothing is shown, the run may have been deleted under us.
        nothing = self.there is None or self.foreign
        if nothing and not await exists(self.control, self.run, self.run_id):
            return "the run is deleted, or another one has its name"
        if self.there is None:
            return ""
        why = keeps(self.there, status)
        lower = status.term < self.there.term and not over(self.there)
        silent = ambient.monotonic() - self.seen_at > SILENT_S
        if why and lower and silent and status.epoch == self.there.epoch:
            log.warning("status of a lost term replaced", key=self.key, term=self.there.term)
            return ""
        return why

    async def _set(self, status: RunStatus) -> None:
        value, revision = encode(status), self.revision
        self.revision = None  # until it is known what became of it
        new = await write_if(self.control, subjects.STATUS, self.key, value, revision or 0)
        self.revision, self.there, self.foreign = new, status, False
        self._saw()
