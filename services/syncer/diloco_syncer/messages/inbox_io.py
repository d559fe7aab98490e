"""From the bus to events: progress, joins, contributions, initial parameters, wishes.

What cannot be accepted becomes a Malformed event: counted, told, never fatal.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from diloco_shared.bus.blobs import get_blob, receiving
from diloco_shared.bus.port import BusError, Delivery, Stored, Unavailable
from diloco_shared.bus.repeating import until_done
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    ContributionManifest,
    Join,
    Message,
    Progress,
)
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import WireError, decode
from diloco_shared.spec.fragmentation import Piece
from diloco_syncer.context import RunContext
from diloco_syncer.events import (
    ContributionSeen,
    Event,
    JoinSeen,
    Malformed,
    ProgressSeen,
    Wanted,
)
from diloco_syncer.leadership.initial_parameters_io import InitialSets
from diloco_syncer.merging.payloads_io import FETCHES, Payloads, PayloadsFull
from diloco_syncer.rounds.norms import inspect

# Between two looks at whether a round still waits for what is being fetched, in seconds.
LOOK_S = 0.3

Put = Callable[[Event], None]


class Inbox:
    """Everything that comes in for one run."""

    def __init__(
        self,
        context: RunContext,
        payloads: Payloads,
        put: Put,
        wanted: Callable[[ContributionManifest], bool],
        pieces: Callable[[int], Sequence[Piece]] = lambda _: (),
        saw: Callable[[int, str], None] = lambda seq, subject: None,
        appointed: Callable[[str], bool] = lambda learner: True,
        initializer: Callable[[], tuple[str, int]] = lambda: ("", -1),
    ) -> None:
        self.spec = spec = context.spec
        self.owned = spec.algorithm.owned(context.shard)
        self.run = spec.name
        self.control, self.data = context.control, context.data
        self.payloads = payloads
        self.put = put
        self.wanted = wanted  # whether an open round asks for it: nothing else is fetched
        self.pieces = pieces  # of a fragment, as far as known
        self.saw = saw  # told the sequence and subject of every manifest
        self.appointed = appointed  # whether a learner was asked for initial parameters
        self.initializer = initializer  # who is asked for them now, and in which life
        self.bytes_in = 0
        self.up_seq = 0  # of the newest contribution's manifest
        self.under_way: set[str] = set()
        self.fetching = asyncio.Semaphore(FETCHES)

    # --- control plane -------------------------------------------------------------------------

    async def progress(self) -> None:
        """Progress reports, for ever."""
        # 4096: some seconds of reports of a hundred learners while a merge holds the loop.
        async with self.control.subscribe(
            subjects.progress(self.run, "*"), limit=4096
        ) as deliveries:
            async for d in deliveries:
                self._decoded(d, Progress, lambda p: ProgressSeen(p))

    async def joins(self) -> None:
        """Join requests, for ever; learners of release 0.2 say theirs without their names."""
        async with asyncio.TaskGroup() as group:
            for subject in (subjects.join(self.run, "*"), subjects.unsigned_join(self.run)):
                group.create_task(self._joins(subject))

    async def _joins(self, subject: str) -> None:
        async with self.control.subscribe(subject, limit=256) as deliveries:
            async for d in deliveries:
                self._decoded(d, Join, lambda j: JoinSeen(j))

    def _decoded(self, d: Delivery, kind: type[Message], event: Callable[..., Event]) -> None:
        try:
            message = decode(d.payload, kind)
        except WireError as error:
            self.put(Malformed("wire", d.subject, str(error)))
            return
        if kind is Progress and getattr(message, "run_id", "") != self.spec.id:
            self.put(Malformed("run", d.subject, "speaks of a deleted run of this name"))
            return
        speaker = d.subject.rsplit(".", 1)[-1]
        signed = d.subject != subjects.unsigned_join(self.run)
        if signed and getattr(message, "learner", "") != speaker:
            self.put(Malformed("wire", d.subject, "speaks for another learner"))
            return
        self.put(event(message))

    async def user_requests(self) -> None:
        """What the user wants of the run, for ever."""
        async with self.control.kv_watch(subjects.RUNS, self.run) as entries:
            async for entry in entries:
                if entry.value is None:
                    self.put(Wanted(paused=False, stopping=True, quorum=1))
                    continue
                try:
                    record = decode(entry.value, RunRecord)
                except WireError as error:
                    self.put(Malformed("wire", f"{subjects.RUNS}.{self.run}", str(error)))
                    continue
                self.put(
                    Wanted(
                        paused=record.desired == "paused",
                        stopping=record.desired == "stopped",
                        quorum=max(record.quorum, 1),
                        checkpoint=record.checkpoint,
                        restore=record.restore,
                    )
                )

    # --- data plane ----------------------------------------------------------------------------

    async def contributions(self, start_seq: int) -> None:
        """Manifests on UP from `start_seq` on, for ever; their chunks if a round wants them."""
        stream = subjects.up_stream(self.run)
        async with (
            asyncio.TaskGroup() as group,
            self.data.read(stream, f"up.{self.run}.*.*.*.*.*.m", start_seq=start_seq) as messages,
        ):
            async for stored in messages:
                self.saw(stored.seq, stored.subject)
                self.up_seq = stored.seq
                manifest = self._manifest(stored)
                if manifest is None or self._answered(manifest.blob.subject):
                    continue
                if manifest.fragment not in self.owned:
                    continue  # another shard's
                if not self.wanted(manifest):
                    self.put(_not_fetched(manifest))
                    continue
                self.under_way.add(manifest.blob.subject)
                group.create_task(self._fetch(manifest))

    def _answered(self, subject: str) -> bool:
        """Whether a contribution of this place is being fetched, or waits to be judged or merged.

        Another one may not take its place: what is judged is what is merged.
        """
        return subject in self.under_way or subject in self.payloads.held

    def _manifest(self, stored: Stored) -> ContributionManifest | None:
        subject = stored.subject.removesuffix(".m")
        kind = "wire"
        try:
            m = decode(stored.payload, ContributionManifest)
            where = subjects.contribution(self.run, m.learner, m.epoch, m.fragment, m.round, m.term)
            if m.run != self.run or m.blob.subject != subject or where != subject:
                same = where.rsplit(".", 1)[0] == subject.rsplit(".", 1)[0]
                kind = "run" if m.run != self.run else "term" if same else "place"
                raise WireError(f"a manifest for {where} of run {m.run} on {subject}")
            kind = "codec"
            expected = codec.bytes_of(m.codec, m.values)
            if m.blob.bytes != expected:
                kind = "size"
                raise WireError(f"{m.blob.bytes} bytes for {m.values} values, not {expected}")
        except (WireError, ValueError) as error:
            self.data.traffic.count_refused("manifest", kind)
            self.put(Malformed("malformed", stored.subject, str(error)[:300], subject))
            return None
        return m

    async def _fetch(self, manifest: ContributionManifest) -> None:
        blob = manifest.blob
        try:
            async with self.fetching:
                self.payloads.room_for(blob.bytes)
                payload = await self._while_wanted(manifest)
                if payload is None:
                    self.put(_not_fetched(manifest))
                    return
                pieces = self.pieces(manifest.fragment)
                found = await asyncio.to_thread(
                    inspect, payload, manifest.codec, manifest.values, pieces
                )
                if self.wanted(manifest):
                    self.payloads.put(blob.subject, payload, found.norms_P)
        except (BusError, PayloadsFull, ValueError) as error:
            kind = "no-room" if isinstance(error, PayloadsFull) else "malformed"
            self.put(Malformed(kind, manifest.learner, str(error)[:300], blob.subject))
            return
        finally:
            self.under_way.discard(blob.subject)
        self.bytes_in += blob.bytes
        self.put(ContributionSeen(manifest, found.finite, found.norm))

    async def _while_wanted(self, manifest: ContributionManifest) -> memoryview | None:
        """The payload, for as long as a round waits for it: its deadline is the only one.

        Raises BlobIncomplete when the stream does not hold what the manifest names. While the bus
        is away what has come is kept.
        """
        stream, blob = subjects.up_stream(self.run), manifest.blob
        incoming = receiving(self.data, blob)

        async def fetched() -> memoryview | None:
            fetching = asyncio.ensure_future(get_blob(self.data, stream, blob, into=incoming))
            try:
                while not fetching.done() and self.wanted(manifest):
                    await asyncio.wait({fetching}, timeout=LOOK_S)
                return fetching.result() if fetching.done() else None
            finally:
                fetching.cancel()

        return await until_done(fetched, blob.subject, pauses=(LOOK_S, LOOK_S), trouble=Unavailable)

    async def initial(self) -> None:
        """Initial parameters, set after set, until there are parameters."""
        sets = InitialSets(
            self.spec,
            self.owned,
            self.data,
            self.payloads,
            self.put,
            self._begun,
            self.appointed,
            self.initializer,
        )
        await sets.work()

    def _begun(self) -> bool:
        return bool(self.pieces(self.owned[0]))


def _not_fetched(manifest: ContributionManifest) -> ContributionSeen:
    """No round waits for it. Should one that opens meanwhile ask for it, it has no norm: what is
    not there cannot be merged."""
    return ContributionSeen(manifest, finite=True, norm=math.nan)
