"""What an island gives away of its state: moments to a newcomer, the parameters a run begins with.

Every host keeps its share of such a payload until nobody needs it any more. So a host that cannot
store its share does not spoil the whole: process 0 asks for its chunks, and stores them itself. So,
too, does it get all of them where it needs the payload whole: for the part of a checkpoint, and for
every newcomer but the first that is given the same moments.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from diloco_learner.hosts.carrying_io import CarrierFailed, SharedUpload
from diloco_learner.hosts.shares import Composed
from diloco_shared.bus.blobs import fresh, put_blob, put_chunks
from diloco_shared.bus.port import Bus, TransferProgress
from diloco_shared.memory.pages import fill
from diloco_shared.protocol.chunks import Incoming, Outgoing
from diloco_shared.protocol.messages import Blob
from diloco_shared.protocol.pace import silence_s

log = structlog.get_logger()

# A host that has stored no more for so many seconds gives its chunks to process 0: before whoever
# waits for them gives up, which takes twice as long.
PATIENCE_S = silence_s()


class SharedStateUpload(SharedUpload):
    """Part of the state that several hosts store: process 0's handle; `let_go` must follow."""

    composing: asyncio.Future[Composed] | None = None
    gathering: asyncio.Task[memoryview] | None = None
    stored = False  # by its hosts, or it is meanwhile: what they are told has one number

    async def store(
        self,
        bus: Bus,
        subject: str,
        *,
        patience_s: float | None = None,
        announce: Callable[[Blob], Awaitable[None]] | None = None,
        progress: TransferProgress | None = None,
    ) -> Blob:
        """Have all of it stored, as `put_blob` does; the Blob for the manifest.

        The hosts do so once. Whoever else it goes to gets it from here, where all of it is then.
        Raises what `put_blob` does, HostLost, and CarrierFailed where a host kept its share no
        more.
        """
        if self.stored:
            to: dict[str, Any] = {"patience_s": patience_s, "announce": announce}
            return await put_blob(bus, subject, await self.whole(), progress=progress, **to)
        self.stored = True
        made = await self._made()
        blob = made.outgoing.blob.model_copy(update={"subject": subject})
        whole = Outgoing(blob, made.outgoing.payload, made.outgoing.checks)
        if announce is not None:
            await announce(blob)
        own = put_chunks(bus, whole, made.chunks, patience_s=patience_s, progress=progress)
        others = (self._carried(n, bus, whole, made, patience_s) for n in made.carried)
        tasks = [asyncio.ensure_future(one) for one in (own, *others)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return blob

    async def _carried(
        self, index: int, bus: Bus, whole: Outgoing, made: Composed, patience_s: float | None
    ) -> None:
        """Once the share of a host is stored, by itself or from here."""
        try:
            await self.carriers.put(index, self.number, whole.blob, None, PATIENCE_S)
        except CarrierFailed as failed:
            log.warning("process 0 stores the share of a host", reason=str(failed))
            self.carriers.rest(index)
            chunks = made.carried[index]
            memory = await self._gathered(whole.blob, {index: chunks})
            given = Outgoing(whole.blob, memory, whole.checks)
            await put_chunks(bus, given, chunks, patience_s=patience_s)

    async def whole(self) -> memoryview:
        """All bytes, here; the same memory for all who ask. Raises as `store` does."""
        if self.gathering is None:
            self.gathering = asyncio.create_task(self._whole())
            self.gathering.add_done_callback(_looked_at)
        return await asyncio.shield(self.gathering)

    async def _whole(self) -> memoryview:
        made = await self._made()
        memory = await self._gathered(made.outgoing.blob, made.carried)
        await asyncio.to_thread(_fill, memory, made)
        return memory

    async def _made(self) -> Composed:
        """Composed once, also where whoever asked for it first is cancelled meanwhile."""
        if self.composing is None:
            loop = asyncio.get_running_loop()
            self.composing = loop.run_in_executor(None, self.shared.compose, "")
        return await asyncio.shield(self.composing)

    async def _gathered(self, blob: Blob, wanted: Mapping[int, Sequence[int]]) -> memoryview:
        """Memory for the payload, with the chunks that these hosts keep: no more of it is used."""
        memory = fresh(blob.bytes)
        incoming = Incoming(blob, lambda size: memory)
        for index, chunks in wanted.items():
            lent = self.carriers.lend(index, incoming, chunks)
            try:
                await self.carriers.give(lent, self.number)
            finally:
                self.carriers.over(lent)
        return memory

    def let_go(self) -> None:
        """Nobody needs it any more. Any thread may say so; a host may be slow to read it."""
        apart(partial(self.carriers.drop, self.number, self.indices))


def apart(work: Callable[[], object]) -> None:
    """In a thread of its own: whoever asks for it may have no loop, and waits for nobody."""
    threading.Thread(target=work, name="drop", daemon=True).start()


def _looked_at(task: "asyncio.Task[memoryview]") -> None:
    """Whoever waited for it may be gone, and asks no more what became of it."""
    if not task.cancelled():
        task.exception()


def _fill(memory: memoryview, made: Composed) -> None:
    """The chunks that process 0 has itself."""
    for index in made.chunks:
        data = made.outgoing.data(index)
        start = index * made.outgoing.blob.chunk_bytes
        fill(memory[start : start + len(data)], data)
