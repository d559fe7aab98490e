"""The newest mark on the first shard's tape: where the other shards look whether there is one.

Learners tell of marks, and a learner may lie: a shard that set a mark of any number would refuse
all true ones after it, whose numbers are lower.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from diloco_shared.bus.port import Stored
from diloco_shared.bus.repeating import until_done
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeCheckpoint
from diloco_shared.protocol.wire import WireError, decode_tape
from diloco_syncer.context import RunContext
from diloco_syncer.events import Event, MarkFound

# Records that are read at once: less than a megabyte.
PAGE = 1000


class Marks:
    """Of one leader's term. What leaves the stream is of a mark that is over: it is not missed."""

    def __init__(self, context: RunContext, put: Callable[[Event], None]) -> None:
        self.control, self.put = context.control, put
        self.stream = subjects.tape_stream(context.spec.name)
        self.subject = subjects.tape(context.spec.name, 0)
        self.last: Stored | None = None  # up to which the tape was read
        self.newest = 0
        self.open = 0  # that of a checkpoint without an end
        self.wanted = asyncio.Event()

    def want(self) -> None:
        """Somebody tells of a mark that is not on the tape of this shard."""
        self.wanted.set()

    async def work(self) -> None:
        """For ever."""
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            while not await until_done(self._read, "marks on the first shard's tape"):
                pass
            self.put(MarkFound(self.newest, self.open))

    async def _read(self) -> bool:
        """A page; whether it was the last one. Raises BusError."""
        start = self.last.seq if self.last else 1
        stored = await self.control.fetch(self.stream, self.subject, start_seq=start, limit=PAGE)
        if self.last and (not stored or stored[0].payload != self.last.payload):
            # It went to the archive; or the server lost it, and others are in its place.
            self.last, self.open = None, 0
            return False
        for message in stored:
            with suppress(WireError):  # which its own shard tells of
                record = decode_tape(message.payload)
                if isinstance(record, TapeCheckpoint):
                    self.newest = max(self.newest, record.number)
                    self.open = record.number if record.outcome == "begun" else 0
            self.last = message
        return len(stored) < PAGE
