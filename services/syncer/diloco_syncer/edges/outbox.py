"""From effects to the bus: what must arrive is repeated until it does; the rest is sent once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from diloco_shared.config import RunSpec, config_hash
from diloco_shared.edges.blobs import put_blob
from diloco_shared.edges.bus import Bus, BusError, Progress, Stored, StreamFull
from diloco_shared.edges.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import Payload
from diloco_shared.protocol.messages import (
    Beat,
    Donate,
    Grant,
    PublicationManifest,
    Pull,
    TensorSpec,
)
from diloco_shared.protocol.records import Event as EventRecord
from diloco_shared.protocol.wire import encode
from diloco_syncer.acknowledged import Acknowledged
from diloco_syncer.events import (
    Publish,
    PurgeDown,
    SendBeat,
    SendDonate,
    SendGrant,
    SendPull,
    Tell,
)

log = structlog.get_logger()

T = TypeVar("T")

# What every shard sees alike is told by the first alone.
OF_LEARNERS = frozenset({"join", "learner-seen", "learner-alive", "learner-lost", "returned"})
Control = SendPull | SendGrant | SendDonate | SendBeat
# First and longest pause between attempts, in seconds.
PAUSE_S, PAUSE_S_MAX = 0.2, 3.0
# Events waiting for a server that is away; older ones are the ones worth losing.
EVENTS_MAX = 1000


async def until_done(what: Callable[[], Awaitable[T]]) -> T:
    """Repeat until the bus takes it, pausing ever longer up to a limit."""
    pause_s = PAUSE_S
    while True:
        try:
            return await what()
        except BusError as error:
            log.warning("bus: again later", error=str(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)


class Outbox:
    """Everything that goes out for one run."""

    def __init__(self, spec: RunSpec, source: str, control: Bus, data: Bus, shard: int = 0) -> None:
        self.spec = spec
        self.shard = shard
        self.run = spec.name
        self.hash = config_hash(spec)
        self.source = source
        self.control = control
        self.data = data
        self.bytes_out = 0
        # As many publications under way as rounds in flight, and one of no round: what DN must
        # have room for before a keyframe lets it be purged. In the order in which they were asked.
        self.turns = asyncio.Semaphore(spec.algorithm.rounds_in_flight_max + 1)
        self.sending: dict[str, Progress] = {}  # of each publication under way, by its subject
        self.acknowledged = Acknowledged()
        self.events: asyncio.Queue[EventRecord] = asyncio.Queue(EVENTS_MAX)

    async def send(self, effect: Control) -> None:
        """Control messages: lost is lost, the machine repeats them."""
        message: Pull | Grant | Donate | Beat
        match effect:
            case SendPull():
                subject, message = subjects.pull(self.run), effect.pull
            case SendGrant():
                subject, message = subjects.grant(self.run, effect.grant.learner), effect.grant
            case SendDonate():
                subject, message = subjects.donate(self.run, effect.donate.donor), effect.donate
            case SendBeat():
                subject, message = subjects.beat(self.run), effect.beat
        await self._say(subject, message)

    async def say_lapsed(self, beat: Beat) -> None:
        """A beat while the lease is in doubt, where no learner hears it."""
        await self._say(subjects.lapsed_beat(self.run), beat)

    async def _say(self, subject: str, message: Pull | Grant | Donate | Beat) -> None:
        try:
            payload = encode(message.model_copy(update={"run_id": self.spec.id}))
            await self.control.publish(subject, payload)
        except BusError as error:
            log.debug("not sent", subject=subject, error=str(error))

    async def publish(
        self,
        effect: Publish,
        payload: Payload,
        codec: str,
        values: int,
        anchor_digest: str,
        layout: tuple[TensorSpec, ...],
        readers: int,
    ) -> None:
        """Chunks, then the manifest that makes them a publication; repeated until both are in."""
        e = effect
        subject = subjects.publication(self.run, e.epoch, e.fragment, e.version, e.term)

        async def put(progress: Progress) -> None:
            # The chunks once: the server takes repeats of them for new ones after two minutes.
            blob = await until_done(
                lambda: put_blob(self.data, subject, payload, progress=progress)
            )
            passing("publication")
            manifest = PublicationManifest(
                run=self.run,
                epoch=e.epoch,
                term=e.term,
                round=e.round,
                fragment=e.fragment,
                version=e.version,
                prev_version=e.prev_version,
                codec=codec,
                values=values,
                anchor_digest=anchor_digest,
                config_hash=self.hash,
                checkpoint=e.checkpoint,
                participants=e.participants,
                last_merged=e.last_merged,
                stamp=e.stamp,
                layout=layout if e.prev_version < 0 else (),
                blob=blob,
            )
            sealed = encode(manifest)
            seq = await until_done(lambda: self._seal(subject + ".m", sealed, progress))
            while progress.silent:
                # Chunks that were acknowledged may be lost: what is there is dropped as a repeat.
                # To count them is no help: the server (2.15.1) counts those that it lost.
                progress.silent, self.acknowledged.doubted = False, True
                await until_done(lambda: put_blob(self.data, subject, payload, progress=progress))
            self.acknowledged.took(seq, subject + ".m")
            passing("after-manifest")

        async with self.turns:
            progress = self.sending[subject] = Progress()
            try:
                await put(progress)
            finally:
                if self.sending.get(subject) is progress:
                    del self.sending[subject]
        self.bytes_out += len(payload) * readers

    async def _seal(self, subject: str, manifest: bytes, progress: Progress) -> int:
        try:
            seq = await self.data.append(subject, manifest, msg_id=subject)
        except BusError as error:
            progress.trouble = str(error)
            if isinstance(error, StreamFull):
                progress.no_room(str(error))
            else:
                progress.silent = True
            raise
        progress.room()
        return seq

    async def purge_up(self, below_seq: int) -> None:
        """Remove everything older from UP. One purge by sequence: one per subject would hold up
        the stream for seconds. A shard among others removes what is of its own fragments."""
        stream, algorithm = subjects.up_stream(self.run), self.spec.algorithm
        filters = [f"up.{self.run}.>"]
        if algorithm.shards > 1:
            filters = [f"up.{self.run}.*.*.{p}.>" for p in algorithm.owned(self.shard)]
        for subject in filters:
            await until_done(
                lambda s=subject: self.data.purge(stream, s, below_seq=below_seq)  # type: ignore[misc]
            )

    async def purge_down(self, effect: PurgeDown) -> None:
        """Remove what a keyframe replaces: everything of its fragment up to the manifest before.

        Ordinarily the keyframe's chunks were sent after that manifest had been stored. One that an
        earlier leader was still sending may come later, and then stays until the next keyframe.
        """
        stream, p = subjects.dn_stream(self.run), effect.fragment
        manifests = await until_done(lambda: self.data.fetch(stream, f"dn.{self.run}.*.{p}.*.*.m"))
        older = [
            stored.seq
            for stored in manifests
            if (parts := subjects.parse_publication(stored.subject))
            and (parts.epoch, parts.version) < (effect.epoch, effect.below_version)
        ]
        kept = [stored for stored in manifests if stored.seq not in older]
        if older:
            below = min([max(older) + 1, *[await self._first_chunk(stream, m) for m in kept]])
            await until_done(
                lambda: self.data.purge(stream, f"dn.{self.run}.*.{p}.>", below_seq=below)
            )

    async def _first_chunk(self, stream: str, manifest: Stored) -> int:
        """Where what a manifest names begins."""
        chunks = manifest.subject.removesuffix(".m")
        found = await until_done(lambda: self.data.fetch(stream, chunks, limit=1))
        return found[0].seq if found else manifest.seq

    def tell(self, effect: Tell) -> None:
        """Queue an event for the log; the oldest goes when the queue is full."""
        if self.shard and effect.kind in OF_LEARNERS:
            return
        record = EventRecord(
            run=self.run,
            kind=effect.kind,
            source=self.source,
            text=effect.text[:500],
            data=effect.data,
            at=time.time(),
        )
        log.info(effect.kind, text=effect.text)
        if self.events.full():
            self.events.get_nowait()
        self.events.put_nowait(record)

    async def events_out(self) -> None:
        """Write queued events, for ever."""
        while True:
            record = await self.events.get()
            await self.event(record)

    async def event(self, record: EventRecord) -> None:
        await until_done(
            lambda: self.control.append(subjects.event(self.run, record.kind), encode(record))
        )
