"""Keeps one leader lease: asks the bucket what the machine wants to know, and tells it the answer.

Its own task beside everything else: a leader that is busy must not lose the lease for it.
"""

import asyncio
from contextlib import suppress

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError, Conflict
from diloco_shared.bus.stored_records import write_if
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import LeaderLease
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_syncer.history.tape_io import Deposed
from diloco_syncer.leadership.lease import (
    Away,
    Event,
    Fitness,
    Lease,
    LeaseKey,
    LeaseLost,
    Look,
    Looked,
    Request,
    Tick,
    Write,
    Written,
)

log = structlog.get_logger()

# The key outlives its holder's silence, and a restart of the server: standbys judge by their own
# clocks. It only cleans up after a cluster that is gone, in seconds.
TTL_S = 60.0
# Giving the lease back when the process ends, in seconds: the next leader would only wait longer.
GIVE_BACK_S = 2.0
# How often it looks for that what is there. A renewal that was under way may come through after
# the first look, once the server is back; what is there after the third is somebody else's doing.
GIVE_BACK_LOOKS = 3


class LeaseKeeper:
    """`keep` runs for ever; `leading` and `lapsed` are read meanwhile."""

    def __init__(
        self, bus: Bus, run: str, me: str, boot: str, lock: str, lease_s: float, shard: int = 0
    ) -> None:
        self.bus = bus
        self.key = subjects.leader_lease(run, shard)
        self.lease = Lease(me, boot, lock, lease_s)
        self.events: asyncio.Queue[Event] = asyncio.Queue(16)  # fitness, which changes rarely
        self.changed = asyncio.Event()  # the role is another one
        self.moved = asyncio.Event()  # something was heard of it

    @property
    def leading(self) -> bool:
        return self.lease.leading

    @property
    def holder(self) -> str:
        return self.lease.holder or "nobody"

    @property
    def elsewhere(self) -> str:
        """Who else has it, or may have; "" once nobody does."""
        lease = self.lease
        if lease.leading or (lease.sure and lease.free(ambient.monotonic())):
            return ""
        return lease.holder or "somebody"

    @property
    def lapsed(self) -> bool:
        """Whether another may be leading by now."""
        return self.lease.lapsed(ambient.monotonic())

    async def moves(self) -> None:
        """Until something is heard of the lease, or it lapses."""
        self.moved.clear()
        left_s = self.lease.until - ambient.monotonic()
        if left_s <= 0:
            await self.moved.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self.moved.wait()

    def check(self) -> None:
        """Raises Deposed when another may have it for good."""
        if not self.leading:
            raise Deposed(f"the lease is not ours any more, but {self.holder}'s")

    async def ours(self) -> None:
        """At once while nobody else may lead; else once it is renewed, however long the hub is
        away. Raises Deposed when another has it.

        Before each write that says what this leader knows: whoever leads meanwhile knows more, and
        only the tape fences by itself.
        """
        while self.lapsed:
            self.check()
            await self.moves()

    def fit(self, why_not: str = "") -> None:
        """This process could lead at once, or why it could not."""
        if why_not != self.lease.why_not and not self.events.full():
            self.events.put_nowait(Fitness(why_not))

    async def keep(self) -> None:
        """Look, take and renew, for ever."""
        request = self._handle(Tick())
        while True:
            event = await self._next() if request is None else await self._ask(request)
            request = self._handle(event)

    async def give_back(self) -> None:
        """The process stops: whoever stands by need not wait. Call after `keep` has ended."""
        lease = self.lease
        # What was under way may have come through, or not: then one has to look what is there.
        looks = GIVE_BACK_LOOKS if lease.leading or isinstance(lease.asked, Write) else 0
        lease.asked, lease.next_at = None, ambient.monotonic() if looks else lease.next_at
        request = self._handle(Fitness("stopping"))
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                while request is not None and (looks or not isinstance(request, Look)):
                    looks -= isinstance(request, Look)
                    request = self._handle(await self._ask(request))
        except TimeoutError:
            log.info("lease not given back, it will run out")

    def _handle(self, event: Event) -> Request | None:
        before = self.lease.role
        request = self.lease.handle(event, ambient.monotonic())
        self.moved.set()
        if self.lease.role is not before:
            log.info("lease", role=self.lease.role.value, holder=self.lease.holder)
            self.changed.set()
        return request

    async def _next(self) -> Event:
        deadline = self.lease.deadline
        assert deadline is not None, "nothing is outstanding here"
        try:
            async with asyncio.timeout(max(deadline - ambient.monotonic(), 0.001)):
                return await self.events.get()
        except TimeoutError:
            return Tick()

    async def _ask(self, request: Request) -> Event:
        lease_s = self.lease.lease_s
        # To renew, an answer later than this is of no use for the present period. Where nobody has
        # the lease there is none, and a key that was there before takes three requests.
        taking = isinstance(request, Write) and not request.revision
        try:
            async with asyncio.timeout(lease_s if taking else lease_s / 3):
                return await self._answer(request)
        except (BusError, TimeoutError) as error:
            log.debug("lease: no answer", error=str(error))
            return Away()

    async def _answer(self, request: Request) -> Event:
        if isinstance(request, Look):
            entry = await self.bus.kv_get(subjects.LEASES, self.key)
            if entry is None or entry.value is None:
                return Looked(None)
            try:
                there = decode(entry.value, LeaderLease)
            except WireError as error:
                # Nobody can be renewing what nobody can read: it counts as silent.
                log.warning("unreadable lease", error=str(error))
                return Looked(LeaseKey("unreadable", "", "", entry.revision))
            return Looked(LeaseKey(there.holder, there.boot, there.lock, entry.revision))
        lease, sent_at = self.lease, ambient.monotonic()
        holder = "" if request.give_back else lease.me
        value = encode(
            LeaderLease(holder=holder, boot=lease.boot, lock=lease.lock, at=ambient.wall())
        )
        try:
            place, known = (subjects.LEASES, self.key), request.revision
            revision = await write_if(self.bus, *place, value, known, ttl_s=TTL_S)
        except Conflict:
            return LeaseLost()
        return Written(revision, sent_at)
