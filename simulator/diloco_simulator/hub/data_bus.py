"""The data client of a process: chunks go over connections of their own, as the product's lanes.

Each connection is in order and none waits for another, so that transfers overtake each other. What
is sent may be a lie, and what is fetched may be damaged: on its way, or for a while.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from diloco_shared.bus.port import Stored, StreamFull
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.hub.net import Net, Way
from diloco_simulator.troubles.chance import Chance
from diloco_simulator.troubles.spoiling import Spoiling, altered
from diloco_simulator.worlds.options import Options

# Beside the one that carries all else.
LANES = 3
# A transfer that is overtaken takes up to this many mean delays more.
OVERTAKEN_DELAYS = 10.0
# Streams whose payloads come in chunks, by what their subjects begin with.
BULK = ("up", "dn", "state")
# Behind the subject of a payload: its manifest, and what announces it.
SMALL = (".m", ".a")

Sent = Callable[[str, bytes], bytes]


def is_chunk(subject: str) -> bool:
    """Whether a message on it is a chunk of a payload."""
    return subject.split(".", 1)[0] in BULK and not subject.endswith(SMALL)


@dataclass(frozen=True, slots=True)
class DataTroubles:
    """What goes wrong with payloads: `sent` may change what is stored, learners may get what is
    damaged, and whoever reads what is `spoiling`."""

    options: Options
    chance: Chance
    sent: Sent
    spoiling: Spoiling | None = None


class DataBus(FarBus):
    """One process's."""

    def __init__(
        self,
        broker: MemoryBroker,
        name: str,
        machine: str,
        net: Net,
        passing: Callable[[str], bool] | None,
        troubles: DataTroubles,
    ) -> None:
        super().__init__(broker, name, machine, net, passing)
        self.options = options = troubles.options
        self.chance, self.sent = troubles.chance, troubles.sent
        self.spoiling = troubles.spoiling
        self.damages = options.corrupt if name.startswith("learner") else 0.0
        self.beside = [
            FarBus(broker, f"{name}-lane-{n}", machine, net, passing) for n in range(LANES)
        ]
        for lane in self.beside:
            lane.traffic = self.traffic

    def _lane(self, subject: str) -> FarBus:
        """That of a payload; now and then it is slower than the others for a while."""
        lane = self.beside[zlib.crc32(subject.encode()) % LANES]
        if self.chance(self.options.overtaken, "overtaken"):
            seconds = self.chance.rng.uniform(0.0, OVERTAKEN_DELAYS * self.options.delay_s)
            self._slowed(self.chance.rng.choice([lane.out, lane.into]), seconds)
        return lane

    def _slowed(self, way: Way, seconds: float) -> None:
        """What it carries from now on arrives so much later at least."""
        way.arrived_at = max(way.arrived_at, self.net.loop.now + seconds)

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: dict[str, str] | None = None,
        msg_id: str | None = None,
        expect_last: int | None = None,
        timeout_s: float = 5.0,
    ) -> int:
        way = self._lane(subject).append if is_chunk(subject) else super().append
        try:
            return await way(
                subject,
                self.sent(subject, payload),
                headers=headers,
                msg_id=msg_id,
                expect_last=expect_last,
                timeout_s=timeout_s,
            )
        except StreamFull:
            if not self.broker.squeezed:
                self.chance.scene.counts[f"{subject.split('.', 1)[0].upper()} full"] += 1
            raise

    async def fetch_raw(
        self, stream: str, subject: str, *, start_seq: int = 1, limit: int | None = None
    ) -> list[Stored]:
        """Chunks come over a lane; one of those on DN may have a wrong byte, if the dice say so."""
        if not is_chunk(subject):
            return await super().fetch_raw(stream, subject, start_seq=start_seq, limit=limit)
        lane = self._lane(subject)
        found = await lane.fetch_raw(stream, subject, start_seq=start_seq, limit=limit)
        if found and subject.startswith("dn.") and self.chance(self.damages, "corrupted"):
            at = self.chance.rng.randrange(len(found))
            byte = self.chance.rng.randrange(len(found[at].payload))
            found[at] = altered(found[at], byte)
        return found if self.spoiling is None else self.spoiling.seen(self.name, subject, found)

    @property
    def ways(self) -> list[Way]:
        return [*super().ways, *(way for lane in self.beside for way in lane.ways)]

    # --- all connections are up or down together -----------------------------------------------

    def disconnect(self) -> None:
        super().disconnect()
        for lane in self.beside:
            lane.disconnect()

    def breaks(self) -> None:
        super().breaks()
        for lane in self.beside:
            lane.breaks()

    def mended(self) -> None:
        for lane in self.beside:
            lane.broken = False
        super().mended()

    def reconnect(self) -> None:
        super().reconnect()
        for lane in self.beside:
            lane.reconnect()

    async def close(self) -> None:
        await super().close()
        for lane in self.beside:
            await lane.close()
