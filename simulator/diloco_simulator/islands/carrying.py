"""What the hosts of a world's island carry to and from the hub, each over a link of its own.

The product's own code does it (`carrying_io`, `giving_io`, `receiving_io`, `shares`). Here is what
stands for the connections, how payloads of some dozen bytes lie on the hosts, and who looks on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco_learner.hosts import carrying_io
from diloco_learner.hosts.carrying_io import (
    Carrier,
    CarrierFailed,
    Carriers,
    Got,
    Lent,
    SharedUpload,
)
from diloco_learner.hosts.giving_io import SharedStateUpload
from diloco_learner.hosts.link_io import head_of, values_of
from diloco_learner.hosts.parts import Buffer, Span
from diloco_learner.hosts.shares import (
    CONTRIBUTION,
    Composed,
    KeptPayload,
    Lying,
    compose,
)
from diloco_shared import ambient
from diloco_shared.bus.port import Unavailable
from diloco_shared.protocol.chunks import describe
from diloco_shared.protocol.messages import Blob
from diloco_simulator.checkers.islands import IslandLife
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.islands.links import Connection
from diloco_simulator.virtual_loop import Hosted
from diloco_simulator.worlds.processes import Client
from diloco_simulator.worlds.tiny import Part

# An anchor of fewer chunks is fetched by process 0 alone.
SHARED_MIN = 2
# Of a payload, before what the hosts have: a codec's header, or the first bytes of a tensor file.
HEAD = 8
# A carrier tries to connect for so long, and so often, in virtual seconds.
CONNECT_S, TRY_S = 10.0, 0.5
# What a carrier does at the hub, where it may die with it.
MOMENTS = {"append": "carries", "api": "fetches"}


# --------------------------------------------------------------------------------------------------
# How payloads lie on hosts.


def spans_of(size: int, hosts: int) -> dict[int, list[Span]]:
    """By host: the part of a vector that it holds."""
    found = {n: Part(n, hosts).of(size) for n in range(hosts)}
    return {n: [((s.start, s.stop),)] for n, s in found.items()}


def bytes_lie(size: int, hosts: int) -> Lying:
    """Of a payload of which every host has a part of the first eighth, and one of the rest: as of
    the scales and the quanta of a codec."""
    body = size - HEAD
    counts = body // 8, body - body // 8
    return Lying(HEAD, counts, (1, 1), tuple(spans_of(n, hosts) for n in counts))


def values_lie(size: int, hosts: int) -> Lying:
    """Of a fragment of so many fp32 values behind a header."""
    return Lying(HEAD, (size,), (4,), (spans_of(size, hosts),))


def parts_of(payload: Buffer, lying: Lying, host: int) -> list[memoryview]:
    """What a host has of a payload that is all here."""
    return [memoryview(payload)[start:stop] for start, stop in lying.stretches(host)]


class Links(Protocol):
    """What process 0 needs of the others."""

    hosts: int

    def answers(self, number: int) -> Mapping[int, Buffer]: ...


@dataclass(slots=True)
class SharedWhole:
    """A payload of all hosts, as process 0 has it: see `hosts.trainer.SharedPayload`.

    Process 0 of a world knows all of it, of a second computation: what is put together must be
    that one's. `done` is told of it, or of nothing where it is another.
    """

    leading: Links
    number: int
    lying: Lying
    whole: bytes
    carriers: tuple[int, ...]
    chunk_bytes: int
    of: str
    done: Callable[[bytes], None]

    def compose(self, subject: str) -> Composed:
        """As the product's."""
        made = compose(
            subject,
            self.lying,
            self.whole[: self.lying.head],
            (0, parts_of(self.whole, self.lying, 0)),
            self.leading.answers(self.number),
            self.carriers,
            self.chunk_bytes,
        )
        known = describe(subject, self.whole, chunk_bytes=self.chunk_bytes)
        self.done(self.whole if made.outgoing.blob == known else b"")
        return made

    def fetch(self) -> bytes:
        """All of it, once all have given their parts: for whoever sends another in its place."""
        self.compose("")
        return self.whole


# --------------------------------------------------------------------------------------------------
# Process 0.


class SeenCarriers(Carriers):
    """The product's, and what they do is counted."""

    def __init__(
        self, say: Callable[[int, bytes], None], life: IslandLife, *, wanted: bool
    ) -> None:
        super().__init__(say, wanted=wanted)
        self.life, self.counts = life, life.watch.counts
        self.failed: set[tuple[int, int]] = set()  # (host, order) whose share is not stored

    def upload_of(self, shared: SharedWhole) -> SharedUpload:
        """As of `leading_io.Hosts`."""
        kind = SharedUpload if shared.of == CONTRIBUTION else SharedStateUpload
        return kind(self, shared.number, shared.carriers, shared)

    async def put(
        self,
        index: int,
        number: int,
        blob: Blob,
        left_s: float | None,
        patience_s: float | None = None,
    ) -> None:
        try:
            await super().put(index, number, blob, left_s, patience_s)
        except CarrierFailed:
            self.failed.add((index, number))
            self.counts["islands: a share not stored by its host"] += 1
            raise
        self.counts["islands: a share carried"] += 1

    async def get(self, lent: Lent, stream: str, start_seq: int) -> None:
        many = len(lent.wanted)
        await super().get(lent, stream, start_seq)
        self.counts["islands: chunks fetched by another host"] += many

    async def give(self, lent: Lent, number: int) -> None:
        await super().give(lent, number)
        how = "that process 0 stored instead" if (lent.index, number) in self.failed else "given"
        self.counts[f"islands: a share {how}"] += 1

    def rest(self, index: int) -> None:
        super().rest(index)
        self.counts["islands: a carrier left alone"] += 1
        self.life.rests(index, ambient.monotonic() + carrying_io.REST_S)


# --------------------------------------------------------------------------------------------------
# The others.


@dataclass(slots=True)
class HubWay:
    """Of one host to the hub, in one life of its process."""

    client: Client
    name: str  # of its connection
    host: str  # of its link
    process: Hosted
    moment: Callable[[str], None]  # shown what it does
    buses: list[FarBus] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process.before = self._before

    def _before(self, what: str) -> None:
        if (moment := MOMENTS.get(what)) is not None:
            self.moment(moment)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[FarBus]:
        """As `serving.connected_for_data`. Raises Unavailable where nobody can be reached."""
        bus = self.client(self.name, self.host, self.process.passes)
        self.buses.append(bus)
        try:
            for _ in range(int(CONNECT_S / TRY_S)):
                if self._there(bus):
                    break
                await asyncio.sleep(TRY_S)
            else:
                raise Unavailable("no server there")
            yield bus
        finally:
            self.buses.remove(bus)
            await bus.close()

    def _there(self, bus: FarBus) -> bool:
        return bus.out.open and bus.into.open and not bus.net.away

    def breaks(self, seconds: float) -> None:
        """Its connections do, and are made again by themselves."""
        for bus in self.buses:
            bus.disconnect()
            bus.net.loop.call_later(seconds, _again, bus, context=bus.net.outside)

    def vanish(self) -> None:
        """Its process is gone."""
        for bus in self.buses:
            bus.vanish()


def _again(bus: FarBus) -> None:
    if not bus.closed:
        bus.reconnect()


class SeenCarrier(Carrier):
    """The product's, in a follower's process; what it keeps is looked at."""

    def __init__(self, way: HubWay, connection: Connection, life: IslandLife) -> None:
        super().__init__(way.connect, self._says, self._gives)
        self.way, self.connection, self.life = way, connection, life

    def _says(self, *values: Any) -> None:
        self.connection.said.send(values_of(head_of(*values)))

    def _gives(self, number: int, got: Got) -> None:
        self.connection.answers.send((number, b"".join(got.parts), "", *got.indices))

    def hears(self, head: bytes) -> None:
        """An errand."""
        self.told(*values_of(head)[1:])

    def keep(self, number: int, kept: KeptPayload) -> None:
        super().keep(number, kept)
        self.life.keeps(kept.of, sum(k.of == kept.of for k in self.kept.values()))

    async def run_here(self) -> None:
        """As `run`, in a loop that others share. Its end, once process 0 is gone, others notice."""
        with suppress(OSError):
            await self.serve()
