"""What several hosts of an island fetch of one payload: the lanes of process 0's connection.

    hub --- a run of the chunks ---> process 0
        --- the next run ----------> process 1 --- what it has fetched ---> process 0
        ...

Process 0 needs all of an anchor, since its digest is of the whole. So the hosts' own connections to
the hub carry a run each, and the island's network carries to process 0 what the others fetched. It
looks first which chunks are where in the stream, and cuts them in the order in which they lie there
into runs of about as many: whoever reads from the first one of a run on gets no other host's.
What a host does not bring, process 0 fetches in its next pass, as it would have without them.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import structlog

from diloco_learner.hosts.carrying_io import CarrierFailed, Carriers
from diloco_shared.bus.blobs import one_pass, send_all
from diloco_shared.bus.port import Bus, Lanes, Stored, TransferProgress, Unavailable
from diloco_shared.protocol.chunks import HEADER_DIGEST, HEADER_INDEX, Incoming, Outgoing

log = structlog.get_logger()

# Fewer chunks are fetched by process 0 alone: 4 MiB of 512 KiB take a third of a second at
# 100 Mbit/s, and to look where they are takes some round trips.
SHARED_MIN = 8
# Messages looked at, for each chunk of a payload: it may have been sent again. With more of them
# process 0 fetches alone.
HEADS_PER_CHUNK = 2
# Chunks that one host is asked for, by their numbers, which must fit into the head of a frame.
RUN_MAX = 100_000


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks that lie one behind the other in the stream, from sequence `start_seq` on."""

    start_seq: int
    chunks: tuple[int, ...]


def fetched_by_all(bus: Bus, carriers: Carriers, shared_min: int = SHARED_MIN) -> None:
    """From now on the others fetch their runs of what comes to process 0 over `bus`, and their
    bytes are counted there."""
    carriers.traffic = bus.traffic
    bus.lanes = SharedLanes(bus, bus.lanes, carriers, shared_min)


def places_of(heads: Iterable[Stored], digest: str) -> dict[int, int]:
    """By chunk of that payload: the sequence of the first message with it. Others are left out."""
    found: dict[int, int] = {}
    for head in heads:
        if head.headers.get(HEADER_DIGEST) == digest:
            with suppress(KeyError, ValueError):
                found.setdefault(int(head.headers[HEADER_INDEX]), head.seq)
    return found


def runs_of(places: Mapping[int, int], wanted: Sequence[int], hosts: int) -> list[ChunkRun]:
    """So many runs of these chunks, or none where not all of them are there."""
    if not places.keys() >= set(wanted):
        return []
    ordered = sorted(wanted, key=lambda index: places[index])
    ends = [len(ordered) * n // hosts for n in range(hosts + 1)]
    cut = [tuple(ordered[a:b]) for a, b in pairwise(ends)]
    return [ChunkRun(places[run[0]], run) for run in cut if run]


class SharedLanes:
    """`bus.Lanes` of process 0."""

    def __init__(
        self, bus: Bus, lanes: Lanes | None, carriers: Carriers, shared_min: int = SHARED_MIN
    ) -> None:
        """`lanes`: those that `bus` has of its own; None where it has none."""
        self.bus, self.lanes = bus, lanes
        self.carriers = carriers
        self.shared_min = shared_min

    async def send(
        self,
        outgoing: Outgoing,
        chunks: Sequence[int],
        progress: TransferProgress,
        *,
        window: int,
        chunk_timeout_s: float,
    ) -> None:
        """As one process does."""
        await send_all(self.bus, self.lanes, outgoing, chunks, progress, window, chunk_timeout_s)

    async def receive(self, stream: str, incoming: Incoming, progress: TransferProgress) -> None:
        """One pass, of all hosts where that is worth it. Raises Unavailable."""
        hosts = self.carriers.ready()
        runs = await self._runs(stream, incoming, 1 + len(hosts)) if hosts else []
        if len(runs) < 2:
            await one_pass(self.bus, self.lanes, stream, incoming, progress)
            return
        next_seq = progress.next_seq
        lent = [
            self.carriers.lend(host, incoming, run.chunks)
            for host, run in zip(hosts, runs[1:], strict=False)
        ]
        tasks = [
            asyncio.ensure_future(self.carriers.get(one, stream, run.start_seq))
            for one, run in zip(lent, runs[1:], strict=True)
        ]
        try:
            progress.next_seq = max(next_seq, runs[0].start_seq)
            await one_pass(self.bus, self.lanes, stream, incoming, progress)
            self._judge(await asyncio.gather(*tasks, return_exceptions=True))
        finally:
            for task in tasks:
                task.cancel()
            # Not all of what lies before was seen: some of it was lent.
            progress.next_seq = next_seq
            for one in lent:
                if self.carriers.over(one):
                    # In a thread, since a host may be slow to read.
                    loop = asyncio.get_running_loop()
                    loop.run_in_executor(None, self.carriers.drop, one.number, (one.index,))

    def _judge(self, outcomes: Iterable[BaseException | None]) -> None:
        """What hosts could not fetch is fetched here; where one is lost, the island ends."""
        for fault in outcomes:
            if isinstance(fault, CarrierFailed):
                self.carriers.rest(fault.index)
                log.warning("process 0 fetches what another host could not", reason=str(fault))
            elif fault is not None:
                raise Unavailable(str(fault))

    async def _runs(self, stream: str, incoming: Incoming, hosts: int) -> list[ChunkRun]:
        blob = incoming.blob
        with incoming.lock:
            wanted = [n for n in range(blob.chunks) if not incoming.has(n)]
        if not self.shared_min <= len(wanted) <= RUN_MAX * hosts:
            return []
        heads = await self.bus.heads(
            stream,
            blob.subject,
            messages_max=HEADS_PER_CHUNK * blob.chunks,
            messages_min=len(wanted),  # a donor still sends
        )
        return runs_of(places_of(heads, blob.digest), wanted, hosts)
