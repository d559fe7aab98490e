"""The tape in JetStream: one subject per shard, appended to only at its known end."""

import asyncio

from diloco_shared.edges.bus import Bus, Conflict, Unavailable
from diloco_shared.edges.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeRecord
from diloco_shared.protocol.wire import decode_tape, encode

# Pause between two looks at a server that does not answer, in seconds.
RETRY_S = 0.3


class Deposed(Exception):
    """Another leader has appended: this one must not decide anything more."""


class Tape:
    """Reads from the start, appends at the end."""

    def __init__(self, bus: Bus, run: str, shard: int = 0) -> None:
        self.bus = bus
        self.shard = shard
        self.stream = subjects.tape_stream(run)
        self.subject = subjects.tape(run, shard)
        self.end = 0  # stream sequence of the newest record of this shard

    async def read(
        self, after: int = 0, *, limit: int | None = None
    ) -> list[tuple[int, TapeRecord]]:
        """The first `limit` records with sequence > `after`; remembers where they end."""
        stored = await self.bus.fetch(self.stream, self.subject, start_seq=after + 1, limit=limit)
        self.end = max([self.end, after, *(s.seq for s in stored)])
        return [(s.seq, decode_tape(s.payload)) for s in stored]

    async def append(self, record: TapeRecord) -> int:
        """Append where this process believes the end is; the commit point of a round.

        An unknown outcome is settled by reading the tail. Raises Deposed when somebody else's
        record is there. Waits as long as the server is away: nothing can be decided without it.
        """
        payload = encode(record)
        passing("before-append")
        while True:
            try:
                self.end = await self.bus.append(self.subject, payload, expect_last=self.end)
                passing("after-append")
                return self.end
            except (Conflict, Unavailable) as error:
                settled = await self._settle(payload, isinstance(error, Conflict))
                if settled:
                    self.end = settled
                    return settled
                await asyncio.sleep(RETRY_S)

    async def _settle(self, payload: bytes, conflict: bool) -> int:
        """Sequence of our record if it is the tail, 0 if it is not there; Deposed otherwise."""
        try:
            tail = await self.bus.last(self.stream, self.subject)
        except Unavailable:
            return 0
        if tail is None or tail.seq == self.end:
            # A conflict with nothing new there: our own earlier attempt may still be on its way.
            return 0
        if tail.payload == payload:
            return tail.seq
        raise Deposed(
            f"record {tail.seq} on {self.subject} is not ours (we expected the end at {self.end}"
            f"{', refused' if conflict else ''}): another leader is at work"
        )
