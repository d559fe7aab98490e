"""Keeps TAPE small: what snapshots cover goes to an archive beside the run's checkpoints.

A record is removed from the stream only after the segment that holds it is durable. The newest
record stays: the stream's own end is what appends are fenced by.
"""

import asyncio
import math
from collections.abc import Callable, Iterable

import structlog

from diloco_shared.budget.streams import RECORDS_IN_STREAM
from diloco_shared.bus.port import BusError, Stored, StreamInfo, Unavailable
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.checkpoints.checkpoints_io import digest_bytes
from diloco_shared.checkpoints.tape_archive_io import (
    SEGMENT_RECORDS,
    TapeArchive,
    of_one_segment,
)
from diloco_shared.process.crash_points import passing
from diloco_shared.protocol.pace import ANSWER_S
from diloco_syncer.context import RunContext
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.streams.purging_io import FULL, standbys_behind

log = structlog.get_logger()

# After a failure, and between two looks at standbys that are behind, in seconds.
RETRY_S = 5.0
# Records that are fetched at a time, each of 1 MiB at most: no more than a few go beyond what one
# segment takes.
BATCH_RECORDS = 16


class TapeArchiver:
    """Of one leader's term. `needed_from`: the oldest record that others read from the stream."""

    def __init__(
        self,
        context: RunContext,
        tape: Tape,
        archive: TapeArchive,
        needed_from: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.spec, self.me = context.spec, context.me
        self.control, self.snapshots = context.control, context.snapshots
        self.tape = tape
        self.archive, self.threads = archive, context.place_threads
        self.needed_from = needed_from
        self.wanted = asyncio.Event()
        self.turn = asyncio.Lock()
        self.agrees = False  # with the stream, which this process alone archives from now on
        tape.make_room = self.make_room

    def want(self) -> None:
        """A snapshot is durable: more may go."""
        self.wanted.set()

    async def work(self) -> None:
        """For ever."""

        async def look() -> bool:
            self.wanted.clear()
            async with self.turn:
                return not await self._archive(forced=False)

        while True:
            await self.wanted.wait()
            trouble = (BusError, OSError)
            await again_and_again(look, "the tape's archive", RETRY_S, trouble=trouble)

    async def make_room(self) -> str:
        """The stream is full: archive what may go, at once; why that is nothing, or "" """
        async with self.turn:
            before = (await self.control.stream_info(self.tape.stream)).messages
            try:
                await self._archive(forced=True)
            except OSError as error:
                return f"its archive cannot be written: {error}"
            after = (await self.control.stream_info(self.tape.stream)).messages
        return "" if after < before else "no snapshot covers what it holds"

    async def _archive(self, *, forced: bool) -> bool:
        """Move what may go, if there is enough of it; whether standbys are waited for."""
        info = await self.control.stream_info(self.tape.stream)
        crowded = bool(info.bytes_max) and info.bytes > FULL * info.bytes_max
        if not (forced or crowded or self._many(info)):
            return False
        covers = await asyncio.to_thread(self.snapshots.covers)
        # The oldest that is kept: the newer one may turn out to be torn.
        last = min(min(covers, default=0), self.tape.end - 1)
        waited = False
        if not (forced or crowded):
            place = (self.spec.name, self.tape.shard)
            behind = await standbys_behind(self.control, *place, self.me, last)
            waited = bool(behind)
            last = min([last, *(m.tape_seq for m in behind)])
            last = int(min(last, self.needed_from() - 1))
        if not await self._move(last) and forced:
            # Nothing can be appended, so no older snapshot will ever be replaced.
            newest = await asyncio.to_thread(self._newest_sound, covers)
            await self._move(min(newest, self.tape.end - 1))
        return waited

    def _newest_sound(self, covers: Iterable[int]) -> int:
        """What the newest snapshot covers that is not torn; it is read whole to know that."""
        newest_first = sorted(covers, reverse=True)
        return next((seq for seq in newest_first if self.snapshots.sound(seq)), 0)

    async def _move(self, last: int) -> int:
        """Archive this shard's records up to `last`; how many segments that made."""
        moved = 0
        await self._agree()
        while gone := await self._oldest(last):
            moved += 1
            passing("archive")
            self.agrees = False  # what is left behind may be written all the same
            place = self.archive.vault.root
            segment = await self.threads.within(ANSWER_S, place, self.archive.write, gone)
            self.agrees = True
            passing("archived")
            # Whoever stood still meanwhile may have a successor, and then removes nothing. Not by
            # the lease: on a hub that is full nobody can renew it, and this is what makes room.
            await self.tape.still_ours()
            below = segment.last + 1
            await self.control.purge(self.tape.stream, self.tape.subject, below_seq=below)
            log.info("tape archived", first=segment.first, last=segment.last)
        return moved

    async def _oldest(self, last: int) -> list[Stored]:
        """This shard's oldest records in the stream, up to `last`: as many as one segment takes."""
        found: list[Stored] = []
        while True:
            after, room = found[-1].seq if found else 0, SEGMENT_RECORDS - len(found)
            wanted = min(room, BATCH_RECORDS)
            more = await self.control.fetch(
                self.tape.stream, self.tape.subject, start_seq=after + 1, limit=wanted
            )
            found += [r for r in more if r.seq <= last]
            taken = of_one_segment(found)
            if taken < len(found) or wanted == room or len(more) < wanted or more[-1].seq >= last:
                break
        if found and await self._first() != found[0].seq:
            # What it removed is missing between two batches: no segment has such a gap.
            raise Unavailable("another leader archives the tape: it is looked at again")
        return found[:taken]

    async def _agree(self) -> None:
        """The archive has nothing that the stream has otherwise: before it gets more.

        It may have what the stream has, too. Another leader, which stands still between its write
        and its purge, removes that from the stream yet.
        """
        if self.agrees:
            return
        place = self.archive.vault.root
        # Before the stream: what is written since is of another leader, and none of ours to judge.
        segments = await self.threads.within(ANSWER_S, place, self.archive.segments)
        first = await self._first()
        if not first:
            return
        for segment in (s for s in segments if s.last >= first):
            there = await self._digests(max(first, segment.first), segment.last)
            if await self._first() != first:
                raise Unavailable("another leader archives the tape: it is looked at again")
            what = self.spec.name, segment, first, there
            if await self.threads.within(ANSWER_S, place, self.archive.cut, *what):
                log.info("archived records of a lost history go", key=segment.key, first=first)
        self.agrees = True

    async def _first(self) -> int:
        """Sequence of this shard's oldest record in the stream; 0: there is none."""
        oldest = await self.control.fetch(self.tape.stream, self.tape.subject, limit=1)
        return oldest[0].seq if oldest else 0

    async def _digests(self, first: int, last: int) -> dict[int, str]:
        """Of this shard's records from `first` to `last` in the stream."""
        found: dict[int, str] = {}
        while first <= last:
            batch = await self.control.fetch(
                self.tape.stream, self.tape.subject, start_seq=first, limit=BATCH_RECORDS
            )
            found |= {r.seq: digest_bytes(r.payload) for r in batch if r.seq <= last}
            first = batch[-1].seq + 1 if batch else last + 1
        return found

    def _many(self, info: StreamInfo) -> bool:
        return info.messages > RECORDS_IN_STREAM * self.spec.algorithm.shards
