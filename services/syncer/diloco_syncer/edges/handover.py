"""A snapshot from the leader's disk to a standby's, for one that UP no longer has enough for.

One at a time, on STATE, within that stream's limit; the standby removes it once it has it. Both
hold the whole file in memory while it is sent: once more what the run's fragments take.
"""

import asyncio
import uuid
from contextlib import AbstractAsyncContextManager

import structlog

from diloco_shared.config import RunSpec
from diloco_shared.edges.blobs import get_blob, put_blob
from diloco_shared.edges.bus import Bus, BusError, Delivery
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import SnapshotManifest, SnapshotReply, SnapshotWish
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_syncer.edges.snapshots import SnapshotStore

log = structlog.get_logger()

# A snapshot must pass within this time, in seconds: the 16 bytes a parameter of a 1B model take
# 850 s on 150 Mbit/s. Then the standby asks again.
TRANSFER_S = 900.0


class NoSnapshot(Exception):
    """None was got; the text says why."""


class SnapshotSender:
    """At the leader: answers wishes, one transfer at a time."""

    def __init__(
        self,
        spec: RunSpec,
        shard: int,
        leader: str,
        control: Bus,
        data: Bus,
        snapshots: SnapshotStore,
    ) -> None:
        self.run = spec.name
        self.shard = shard
        self.bytes_max = spec.keeping.stream_bytes_max
        self.leader = leader
        self.control = control
        self.data = data
        self.snapshots = snapshots
        self.wishes: asyncio.Queue[SnapshotWish] = asyncio.Queue(1)
        self.busy_with = ""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Answer wishes until the context ends."""
        return self.control.serve(subjects.snapshot_wish(self.run, self.shard), self._answer)

    async def _answer(self, delivery: Delivery) -> bytes:
        try:
            wish = decode(delivery.payload, SnapshotWish)
        except WireError as error:
            return encode(SnapshotReply(accepted=False, reason=str(error)[:500]))
        size = await asyncio.to_thread(self.snapshots.newest_bytes)
        why_not = ""
        if self.busy_with:
            why_not = f"{self.leader} is sending a snapshot to {self.busy_with}"
        elif not size:
            why_not = f"{self.leader} has no snapshot yet"
        elif size > self.bytes_max:
            why_not = (
                f"a snapshot of {size} bytes does not fit into {self.bytes_max}: raise "
                "keeping.stream_bytes_max"
            )
        else:
            self.busy_with = wish.standby
            self.wishes.put_nowait(wish)
        return encode(SnapshotReply(accepted=not why_not, reason=why_not[:500]))

    async def send(self) -> None:
        """Send what was accepted, for ever."""
        async with self.serving():
            while True:
                wish = await self.wishes.get()
                try:
                    async with asyncio.timeout(TRANSFER_S):
                        await self._send(wish)
                except (BusError, OSError, TimeoutError, ValueError) as error:
                    log.warning("snapshot not sent", standby=wish.standby, error=str(error))
                finally:
                    self.busy_with = ""

    async def _send(self, wish: SnapshotWish) -> None:
        covers, meta, arrays = await asyncio.to_thread(self.snapshots.newest_files)
        subject = subjects.state(self.run, self.leader, wish.standby, wish.nonce)
        manifest = SnapshotManifest(
            run=self.run,
            leader=self.leader,
            standby=wish.standby,
            nonce=wish.nonce,
            covers=covers,
            meta=await put_blob(self.data, subject + ".meta", meta),
            arrays=await put_blob(self.data, subject + ".arrays", arrays),
        )
        await self.data.append(subject + ".m", encode(manifest), msg_id=subject + ".m")
        log.info("snapshot sent", standby=wish.standby, covers=covers, bytes=len(arrays))


async def fetch_snapshot(
    run: str,
    shard: int,
    standby: str,
    control: Bus,
    data: Bus,
    snapshots: SnapshotStore,
    *,
    after: int,
) -> int:
    """Get the leader's newest snapshot into our own folder; the record that it covers.

    Raises NoSnapshot (with the leader's own reason, if it gave one), BusError or OSError.
    """
    nonce = uuid.uuid4().hex
    wish = SnapshotWish(standby=standby, nonce=nonce, after=after)
    where = subjects.snapshot_wish(run, shard)
    reply = decode(await control.request(where, encode(wish)), SnapshotReply)
    if not reply.accepted:
        raise NoSnapshot(reply.reason)
    stream, ours = subjects.state_stream(run), f"state.{run}.*.{standby}.>"
    try:
        async with asyncio.timeout(TRANSFER_S):
            return await _receive(run, data, snapshots, f"state.{run}.*.{standby}.{nonce}.m", after)
    except TimeoutError:
        raise NoSnapshot(f"none came within {TRANSFER_S:.0f} s") from None
    finally:
        await data.purge(stream, ours)


async def _receive(run: str, data: Bus, snapshots: SnapshotStore, where: str, after: int) -> int:
    stream = subjects.state_stream(run)
    async with data.read(stream, where) as messages:
        m = decode((await anext(messages)).payload, SnapshotManifest)
    if m.covers <= after:
        raise NoSnapshot(f"the snapshot of {m.leader} is of record {m.covers}, too old as well")
    meta = await get_blob(data, stream, m.meta, timeout_s=TRANSFER_S)
    arrays = await get_blob(data, stream, m.arrays, timeout_s=TRANSFER_S)
    await asyncio.to_thread(snapshots.adopt, m.covers, bytes(meta), arrays)
    return m.covers
