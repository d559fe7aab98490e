"""Initial parameters on their way in: fetched fragment by fragment while the rest is being sent.

    manifest ──► chunks fetched, decoded, digested ──► all that this shard owns ──► InitSeen

One set is in memory at a time: that of the learner whose manifests came first, until another's are
all there before it. Which one that is follows from what is known of all of them, whenever more is:
nobody sends again what is on the stream. Only what a learner sends that the leader has asked for it
is fetched: whoever may write to the stream does not choose where a run begins. What is fetched
stays, whatever becomes of the rest; what the stream does not hold although a manifest names it is
taken off the stream, so that its sender sees that it is missing. The machine is told how
much of it has come (InitMoved).
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from diloco_shared import ambient
from diloco_shared.bus.blobs import BlobIncomplete, fresh, get_blob, receiving
from diloco_shared.bus.port import Bus, BusError, Stored, StreamInfo
from diloco_shared.bus.repeating import PROMPT, again_and_again, until_done
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import Buffer
from diloco_shared.protocol.messages import InitManifest
from diloco_shared.protocol.wire import WireError, decode
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import Event, InitMoved, InitSeen, Malformed
from diloco_syncer.merging.payloads_io import Payloads, PayloadsFull
from diloco_syncer.status.announce import INITIALIZER_S

# Between two looks at whether more has come, in seconds.
LOOK_S = 1.0
# So many times as long as it took to count what is stored, it is not counted again: the server
# reads the headers of every chunk for that. But never for so long that an initializer that sends
# would be passed over because nobody looked.
REST, REST_S_MAX = 9.0, INITIALIZER_S / 4
# Messages whose headers are read at once, at most: a few seconds of a server that reads 16,400 a
# second, so that what a new leader finds of a large model is told of long before all is counted.
COUNTED_AT_ONCE = 100_000
# Sets of manifests remembered: those of some initializers that were passed over, newest last.
SETS_MAX = 8
# Values looked at together: what is found of them takes no memory of the fragment's size.
STRETCH = 1 << 20

Whose = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fragment's payload is."""

    digest: str
    size: int  # values
    finite: bool  # all of them


@dataclass(slots=True)
class InitialSet:
    """What one life of a learner has sent so far."""

    parts: dict[int, InitManifest] = field(default_factory=dict)
    fetched: dict[int, Fetched] = field(default_factory=dict)  # by fragment
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    roomless: bool = False  # there was no room for some of it

    def complete(self, owned: Sequence[int]) -> bool:
        """Whether all that is needed is on the bus."""
        return all(p in self.parts for p in owned)


class InitialSets:
    """For one syncer shard that has no parameters yet."""

    def __init__(
        self,
        spec: RunSpec,
        owned: Sequence[int],
        data: Bus,
        payloads: Payloads,
        put: Callable[[Event], None],
        begun: Callable[[], bool],
        appointed: Callable[[str], bool],
        initializer: Callable[[], Whose],
    ) -> None:
        self.run, self.fragments = spec.name, spec.algorithm.fragments
        self.owned = owned
        self.data = data
        self.payloads = payloads
        self.put = put
        self.begun = begun  # whether the shard has parameters
        self.appointed = appointed  # whether a learner was asked for them
        self.initializer = initializer  # who is asked for them now
        self.stream = subjects.up_stream(spec.name)
        self.sets: dict[Whose, InitialSet] = {}
        self.current: Whose | None = None  # whose set is being fetched
        # Bytes fetched of each learner's fragments, at most, and of which life: what that one sends
        # anew is no more. Of learners that were asked for them.
        self.came: dict[tuple[str, int], tuple[int, int]] = {}
        self.came_before = 0  # bytes of lives before those
        # Whose chunks on the stream were counted, up to which sequence, and their bytes.
        self.counted: tuple[Whose, int, int] = ("", -1), 1, 0
        self.rest_until = -math.inf  # monotonic seconds

    async def work(self) -> None:
        """Take in manifests, fetch what they name, hand on complete sets, until one is taken."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(tasks))
            await self._watch(tasks)
            reading.cancel()
            self._choose(None)

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        async with self.data.read(self.stream, f"up.{self.run}.*.init.*.*.m") as messages:
            async for stored in messages:
                manifest = self._manifest(stored)
                if manifest is not None:
                    self._take(manifest, tasks)

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        """Tell whenever more is on the stream, or here; and fetch once somebody is asked for it.

        Only what the initializer has stored of its own parameters counts, whatever else comes.
        """
        seen: tuple[int, int, tuple[str, ...], Whose] = (0, 0, (), ("", -1))

        async def look() -> bool:
            nonlocal seen
            if self.begun():
                return True
            info = await self.data.stream_info(self.stream)
            senders = tuple(sorted({learner for learner, _ in self.sets}))
            who, here = self.initializer(), self._here
            there = (info.last_seq, here, senders, who)
            if there != seen and ambient.monotonic() >= self.rest_until:
                stored, all_counted = await self._stored(who, info)
                seen = there if all_counted else seen
                self.put(InitMoved(senders, who[0], stored, here, who[1]))
            self._fetch_best(tasks)
            return False

        await again_and_again(look, "initial parameters", LOOK_S)

    @property
    def _here(self) -> int:
        """Bytes that were fetched; it never falls."""
        return self.came_before + sum(size for _, size in self.came.values())

    async def _stored(self, whose: Whose, info: StreamInfo) -> tuple[int, bool]:
        """Bytes of that life's initial parameters that came onto the stream, as far as they are
        counted, and whether all are.

        What was counted is not read again; unless the server has lost the end of the stream.
        """
        if not whose[0]:
            return 0, True
        of, start, size = self.counted
        if of != whose or start > info.last_seq + 1:
            start, size = 1, 0
        start = max(start, info.first_seq)
        below = min(info.last_seq + 1, start + COUNTED_AT_ONCE)
        if start < below:
            size += await self._between(whose, start, below)
        self.counted = whose, max(start, below), size
        return size, below > info.last_seq

    async def _between(self, whose: Whose, start: int, below: int) -> int:
        """Bytes of that life's chunks with these sequences."""
        began = ambient.monotonic()
        chunks = subjects.initial(self.run, *whose, "*")
        held = await self.data.held(
            self.stream, chunks, messages_max=below - start, start_seq=start, below_seq=below
        )
        ended = ambient.monotonic()
        self.rest_until = ended + min(REST * (ended - began), REST_S_MAX)
        return sum(each.bytes for each in held.values())

    def _manifest(self, stored: Stored) -> InitManifest | None:
        try:
            m = decode(stored.payload, InitManifest)
            where = subjects.initial(self.run, m.learner, m.incarnation, m.fragment)
            if m.run != self.run or stored.subject != where + ".m" or m.blob.subject != where:
                raise WireError(f"initial parameters for {where} on {stored.subject}")
            if m.fragment >= self.fragments:
                raise WireError(f"fragment {m.fragment} does not exist")
        except WireError as error:
            self.put(Malformed("malformed", stored.subject, str(error)[:300]))
            return None
        return m

    def _take(self, m: InitManifest, tasks: asyncio.TaskGroup) -> None:
        if m.fragment not in self.owned:
            return  # another shard's
        whose = (m.learner, m.incarnation)
        lives = [life for learner, life in self.sets if learner == m.learner]
        if any(life > m.incarnation for life in lives):
            return
        for life in lives:
            if life < m.incarnation:
                self._forget((m.learner, life))
        found = self.sets.setdefault(whose, InitialSet())
        if found.parts.get(m.fragment) == m:
            return
        self._forget_part(found, m.fragment)
        found.parts[m.fragment] = m
        self._fetch_best(tasks)
        others = [w for w in self.sets if w != whose and not self.appointed(w[0])]
        for other in others[: -SETS_MAX + 1]:
            del self.sets[other]

    def _forget(self, whose: Whose) -> None:
        """A set that a later life of the learner replaces."""
        if whose == self.current:
            self._choose(None)
        del self.sets[whose]

    def _fetch_best(self, tasks: asyncio.TaskGroup) -> None:
        """After every change: fetch what is missing of the set that promises most by now."""
        self._choose(self._best())
        self._fetch_missing(tasks)

    def _best(self) -> Whose | None:
        """One that is all on the bus, as far as anybody knows, before one that is not; of those
        one that has room; of those the present one, since some of it may be here; then the first.
        """

        def later(whose: Whose) -> tuple[bool, bool, bool]:
            of = self.sets[whose]
            return not of.complete(self.owned), of.roomless, whose != self.current

        asked = (w for w, of in self.sets.items() if of.parts and self.appointed(w[0]))
        return min(asked, key=later, default=None)

    def _choose(self, whose: Whose | None) -> None:
        """From now on this set is fetched; what is held of another goes."""
        if self.current is not None and self.current != whose:
            left = self.sets.get(self.current)
            for p in list(left.parts) if left else ():
                assert left is not None
                self._free(left, p)
        self.current = whose

    def _forget_part(self, of: InitialSet, p: int) -> None:
        if p in of.parts:
            self._free(of, p)
            del of.parts[p]

    def _free(self, of: InitialSet, p: int) -> None:
        """Nothing of this fragment is held any more."""
        task = of.tasks.pop(p, None)
        if task is not None:
            task.cancel()
        if of.fetched.pop(p, None) is not None:
            self.payloads.drop(of.parts[p].blob.subject)

    def _fetch_missing(self, tasks: asyncio.TaskGroup) -> None:
        if self.current is None:
            return
        present = self.sets[self.current]
        for p, m in present.parts.items():
            if p not in present.tasks and p not in present.fetched:
                fetching = self._fetch(self.current, present, m, tasks)
                present.tasks[p] = tasks.create_task(fetching)

    async def _fetch(
        self, whose: Whose, of: InitialSet, m: InitManifest, tasks: asyncio.TaskGroup
    ) -> None:
        """One fragment, until it is here, or the stream turns out not to hold it."""
        p = m.fragment
        try:
            payload = await self._payload(whose, of, m, tasks)
            looked = await asyncio.to_thread(_look_at, payload)
        except asyncio.CancelledError:
            self.payloads.drop(m.blob.subject)
            raise
        except (BlobIncomplete, ValueError) as error:
            self.payloads.drop(m.blob.subject)
            self.put(Malformed("malformed", m.learner, str(error)[:300]))
            # Before it is taken off: the same one that is sent again is another one.
            del of.parts[p], of.tasks[p]
            self._fetch_best(tasks)
            await self._purge(m)
            return
        of.fetched[p] = looked
        del of.tasks[p]
        if all(q in of.fetched for q in self.owned):
            self._hand_on(whose, of)
            self._fetch_best(tasks)

    async def _payload(
        self, whose: Whose, of: InitialSet, m: InitManifest, tasks: asyncio.TaskGroup
    ) -> memoryview:
        """Fetched and put where effects find it. Raises BlobIncomplete."""
        # They become the store's arrays: no memory that is lent.
        incoming, told = receiving(self.data, m.blob, fresh), False
        learner, life = whose

        def moved(chunks: int) -> None:
            place, size = (learner, m.fragment), min(chunks * m.blob.chunk_bytes, m.blob.bytes)
            before, came = self.came.get(place, (life, 0))
            if before < life:
                self.came_before, came = self.came_before + came, 0
            self.came[place] = life, max(came, size)

        async def fetch() -> memoryview:
            nonlocal told
            try:
                self.payloads.room_for(m.blob.bytes)
                payload = await get_blob(self.data, self.stream, m.blob, into=incoming, moved=moved)
                moved(m.blob.chunks)  # a quick one is told of at its end alone
                self.payloads.put(m.blob.subject, payload)
            except PayloadsFull as error:
                if not told:
                    self.put(Malformed("no-room", m.learner, str(error)[:300]))
                    of.roomless = True
                    self._fetch_best(tasks)  # another set may have room
                told = True
                raise
            return payload

        trouble = (BusError, PayloadsFull)
        return await until_done(
            fetch, m.blob.subject, pauses=PROMPT, trouble=trouble, fatal=BlobIncomplete
        )

    async def _purge(self, m: InitManifest) -> None:
        """What is not whole goes, manifest first: its sender looks whether that is there.

        Until it is gone: as long as it lies there nobody sends another, and nobody reads this one.
        """
        for subject in (m.blob.subject + ".m", m.blob.subject):
            purge = partial(self.data.purge, self.stream, subject)
            await until_done(purge, f"purge of {subject}")

    def _hand_on(self, whose: Whose, of: InitialSet) -> None:
        """The payloads are the machine's from now on: it drops them if it does not take them."""
        digests, names = [""] * self.fragments, [""] * self.fragments
        sizes = [0] * self.fragments
        for p in self.owned:
            digests[p], names[p] = of.fetched[p].digest, of.parts[p].blob.subject
            sizes[p] = of.fetched[p].size
        finite = all(of.fetched[p].finite for p in self.owned)
        first = of.parts[self.owned[0]]
        del self.sets[whose]
        self.current = None
        self.put(
            InitSeen(
                *whose,
                first.config_hash,
                first.layout,
                tuple(names),
                tuple(digests),
                tuple(sizes),
                finite,
            )
        )


def _look_at(payload: Buffer) -> Fetched:
    """A fragment in fp32; ValueError when it is none."""
    values_F = codec.view(payload, codec.count("fp32", payload))
    finite = all(
        bool(np.isfinite(values_F[at : at + STRETCH]).all())
        for at in range(0, values_F.size, STRETCH)
    )
    return Fetched(digest_array(values_F), values_F.size, finite)
