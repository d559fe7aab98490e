"""Reads a run's published parameters from the bus, fragment by fragment, and says nothing to it.

Memory: one fragment and one payload of it, at most 8 bytes per value of the largest fragment; and
the manifests of all publications that DN holds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import structlog

from diloco_learner.exporting.assembling import NotAsPublished, Values, applied
from diloco_learner.exporting.choosing import Chain, NotYetPublished, View, choose, layout_of
from diloco_shared import ambient
from diloco_shared.bus.blobs import BlobIncomplete, get_blob, manifest_subject, receiving
from diloco_shared.bus.port import Bus, BusError, Stored
from diloco_shared.bus.repeating import until_done
from diloco_shared.bus.status_key import shown
from diloco_shared.bus.stored_records import messages_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.exports import ExportedFragment
from diloco_shared.protocol.messages import Blob, PublicationManifest
from diloco_shared.protocol.records import RunStatus
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec, config_hash

log = structlog.get_logger()

# An epoch that has just begun is published within seconds; a run that has not begun is not waited
# for longer than somebody at a terminal would.
WAIT_S = 30.0
# Between two looks at what is published, and at whether what is being fetched was replaced.
LOOK_S = 0.5
# Without one more good chunk, or without an answer of the bus, for so long in seconds: given up.
# A message server that is restarted, or a link that is down for a moment, takes less.
STALL_S = 300.0
# One attempt counts for at most so long: one that took longer was stopped meanwhile.
ATTEMPT_S_MAX = 60.0
# A fragment is taken anew so often because a keyframe had replaced what was being read, or because
# it was damaged. Each time it is read from the newest keyframe on.
ATTEMPTS_MAX = 8

Moved = Callable[[int, int], None]  # (bytes fetched, bytes that there are to fetch)


class UnreadableRun(Exception):
    """The parameters cannot be read; the text says why and what to do."""


class _Replaced(Exception):
    """A keyframe has taken the place of what was being read."""


class PublishedView:
    """One view of what a run has published. `begin`, then `fragments` once."""

    layout: Layout
    view: View

    def __init__(self, bus: Bus, spec: RunSpec, version: int | None, moved: Moved) -> None:
        self.bus = bus
        self.spec = spec
        self.version = version
        self.moved = moved
        self.stream = subjects.dn_stream(spec.name)
        self.hash = config_hash(spec)
        self.wait_s, self.stall_s = WAIT_S, STALL_S
        self._done = 0  # bytes of the chains that are behind
        self._total = 0

    @property
    def epoch(self) -> int:
        return self.view.epoch

    @property
    def fetch_bytes(self) -> int:
        """Of all chains of the view."""
        return sum(_bytes(chain) for chain in self.view.chains)

    async def begin(self) -> None:
        """Decide which publications it is. Raises NotPublished, UnreadableRun."""
        self.view = await until_done(
            self._chosen,
            "what the run publishes",
            pauses=(LOOK_S, LOOK_S),
            trouble=NotYetPublished,
            until=ambient.monotonic() + self.wait_s,
        )
        try:
            self.layout = layout_of(self.spec, self.view)
        except ValueError as error:
            raise UnreadableRun(str(error)) from None
        self._total = self.fetch_bytes

    async def _chosen(self) -> View:
        stored = await self._manifests()
        fragments = self.spec.algorithm.fragments
        manifests = [m for m in messages_of(stored, PublicationManifest) if m.run == self.spec.name]
        return choose(self.spec.name, manifests, fragments, self.hash, self.version)

    async def _manifests(self) -> list[Stored]:
        """Of all publications that are there, however often the bus goes away meanwhile."""
        subject = f"dn.{self.spec.name}.*.*.*.*.m"
        try:
            return await until_done(
                lambda: self.bus.fetch(self.stream, subject, start_seq=1),
                "manifests of publications",
                pauses=(LOOK_S, LOOK_S),
                until=ambient.monotonic() + self.stall_s,
            )
        except BusError as error:
            raise UnreadableRun(f"the message server does not answer: {error}") from None

    async def fragments(self) -> AsyncIterator[tuple[ExportedFragment, Values]]:
        """Every fragment once, in order. Raises NotPublished, UnreadableRun."""
        for p, chain in enumerate(self.view.chains):
            yield await self._fragment(p, chain)

    async def _fragment(self, p: int, chain: Chain) -> tuple[ExportedFragment, Values]:
        trouble = ""
        for _ in range(ATTEMPTS_MAX):
            try:
                values_F = await self._anchor(chain)
            except (_Replaced, BlobIncomplete, NotAsPublished) as error:
                trouble = str(error)
                log.info("a fragment is read again", fragment=p, why=trouble)
                chain = await self._again(p, chain)
                continue
            self._done += _bytes(chain)
            return _described(chain[-1]), values_F
        raise UnreadableRun(
            f"fragment {p} could not be read in {ATTEMPTS_MAX} attempts, the last of them because "
            f"{trouble}: try again; if it stays so, export a checkpoint instead"
        )

    async def _again(self, p: int, before: Chain) -> Chain:
        """What makes the fragment now; of the same epoch, else the view would be of two."""
        view = await self._chosen()
        if view.epoch != self.view.epoch:
            raise UnreadableRun(
                f"run {self.spec.name!r} began epoch {view.epoch} while epoch {self.view.epoch} "
                "was being read: export it again"
            )
        chain = view.chains[p]
        self._total += _bytes(chain) - _bytes(before)
        return chain

    async def _anchor(self, chain: Chain) -> Values:
        anchor_F: Values | None = None
        behind = self._done
        for m in chain:
            payload = await self._payload(m.blob, behind)
            behind += m.blob.bytes
            anchor_F = await asyncio.to_thread(applied, anchor_F, m, payload)
            del payload
        assert anchor_F is not None, "an empty chain"
        return anchor_F

    async def _payload(self, blob: Blob, behind: int) -> memoryview:
        """The payload, however often the bus goes away meanwhile. Raises _Replaced."""
        incoming = receiving(self.bus, blob)
        stalled_s, most = 0.0, 0

        def moved(chunks: int) -> None:
            nonlocal stalled_s, most
            if chunks > most:  # each attempt begins by telling what the ones before have got
                stalled_s, most = 0.0, chunks
            self.moved(behind + min(chunks * blob.chunk_bytes, blob.bytes), self._total)

        async def fetched() -> memoryview:
            nonlocal stalled_s
            began = ambient.monotonic()
            fetching = asyncio.ensure_future(
                get_blob(self.bus, self.stream, blob, into=incoming, moved=moved)
            )
            try:
                return await self._unless_replaced(fetching, blob)
            except BusError as error:
                stalled_s += min(ambient.monotonic() - began, ATTEMPT_S_MAX) + LOOK_S
                if stalled_s > self.stall_s and not isinstance(error, BlobIncomplete):
                    text = f"nothing has arrived for {self.stall_s:.0f} s: {error}"
                    raise UnreadableRun(text) from None
                raise

        payload = await until_done(
            fetched, blob.subject, pauses=(LOOK_S, LOOK_S), fatal=BlobIncomplete
        )
        self.moved(behind + blob.bytes, self._total)
        return payload

    async def _unless_replaced(
        self, fetching: "asyncio.Future[memoryview]", blob: Blob
    ) -> memoryview:
        try:
            while True:
                await asyncio.wait({fetching}, timeout=LOOK_S)
                if fetching.done():
                    return fetching.result()
                if not await self._there(blob):
                    raise _Replaced(f"{blob.subject} was replaced by a keyframe")
        finally:
            if not fetching.done():
                fetching.cancel()
                await asyncio.wait({fetching})

    async def _there(self, blob: Blob) -> bool:
        """Whether it is still published; perhaps, where the bus does not say."""
        try:
            return await self.bus.last(self.stream, manifest_subject(blob.subject)) is not None
        except BusError:
            return True

    async def tokens(self) -> tuple[int | None, int | None]:
        """(merged, processed) as the run's status says now; None where it says nothing."""
        shards = self.spec.algorithm.shards
        statuses: list[RunStatus] = []
        for shard in range(shards):
            try:
                found = await shown(self.bus, self.spec.name, self.spec.id, shard)
            except BusError:
                found = None
            if found is None:
                return None, None
            statuses.append(found)
        return counted(statuses), max(s.tokens_processed for s in statuses)


def counted(statuses: list[RunStatus]) -> int:
    """Merged tokens: the mean over the shards, weighted by their parameters as everywhere."""
    weights = sum(s.parameters for s in statuses)
    if not weights:
        return statuses[0].tokens.merged
    return sum(s.tokens.merged * s.parameters for s in statuses) // weights


def _described(m: PublicationManifest) -> ExportedFragment:
    return ExportedFragment(
        fragment=m.fragment,
        version=m.version,
        round=m.round,
        steps=m.stamp.steps,
        digest=m.anchor_digest,
    )


def _bytes(chain: Chain) -> int:
    return sum(m.blob.bytes for m in chain)
