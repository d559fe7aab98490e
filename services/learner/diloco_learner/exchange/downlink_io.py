"""What arrives from the bus, as events: beats, pulls, grants, publications, inner state."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial

import structlog

from diloco_learner.context import RunContext
from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    DonateSeen,
    GrantSeen,
    PublicationMoved,
    PullSeen,
    StateBad,
    StateComing,
    StateMoved,
    StateSeen,
)
from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.exchange.leaders import Leaders, is_final
from diloco_learner.exchange.priority_semaphore_io import Permit, PrioritySemaphore, Rank
from diloco_learner.hosts.whole import HostLost
from diloco_learner.recovery.moments import Check, Received
from diloco_learner.training.train import Anchored, Values
from diloco_shared import ambient
from diloco_shared.bus.blobs import (
    BlobIncomplete,
    announcement_subject,
    fresh,
    get_blob,
    manifest_subject,
    receiving,
)
from diloco_shared.bus.port import BusError, Stored, Unavailable
from diloco_shared.bus.repeating import PROMPT, again_and_again, left_undone, until_done
from diloco_shared.bus.status_key import shown
from diloco_shared.memory.pages import joined
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.process.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import Incoming
from diloco_shared.protocol.messages import (
    Beat,
    Blob,
    Donate,
    Grant,
    Message,
    PublicationManifest,
    Pull,
    StateManifest,
)
from diloco_shared.protocol.wire import WireError, decode
from diloco_shared.spec.run import config_hash

# For so many seconds, and with such pauses, a leader is asked to remove an inner state that is in
# use: an hour is longer than a run has none.
FORGET_S, FORGET_PAUSES_S = 3600.0, (2.0, 30.0)

# An inner state has so many times the bytes of this learner's at most, and a header: a donor of
# another release may store it in wider numbers. The header names each tensor.
STATES_MAX, STATE_HEAD_MAX = 2, 16 << 20

# --------------------------------------------------------------------------------------------------
# Publications of one fragment that wait for the one before them.

# Beyond, whoever adds waits: several keyframe periods of manifests of at most some kilobytes.
WAITING_MAX = 256


class Backlog:
    """In order of arrival; a keyframe makes those before it needless.

    Without that, one who reads what was purged meanwhile finds out one by one, and may never
    catch up with a run that publishes faster than it does.
    """

    def __init__(self) -> None:
        self._waiting: deque[PublicationManifest] = deque()
        self._changed = asyncio.Condition()

    async def put(self, manifest: PublicationManifest) -> None:
        """Add one, once fewer than WAITING_MAX wait.

        A keyframe first removes what waits and is no newer.
        """
        async with self._changed:
            if manifest.prev_version < 0:
                place = (manifest.epoch, manifest.version)
                newer = [m for m in self._waiting if (m.epoch, m.version) > place]
                self._waiting = deque(newer)
            await self._changed.wait_for(lambda: len(self._waiting) < WAITING_MAX)
            self._waiting.append(manifest)
            self._changed.notify_all()

    async def get(self) -> PublicationManifest:
        """The oldest that is worth fetching, once there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._waiting))
            manifest = self._waiting.popleft()
            self._changed.notify_all()
            return manifest


log = structlog.get_logger()

# Looks at whether a publication being fetched was replaced by a keyframe, in seconds: a learner
# that catches up meets many of those.
LOOK_S = 0.3
# Publications fetched at a time, and taken in. While one is decoded and checked another comes, and
# of small ones each begins with some round trips; more would come no sooner over one link, and each
# takes the memory of its payload. The first of them are here the sooner.
DOWNLOADS_MAX = 4
# One of which nothing more comes for so many seconds, while the hub answers, gives its permit to
# another: on a link of 2 Mbit/s four of them get a chunk each in that time.
STILL_S = 10.0
# Between two words on how a run's last publications come, in seconds.
MOVED_S = 1.0
# Before what was not whole is fetched again, in seconds: it was waited for a minute or more.
AGAIN_S = 5.0
# Publications that were not whole and are fetched again: two of each of some dozen fragments.
INCOMPLETE_MAX = 64
# Between two looks at whether a shard is over whose leader is not heard, in seconds: while others
# have told their end, that is a few requests.
UNTOLD_S = 5.0


class Downlink:
    """The receiving side of one learner in one run. `put` takes events in order of arrival."""

    def __init__(
        self,
        context: RunContext,
        book: AnchorBook,
        put: Callable[[object], None],
        check_state: Check,
        initial: Callable[[int], Values] | None = None,
    ) -> None:
        """`initial`: a fragment of the parameters that this learner made by itself, fp32."""
        spec = context.spec
        self.run, self.run_id = spec.name, spec.id
        self.config_hash = config_hash(spec)
        self.learner, self.incarnation = context.me, context.incarnation
        self.control, self.data = context.control, context.data
        self.book = book
        self.put = put
        self.check_state = check_state  # raises ValueError for what the trainer cannot use
        self.leaders = Leaders(context.me, spec.algorithm.shards)
        self.states: dict[str, Received] = {}  # by nonce; at most the newest
        self.state_bytes = 0  # of an inner state, once it is known
        self.still_there = asyncio.Event()  # an inner state that is in use
        self.refused = 0
        self.booking = asyncio.Lock()  # the book takes one publication at a time
        self.downloads = PrioritySemaphore(DOWNLOADS_MAX)
        self.ends, self.moved_at = False, -math.inf  # the run; when it was told that more comes
        self.came: dict[str, int] = {}  # while it ends: chunks of each publication, at most
        self.initial, self.reading = initial, asyncio.Lock()
        # By epoch, fragment and version: to be fetched again; the newest few.
        self.incomplete: dict[tuple[int, int, int], PublicationManifest] = {}

    async def beats(self) -> None:
        await self._listen(subjects.beat(self.run), Beat, self._seen)

    def _seen(self, heard: Beat) -> BeatSeen | None:
        beat = self.leaders.beat(heard)
        if beat is None:
            return None
        if not is_final(beat):
            self.came.clear()
        self.ends = is_final(beat)
        return BeatSeen(beat)

    async def untold_end(self) -> None:
        """Until the run is over, and the leader of a shard has left without a word to this learner,
        which had stood still. The leader of another one waits for it, and neither would end."""

        async def look() -> bool:
            told = {shard for shard, beat in self.leaders.beats.items() if is_final(beat)}
            untold = set(range(self.leaders.shards)) - told if told else set()
            found = [await shown(self.control, self.run, self.run_id, s) for s in untold]
            return bool(found) and all(status and status.settled for status in found)

        await again_and_again(look, "end of the run", UNTOLD_S)

    async def pulls(self) -> None:
        await self._listen(subjects.pull(self.run), Pull, PullSeen)

    async def grants(self) -> None:
        subject = subjects.grant(self.run, self.learner)
        await self._listen(subject, Grant, lambda g: _granted(self.leaders.grant(g)))

    async def donations(self) -> None:
        """Asked of this learner as a donor; and what it was given by one is removed."""
        async with asyncio.TaskGroup() as tasks:
            # Not of `forget_state`: a life that ends waits for no leader.
            tasks.create_task(self._ask_leaders())
            await self._listen(subjects.donate(self.run, self.learner), Donate, DonateSeen)

    async def _listen(
        self, subject: str, kind: type[Message], event: Callable[..., object]
    ) -> None:
        # 256: minutes of beats and pulls; the oldest are repeated by design.
        async with self.control.subscribe(subject, limit=256) as deliveries:
            async for d in deliveries:
                try:
                    message = decode(d.payload, kind)
                    if getattr(message, "run_id", "") != self.run_id:
                        raise WireError("it is of a deleted run of this name")
                    found = event(message)
                except WireError as error:
                    self.control.traffic.count_refused("message", "wire")
                    self._refuse(d.subject, str(error))
                    continue
                if found is not None:
                    self.put(found)

    def _refuse(self, subject: str, reason: str) -> None:
        self.refused += 1
        log.warning("refused", subject=subject, reason=reason)

    def _refuse_manifest(self, subject: str, kind: str, reason: str) -> None:
        self.data.traffic.count_refused("manifest", kind)
        self._refuse(subject, f"{kind}: {reason}")

    async def publications(self) -> None:
        """Every publication DN holds, then every new one, for ever.

        Those of one fragment one after the other, since deltas build on each other; fragments side
        by side, so that an incomplete one holds up no other.
        """
        stream = subjects.dn_stream(self.run)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fetch_again())
            backlogs: dict[int, Backlog] = {}
            async with self.data.read(stream, f"dn.{self.run}.*.*.*.*.m") as messages:
                async for stored in messages:
                    manifest = self._manifest(stored)
                    if manifest is None:
                        continue
                    if manifest.fragment not in backlogs:
                        backlogs[manifest.fragment] = Backlog()
                        tasks.create_task(self._fragment(backlogs[manifest.fragment]))
                    await backlogs[manifest.fragment].put(manifest)

    def _manifest(self, stored: Stored) -> PublicationManifest | None:
        try:
            manifest = decode(stored.payload, PublicationManifest)
        except WireError as error:
            self._refuse_manifest(stored.subject, "wire", str(error))
            return None
        kind, reason = self._fault(manifest, stored.subject)
        if kind:
            self._refuse_manifest(stored.subject, kind, reason)
            return None
        return manifest

    def _fault(self, m: PublicationManifest, subject: str) -> tuple[str, str]:
        """What is wrong with a manifest on `subject`: (kind, reason), or two empty strings.

        Seen before its chunks are fetched: nobody should carry megabytes that nobody can use.
        """
        if m.run != self.run:
            return "run", f"of run {m.run[:40]}"
        where = subjects.publication(m.run, m.epoch, m.fragment, m.version, m.term)
        if subject != manifest_subject(where) or m.blob.subject != where:
            ours, theirs = where.rsplit(".", 1), subject.removesuffix(".m").rsplit(".", 1)
            kind = "term" if ours[0] == theirs[0] else "place"
            return kind, f"a manifest for {where} with chunks on {m.blob.subject[:200]}"
        if m.config_hash != self.config_hash:
            return "configuration", "of another configuration, or of a deleted run"
        if m.fragment >= len(self.book.sizes_P):
            return "fragment", f"fragment {m.fragment} does not exist"
        size = self.book.sizes_P[m.fragment]
        if m.values != size:
            return "size", f"{m.values} values, the layout has {size}"
        try:
            expected = codec.bytes_of(m.codec, m.values)
        except ValueError as error:
            return "codec", str(error)
        if m.blob.bytes != expected:
            return "size", f"{m.blob.bytes} bytes for {m.values} values, not {expected}"
        return "", ""

    async def _fragment(self, backlog: Backlog) -> None:
        while True:
            await self._publication(await backlog.get())

    async def _publication(self, manifest: PublicationManifest) -> None:
        held = (self.book.epoch, self.book.versions[manifest.fragment])
        if (manifest.epoch, manifest.version) <= held:
            return  # held already: a repeat under a later term
        async with self.downloads.acquired(self._rank(manifest)) as permit:
            await self._taken_in(manifest, permit)

    def _rank(self, m: PublicationManifest) -> Rank:
        """The newest epoch first, which makes all others void; then fragments of which nothing is
        held, which keep the learner from stepping; then the oldest round."""
        held = m.epoch == self.book.epoch and self.book.versions[m.fragment] >= 0
        return -m.epoch, int(held), m.round

    async def _taken_in(self, manifest: PublicationManifest, permit: Permit) -> None:
        payload = await self._own(manifest) or await self._chunks(manifest, permit)
        if payload is None:
            return
        async with self.booking:
            try:
                ready = await asyncio.to_thread(self.book.offer, manifest, payload)
            except HostLost as error:
                # The island ends, and says why where it trains.
                log.warning("not taken in", subject=manifest.blob.subject, error=str(error))
                return
            if ready is not None:
                self.put(self.anchored(ready))
            elif self.book.last_refusal:
                self._refuse(manifest.blob.subject, self.book.last_refusal)
                self.book.last_refusal = ""

    async def _own(self, m: PublicationManifest) -> memoryview | None:
        """The payload of version 0 if this learner makes the same parameters: nobody fetches it.

        Ordinarily all do, since they begin with the run's seed; the digest decides.
        """
        if m.version or m.codec != "fp32":
            return None
        async with self.reading:
            if self.initial is None:
                return None
            return await asyncio.to_thread(_same, self.initial, m)

    async def no_initial(self) -> None:
        """From now on the parameters that this learner made are somebody else's to change."""
        async with self.reading:
            self.initial = None

    async def _chunks(self, manifest: PublicationManifest, permit: Permit) -> memoryview | None:
        """The payload; None once a keyframe has replaced the publication, or it is no good."""
        blob = manifest.blob
        try:
            incoming = receiving(self.data, blob)
            return await until_done(
                lambda: self._unless_replaced(blob, incoming, permit),
                blob.subject,
                pauses=PROMPT,
                fatal=BlobIncomplete,
            )
        except BlobIncomplete as error:
            # What builds on it waits; what follows and does not is not held up.
            self._refuse_manifest(blob.subject, "incomplete", str(error))
            self.incomplete[manifest.epoch, manifest.fragment, manifest.version] = manifest
            while len(self.incomplete) > INCOMPLETE_MAX:
                del self.incomplete[min(self.incomplete)]
            return None

    async def _fetch_again(self) -> None:
        """What was not whole, for ever: a keyframe may be the last one for a long time."""
        while True:
            await asyncio.sleep(AGAIN_S)
            again, self.incomplete = self.incomplete, {}
            async with asyncio.TaskGroup() as tasks:
                for of_p in _by_fragment(again):
                    tasks.create_task(self._again(of_p))

    async def _again(self, manifests: list[PublicationManifest]) -> None:
        """Of one fragment, one after the other; one that is replaced is left."""
        for manifest in manifests:
            if await self._there(manifest.blob):
                await self._publication(manifest)

    async def _there(self, blob: Blob) -> bool:
        """Whether it is still published; perhaps, where the bus does not say."""
        stream = subjects.dn_stream(self.run)
        try:
            return await self.data.last(stream, manifest_subject(blob.subject)) is not None
        except BusError:
            return True

    async def _unless_replaced(
        self, blob: Blob, incoming: Incoming, permit: Permit
    ) -> memoryview | None:
        stream, received, still_s = subjects.dn_stream(self.run), incoming.received, 0.0
        moved = partial(self._moves, blob.subject)
        fetching = asyncio.ensure_future(
            get_blob(self.data, stream, blob, into=incoming, moved=moved)
        )
        try:
            while True:
                await asyncio.wait({fetching}, timeout=LOOK_S)
                if fetching.done():
                    return fetching.result()
                if not await self._there(blob):
                    return None
                still_s = still_s + LOOK_S if incoming.received == received else 0.0
                received = incoming.received
                if still_s >= STILL_S:
                    permit.release()
        finally:
            if not fetching.done():  # it writes into `incoming`, which somebody else may fill next
                fetching.cancel()
                await asyncio.wait({fetching})

    def _moves(self, subject: str, chunks: int) -> None:
        """So many have come. At the end of a run a learner stays for as long as there are more.

        Of one that is never whole the same ones come again and again: they hold nobody.
        """
        if not self.ends or chunks <= self.came.get(subject, 0):
            return
        self.came[subject] = chunks
        if (now := ambient.monotonic()) - self.moved_at >= MOVED_S:
            self.moved_at = now
            self.put(PublicationMoved())

    def anchored(self, ready: AnchorReady) -> Anchored:
        return Anchored(ready, self.book.take(ready.epoch, ready.fragment, ready.version))

    async def state(self, donor: str, nonce: str) -> None:
        """Wait for the inner state that `donor` was asked for under `nonce`.

        It is fetched from its announcement on, while the donor still sends.
        """
        async with asyncio.TaskGroup() as tasks:
            here = asyncio.Event()
            reading = tasks.create_task(self._state_manifests(donor, nonce, tasks, here))
            await here.wait()
            reading.cancel()

    async def _state_manifests(
        self, donor: str, nonce: str, tasks: asyncio.TaskGroup, here: asyncio.Event
    ) -> None:
        """What announces a state, and what says that all of it is on the bus."""
        subject = subjects.state(self.run, donor, self.learner, nonce)
        announced, wanted = announcement_subject(subject), None
        fetching: asyncio.Task[None] | None = None
        async with self.data.read(subjects.state_stream(self.run), subject + ".*") as messages:
            async for stored in messages:
                try:
                    blob = self._state_blob(stored, donor, nonce)
                except WireError as error:
                    self.put(StateBad(donor, nonce, str(error)[:300]))
                    continue
                coming = StateMoved if stored.subject == announced else StateComing
                self.put(coming(donor, nonce))
                if blob != wanted or fetching is None or fetching.done():
                    if fetching is not None:
                        fetching.cancel()
                    wanted = blob
                    fetching = tasks.create_task(self._state(blob, donor, nonce, here))

    def _state_blob(self, stored: Stored, donor: str, nonce: str) -> Blob:
        m = decode(stored.payload, StateManifest)
        whose = (m.donor, m.newcomer, m.newcomer_incarnation, m.nonce, m.config_hash)
        if whose != (donor, self.learner, self.incarnation, nonce, self.config_hash):
            raise WireError(f"inner state of {whose[0]} for {whose[1]}, not as granted")
        # Before its chunks are fetched: memory is taken for as many bytes as it says.
        if m.blob.subject != subjects.state(self.run, donor, self.learner, nonce):
            raise WireError(f"inner state with chunks on {m.blob.subject[:200]}")
        if self.state_bytes and m.blob.bytes > STATES_MAX * self.state_bytes + STATE_HEAD_MAX:
            raise WireError(f"inner state of {m.blob.bytes} bytes, here it has {self.state_bytes}")
        return m.blob

    async def _state(self, blob: Blob, donor: str, nonce: str, here: asyncio.Event) -> None:
        """Fetched, checked and put; while the bus is away what has come is kept."""
        stream = subjects.state_stream(self.run)

        told = 0

        def moved(chunks: int) -> None:
            nonlocal told
            here = min(chunks * blob.chunk_bytes, blob.bytes)
            self.put(StateMoved(donor, nonce, here, waiting=chunks <= told))
            told = max(told, chunks)

        try:
            # Ten times a payload and more, once in a life: nobody needs that memory again.
            incoming = receiving(self.data, blob, fresh)
            fetched = await until_done(
                lambda: get_blob(self.data, stream, blob, into=incoming, moved=moved),
                blob.subject,
                pauses=PROMPT,
                trouble=Unavailable,
            )
            passing("receiving")
            await asyncio.to_thread(self.check_state, fetched)
        except (ValueError, BusError) as error:
            self.put(StateBad(donor, nonce, str(error)[:300]))
            return
        self.states = {nonce: Received(fetched, blob.digest)}
        self.put(StateSeen(donor, nonce))
        here.set()

    async def forget_state(self) -> None:
        """The inner state is in use: remove what was sent to this learner. Where nobody can now,
        leaders are asked from then on."""
        self.states = {}
        asked = subjects.forget_state(self.run, self.learner)
        with left_undone("purge of inner state"):
            try:
                await self.control.request(asked, b"")
                return
            except Unavailable:  # no leader now: who has the right removes it himself
                everything = subjects.states_of(self.run, self.learner)
                await self.data.purge(subjects.state_stream(self.run), everything)
                return
        # A hub that knows who writes lets no learner remove anything. What stays may be as large as
        # the stream, and then the next donor is taken for somebody who floods it.
        self.still_there.set()

    async def _ask_leaders(self) -> None:
        """Until one of them has removed what `forget_state` could not, or for long enough."""
        await self.still_there.wait()
        asked = subjects.forget_state(self.run, self.learner)
        with left_undone("purge of inner state"):
            await until_done(
                lambda: self.control.request(asked, b""),
                "purge of inner state",
                pauses=FORGET_PAUSES_S,
                until=ambient.monotonic() + FORGET_S,
            )


def _same(initial: Callable[[int], Values], m: PublicationManifest) -> memoryview | None:
    values_F = initial(m.fragment)
    if digest_array(values_F) != m.anchor_digest:
        return None
    return joined(codec.frame(values_F))


def _by_fragment(
    manifests: dict[tuple[int, int, int], PublicationManifest],
) -> list[list[PublicationManifest]]:
    """Those of each fragment, in the order in which they were published."""
    found: dict[int, list[PublicationManifest]] = {}
    for _, manifest in sorted(manifests.items(), key=lambda item: item[0]):
        found.setdefault(manifest.fragment, []).append(manifest)
    return list(found.values())


def _granted(grant: Grant | None) -> GrantSeen | None:
    return None if grant is None else GrantSeen(grant)
