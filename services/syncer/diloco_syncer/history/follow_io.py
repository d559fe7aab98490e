"""A standby: rebuilds history and store from snapshot, tape and contributions, and keeps up.

Every record is executed as the leader did it and every digest compared, so that taking over needs
nothing more, and a machine that would compute something else is found out before it leads.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from diloco_shared.bus.blobs import BlobIncomplete, fresh, get_blob
from diloco_shared.bus.port import Bus, BusError
from diloco_shared.bus.stored_records import readable
from diloco_shared.process.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    AHEAD,
    Blob,
    ContributionManifest,
    InitManifest,
    TapeEpoch,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeTerm,
)
from diloco_shared.protocol.pace import ANSWER_S
from diloco_shared.protocol.wire import decode, decode_tape
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints import gone_back_io as gone_back
from diloco_syncer.checkpoints.parts_io import bytes_of, load_recorded
from diloco_syncer.history.history import History, TapeFault, is_of
from diloco_syncer.history.own_snapshots_io import OwnSnapshots
from diloco_syncer.history.replay import (
    RestoredState,
    newest_keyframes,
    newest_published,
    payloads_needed,
    replay,
)
from diloco_syncer.history.tape_io import Purged as Purged
from diloco_syncer.history.tape_io import Tape, Unread
from diloco_syncer.leadership.rebirth import Reborn
from diloco_syncer.merging.payloads_io import FETCHES
from diloco_syncer.merging.published_io import (
    Unpublished,
    manifests_on,
    read_newest,
    read_recorded,
)
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.snapshots.finding_io import Finder, FoundState

log = structlog.get_logger()

# Reads of a contribution whose manifest is there and whose chunks do not come: then it is damaged.
READS_MAX = 2
# Between two looks at whether the manifest of what is being read is still there, in seconds. The
# leader may have removed both, and whoever is to lead cannot wait as long as for slow chunks.
THERE_S = 2.0
# Records executed between two looks at whether this process leads by now: some seconds of work.
BATCH_RECORDS = 64
# Manifests of one subject that are read at once where the newest is not the one: some KB each.
BATCH_MANIFESTS = 16

# Told of the record that a history goes up to, and of the tape's end.
Progress = Callable[[int, int], None]


class Replaced(Exception):
    """The tape has other records than this process has executed, or UP has what was gone: the hub
    was put back from a backup. Whoever begins anew sees what it has."""


class Damaged(Unread):
    """The tape names something that UP has, and does not give whole."""


@dataclass(slots=True)
class Recovered:
    """Where the run stands, and how that is known."""

    history: History
    store: FragmentStore | None
    published: tuple[int, ...]  # newest version of each fragment on DN; -1 none
    notes: list[str]
    reborn: Reborn | None = None  # the state is what was published
    keyframes: tuple[int, ...] = ()  # newest version of each that is there whole; -1 none
    unsure: bool = False  # UP may have lost what was executed from it
    uncovered: bool = False  # no snapshot of our own covers what may be gone from UP

    def take_store(self) -> FragmentStore | None:
        """The store, once: whoever has it may replace it, and then it shall be gone."""
        store, self.store = self.store, None
        return store


class Follower:
    """One process's copy of the run's state. After an exception only a new one is sound."""

    def __init__(
        self,
        spec: RunSpec,
        data: Bus,
        tape: Tape,
        finder: Finder,
        leads: Callable[[], bool] = lambda: False,
    ) -> None:
        """`leads`: whether this process has the lease: then nothing is done but what it takes to
        lead."""
        self.spec = spec
        self.data = data
        self.tape = tape
        self.finder = finder
        self.snapshots = finder.snapshots
        self.history = History(spec, tape.shard)
        self.store: FragmentStore | None = None
        self.own = OwnSnapshots(self.snapshots, data, leads)
        self.executed = 0
        self.complete = False  # has been at the tape's end
        self.notes: list[str] = []
        self.put_back = 0  # the newest record executed that the restore of a hub has written
        self.unread = 0  # how often a contribution was not whole
        self.reborn: Reborn | None = None

    async def load(self) -> None:
        """Begin at our own newest snapshot, if there is one. Raises BusError or OSError.

        Those of records that the tape has lost go: they would pass for newer than what follows.
        """
        while True:
            found, self.notes = await asyncio.to_thread(self.finder.own)
            if found is None:
                return
            # One that is past the tape's end says that the server has lost what it must keep,
            # unless somebody has taken the tape back on purpose.
            lost = await self.tape.newest() < found.seq and not await self._taken_back(found)
            if lost or await self._is_of_tape(found.seq, found.history):
                self._begin(found)
                self.own.covered = self.history.seq
                return
            log.warning("a snapshot of records that the tape has lost goes", covers=found.seq)
            await asyncio.to_thread(self.snapshots.remove, found.seq)

    async def load_newer(self, after: int, *, checkpoints: bool) -> bool:
        """Begin at anybody's snapshot that covers more than record `after`; False for none.

        `checkpoints`: look among those as well, where nothing is here. Raises OSError or
        ValueError like `Finder`, and BusError.
        """
        here = partial(asyncio.to_thread, self.finder.newer, after)
        there = partial(self.finder.newest_checkpoint, self.tape.threads, after)
        for find in (here, *([there] if checkpoints else [])):
            before = math.inf
            while (found := await find(before=before)) is not None:
                if await self._is_of_tape(found.seq, found.history):
                    self._begin(found)
                    return True
                before = found.seq
        return False

    async def _is_of_tape(self, covers: int, meta: dict[str, Any]) -> bool:
        """Whether the record that this state covers is still on the tape, or nobody can tell."""
        try:
            records = await self.tape.read(after=covers - 1, limit=1)
        except Purged:
            return True  # it was archived, and the archive cannot be read now
        if records and records[0][0] == covers:
            return is_of(meta, records[0][1])
        info = await self.data.stream_info(self.tape.stream)
        return covers < info.first_seq  # it was archived, and is gone from there

    async def _taken_back(self, found: FoundState) -> bool:
        """Whether the tape has begun an epoch later than this state's: a backup was restored.

        A tape that lost its end is in the state's own epoch, or in one before it.
        """
        end = await self.tape.newest()
        try:
            records = await self.tape.read(after=max(end - BATCH_RECORDS, 0), limit=BATCH_RECORDS)
        except Purged:
            return False
        epochs = [r.epoch for _, r in records if isinstance(r, TapeEpoch | TapeTerm | TapeRound)]
        return max(epochs, default=0) > int(found.history["epoch"])

    def _begin(self, found: FoundState) -> None:
        self.history, self.store = History.restore(self.spec, found.history), found.store
        rounds = self.history.next_round - 1
        place = f"record {self.history.seq} (round {rounds})"
        self.notes.append(f"this syncer begins with the {found.source}, which goes up to {place}")

    async def catch_up(self) -> bool:
        """Execute what has been added to the tape; whether that was all of it.

        Raises Purged when a contribution is gone, another TapeFault naming the record when a
        digest differs, Replaced, and BusError when the bus does not answer.
        """
        end = await self.tape.newest()
        if end < self.history.seq:
            raise TapeFault(
                f"the tape ends at record {end}, our snapshot is of record {self.history.seq}: the "
                f"message server has lost its state (snapshots: {self.snapshots.folder})"
            )
        await self.look_back()
        if end == self.history.seq:
            self.tape.end, self.tape.tail, self.complete = end, self.history.tail, True
            if self.reborn is None:  # the state is the tape's
                self.own.cover(self.history, self.store)
            return True
        if self.reborn is not None:
            raise Purged(f"record {end} was written by a syncer that has more than is published")
        for stored in await self.tape.stored(self.history.seq, limit=BATCH_RECORDS):
            record = decode_tape(stored.payload)
            payloads = await self._payloads(record)
            passing("follow" if self.complete else "replay")
            if isinstance(record, TapeEpoch) and record.epoch >= self.history.epoch + AHEAD:
                self.put_back = stored.seq
            await self.own.may_replace(record)
            back = await self._back(record)
            self.store = await asyncio.to_thread(
                replay,
                self.history,
                self.store,
                record,
                stored.seq,
                payloads,
                back,
                self.snapshots.shelf,
            )
            self.executed += 1
        self.own.cover(self.history, self.store)
        return False

    def let_go(self) -> None:
        """Keep nothing large: another goes on."""
        self.store = None
        self.own.break_off()

    async def look_back(self) -> bool:
        """Whether the server has begun a new life: it may have other records than before."""
        if (life := self.tape.bus.life) == self.tape.life:
            return False
        await self._still_there()
        self.tape.life = life
        return True

    async def _still_there(self) -> None:
        seq = self.history.seq
        if seq and not await self._is_of_tape(seq, self.history.meta()):
            raise Replaced(f"record {seq} of the tape is another one than it was")

    async def _payloads(self, record: TapeRecord) -> dict[str, bytes]:
        """What the record names; Damaged when it was read in vain often enough."""
        try:
            payloads = await payloads_of(self.spec.name, self.data, record)
        except BlobIncomplete as error:
            self.unread += 1
            if self.unread < READS_MAX:
                raise
            raise Damaged(f"the tape needs what is damaged: {error}") from None
        self.unread = 0
        return payloads

    async def readable(self) -> bool:
        """Whether what was `Unread` can be read after all: a server may stall, a store be away."""
        try:
            for _, record in await self.tape.read(after=self.history.seq, limit=1):
                await payloads_of(self.spec.name, self.data, record)
                await self._back(record)
        except (BlobIncomplete, Purged):
            return False
        return True

    async def begin_again(
        self, known: History, reason: str, progress: Progress = lambda seq, end: None
    ) -> None:
        """Take what is published for the state, and all else from the tape after `known`.

        Raises Unpublished, Purged when a restore on the tape has lost its checkpoint and its
        history was not kept, Replaced, or BusError. After these but Replaced the history says what
        the tape says up to some record, and another follower may go on after it.
        """
        self.history = History.restore(self.spec, known.meta())
        await self._still_there()  # `known` may be of a life of the server before
        end = await self.tape.newest()
        while batch := await self.tape.stored(self.history.seq, limit=BATCH_RECORDS):
            for stored in batch:
                record = decode_tape(stored.payload)
                if isinstance(record, TapeRestore):
                    meta = await self._history_of(record)
                    self.history.resume(meta, record, stored.seq)
                else:
                    self.history.apply(record, stored.seq)
            progress(self.history.seq, max(end, self.history.seq))
        if not self.history.initialised:
            raise Unpublished("nothing has been published yet")
        h = self.history
        self.store, self.reborn = await read_newest(h, self.data, reason, self.snapshots.shelf)
        published = self.reborn.versions, self.reborn.anchor_digests
        if h.outcome and published != (tuple(h.versions), tuple(h.anchor_digests)):
            raise Unpublished("the run is over, and its last versions are not published")
        self.notes.append(f"this syncer begins again from what is published: {reason}")

    async def _back(self, record: TapeRecord) -> RestoredState | FragmentStore | None:
        """The state that a restore or a rebirth speaks of; Purged when it cannot be had."""
        if isinstance(record, TapeRebirth):
            try:
                return await read_recorded(self.history, self.data, record, self.snapshots.shelf)
            except Unpublished as error:
                raise Purged(f"the run began again from what was published, and {error}") from None
        if not isinstance(record, TapeRestore):
            return None
        # Two stores are twice what a syncer needs: beside one, the other does not lie in memory.
        aside = None if self.store is None else self.snapshots.folder
        try:
            which = self.spec, self.tape.shard, record.source, self.finder.root
            return await self.tape.threads.read(
                self.finder.root,
                partial(bytes_of, *which, self.finder.places),
                load_recorded,
                self.spec,
                self.tape.shard,
                record,
                self.finder.root,
                self.snapshots.shelf,
                self.finder.places,
                aside,
            )
        except (OSError, ValueError, KeyError) as error:
            raise Unread(f"the tape goes back to {record.source}, and {error}") from None

    async def _history_of(self, restore: TapeRestore) -> dict[str, Any]:
        """`History.meta` of what a restore goes back to, without its numbers."""
        where = self.spec, self.tape.shard, self.finder.root
        try:
            threads, root = self.tape.threads, self.finder.root
            kept = await threads.within(ANSWER_S, root, gone_back.found, *where, restore)
        except (OSError, ValueError) as error:
            log.warning("what a restore goes back to is not read", error=str(error))
            kept = None
        if kept is not None:
            return kept
        back = await self._back(restore)
        assert isinstance(back, RestoredState)
        return back.history

    async def recovered(self) -> Recovered:
        """For a leader that begins here."""
        h = self.history
        manifests = await manifests_on(self.spec.name, self.data, str(h.epoch))
        published, keyframes = newest_published(h, manifests), newest_keyframes(h, manifests)
        notes = [*self.notes, executed(self.executed, h.seq)]
        unsure = self.data.life != self.own.life and not self.data.several_nodes
        # A backup has the tape of one moment and UP of a later one, which may lack what a snapshot
        # covers that this tape does not know.
        uncovered = self.own.covered < max(h.snapshot_covers, self.put_back)
        return Recovered(h, self.store, published, notes, self.reborn, keyframes, unsure, uncovered)


def executed(records: int, seq: int) -> str:
    """For people: how many records of the tape a syncer has executed, up to that of this number."""
    if not seq:
        return "the run's tape is empty, so this syncer had nothing to execute"
    many = "1 record" if records == 1 else f"{records} records"
    return f"this syncer has executed {many} of the run's tape, up to record {seq}"


async def blob_of(data: Bus, stream: str, record: TapeRecord, subject: str) -> Blob | None:
    """What the manifest names that a record speaks of; None once it is gone. Raises WireError.

    A subject may hold several manifests: of two lives of a learner, or of one that lies after it
    was merged. A round's record says by its digest which of them counts.
    """
    kind: type[InitManifest] | type[ContributionManifest] = (
        InitManifest if isinstance(record, TapeInit) else ContributionManifest
    )
    stored = await data.last(stream, subject + ".m")
    if stored is None:
        return None
    newest = readable(stored.payload, kind)
    verdicts = record.verdicts if isinstance(record, TapeRound) else ()
    for digest in (v.digest for v in verdicts if v.subject == subject):
        if newest is None or newest.blob.digest != digest:
            named = await _blob_with(digest, data, stream, subject)
            if named is not None:
                return named
    return decode(stored.payload, kind).blob


async def _blob_with(digest: str, data: Bus, stream: str, subject: str) -> Blob | None:
    """What the first manifest on a contribution's subject names that has this digest."""
    start_seq = 1
    where = stream, subject + ".m"
    while batch := await data.fetch(*where, start_seq=start_seq, limit=BATCH_MANIFESTS):
        for stored in batch:
            manifest = readable(stored.payload, ContributionManifest)
            if manifest is not None and manifest.blob.digest == digest:
                return manifest.blob
        start_seq = batch[-1].seq + 1
    return None


async def payloads_of(run: str, data: Bus, record: TapeRecord) -> dict[str, bytes]:
    """The blobs that a record names, from UP; Purged when one is gone."""
    stream = subjects.up_stream(run)
    # Initial parameters become the store's arrays.
    take = fresh if isinstance(record, TapeInit) else None
    turns = asyncio.Semaphore(FETCHES)

    async def still_there(subject: str) -> None:
        if await data.last(stream, subject + ".m") is None:
            raise Purged(f"{subject} was purged from {stream} while it was read")

    async def fetched(subject: str) -> bytes:
        async with turns:
            blob = await blob_of(data, stream, record, subject)
            if blob is None:
                raise Purged(f"the tape needs {subject}, which is no longer in {stream}")
            getting = asyncio.create_task(get_blob(data, stream, blob, take=take))
            try:
                while not (await asyncio.wait({getting}, timeout=THERE_S))[0]:
                    with suppress(BusError):  # as for what is being read: it goes on by itself
                        await still_there(subject)
                return await getting
            except BlobIncomplete:
                await still_there(subject)
                raise
            finally:
                getting.cancel()

    needed = [*payloads_needed(record)]
    tasks = [asyncio.create_task(fetched(subject)) for subject in needed]
    try:
        return dict(zip(needed, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
