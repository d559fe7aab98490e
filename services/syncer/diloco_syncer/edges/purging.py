"""Removes from UP what a snapshot covers, once the standbys have executed it too."""

import asyncio

import structlog

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus, BusError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import MemberRecord
from diloco_shared.protocol.wire import WireError, decode
from diloco_syncer.edges.outbox import Outbox

log = structlog.get_logger()

# Between two looks at how far the standbys are, in seconds; they tell about as often.
LOOK_S = 1.0
# UP is never more than this full for the sake of a standby: a slower one fetches a snapshot.
FULL = 0.5
# What a syncer's member record shows while it executes the tape.
FOLLOWING = ("standby", "catching up")


class UpPurger:
    """Of one leader's term. A later wish replaces an earlier one: it covers more."""

    def __init__(self, spec: RunSpec, me: str, control: Bus, data: Bus, outbox: Outbox) -> None:
        self.run = spec.name
        self.me = me
        self.control = control
        self.data = data
        self.outbox = outbox
        self.covers = 0  # tape record up to which a snapshot covers
        self.below = 0  # stream sequence on UP below which nothing later lies
        self.wanted = asyncio.Event()

    def want(self, covers: int, below: int) -> None:
        """A snapshot of record `covers` is durable; what UP has below `below` may go."""
        self.covers, self.below = covers, below
        self.wanted.set()

    def rewound(self, end: int) -> None:
        """UP lost what came after sequence `end`: what stands there from now on is of later."""
        self.below = min(self.below, end + 1)

    async def work(self) -> None:
        """For ever."""
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            while True:
                if not await self._needed():
                    break
                await asyncio.sleep(LOOK_S)
            await self.outbox.purge_up(lambda: self.below)

    async def _needed(self) -> bool:
        """Whether a living standby has not executed what would go, and there is room to wait."""
        try:
            place = (self.run, self.outbox.shard)
            behind = await standbys_behind(self.control, *place, self.me, self.covers)
            if not behind:
                return False
            info = await self.data.stream_info(subjects.up_stream(self.run))
        except BusError as error:
            log.debug("purge waits", error=str(error))
            return True
        if info.bytes_max and info.bytes > FULL * info.bytes_max:
            standbys = [m.id for m in behind]
            log.warning("contributions go before these standbys used them", standbys=standbys)
            return False
        return True


async def standbys_behind(
    control: Bus, run: str, shard: int, me: str, covers: int
) -> list[MemberRecord]:
    """Living standbys of the shard that have not executed tape record `covers`. Raises BusError."""
    found = []
    for entry in (await control.kv_all(subjects.MEMBERS)).values():
        try:
            m = decode(entry.value or b"", MemberRecord)
        except WireError:
            continue
        ours = (m.role, m.run, m.shard) == ("syncer", run, shard) and m.id != me
        if ours and m.state in FOLLOWING and m.tape_seq < covers:
            found.append(m)
    return found
