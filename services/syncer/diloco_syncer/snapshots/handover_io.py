"""A snapshot from one syncer's disk to another's, for one that UP no longer has enough for.

The standby asks the leader, or another syncer, for what describes its newest one, then for every
file it does not have, one after the other; it removes each from STATE before it asks for the next.
So STATE holds one file at a time (two while a broken attempt gives way to the next), the receiver's
memory one, the sender's none: it sends from the page cache. What moves forward is not given up;
what was received stays on the standby's disk, and a transfer that breaks goes on with the file
where it was, until the standby writes a snapshot of its own. The sender keeps the snapshot until it
is fetched: as long as what it sent lies in STATE, and the standby lives that is to fetch it.
"""

import asyncio
import mmap
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import structlog

from diloco_shared import ambient
from diloco_shared.bus.blobs import fresh, get_blob, put_blob
from diloco_shared.bus.port import Bus, BusError, Delivery
from diloco_shared.bus.repeating import PROMPT, until_done
from diloco_shared.bus.stored_records import members_of
from diloco_shared.memory.pages import Pages
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import Buffer
from diloco_shared.protocol.messages import Blob
from diloco_shared.protocol.pace import silence_s
from diloco_shared.protocol.records import SnapshotManifest, SnapshotReply, SnapshotWish
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_syncer.context import RunContext
from diloco_syncer.snapshots.snapshots_io import Listed, SnapshotStore, table_of

log = structlog.get_logger()

# A standby that asks for nothing for so long, in seconds, has gone: another may be served, and the
# snapshot kept for it be removed. It asks for the next file as soon as it has one.
IDLE_S = 60.0
# Bytes a second, at the least, at which a disk is read and digested before anything is sent: the
# standby waits so much longer for the first word of a large file.
READ_PER_S_MIN = 50 << 20
# Of one file at the hub: at half a second a gigabyte, the largest that there is, and its disk slow.
PURGE_S = 120.0
# Whoever is told to stop is killed after seconds, with its seat in the cluster not given back. What
# it leaves at the hub, it removes before it asks again.
LEAVES_S = 2.0
# For an answer: who is asked looks at its disk, and asks the hub one thing.
ANSWER_S = 10.0


class NoSnapshot(Exception):
    """None was got; the text says why."""


class SnapshotSender:
    """At whoever has one: answers wishes at `where` (the leader's), of one standby at a time.

    A syncer that leads has two: one for wishes to the leader, one for those to it by name.
    """

    def __init__(self, context: RunContext, where: str = "") -> None:
        self.run, self.me = context.spec.name, context.me
        self.where = where or subjects.snapshot_wish(self.run, context.shard)
        self.control, self.data, self.snapshots = context.control, context.data, context.snapshots
        self.wishes: asyncio.Queue[SnapshotWish] = asyncio.Queue(1)
        self.busy_with, self.busy_until = "", 0.0
        self.sending: asyncio.Task[None] | None = None

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Answer wishes until the context ends."""
        return self.control.serve(self.where, self._answer)

    async def _answer(self, delivery: Delivery) -> bytes:
        try:
            wish = decode(delivery.payload, SnapshotWish)
        except WireError as error:
            return encode(SnapshotReply(accepted=False, reason=str(error)[:500]))
        busy = self.sending is not None or ambient.monotonic() < self.busy_until
        if busy and wish.standby != self.busy_with:
            why_not = f"{self.me} is sending a snapshot to {self.busy_with}"
        else:
            # Before anything is awaited: another standby may ask meanwhile.
            was, until = (self.busy_with, self.busy_until), ambient.monotonic() + IDLE_S
            self.busy_with, self.busy_until = wish.standby, until
            bytes_max = 0 if wish.digest else await self._bytes_max()
            why_not = await asyncio.to_thread(self._why_not, wish, bytes_max)
            if why_not and self.busy_until == until:
                self.busy_with, self.busy_until = was
        if not why_not:
            self.busy_with, self.busy_until = wish.standby, ambient.monotonic() + IDLE_S
            self._accept(wish)
        return encode(SnapshotReply(accepted=not why_not, reason=why_not[:500]))

    def _accept(self, wish: SnapshotWish) -> None:
        """It is the next; what is on its way to the same standby is not waited for any more."""
        with suppress(asyncio.QueueEmpty):
            self.wishes.get_nowait()
        self.wishes.put_nowait(wish)
        if self.sending is not None:
            self.sending.cancel()

    def _why_not(self, wish: SnapshotWish, bytes_max: int) -> str:
        """Why what was asked for is not sent; "" if it is. Waits for the disk."""
        if wish.digest:
            there = self.snapshots.file(wish.covers, wish.digest) is not None
            return "" if there else f"{self.me} has no snapshot of {wish.covers} any more"
        newest = self.snapshots.newest_meta()
        if newest is None:
            return f"{self.me} has no snapshot yet"
        if newest[0] <= wish.after:
            return f"{self.me} has no snapshot after record {wish.after}"
        largest = max(listed.bytes for listed in table_of(newest[1]))
        if 0 < bytes_max < largest:
            return (
                f"the {largest} bytes of one fragment of a snapshot do not fit into STATE, which "
                f"holds {bytes_max}"
            )
        return ""

    async def _bytes_max(self) -> int:
        """Of STATE; 0 where the bus does not tell: then the transfer finds out."""
        try:
            return (await self.data.stream_info(subjects.state_stream(self.run))).bytes_max
        except BusError:
            return 0

    async def send(self) -> None:
        """Send what was accepted, for ever."""
        async with self.serving():
            try:
                while True:
                    await self._next()
            finally:
                self._unpin()

    async def _next(self) -> None:
        until = self.busy_until
        wait_s = max(until - ambient.monotonic(), 0.0) if self.busy_with else None
        try:
            async with asyncio.timeout(wait_s):
                wish = await self.wishes.get()
        except TimeoutError:
            fetched = await self._being_fetched()
            if self.busy_until != until or not self.wishes.empty():
                return  # somebody asked meanwhile, and is to be served
            if fetched:
                self.busy_until = ambient.monotonic() + IDLE_S
                return
            self.busy_with = ""  # has all of it, or is gone
            self._unpin()
            return
        self.sending = asyncio.create_task(self._sent(wish))
        try:
            await asyncio.wait({self.sending})
        finally:
            self.sending.cancel()
            self.sending = None
        self.busy_until = ambient.monotonic() + IDLE_S

    async def _being_fetched(self) -> bool:
        """Whether the standby lives, and has yet to remove what was sent: a large file takes longer
        to read, to check and to write than nothing may be heard of it."""
        sent = f"state.{self.run}.{self.me}.{self.busy_with}.*.m"
        try:
            if not await self.data.fetch(subjects.state_stream(self.run), sent, limit=1):
                return False
            return any(m.id == self.busy_with for m in await members_of(self.control))
        except BusError:
            return False

    def _unpin(self) -> None:
        self.snapshots.pinned.pop(self.where, None)

    async def _sent(self, wish: SnapshotWish) -> None:
        try:
            await self._send(wish)
        except (BusError, OSError, TimeoutError, ValueError) as error:
            log.warning("snapshot not sent", standby=wish.standby, error=str(error))

    async def _send(self, wish: SnapshotWish) -> None:
        covers, body = await asyncio.to_thread(self._body, wish)
        subject = subjects.state(self.run, self.me, wish.standby, wish.nonce)

        async def announce(blob: Blob) -> None:
            manifest = SnapshotManifest(
                run=self.run,
                leader=self.me,
                standby=wish.standby,
                nonce=wish.nonce,
                covers=covers,
                blob=blob,
            )
            await self.data.append(subject + ".m", encode(manifest), msg_id=subject + ".m")

        await put_blob(self.data, subject, body, patience_s=silence_s(), announce=announce)
        log.info("snapshot sent", standby=wish.standby, covers=covers, bytes=len(body))

    def _body(self, wish: SnapshotWish) -> tuple[int, Buffer]:
        """(record covered, what was asked for). The snapshot stays until the standby has it."""
        if not wish.digest:
            newest = self.snapshots.newest_meta()
            if newest is None:
                raise ValueError("there is no snapshot any more")
            self.snapshots.pinned[self.where] = newest[0]
            return newest
        path = self.snapshots.file(wish.covers, wish.digest)
        if path is None:
            raise ValueError(f"the snapshot of record {wish.covers} is gone")
        self.snapshots.pinned[self.where] = wish.covers
        return wish.covers, _mapped(path)


def _mapped(path: Path) -> Buffer:
    """A file's bytes in the page cache."""
    with path.open("rb") as file:
        return memoryview(Pages(file.fileno(), 0, access=mmap.ACCESS_READ))


async def fetch_snapshot(
    run: str,
    shard: int,
    standby: str,
    control: Bus,
    data: Bus,
    snapshots: SnapshotStore,
    *,
    after: int,
    of: str = "",
) -> int:
    """Get the newest snapshot of the leader, or of syncer `of`, into our folder; what it covers.

    Called again after a failure it goes on with what is missing. Raises NoSnapshot (with their own
    reason, if they gave one), BusError or OSError.
    """
    fetch = _Fetch(run, shard, standby, control, data, after, of)
    with snapshots.receiving():
        await fetch.purge()
        try:
            covers, meta = await fetch.description()
            for listed in await asyncio.to_thread(snapshots.missing, meta):
                body = await fetch.file(covers, listed)
                await asyncio.to_thread(snapshots.receive, listed, body)
                del body
                await fetch.purge()
        except BaseException:
            with suppress(BusError, TimeoutError):
                async with asyncio.timeout(LEAVES_S):
                    await fetch.purge()
            raise
        await asyncio.to_thread(snapshots.adopt, covers, meta)
    return covers


class _Fetch:
    """One standby's wishes."""

    def __init__(
        self, run: str, shard: int, standby: str, control: Bus, data: Bus, after: int, of: str
    ) -> None:
        self.run = run
        self.standby = standby
        self.control = control
        self.data = data
        self.after = after
        leaders = subjects.snapshot_wish(run, shard)
        self.where = subjects.snapshot_wish_to(run, shard, of) if of else leaders
        self.stream = subjects.state_stream(run)

    async def purge(self) -> None:
        """What was sent to us is here, or of no use any more.

        A server reads what it removes, so that takes a while where it is large: each attempt
        finds less than the one before.
        """
        filter_ = f"state.{self.run}.*.{self.standby}.>"
        await until_done(
            lambda: self.data.purge(self.stream, filter_),
            f"purge of {filter_}",
            pauses=PROMPT,
            until=ambient.monotonic() + PURGE_S,
        )

    async def description(self) -> tuple[int, bytes]:
        """(record covered, meta.json) of the newest snapshot of whoever is asked."""
        m, body = await self._get(0, "")
        await self.purge()
        if m.covers <= self.after:
            raise NoSnapshot(f"the snapshot of {m.leader} is of record {m.covers}, too old as well")
        return m.covers, bytes(body)

    async def file(self, covers: int, listed: Listed) -> memoryview:
        """One of its files."""
        return (await self._get(covers, listed.digest, listed.bytes))[1]

    async def _get(
        self, covers: int, digest: str, size: int = 0
    ) -> tuple[SnapshotManifest, memoryview]:
        nonce = ambient.unique()
        wish = SnapshotWish(
            standby=self.standby, nonce=nonce, after=self.after, covers=covers, digest=digest
        )
        answer = await self.control.request(self.where, encode(wish), timeout_s=ANSWER_S)
        reply = decode(answer, SnapshotReply)
        if not reply.accepted:
            raise NoSnapshot(reply.reason)
        where = f"state.{self.run}.*.{self.standby}.{nonce}.m"
        wait_s = silence_s() + size / READ_PER_S_MIN
        try:
            async with asyncio.timeout(wait_s), self.data.read(self.stream, where) as messages:
                m = decode((await anext(messages)).payload, SnapshotManifest)
        except TimeoutError:
            raise NoSnapshot(f"nothing of it came within {wait_s:.0f} s") from None
        return m, await get_blob(self.data, self.stream, m.blob, take=fresh)
