"""The tape in JetStream: one subject per shard, appended to only at its known end.

The oldest records lie in an archive (`tape_archive`); readers here find them there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import (
    Bus,
    BusError,
    Conflict,
    Refused,
    Stored,
    StreamFull,
    TransferProgress,
    Unavailable,
)
from diloco_shared.checkpoints.place_threads_io import PlaceThreads
from diloco_shared.checkpoints.tape_archive_io import TapeArchive, has_left, read_tape
from diloco_shared.checkpoints.vault_io import VaultError
from diloco_shared.process.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeRecord
from diloco_shared.protocol.pace import ANSWER_S
from diloco_shared.protocol.wire import WireError, decode_tape, encode
from diloco_syncer.history.history import Identity, TapeFault, identity

log = structlog.get_logger()

T = TypeVar("T")

# Pause between two looks at a server that does not answer, in seconds.
RETRY_S = 0.3
# Between two attempts at a full stream, in seconds: room is made by people, or the next snapshot.
FULL_RETRY_S = 1.0


class Deposed(Exception):
    """Another leader has appended: this one must not decide anything more."""


class TapeReplaced(Deposed):
    """The tape has less than this process has written, or other records: the hub may have been put
    back from a backup, and what this process has may be of a history that is lost."""


class Purged(TapeFault):
    """What the tape needs, or records of its own, are gone: only a newer snapshot helps."""


class Unread(Purged):
    """What the tape needs may be there, and could not be read: perhaps it can be later."""


async def _no_room() -> str:
    return "nobody archives it"


class Tape:
    """Reads from the start, appends at the end."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        shard: int = 0,
        archive: TapeArchive | None = None,
        *,
        shards: int = 1,
        threads: PlaceThreads | None = None,
    ) -> None:
        """`threads`: of the process, for the archive."""
        self.bus = bus
        self.run = run
        self.shard = shard
        self.shards = shards
        self.archive, self.threads = archive, threads or PlaceThreads()
        self.stream = subjects.tape_stream(run)
        self.subject = subjects.tape(run, shard)
        self.end = 0  # stream sequence of the newest record of this shard
        self.emptied = False  # the stream has none of them: the newest lies in the archive
        self.tail: Identity | None = None  # of that record; None: not known
        self.life = bus.life  # of the server, in which the record was seen there last
        self.progress = TransferProgress()  # of the append under way
        self.appending_since = 0.0  # monotonic seconds; 0: none is under way
        # Called when the stream is full: why nothing could be archived, or "".
        self.make_room: Callable[[], Awaitable[str]] = _no_room

    async def read(
        self, after: int = 0, *, limit: int | None = None
    ) -> list[tuple[int, TapeRecord]]:
        """The first `limit` records with sequence > `after`; remembers where they end.

        Raises Purged when records after that are neither in the stream nor in the archive, Unread
        when the archive cannot be read.
        """
        stored = await self.stored(after, limit=limit)
        records = [(s.seq, decode_tape(s.payload)) for s in stored]
        if records and records[-1][0] == self.end:
            self.tail = identity(records[-1][1])
        return records

    async def stored(self, after: int = 0, *, limit: int | None = None) -> list[Stored]:
        """The same as they lie there. Of hundreds of learners a record takes nine times as much
        memory once it is decoded: whoever reads many decodes one after the other.
        """
        if self.archive is None:
            start = after + 1
            stored = await self.bus.fetch(self.stream, self.subject, start_seq=start, limit=limit)
        else:
            try:
                stored = await read_tape(
                    self.bus, self.run, [self.archive], after=after, limit=limit, ask=self._asked
                )
            except VaultError as error:
                raise Unread(f"archived records of the tape cannot be read: {error}") from None
        if gone := await self._gone(after, [s.seq for s in stored]):
            place = "any archive" if self.archive is None else self.archive.vault.root
            raise Purged(
                f"record {min(gone)} of the tape was archived or is damaged: it is neither in "
                f"{self.stream} nor in {place}"
            )
        end = max([self.end, after, *(s.seq for s in stored)])
        if end != self.end:
            self.end, self.tail = end, None
        return stored

    async def _asked(self, read: Callable[..., T], *args: Any) -> T:
        """Of the archive. Raises what `read` does, and VaultError."""
        assert self.archive is not None
        return await self.threads.within(ANSWER_S, self.archive.vault.root, read, *args)

    async def newest(self) -> int:
        """Sequence of the newest record of this shard, wherever it lies; 0: there is none.

        A server that lost what it had acknowledged may have lost all that was not archived. Raises
        BusError, or Unread when the archive cannot be read.
        """
        tail = await self.bus.last(self.stream, self.subject)
        self.emptied = tail is None
        if tail is not None:
            return tail.seq
        if self.archive is None or not await has_left(self.bus, self.stream):
            return 0
        try:
            segments = await self._asked(self.archive.segments)
        except VaultError as error:
            raise Unread(f"archived records of the tape cannot be read: {error}") from None
        return max((s.last for s in segments), default=0)  # some records are there twice

    async def _gone(self, after: int, seqs: Sequence[int]) -> set[int]:
        """Sequences from `after` to the last of `seqs` that may have been records of this shard.

        What the stream or an archive has of anybody else was none.
        """
        gone = set(range(after + 1, seqs[-1])) - set(seqs) if seqs else set()
        if gone and self.shards > 1:
            # What leaves the stream is its beginning; after that others' records are between.
            oldest = await self.bus.fetch(self.stream, self.subject, limit=1)
            gone = {n for n in gone if not oldest or n < oldest[0].seq}
        if gone:
            every, first = f"tape.{self.run}.>", min(gone)
            many = max(gone) - first + 1
            gone -= {
                s.seq for s in await self.bus.fetch(self.stream, every, start_seq=first, limit=many)
            }
        if gone and self.archive is not None:
            try:
                gone -= await self._asked(self.archive.of_others, min(gone), max(gone))
            except VaultError as error:
                log.warning("an archive of the tape cannot be read", error=str(error))
        return gone

    async def append(self, record: TapeRecord) -> int:
        """Append where this process believes the end is; the commit point of a round.

        An unknown outcome is settled by reading the tail. Raises Deposed when somebody else's
        record is there. Waits as long as the server is away, the stream is full or takes nothing:
        nothing can be decided without it.
        """
        payload = encode(record)
        passing("before-append")
        self.appending_since = ambient.monotonic()
        try:
            self.end, self.emptied = await self._append(payload), False
            self.tail = identity(record)
        finally:
            self.appending_since = 0.0
            self.progress.trouble = ""
        passing("after-append")
        self.progress.room()
        return self.end

    async def _append(self, payload: bytes) -> int:
        # Not by `until_done`: what has failed may be stored, so that is settled before it is tried.
        while True:
            try:
                await self.look_back()
                expected = 0 if self.emptied else self.end
                return await self.bus.append(self.subject, payload, expect_last=expected)
            except StreamFull as error:
                why_not = await self._archived()
                self.progress.no_room(f"{error}; {why_not}" if why_not else str(error))
                if why_not:
                    await asyncio.sleep(FULL_RETRY_S)
            except BusError as error:
                settled = await self._settle(payload, isinstance(error, Conflict))
                if settled:
                    return settled
                if isinstance(error, Refused):
                    self.progress.trouble = str(error)
                    log.warning("the tape takes no record", error=str(error))
                await asyncio.sleep(RETRY_S)

    @property
    def replaceable(self) -> bool:
        """A server has begun a new life since our newest record was seen there last."""
        return self.bus.life != self.life

    async def look_back(self, *, at_once: bool = False) -> None:
        """Once a server has begun a new life: it may be a hub that was put back from a backup, and
        have less, or others' records where this process believes the end is, or beyond it.

        `at_once`: in the same life, too, where another leader may have appended. Raises Deposed
        then, and BusError where nobody can tell.
        """
        if not self.bus.connected:  # an append would wait for whatever server comes
            raise Unavailable("the message server is away")
        if not (self.replaceable or at_once):
            return
        life = self.bus.life
        end, appending = self.end, self.appending_since
        stored = await self.bus.last(self.stream, self.subject)
        if (end, appending) != (self.end, self.appending_since):
            return  # something was appended meanwhile: the next look is about that
        seq = 0 if stored is None else stored.seq
        other = stored is not None and seq == end and not self._is_tail(stored)
        if not self.emptied and (seq < end or other):
            raise TapeReplaced(f"record {end} on {self.subject} is gone, or is another one")
        if seq > end:
            if appending:
                return  # it may be ours, of an attempt without an answer: `_settle` finds out
            raise TapeReplaced(f"record {seq} on {self.subject} is not ours: our newest is {end}")
        self.life = life

    async def still_ours(self) -> None:
        """Before anything is removed for good that only this tape says is not needed: nobody else
        has appended to it, and no backup was put back in its place.

        Raises Deposed as `look_back` does, and BusError where nobody can tell, as while an append
        to a server that has begun a new life has no answer.
        """
        await self.look_back(at_once=True)
        if self.replaceable:
            raise Unavailable("it is not known yet whether the hub was put back from a backup")

    def _is_tail(self, stored: Stored) -> bool:
        try:
            return self.tail in (None, identity(decode_tape(stored.payload)))
        except WireError:
            return False

    async def _archived(self) -> str:
        try:
            return await self.make_room()
        except BusError as error:
            return str(error)

    async def _settle(self, payload: bytes, conflict: bool) -> int:
        """Sequence of our record if it is the tail, 0 if it is not there; Deposed otherwise, and
        TapeReplaced where a hub that was put back may be why."""
        try:
            tail = await self.bus.last(self.stream, self.subject)
        except BusError:
            return 0
        if tail is None or tail.seq == self.end:
            # A conflict with nothing new there: our own earlier attempt may still be on its way.
            return 0
        if tail.payload == payload:
            return tail.seq
        text = f"record {tail.seq} on {self.subject} is not ours (we expected the end at {self.end}"
        if tail.seq < self.end or self.replaceable:
            raise TapeReplaced(f"{text}): another leader is at work, or the hub was put back")
        raise Deposed(f"{text}{', refused' if conflict else ''}): another leader is at work")
