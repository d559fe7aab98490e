"""A standby: rebuilds history and store from snapshot, tape and contributions, and keeps up.

Every record is executed as the leader did it and every digest compared, so that taking over needs
nothing more, and a machine that would compute something else is found out before it leads.
"""

import asyncio
from dataclasses import dataclass

import structlog

from diloco_shared.config import RunSpec
from diloco_shared.edges.blobs import BlobIncomplete, get_blob
from diloco_shared.edges.bus import Bus
from diloco_shared.edges.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    ContributionManifest,
    InitManifest,
    PublicationManifest,
    TapeInit,
    TapeRecord,
    TapeRestore,
)
from diloco_shared.protocol.wire import WireError, decode
from diloco_syncer.edges.parts import load_recorded
from diloco_syncer.edges.snapshots import SnapshotStore
from diloco_syncer.edges.tape import Tape
from diloco_syncer.history import History, TapeFault
from diloco_syncer.replay import State, newest_published, payloads_needed, replay
from diloco_syncer.store import FragmentStore

log = structlog.get_logger()

# Time to read one contribution back, in seconds; it lies on the hub's own disk.
BLOB_TIMEOUT_S = 60.0
# Records executed between two looks at whether this process leads by now: some seconds of work.
BATCH_RECORDS = 64


class Purged(TapeFault):
    """The tape names something that UP no longer has: only a newer snapshot helps."""


@dataclass(slots=True)
class Recovered:
    """Where the run stands, and how that is known."""

    history: History
    store: FragmentStore | None
    published: tuple[int, ...]  # newest version of each fragment on DN; -1 none
    notes: list[str]


class Follower:
    """One process's copy of the run's state. After an exception only a new one is sound."""

    def __init__(
        self, spec: RunSpec, data: Bus, tape: Tape, snapshots: SnapshotStore, checkpoint_root: str
    ) -> None:
        self.spec = spec
        self.checkpoint_root = checkpoint_root
        self.data = data
        self.tape = tape
        self.snapshots = snapshots
        self.history = History(spec, tape.shard)
        self.store: FragmentStore | None = None
        self.covered = 0  # tape sequence of our own newest snapshot
        self.executed = 0
        self.complete = False  # has been at the tape's end
        self.notes: list[str] = []

    async def load(self) -> None:
        """Begin at our own newest snapshot, if there is one."""
        found, self.notes = await asyncio.to_thread(self.snapshots.newest)
        if found is None:
            return
        meta, arrays = found
        self.history = History.restore(self.spec, meta["history"])
        self.store = FragmentStore.restore(meta["store"], arrays, self.spec.algorithm)
        self.covered = self.history.seq
        self.notes.append(
            f"snapshot of record {self.history.seq}, round {self.history.next_round - 1}"
        )

    async def catch_up(self) -> bool:
        """Execute what has been added to the tape; whether that was all of it.

        Raises Purged when a contribution is gone, another TapeFault naming the record when a
        digest differs, BusError when the bus does not answer.
        """
        tail = await self.data.last(self.tape.stream, self.tape.subject)
        end = 0 if tail is None else tail.seq
        if end < self.history.seq:
            raise TapeFault(
                f"the tape ends at record {end}, our snapshot is of record {self.history.seq}: the "
                f"message server has lost its state (snapshots: {self.snapshots.folder})"
            )
        if end == self.history.seq:
            self.tape.end, self.complete = end, True
            return True
        records = await self.tape.read(after=self.history.seq, limit=BATCH_RECORDS)
        for seq, record in records:
            payloads = await payloads_of(self.spec.name, self.data, record)
            passing("follow" if self.complete else "replay")
            back = await self._back(record)
            self.store = await asyncio.to_thread(
                replay, self.history, self.store, record, seq, payloads, back
            )
            self.executed += 1
        await self._cover()
        return False

    async def _back(self, record: TapeRecord) -> State | None:
        """The state that a restore goes back to; Purged when it cannot be had."""
        if not isinstance(record, TapeRestore):
            return None
        try:
            return await asyncio.to_thread(
                load_recorded, self.spec, self.tape.shard, record, self.checkpoint_root
            )
        except (OSError, ValueError, KeyError) as error:
            raise Purged(f"the tape goes back to {record.source}, and {error}") from None

    async def _cover(self) -> None:
        """A snapshot of our own, once the leader's allows contributions to be purged."""
        if self.store is None or self.covered >= self.history.snapshot_covers:
            return
        meta = {"history": self.history.meta(), "store": self.store.meta()}
        self.covered, arrays = self.history.seq, self.store.state_arrays()
        try:
            await asyncio.to_thread(self.snapshots.save, self.covered, meta, arrays)
        except OSError as error:
            # What is in memory is sound; the next snapshot of the leader brings another try.
            log.error("snapshot not written, free disk space", error=str(error))

    async def recovered(self) -> Recovered:
        """For a leader that begins here."""
        published = await _published(self.spec.name, self.data, self.history)
        notes = [*self.notes, f"{self.executed} records executed up to {self.history.seq}"]
        return Recovered(self.history, self.store, published, notes)


async def payloads_of(run: str, data: Bus, record: TapeRecord) -> dict[str, bytes]:
    """The blobs that a record names, from UP; Purged when one is gone."""
    kind: type[InitManifest] | type[ContributionManifest] = (
        InitManifest if isinstance(record, TapeInit) else ContributionManifest
    )
    stream = subjects.up_stream(run)
    payloads: dict[str, bytes] = {}
    for subject in payloads_needed(record):
        stored = await data.last(stream, subject + ".m")
        if stored is None:
            raise Purged(f"the tape needs {subject}, which is no longer in {stream}")
        blob = decode(stored.payload, kind).blob
        try:
            payloads[subject] = await get_blob(data, stream, blob, timeout_s=BLOB_TIMEOUT_S)
        except BlobIncomplete:
            if await data.last(stream, subject + ".m") is None:
                raise Purged(f"{subject} was purged from {stream} while it was read") from None
            raise
    return payloads


async def _published(run: str, data: Bus, history: History) -> tuple[int, ...]:
    """Newest version of each fragment on DN in this epoch; -1 none."""
    manifests = []
    for stored in await data.fetch(
        subjects.dn_stream(run), f"dn.{run}.{history.epoch}.*.*.*.m", start_seq=1
    ):
        try:
            manifests.append(decode(stored.payload, PublicationManifest))
        except WireError:
            continue  # not ours to judge: it is simply not a publication
    return newest_published(history, manifests)
