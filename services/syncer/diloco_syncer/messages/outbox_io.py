"""From effects to the bus: what must arrive is repeated until it does; the rest is sent once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import structlog

from diloco_shared import ambient
from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.port import BusError, Stored, StreamFull, TransferProgress
from diloco_shared.bus.repeating import left_undone, until_done
from diloco_shared.bus.stored_records import event_now
from diloco_shared.process.crash_points import passing
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
from diloco_shared.spec.run import config_hash
from diloco_syncer.context import RunContext
from diloco_syncer.events import (
    Publish,
    PurgeDown,
    PurgeUnsealed,
    SendBeat,
    SendDonate,
    SendGrant,
    SendPull,
    Tell,
)
from diloco_syncer.members.claims import Telling
from diloco_syncer.merging.acknowledged import Acknowledged
from diloco_syncer.merging.published_io import parsed, publications

log = structlog.get_logger()

# What every shard sees alike is told by the first alone.
OF_LEARNERS = frozenset({"join", "learner-seen", "learner-alive", "learner-lost", "returned"})
Control = SendPull | SendGrant | SendDonate | SendBeat
# Events waiting for a server that is away; older ones are the ones worth losing.
EVENTS_MAX = 1000
# Messages of a fragment in which chunks without a manifest are looked for: 100 GB of them.
LOOKED_MAX = 200_000
# Passes over what dead servers had acknowledged of a publication, at most.
LIVES_MAX = 8


class Outbox:
    """Everything that goes out for one run."""

    def __init__(self, context: RunContext) -> None:
        self.spec = spec = context.spec
        self.shard, self.source = context.shard, context.me
        self.run = spec.name
        self.hash = config_hash(spec)
        self.control, self.data = context.control, context.data
        self.bytes_out = 0
        # As many publications under way as rounds in flight, and one of no round: what DN must
        # have room for before a keyframe lets it be purged. In the order in which they were asked.
        self.under_way_max = spec.algorithm.rounds_in_flight_max + 1
        self.turns = asyncio.Semaphore(self.under_way_max)
        self.sending: dict[
            str, TransferProgress
        ] = {}  # of each publication under way, by its subject
        self.acknowledged = Acknowledged()
        self.events: asyncio.Queue[EventRecord] = asyncio.Queue(EVENTS_MAX)
        self.telling = Telling()

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
                # A beat comes every second or so: often enough for what waits for its turn.
                for told in self.telling.due(ambient.monotonic()):
                    self._queue(told)
        await self._say(subject, message)

    async def say_lapsed(self, beat: Beat) -> None:
        """A beat while the lease is in doubt, where no learner hears it."""
        await self._say(subjects.lapsed_beat(self.run), beat)

    async def _say(self, subject: str, message: Pull | Grant | Donate | Beat) -> None:
        with left_undone(subject):
            payload = encode(message.model_copy(update={"run_id": self.spec.id}))
            await self.control.publish(subject, payload)

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

        async def put(progress: TransferProgress) -> None:
            # By themselves: no chunk is sent again because the manifest has to be.
            blob = await until_done(
                lambda: put_blob(self.data, subject, payload, progress=progress), subject
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
            seq = await self._sealed(subject, payload, sealed, progress)
            self.acknowledged.took(seq, subject + ".m", self.data.life)
            passing("after-manifest")

        async with self.turns:
            progress = self.sending[subject] = TransferProgress()
            try:
                await put(progress)
            finally:
                if self.sending.get(subject) is progress:
                    del self.sending[subject]
        self.bytes_out += len(payload) * readers

    async def _sealed(
        self, subject: str, payload: Payload, manifest: bytes, progress: TransferProgress
    ) -> int:
        """Put the manifest, and again the chunks that an earlier life of the server acknowledged:
        they may be lost. The sequence of the manifest, which stands behind all its chunks.

        Chunks that are there are dropped as repeats, for two minutes. To count what is there is no
        help: the server (2.15.1) counts what it lost. A link that breaks loses nothing; nor does a
        node of a hub of several. Where all of these were lost and a backup was put back, chunks are
        gone as well; but there another epoch has begun, and nobody reads what is sealed here.
        """
        under, stream = subject + ".m", subjects.dn_stream(self.run)

        async def seal(again: int) -> int:
            # An identity of its own each time: the server would take it for a repeat.
            msg_id = f"{under}.{again}" if again else under
            seq = await until_done(lambda: self._seal(under, msg_id, manifest, progress), subject)
            progress.life = self.data.life
            return seq

        seq = await seal(0)
        for n in range(1, LIVES_MAX + 1):
            if self.data.several_nodes or not (doubtful := progress.doubtful()):
                return seq
            self.acknowledged.doubted = True
            put = partial(put_blob, self.data, subject, payload, progress=progress, only=doubtful)
            await until_done(put, subject)
            # The newest manifest tells whether anything is lost: chunks behind it, it cannot.
            await until_done(lambda: self.data.purge(stream, under), subject)
            seq = await seal(n)
        log.warning("the server was started over and over", subject=subject)
        return seq

    async def _seal(
        self, subject: str, msg_id: str, manifest: bytes, progress: TransferProgress
    ) -> int:
        try:
            seq = await self.data.append(subject, manifest, msg_id=msg_id)
        except BusError as error:
            progress.trouble = str(error)
            if isinstance(error, StreamFull):
                progress.no_room(str(error))
            raise
        progress.room()
        return seq

    async def purge_up(self, below: Callable[[], Awaitable[int]]) -> None:
        """Remove everything older from UP. A shard among others removes what is of its own
        fragments, for which the server reads each message: half a second a gigabyte, and some of it
        at a time (bus/nats/purging.py). Without a filter it drops whole blocks of its file, and one
        shard has all of UP.

        `below` is asked before each attempt: what it says may be lowered while the server is away.
        What it raises ends this, unless it is a BusError.
        """

        async def purge(subject: str) -> None:
            await self.data.purge(stream, subject, below_seq=await below())

        stream, algorithm = subjects.up_stream(self.run), self.spec.algorithm
        filters = [">"]
        if algorithm.shards > 1:
            filters = [f"up.{self.run}.*.*.{p}.>" for p in algorithm.owned(self.shard)]
        for subject in filters:
            await until_done(partial(purge, subject), f"purge of {subject}")

    async def purge_down(self, effect: PurgeDown) -> None:
        """Remove what a keyframe replaces: everything of its fragment up to the manifest before.

        Ordinarily the keyframe's chunks were sent after that manifest had been stored. One that an
        earlier leader was still sending may come later, and then stays until the next keyframe.
        """
        # All of it anew at each attempt: a server that was away may have lost its newest.
        await until_done(
            lambda: self._purge_down(effect), f"purge of DN below {effect.below_version}"
        )

    async def _purge_down(self, effect: PurgeDown) -> None:
        stream, p = subjects.dn_stream(self.run), effect.fragment
        manifests = parsed(await self.data.fetch(stream, f"dn.{self.run}.*.{p}.*.*.m"))
        until = (effect.epoch, effect.below_version)
        older = [m.seq for parts, m in manifests if (parts.epoch, parts.version) < until]
        kept = [m for parts, m in manifests if (parts.epoch, parts.version) >= until]
        # Else the server has lost what replaces them.
        if older and any(m.prev_version < 0 for m in publications(kept)):
            below = min([max(older) + 1, *[await self._first_chunk(stream, m) for m in kept]])
            await self.data.purge(stream, f"dn.{self.run}.*.{p}.>", below_seq=below)

    async def purge_unsealed(self, effect: PurgeUnsealed) -> None:
        """Remove chunks of earlier terms that no manifest names: no keyframe above them may find
        room as long as they are there."""
        await until_done(lambda: self._purge_unsealed(effect.term), "purge of unsealed chunks")

    async def _purge_unsealed(self, term: int) -> None:
        stream = subjects.dn_stream(self.run)
        for p in self.spec.algorithm.owned(self.shard):
            end = (await self.data.stream_info(stream)).last_seq + 1
            held = await self.data.held(  # all of it: part of an answer would be taken for the rest
                stream, f"dn.{self.run}.*.{p}.*.*", messages_max=LOOKED_MAX, below_seq=end
            )
            # Sealed meanwhile is sealed: manifests are asked for last.
            manifests = parsed(await self.data.fetch(stream, f"dn.{self.run}.*.{p}.*.*.m"))
            sealed = {m.subject.removesuffix(".m") for _, m in manifests}
            for subject in held.keys() - sealed:
                with suppress(ValueError):
                    if subjects.parse_publication(subject).term < term:
                        log.warning("chunks without a manifest go", subject=subject)
                        await self.data.purge(stream, subject)

    async def _first_chunk(self, stream: str, manifest: Stored) -> int:
        """Where what a manifest names begins."""
        chunks = manifest.subject.removesuffix(".m")
        found = await self.data.fetch(stream, chunks, limit=1)
        return found[0].seq if found else manifest.seq

    def tell(self, effect: Tell) -> None:
        """Queue an event for the log; the oldest goes when the queue is full."""
        if self.shard and effect.kind in OF_LEARNERS:
            return
        told = self.telling.take(effect, ambient.monotonic())
        if told is not None:
            self._queue(told)

    def _queue(self, told: Tell) -> None:
        record = event_now(self.run, told.kind, self.source, told.text, told.data)
        log.info(told.kind, text=record.text)
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
            lambda: self.control.append(subjects.event(self.run, record.kind), encode(record)),
            "events",
        )
