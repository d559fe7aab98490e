"""Tells learners how far every data shard is merged, as the tape says (bucket PLACES)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from diloco_shared.bus.port import Bus, BusError, Conflict
from diloco_shared.bus.repeating import again_and_again, some_at_once
from diloco_shared.bus.stored_records import readable, write_if
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Place
from diloco_shared.protocol.wire import encode
from diloco_syncer.history.ledger import Ledger

# Between two writes, in seconds: a process that reads on where another died takes longer to start.
PAUSE_S = 0.1


class MergedPositions:
    """How far each data shard is merged, written where learners read it (a `Place` per key).

    A syncer shard's leader alone writes them, and writes all before it admits anybody.

    By compare-and-set: what a deposed leader still has to say replaces nothing. Its successor
    writes the first time over whatever is there and differs, since its tape is the newer one. So
    does whoever meets a conflict, which may be with its own write: hence it first looks whether it
    still leads. A write of before that was on its way for long may stay where its successor had
    nothing to write, until that data shard is merged further: what lies between is read twice.

    Each shard of the syncer has keys of its own: what is merged in any of them is merged.

    A run that goes back to a checkpoint has the checkpoint's places written before the restore is
    on the tape. Else a learner that comes back at once could take a further place, and leave out
    the data in between.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        ledger: Callable[[], Ledger],
        ours: Callable[[], Awaitable[None]],
        syncer: int = 0,
    ) -> None:
        """`ours`: returns while nobody else may lead, and raises Deposed once another does."""
        self.bus = bus
        self.run = run
        self.syncer = syncer
        self.ours = ours
        self.ledger = ledger  # the present one
        # Of the checkpoint that the run is going back to, until the present ledger is that one's.
        self.back: Mapping[int, tuple[int, int]] | None = None
        self.writing = asyncio.Lock()  # what is begun with other places ends before
        self.known = False  # whether `written` is what earlier leaders wrote
        self.written: dict[int, tuple[int, int]] = {}
        self.revisions: dict[int, int] = {}
        # Whose write was not answered: it may be there, or come yet. A run that goes back must not
        # pass them over because it knows nothing of them.
        self.unsure: set[int] = set()
        self.changed = asyncio.Event()  # the tape has taken something
        self.changed.set()

    async def write(self) -> None:
        """Write what is not written yet. Raises BusError; may be called again. Or Deposed."""
        async with self.writing:
            await self._write()

    async def _write(self) -> None:
        if not self.known:
            await self._read()
        merged = self.ledger().places if self.back is None else self.back
        # A place that the tape does not know is one of a history that was gone back behind.
        told = {*merged, *self.written, *self.unsure}
        wanted = ((shard, merged.get(shard, (0, 0))) for shard in told)
        new = [
            (shard, where)
            for shard, where in wanted
            if self.written.get(shard) != where or shard in self.unsure
        ]
        await some_at_once(self._put(shard, where) for shard, where in new)

    async def _put(self, shard: int, where: tuple[int, int]) -> None:
        value = encode(Place(shard=shard, passes=where[0], sequences=where[1]))
        place, known = (subjects.PLACES, self._key(shard)), self.revisions.get(shard, 0)
        await self.ours()
        self.unsure.add(shard)
        try:
            self.revisions[shard] = await write_if(self.bus, *place, value, known)
        except Conflict:
            # A successor; or an answer to our own write was lost: then this one leads still.
            self.known = False
            raise
        self.written[shard] = where
        self.unsure.discard(shard)

    def _key(self, shard: int) -> str:
        return f"{self.run}.{shard}.{self.syncer}"

    async def _read(self) -> None:
        there = await self.bus.kv_all(subjects.PLACES, f"{self.run}.>")
        # What is gone by now, since the hub was put back, has no revision any more.
        self.revisions, self.written = {}, {}
        for key, entry in there.items():
            run, _, place_of = key.partition(".")
            shard, _, syncer = place_of.partition(".")
            if (run, syncer) == (self.run, str(self.syncer)) and shard.isdecimal():
                self.revisions[int(shard)] = entry.revision
            place = readable(entry.value, Place)  # one that is not is written anew
            if place is not None and key == self._key(place.shard):
                self.written[place.shard] = (place.passes, place.sequences)
        self.known = True

    async def keep(self) -> None:
        """For ever, whenever something has changed; nothing while another may lead."""

        async def look() -> None:
            await self.changed.wait()
            self.changed.clear()
            try:
                await self.write()
            except BusError:
                self.changed.set()
                raise

        await again_and_again(look, "places in the data", PAUSE_S)
