"""Writes leases of data shards for learners that have credentials of their own (bucket SHARDS).

Whoever may write one lease may write all, for the holder stands in the record. So such learners
have no right to: they ask, each in a subject of its own, and the leader writes what they may have.
Where all share one secret, learners write leases themselves. Both is by compare-and-set.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import BusError, Conflict, Delivery
from diloco_shared.bus.stored_records import Found, record_at, records_in, write_if
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import LeaseReply, LeaseWish, Place, ShardLease
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_syncer.context import RunContext
from diloco_syncer.events import Event, Malformed
from diloco_syncer.history.tape_io import Deposed

log = structlog.get_logger()

# Shards that one learner may hold: the one it reads, up to six ahead, eight whose end waits to be
# merged (leasing_io.py of the learner), and what it held in an earlier life and has not taken up
# again, as far as that leaves room.
HELD_MAX = 16
# For so many seconds the leader goes by what it has read of who holds what, and has written since:
# others write no leases, but for a leader of before. There is a lease for each data shard, and a
# wish is to be answered within ten seconds.
KNOWN_S = 10.0


def why_not(
    wish: LeaseWish,
    there: Found[ShardLease] | None,
    *,
    learner: str,
    live: Collection[str],
    held: int,
    shards: int,
) -> str:
    """Why a learner may not have what it wishes; "" if it may.

    `there`: the lease as it is. `held`: other shards that this learner holds. `shards`: of the run.
    """
    wished = wish.lease
    holder = there.record.holder if there else ""
    if wished.shard >= shards:
        return f"there are {shards} data shards"
    if wish.revision != (there.revision if there else 0):
        return "it has changed meanwhile"
    if wished.holder not in ("", learner):
        return f"{learner} speaks for {wished.holder}"
    if not wished.holder:
        return "" if holder == learner else "another one holds it"
    if learner not in live:
        return f"{learner} is not live"
    if holder not in ("", learner) and holder in live:
        return f"{holder} holds it, and is live"
    if there and holder == learner and there.record.incarnation > wished.incarnation:
        return "a later life of this learner holds it"
    return f"{learner} holds {held} data shards" if held >= HELD_MAX else ""


def granted(wished: ShardLease, there: ShardLease | None, merged: tuple[int, int]) -> ShardLease:
    """The lease as it is written: nobody puts a shard beyond what is merged of it, for whoever
    reads it next would skip what is between."""
    known = max(there.began if there else (0, 0), merged)
    passes, sequences = min(wished.began, known)
    return wished.model_copy(update={"passes": passes, "sequences": sequences})


class DataLeases:
    """Of one leader's term. `live`: who is, as its beats say; `leading`: whether no other may."""

    def __init__(
        self,
        context: RunContext,
        live: Callable[[], Collection[str]],
        leading: Callable[[], bool],
        put: Callable[[Event], None],
        places: Callable[[], Awaitable[None]],
    ) -> None:
        """`places`: writes how far each data shard is merged, where that is not written yet."""
        self.run, self.shard = context.spec.name, context.shard
        self.shards = context.spec.data.virtual_shards
        self.bus = context.control
        self.live = live
        self.leading = leading
        self.put = put
        self.places = places
        self.refused: Counter[str] = Counter()
        self.holders: dict[int, str] = {}  # data shard -> who holds it, as far as it was read
        self.read_at = float("-inf")
        self.reading = asyncio.Lock()
        self.written: dict[int, str] = {}  # likewise, since the newest reading began
        self.asking: set[str] = set()  # one question of each learner at a time: a flood waits alone

    async def serve(self) -> None:
        """For ever, by the first shard of a syncer for all of them."""
        if self.shard or not self.bus.named:
            return
        async with self.bus.serve(subjects.lease(self.run, "*"), self._answer):
            await asyncio.Event().wait()

    async def _answer(self, request: Delivery) -> bytes:
        learner = request.subject.rsplit(".", 1)[-1]
        if learner in self.asking:
            return _refused("an earlier wish of this learner is not answered yet")
        try:
            wish = decode(request.payload, LeaseWish)
        except WireError as error:
            self.put(Malformed("wire", request.subject, str(error)))
            return _refused(str(error))
        self.asking.add(learner)
        try:
            return encode(await self._written(wish, learner))
        except Deposed:
            return _refused("another syncer leads")
        except (BusError, WireError) as error:
            return _refused(f"it cannot be written: {error}")
        finally:
            self.asking.discard(learner)

    async def _written(self, wish: LeaseWish, learner: str) -> LeaseReply:
        shard = wish.lease.shard
        key = f"{self.run}.{shard}"
        there, held = await asyncio.gather(
            record_at(self.bus, subjects.SHARDS, key, ShardLease),
            self._held_beside(wish.lease, learner),
        )
        refusal = why_not(
            wish, there, learner=learner, live=self.live(), held=held, shards=self.shards
        )
        if not self.leading():
            refusal = "another syncer may lead"
        elif wish.lease.holder not in ("", learner):
            self.put(Malformed("wire", subjects.lease(self.run, learner), refusal))
        if refusal:
            self._note(learner, shard, refusal)
            return LeaseReply(reason=refusal[:500])
        record = there.record if there else None
        # What this leader has merged, also where a hub that takes nothing refused it until now.
        await self.places()
        lease = granted(wish.lease, record, await self._merged(shard))
        try:
            revision = await write_if(self.bus, subjects.SHARDS, key, encode(lease), wish.revision)
        except Conflict:
            return LeaseReply(reason="it has changed meanwhile")
        self.written[shard] = self.holders[shard] = lease.holder
        return LeaseReply(lease=lease, revision=revision)

    def _note(self, learner: str, shard: int, refusal: str) -> None:
        """At 1, 2, 4, … times: whoever asks for ever fills no log."""
        self.refused[learner] += 1
        if self.refused[learner].bit_count() == 1:
            times = self.refused[learner]
            log.info("lease refused", learner=learner, shard=shard, reason=refusal, times=times)

    async def _held_beside(self, wished: ShardLease, learner: str) -> int:
        """Other data shards that a learner holds; who gives one back is not asked."""
        if not wished.holder:
            return 0
        async with self.reading:
            if ambient.monotonic() >= self.read_at + KNOWN_S:
                await self._read()
        holders = self.holders.items()
        return sum(holder == learner and shard != wished.shard for shard, holder in holders)

    async def _read(self) -> None:
        self.written = {}
        found = await records_in(self.bus, subjects.SHARDS, ShardLease, under=f"{self.run}.")
        there = {lease.shard: lease.holder for lease, _ in found.values()}
        self.holders, self.read_at = there | self.written, ambient.monotonic()

    async def _merged(self, shard: int) -> tuple[int, int]:
        """In any shard of the syncer, as far as its leaders have told."""
        under = f"{self.run}.{shard}."
        found = await records_in(self.bus, subjects.PLACES, Place, under=under)
        return max(((p.passes, p.sequences) for p, _ in found.values()), default=(0, 0))


def _refused(reason: str) -> bytes:
    return encode(LeaseReply(reason=reason[:500]))
