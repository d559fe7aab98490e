"""Data shard leases in the key-value bucket, by compare-and-set; written by the run's leader where
every process has credentials of its own.

Who reads what is decided here; how far it is merged is the run's leader's to say (PLACES), as its
tape has it. So whoever takes a shard over reads on exactly behind what is merged, even when its
last reader died before it heard of that.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import structlog

from diloco_learner.context import RunContext
from diloco_learner.data.batches_io import Batches
from diloco_learner.data.leases import Where, choose, given_back, order, place, taken
from diloco_shared import ambient
from diloco_shared.bus.port import BusError, Conflict
from diloco_shared.bus.repeating import again_and_again, left_undone, until_done
from diloco_shared.bus.stored_records import Found, M, record_at, records_in, write_if
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Cursor
from diloco_shared.protocol.records import LeaseReply, LeaseWish, Place, ShardLease
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

# Looks at whether the train thread wants another shard, in seconds: a shard lasts far longer.
LOOK_S = 0.2
# Looks at whether the leases held are still ours, in seconds: somebody who was thought dead reads
# no longer than this what another one reads by now.
VERIFY_S = 5.0
# Between two searches for a shard where none was free, in seconds: each reads what the whole run
# holds, and it may go on so for good, where a run has hardly more shards than learners.
NONE_FREE_S = 5.0
# For the leader's answer to a wish, in seconds. That is a round trip, and three more before the
# leader answers, which reads twice and writes once: all of a second or two, over the slowest links.
ANSWER_S = 10.0
# Finished shards that wait to be merged. More means that for as many shards no round merged this
# learner: then the oldest is given back unmerged, and said so.
FINISHED_MAX = 8

Tell = Callable[[str, str, dict[str, Any]], Awaitable[None]]


class Leases:
    """Keeps the train thread supplied, some shards ahead."""

    def __init__(
        self,
        context: RunContext,
        batches: Batches,
        live: Callable[[], Collection[str]],
        tell: Tell,
        leaves: Callable[[], bool] = lambda: False,
        lately: Callable[[], bool] = lambda: True,
    ) -> None:
        """`live`: the learners of the run, as its leader said last; `lately`: whether that was just
        now; `leaves`: whether this one reads no more than it has."""
        spec, self.bus = context.spec, context.control
        self.run = spec.name
        self.learner, self.incarnation = context.me, context.incarnation
        self.batches = batches
        self.live = live
        self.leaves, self.lately = leaves, lately
        self.tell = tell
        self.wanted = order(spec.data.virtual_shards, self.learner, spec.seed)
        self.supplied = asyncio.Event()
        self.writing = asyncio.Lock()  # a lease has one revision: one write at a time
        self.looking = asyncio.Lock()  # one look at a time
        self.held: dict[int, tuple[ShardLease, int]] = {}  # shard -> (lease, revision)
        self.closed: dict[int, int] = {}  # let go by `batches`: shard -> passes, to be given back
        # Given back unmerged: shard -> passes, at most all that there are. A leader that writes
        # leases takes no word for what is read, and the same shard would be chosen again.
        self.unmerged: dict[int, int] = {}
        self.unmerged_times = 0
        self.verified_at = 0.0
        self.repeats = self.left_out = 0  # as last told
        self.none_free = False  # when a lease was last sought
        self.searched_at = -math.inf

    async def supply(self) -> None:
        """Lease and give back, for ever."""

        async def look() -> None:
            try:
                await self.look(ambient.monotonic())
            except trouble:
                await self._supplied()
                raise
            await self._supplied()

        trouble = (BusError, WireError)
        await again_and_again(look, "leases of data", LOOK_S, trouble=trouble)

    async def _supplied(self) -> None:
        """What a look, and the training meanwhile, have come to."""
        if self.batches.ready:
            self.supplied.set()
        # At 1, 2, 4, … times: tiny shards would fill the log, and so would a damaged corpus.
        left_out = self.batches.left_out
        if (total := left_out.total) >= max(2 * self.left_out, 1):
            self.left_out, times = total, f"{total} times so far" if total > 1 else "once"
            text = f"{self.learner} leaves a sequence out ({times}): {left_out.why}"
            await self.tell("sequence-left-out", text[:500], {"times": total})
        if self.batches.repeats >= max(2 * self.repeats, 1):
            self.repeats = self.batches.repeats
            shard = self.batches.cursor.shard if self.batches.cursor else -1
            text = f"{self.learner} reads data shard {shard} again: {self._why_again()}"
            await self.tell("shard-repeated", text, {"shard": shard, "times": self.repeats})

    def _why_again(self) -> str:
        """Why there was nothing else to read, and what another run could do about it."""
        why = "no other is free" if self.none_free else "no other was leased in time"
        size, batch = self.batches.cut.sequences_per_shard, self.batches.sequences
        if size < batch:
            why += f", and it has {size} sequences where a step takes {batch}. With fewer "
            return why + "data.virtual_shards each has more"
        if self.none_free:
            why += ". With more data.virtual_shards there are some for every learner"
        return why

    async def look(self, now: float) -> None:
        """Give back what is done with, make sure of what is held, lease what is wanted."""
        async with self.looking:
            await self._look(now)

    async def _look(self, now: float) -> None:
        for shard, passes in self.batches.finished[:-FINISHED_MAX]:
            if self.batches.close(shard, passes):
                await self._give_up(shard, passes)
        for shard, passes in list(self.closed.items()):
            await self._give_back(shard, passes)
        if self.held and now - self.verified_at >= VERIFY_S:
            await self._verify()
            self.verified_at = now
        waits = self.none_free and self.batches.ready and now < self.searched_at + NONE_FREE_S
        if self.batches.wants and not waits and self.learner in self.live() and not self.leaves():
            self.searched_at = now
            await self._acquire()

    async def _give_up(self, shard: int, passes: int) -> None:
        """Of a finished shard that no round has merged."""
        self.closed[shard] = self.unmerged[shard] = passes
        self.unmerged_times += 1
        if self.unmerged_times.bit_count() == 1:  # as of repeats
            text = f"{self.learner} gives data shard {shard} back unmerged: no round merges it"
            data = {"shard": shard, "times": self.unmerged_times}
            await self.tell("shard-unmerged", text, data)

    async def first(self, *, gone_back: bool = False) -> None:
        """Until there is something to read: the syncer must first count this learner as live.

        `gone_back`: the run has, to a checkpoint, perhaps since something was leased. Then that
        lies beyond what is merged, and whoever read on there would have what comes before left out.
        """
        if gone_back:
            async with self.looking:  # what is on its way to `batches` is there by then
                await until_done(self._verify, "leases of data")
                self.batches.only_leased()
        if not self.batches.ready:
            self.supplied.clear()
        await self.supplied.wait()

    async def _leases(self) -> tuple[dict[int, ShardLease], dict[int, int]]:
        """All leases of the run, and their revisions."""
        there = {
            int(number): found
            for key, found in (await self._all(subjects.SHARDS, ShardLease)).items()
            if (number := key.removeprefix(f"{self.run}.")).isdecimal()
        }
        leases = {shard: found.record for shard, found in there.items()}
        return leases, {shard: found.revision for shard, found in there.items()}

    async def _all(self, bucket: str, kind: type[M]) -> dict[str, Found[M]]:
        """The run's; WireError for one that nobody can read: it may be somebody's."""
        return await records_in(self.bus, bucket, kind, under=f"{self.run}.", strict=True)

    async def _merged(self) -> dict[int, Where]:
        """How far each shard is merged."""
        found: dict[int, Where] = {}
        for p, _ in (await self._all(subjects.PLACES, Place)).values():
            found[p.shard] = max(found.get(p.shard, (0, 0)), (p.passes, p.sequences))
        return found

    async def _acquire(self) -> None:
        """As many as are wanted, and free."""
        leases, revisions = await self._leases()
        # Read after the leases: whoever gave one back had its end merged before.
        merged = await self._merged()
        read = {**merged}
        for known, passes in self.unmerged.items():
            read[known] = max(read.get(known, (0, 0)), (passes + 1, 0))
        live = self._not_gone(leases)
        while self.batches.wants:
            shard = choose(
                leases,
                read,
                self.wanted,
                learner=self.learner,
                incarnation=self.incarnation,
                live=live,
                holding=self.held,
            )
            self.none_free = shard is None
            if shard is None:
                await self._share(place(leases, merged, self.wanted[0]))
                return
            where = place(leases, merged, shard)
            try:
                await self._take(shard, where, revisions.get(shard, 0))
            except Conflict:
                return  # somebody else was first; the next look sees it

    def _not_gone(self, leases: Mapping[int, ShardLease]) -> set[str]:
        """Whose shards are not to be taken: who is gone by an old word may be back since."""
        held = () if self.lately() else (lease.holder for lease in leases.values())
        return {*self.live(), *held}

    async def _take(self, shard: int, where: Where, revision: int) -> None:
        """Lease it, and have it read; Conflict if it is another's."""
        lease = taken(shard, self.learner, self.incarnation, where)
        lease, revision = await self._put(lease, revision)
        self.held[shard] = (lease, revision)
        # In a thread: the order of a large corpus' sequences takes a while to look up.
        await asyncio.to_thread(self.batches.grant, shard, lease.sequences, lease.passes)
        if shard not in self.held:
            self.batches.revoke(shard)  # lost meanwhile
        self.supplied.set()

    async def _share(self, where: Where) -> None:
        """Every shard is somebody's: read one without a lease rather than not at all."""
        if self.batches.ready:
            return
        shard = self.wanted[0]
        await asyncio.to_thread(self.batches.grant, shard, 0, where[0], leased=False)
        text = f"{self.learner} reads data shard {shard} without a lease: all are taken"
        await self.tell("shard-shared", text, {"shard": shard})

    def merged(self, cursor: Cursor) -> None:
        """What was read up to `cursor` is part of the published parameters."""
        for shard, passes in cursor.finished:
            if self.batches.close(shard, passes):
                self.closed[shard] = passes

    async def _give_back(self, shard: int, passes: int) -> None:
        async with self.writing:
            if shard in self.held:
                await self._write(given_back(shard, passes))
                self.held.pop(shard, None)
                self.searched_at = -math.inf  # this one is free
            del self.closed[shard]

    async def _verify(self) -> None:
        held = list(self.held)
        for shard, ours in zip(held, await asyncio.gather(*map(self._is_ours, held)), strict=True):
            if not ours:
                self._lost(shard)

    async def _is_ours(self, shard: int) -> bool:
        """As the hub has it. What nobody can read is not: we wrote it otherwise."""
        key = f"{self.run}.{shard}"
        try:
            found = await record_at(self.bus, subjects.SHARDS, key, ShardLease)
        except WireError:
            return False
        return found is not None and (found.record.holder, found.record.incarnation) == self._me

    @property
    def _me(self) -> tuple[str, int]:
        return self.learner, self.incarnation

    def _lost(self, shard: int) -> None:
        """Taken over while this process was thought dead: it is no longer ours to read."""
        log.warning("lease lost", shard=shard)
        self.held.pop(shard, None)
        self.batches.revoke(shard)

    async def _put(self, lease: ShardLease, revision: int) -> tuple[ShardLease, int]:
        """The lease as it was written in place of that revision, and its own; else Conflict.

        A process with credentials of its own has no right to write leases, since whoever may write
        one may write all: the leader does it, who knows who asks and who lives.
        """
        if not self.bus.named:
            key = f"{self.run}.{lease.shard}"
            written = await write_if(self.bus, subjects.SHARDS, key, encode(lease), revision)
            return lease, written
        wish = encode(LeaseWish(lease=lease, revision=revision))
        place = subjects.lease(self.run, self.learner)
        answer = await self.bus.request(place, wish, timeout_s=ANSWER_S)
        reply = decode(answer, LeaseReply)
        if reply.lease is None:
            raise Conflict(f"data shard {lease.shard}: {reply.reason}")
        return reply.lease, reply.revision

    async def _write(self, lease: ShardLease) -> None:
        shard, (_, revision) = lease.shard, self.held[lease.shard]
        key = f"{self.run}.{shard}"
        try:
            try:
                lease, revision = await self._put(lease, revision)
            except Conflict:
                # Perhaps an own write whose answer was lost: then the lease is still ours.
                lease, revision = await self._put(lease, await self._own_revision(key))
        except Conflict:
            self._lost(shard)
            return
        self.held[shard] = (lease, revision)

    async def _own_revision(self, key: str) -> int:
        """Revision of a lease that this incarnation holds, else Conflict."""
        found = await record_at(self.bus, subjects.SHARDS, key, ShardLease)
        if found and (found.record.holder, found.record.incarnation) == self._me:
            return found.revision
        raise Conflict(f"{key} is held by another")

    async def release(self) -> None:
        """Leave every shard to others, who go on behind what is merged of it."""
        async with self.writing:
            for shard, (lease, _) in list(self.held.items()):
                with left_undone("release of a lease"):  # it will be taken over
                    await self._write(lease.model_copy(update={"holder": "", "incarnation": -1}))
                self.held.pop(shard, None)
