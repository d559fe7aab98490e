"""A follower's own snapshots, which it writes beside what it executes.

It covers by them what the leader's allow UP to be purged of. Of billions of parameters that takes
minutes, in which the leader may die: so a follower goes on meanwhile, and is behind by no more than
a slow disk makes of it. What rounds replace before it is written lies in memory twice, and so a
merge waits for the disk as it does at a leader (merging/numbers_io.py).

Once this process has the lease it waits for no disk: the snapshot is broken off, and whoever leads
begins with one of its own.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import structlog

from diloco_shared.bus.port import Bus
from diloco_shared.protocol.messages import TapeRebirth, TapeRecord, TapeRestore, TapeRound
from diloco_syncer.events import Snapshot
from diloco_syncer.history.history import History
from diloco_syncer.merging.numbers_io import DiskWrite, Unwritten, may_replace, soonest_first
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.snapshots.snapshots_io import BrokenOff, SnapshotStore

log = structlog.get_logger()


class OwnSnapshots:
    """Of one follower. `leads`: whether this process has the lease by now."""

    def __init__(self, snapshots: SnapshotStore, data: Bus, leads: Callable[[], bool]) -> None:
        self.snapshots = snapshots
        self.data = data
        self.leads = leads
        self.covered = 0  # tape sequence of the newest
        self.begun = 0  # and of the newest that was begun, unless it was broken off
        # Of the server, in which all was read that none covers; a later one may have lost it.
        self.life = data.life
        self.unwritten: dict[type[DiskWrite], Unwritten] = {}  # of the one that is being written
        self.task: asyncio.Task[None] | None = None
        self.broken = threading.Event()  # its thread shall end

    def cover(self, history: History, store: FragmentStore | None) -> None:
        """Begin one of now, if the leader has a newer one; one at a time.

        Raises what ended the one before, if it was neither the disk nor ourselves.
        """
        if self.task is not None and self.task.done():
            done, self.task = self.task, None
            done.result()
        due = max(self.covered, self.begun) < history.snapshot_covers
        if store is None or self.task is not None or self.leads() or not due:
            return
        meta = {"history": history.meta(), "store": store.meta()}
        arrays = soonest_first(store, history.owned, history.next_round)
        self.begun, self.broken = history.seq, threading.Event()
        self.unwritten[Snapshot] = Unwritten(arrays)
        self.task = asyncio.create_task(
            self._write(history.seq, meta, arrays, self.broken, self.data.life)
        )

    async def _write(
        self,
        seq: int,
        meta: dict[str, Any],
        arrays: dict[str, Any],
        broken: threading.Event,
        life: str,
    ) -> None:
        try:
            await asyncio.to_thread(self.snapshots.save, seq, meta, arrays, broken.is_set)
        except BrokenOff:
            log.info("a snapshot is broken off", covers=seq)
        except OSError as error:
            # What is in memory is sound; the next snapshot of the leader brings another try.
            log.error("snapshot not written, free disk space", error=str(error))
        else:
            self.covered, self.life = seq, life  # what was read in an earlier one is covered
        arrays.clear()  # nobody writes the rest any more

    async def may_replace(self, record: TapeRecord) -> None:
        """Once enough is written of what executing `record` replaces.

        A restore or a rebirth replaces all of it, and what is covered is of no use after that.
        """
        if isinstance(record, TapeRound) and record.outcome == "committed":
            await may_replace(self.unwritten, record.fragment, self.leads)
        if self.leads() or isinstance(record, TapeRestore | TapeRebirth):
            self.break_off()

    def break_off(self) -> None:
        """Write no more of what is being written, as soon as its thread has another look."""
        self.broken.set()
        self.unwritten.clear()
        self.begun = 0
