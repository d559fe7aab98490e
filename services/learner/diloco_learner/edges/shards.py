"""Data shard leases in the key-value bucket, by compare-and-set."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import structlog

from diloco_learner.edges.batches import Batches
from diloco_learner.leases import choose, given_back, order, taken
from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus, BusError, Conflict
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Cursor
from diloco_shared.protocol.records import ShardLease
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

# Looks at whether the train thread wants another shard, in seconds: a shard lasts far longer.
LOOK_S = 0.2

Tell = Callable[[str, str, dict[str, Any]], Awaitable[None]]


class Leases:
    """Keeps the train thread supplied, one shard ahead."""

    def __init__(
        self,
        bus: Bus,
        spec: RunSpec,
        learner: str,
        incarnation: int,
        batches: Batches,
        live: Callable[[], Collection[str]],
        tell: Tell,
    ) -> None:
        self.bus = bus
        self.run = spec.name
        self.learner = learner
        self.incarnation = incarnation
        self.batches = batches
        self.live = live
        self.tell = tell
        self.wanted = order(spec.data.virtual_shards, learner, spec.seed)
        self.supplied = asyncio.Event()
        self.writing = asyncio.Lock()  # a lease has one revision: one write at a time
        self.held: dict[int, tuple[ShardLease, int]] = {}  # shard -> (lease, revision)
        self.repeats = 0  # as last told

    async def supply(self) -> None:
        """Lease and give back, for ever."""
        while True:
            try:
                while self.batches.finished:
                    await self._give_back(self.batches.finished[0])
                    self.batches.finished.popleft()
                if self.batches.wants and self.learner in self.live():
                    await self._acquire()
            except (BusError, WireError) as error:
                log.warning("data leases: again later", error=str(error))
            if self.batches.ready:
                self.supplied.set()
            # At 1, 2, 4, … times: tiny shards would fill the log.
            if self.batches.repeats >= max(2 * self.repeats, 1):
                self.repeats = self.batches.repeats
                shard = self.batches.cursor.shard if self.batches.cursor else -1
                text = f"{self.learner} reads data shard {shard} again: no other was leased in time"
                await self.tell("shard-repeated", text, {"shard": shard, "times": self.repeats})
            await asyncio.sleep(LOOK_S)

    async def first(self) -> None:
        """Until there is something to read: the syncer must first count this learner as live."""
        await self.supplied.wait()

    async def _acquire(self) -> None:
        leases: dict[int, ShardLease] = {}
        revisions: dict[int, int] = {}
        for key, entry in (await self.bus.kv_all(subjects.SHARDS)).items():
            run, _, number = key.rpartition(".")
            if run == self.run and entry.value is not None:
                leases[int(number)] = decode(entry.value, ShardLease)
                revisions[int(number)] = entry.revision
        shard = choose(
            leases,
            self.wanted,
            learner=self.learner,
            incarnation=self.incarnation,
            live=self.live(),
            holding=self.held,
        )
        if shard is None:
            await self._share()
            return
        lease = taken(leases.get(shard), shard, self.learner, self.incarnation)
        key, value = f"{self.run}.{shard}", encode(lease)
        try:
            if shard in revisions:
                revision = await self.bus.kv_update(subjects.SHARDS, key, value, revisions[shard])
            else:
                revision = await self.bus.kv_create(subjects.SHARDS, key, value)
        except Conflict:
            return  # somebody else was first; the next look sees it
        self.held[shard] = (lease, revision)
        self.batches.grant(shard, lease.sequences, lease.passes)

    async def _share(self) -> None:
        """Every shard is somebody's: read one without a lease rather than not at all."""
        if self.batches.ready:
            return
        shard = self.wanted[0]
        self.batches.grant(shard, 0, 0)
        text = f"{self.learner} reads data shard {shard} without a lease: all are taken"
        await self.tell("shard-shared", text, {"shard": shard})

    async def merged(self, cursor: Cursor) -> None:
        """What was read up to `cursor` is part of the published parameters."""
        async with self.writing:
            if cursor.shard not in self.held:
                return
            lease, _ = self.held[cursor.shard]
            if cursor.sequences > lease.sequences:
                await self._write(lease.model_copy(update={"sequences": cursor.sequences}))

    async def _give_back(self, shard: int) -> None:
        async with self.writing:
            if shard in self.held:
                await self._write(given_back(self.held[shard][0]))
                self.held.pop(shard, None)

    async def _write(self, lease: ShardLease) -> None:
        shard, (_, revision) = lease.shard, self.held[lease.shard]
        key, value = f"{self.run}.{shard}", encode(lease)
        try:
            try:
                revision = await self.bus.kv_update(subjects.SHARDS, key, value, revision)
            except Conflict:
                # Perhaps an own write whose answer was lost: then the lease is still ours.
                revision = await self._own_revision(key)
                revision = await self.bus.kv_update(subjects.SHARDS, key, value, revision)
        except Conflict:
            # Taken over while this process was thought dead: it is no longer ours to move.
            log.warning("lease lost", shard=shard)
            del self.held[shard]
            return
        self.held[shard] = (lease, revision)

    async def _own_revision(self, key: str) -> int:
        """Revision of a lease that this incarnation holds, else Conflict."""
        entry = await self.bus.kv_get(subjects.SHARDS, key)
        if entry is not None and entry.value is not None:
            lease = decode(entry.value, ShardLease)
            if (lease.holder, lease.incarnation) == (self.learner, self.incarnation):
                return entry.revision
        raise Conflict(f"{key} is held by another")

    async def release(self) -> None:
        """Leave every shard to others, at the cursors merged so far."""
        async with self.writing:
            for shard, (lease, _) in list(self.held.items()):
                try:
                    await self._write(lease.model_copy(update={"holder": "", "incarnation": -1}))
                except BusError as error:
                    log.debug("lease not released, it will be taken over", error=str(error))
                self.held.pop(shard, None)
