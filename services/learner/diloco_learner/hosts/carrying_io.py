"""What several hosts of an island carry to and from the hub, each over a connection of its own.

    process 0:  Carriers  ---- put N, get -N, drop ---->  Carrier of each other  <-- chunks --> hub
                          <- carried, state, what came -

A carrier stores chunks of its own share (`shares`), fetches those that process 0 wants of it, and
does nothing else at the hub: it follows no subject and says nothing there. What it is told are
*errands*, which stand beside the plan: they wait for no step, and change nothing that is computed.

To store, N is the number of the order that made the payload. Process 0 appends the manifest once
every carrier has said that its chunks are stored; where one fails, or dies, nothing names what is
there. To fetch, -N counts; so it does where a carrier gives what it keeps (`give -N`). Chunks are
given to process 0 as they come, and judged there again.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from diloco_learner.hosts.link_io import BadFrame, head_of
from diloco_learner.hosts.parts import Buffer
from diloco_learner.hosts.shares import Composed, KeptPayload, KeptShares
from diloco_learner.hosts.whole import BEAT_S, ORDER_S_MAX, HostLost
from diloco_shared import ambient
from diloco_shared.bus.blobs import fresh, get_chunks, put_chunks
from diloco_shared.bus.port import Bus, BusError, Traffic, Unavailable
from diloco_shared.protocol.chunks import CHECK_BYTES, ChunkError, Incoming
from diloco_shared.protocol.messages import Blob

log = structlog.get_logger()

# Of a frame between the processes of an island that is about all this.
ERRAND = "carrier"
# Chunks of what it keeps that a carrier gives to process 0 at once: 8 MiB.
GIVE_AT_ONCE = 16
# Between two attempts of a carrier to connect, in seconds; each takes ten by itself.
CONNECT_AGAIN_S = 20.0
# So long a carrier that failed is left alone, in seconds, and twice as long after each failure more
# until it has stored something: rounds may be minutes apart, and each would be lost to it.
REST_S, REST_S_MAX = 60.0, 3600.0
# In less nobody stores a share: a chunk and its acknowledgement take so long over many links. And
# so long after the deadline of all process 0's own lanes end at most.
SHORTEST_S, ENDS_S = 0.2, 1.0


class CarrierFailed(Unavailable):
    """A host did not store its share of a payload, or fetch it. `index`: of the host."""

    def __init__(self, text: str, index: int) -> None:
        super().__init__(text)
        self.index = index


class Shared(Protocol):
    """A contribution of which every process has a part."""

    def compose(self, subject: str) -> Composed:
        """For process 0, in a thread: waits for the others. Raises HostLost, ValueError."""


# --------------------------------------------------------------------------------------------------
# Process 0.


@dataclass(slots=True)
class Known:
    """Of one carrier, as process 0 knows it. Bytes: at the sockets of its connection."""

    name: str
    connected: bool = False
    why: str = "it has not said yet that it is connected"
    bytes_out: int = 0
    bytes_in: int = 0
    rests_until: float = field(default=0.0)
    failures: int = 0  # since it has stored a share


@dataclass(slots=True)
class Lent:
    """Chunks of a payload that a host fetches. `wanted`: those that have not come yet."""

    index: int  # of the host
    number: int  # of the errand
    incoming: Incoming
    wanted: set[int]
    ended: Future[None] = field(default_factory=Future)
    # Held while one chunk is judged: whoever takes chunks back knows where each of them is.
    judging: threading.Lock = field(default_factory=threading.Lock)

    def came(self, indices: Sequence[int], data: Buffer) -> None:
        """Take in the checks of these chunks, and the chunks. Raises BadFrame."""
        blob, whole, at = self.incoming.blob, memoryview(data), CHECK_BYTES * len(indices)
        for n, index in enumerate(indices):
            size = min(blob.chunk_bytes, blob.bytes - index * blob.chunk_bytes)
            chunk, at = whole[at : at + size], at + size
            check = whole[n * CHECK_BYTES : (n + 1) * CHECK_BYTES]
            with self.judging:
                if index not in self.wanted:
                    continue
                try:
                    self.incoming.take_lent(index, check, chunk)
                except ChunkError as error:
                    raise BadFrame(str(error)) from None
                self.wanted.discard(index)
        if not self.wanted:
            self.end()

    def end(self, fault: Exception | None = None) -> None:
        """All came, or no more will."""
        with suppress(InvalidStateError):  # nobody waits for it any more
            if fault is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(fault)

    def take_back(self) -> bool:
        """What has not come is anybody's again; whether there is any."""
        with self.judging, self.incoming.lock:
            left, self.wanted = self.wanted, set()
            for index in left:
                self.incoming.take_back(index)
        return bool(left)


class Carriers:
    """The others' connections to the hub. Different threads may call it."""

    def __init__(self, say: Callable[[int, bytes], None], *, wanted: bool = True) -> None:
        """`say` sends a frame to a host; it raises OSError where the host is gone. `wanted`:
        whether the others carry at all; else process 0 does, for all."""
        self.say = say
        self.wanted = wanted
        self.traffic: Traffic | None = None  # where their bytes are counted, too
        self.known: dict[int, Known] = {}
        self.waiting: dict[tuple[int, int], Future[None]] = {}
        self.lent: dict[tuple[int, int], Lent] = {}
        self.told = 0  # errands to fetch
        self.ended = ""  # why
        self.lock = threading.Lock()

    def ready(self) -> tuple[int, ...]:
        """Hosts that may be given errands now."""
        now = ambient.monotonic()
        with self.lock:
            able = (n for n, k in self.known.items() if k.connected and now >= k.rests_until)
            return tuple(sorted(able)) if self.wanted else ()

    def shown(self) -> dict[str, dict[str, int]]:
        """By host: the bytes that crossed its own connection."""
        with self.lock:
            return {
                k.name: {"hub_bytes_out": k.bytes_out, "hub_bytes_in": k.bytes_in}
                for k in self.known.values()
            }

    # --- what they say -------------------------------------------------------------------------

    def heard(self, index: int, name: str, what: str, *values: Any) -> None:
        """Of a host. Raises BadFrame."""
        match what, values:
            case "state", (bool(connected), str(why), int(out), int(into)):
                self._state(index, name, connected, why, out, into)
            case "carried", (int(number), str(fault)):
                self._carried(index, number, fault)
            case _:
                raise BadFrame(f"a carrier says {what[:40]!r}")

    def _state(self, index: int, name: str, connected: bool, why: str, out: int, into: int) -> None:
        with self.lock:
            known = self.known.setdefault(index, Known(name))
            more = out - known.bytes_out, into - known.bytes_in
            news = (connected, why) != (known.connected, known.why)
            known.connected, known.why = connected, why
            known.bytes_out, known.bytes_in = out, into
        if self.traffic is not None:
            self.traffic.crossed_socket(out=more[0], into=more[1])
        if not (news and self.wanted):
            return
        if connected:
            log.info("a host carries its own share", host=name)
        else:
            log.warning("what a host carries goes through process 0", host=name, reason=why)

    def _carried(self, index: int, number: int, fault: str) -> None:
        with self.lock:
            waiting = self.waiting.pop((index, number), None)
            lent = self.lent.get((index, number))
            failed = CarrierFailed(f"{self.known[index].name}: {fault}", index)
        if lent is not None and fault:
            lent.end(failed)
        if waiting is None:
            return  # nobody waits for it any more
        with suppress(InvalidStateError):  # nor here, since this moment
            if fault:
                waiting.set_exception(failed)
            else:
                waiting.set_result(None)

    def rest(self, index: int) -> None:
        """It could not do what process 0 could: it is not asked for a while."""
        with self.lock:
            known = self.known[index]
            now = ambient.monotonic()
            known.failures = max(known.failures + (now >= known.rests_until), 1)
            known.rests_until = now + min(REST_S * 2 ** min(known.failures - 1, 16), REST_S_MAX)

    def came(self, index: int, number: int, indices: Sequence[int], data: Buffer) -> None:
        """Chunks that a host has fetched. Raises BadFrame."""
        with self.lock:
            lent = self.lent.get((index, number))
        if lent is not None:  # else nobody wants them any more
            lent.came(indices, data)

    def lost(self, why: str) -> None:
        """The island ends: nobody waits any longer."""
        with self.lock:
            self.ended = why
            waiting, self.waiting = self.waiting, {}
            lent = [*self.lent.values()]
        for one in lent:
            one.end(HostLost(why))
        for future in waiting.values():
            with suppress(InvalidStateError):
                future.set_exception(HostLost(why))

    # --- what they are told --------------------------------------------------------------------

    async def put(
        self,
        index: int,
        number: int,
        blob: Blob,
        left_s: float | None,
        patience_s: float | None = None,
    ) -> None:
        """Once a host has stored its chunks of that payload.

        Raises CarrierFailed where it could not within `left_s` seconds, or stored no more for
        `patience_s` (the host itself looks at that, and its end is noticed), and HostLost.
        """
        future: Future[None] = Future()
        with self.lock:
            if self.ended:
                raise HostLost(self.ended)
            self.waiting[index, number] = future
        what = (blob.subject, blob.bytes, blob.chunk_bytes, blob.chunks, blob.digest)
        told = (*what, left_s, patience_s)
        try:
            async with asyncio.timeout(left_s):
                # Behind an order of megabytes this waits, too.
                await asyncio.to_thread(self.say, index, head_of(ERRAND, "put", number, *told))
                await asyncio.wrap_future(future)
            self.known[index].failures = 0
        except TimeoutError:
            text = f"{self.known[index].name} said nothing of its share for {left_s:.1f} s"
            raise CarrierFailed(text, index) from None
        finally:
            with self.lock:
                self.waiting.pop((index, number), None)

    def lend(self, index: int, incoming: Incoming, wanted: Sequence[int]) -> Lent:
        """These chunks to a host, for `get`; `over` must follow."""
        with self.lock:
            self.told += 1
            lent = Lent(index, -self.told, incoming, set(wanted))
            self.lent[index, lent.number] = lent
            if self.ended:
                lent.end(HostLost(self.ended))
        with incoming.lock:
            incoming.lend(wanted)
        return lent

    async def get(self, lent: Lent, stream: str, start_seq: int) -> None:
        """Once a host has fetched what it was lent, from that stream sequence on.

        Raises CarrierFailed where it could not, and HostLost.
        """
        blob = lent.incoming.blob
        told = (blob.subject, blob.bytes, blob.chunk_bytes, blob.chunks, blob.digest)
        wanted = sorted(lent.wanted)
        head = head_of(ERRAND, "get", lent.number, *told, stream, start_seq, *wanted)
        await asyncio.to_thread(self.say, lent.index, head)
        await self._all_came(lent)

    async def give(self, lent: Lent, number: int) -> None:
        """Once a host has given what it was lent, of what it keeps since order `number`.

        Raises CarrierFailed where it keeps that no more, and HostLost.
        """
        told = (number, lent.incoming.blob.chunk_bytes, *sorted(lent.wanted))
        await asyncio.to_thread(self.say, lent.index, head_of(ERRAND, "give", lent.number, *told))
        await self._all_came(lent)

    async def _all_came(self, lent: Lent) -> None:
        """CarrierFailed also where nothing more came for as long as an answer may take."""
        ended, left = asyncio.wrap_future(lent.ended), -1
        try:
            while left != (left := len(lent.wanted)):
                if (await asyncio.wait({ended}, timeout=ORDER_S_MAX))[0]:
                    return ended.result()
        finally:
            ended.cancel()
        text = f"{self.known[lent.index].name} gave nothing more for {ORDER_S_MAX:.0f} s"
        raise CarrierFailed(text, lent.index)

    def over(self, lent: Lent) -> bool:
        """What was lent and has not come is anybody's again; whether there is any."""
        with self.lock:
            self.lent.pop((lent.index, lent.number), None)
        return lent.take_back()

    def drop(self, number: int, indices: Sequence[int]) -> None:
        """That errand is of no use any more: nothing is stored or fetched from now on."""
        for index in indices:
            with suppress(OSError):  # then the island ends
                self.say(index, head_of(ERRAND, "drop", number))


class SharedUpload:
    """A contribution that several hosts carry to the hub: process 0's handle of it."""

    def __init__(
        self, carriers: Carriers, number: int, indices: Sequence[int], shared: Shared
    ) -> None:
        """`number`: of the order that encoded it; `indices`: of the hosts that keep their share."""
        self.carriers, self.shared = carriers, shared
        self.number, self.indices = number, tuple(indices)

    async def put(self, bus: Bus, subject: str, deadline: float) -> Blob | None:
        """Have all of it stored; the Blob for the manifest, or None where it came too late.

        Raises what `put_chunks` does, CarrierFailed, HostLost, and ValueError for an answer that
        is none. Whatever it raises, the others stop, too.
        """
        whole = False
        try:
            made = await asyncio.to_thread(self.shared.compose, subject)
            if (left_s := deadline - ambient.monotonic()) > SHORTEST_S:
                await self._store(bus, made, left_s)
                whole = True
                return made.outgoing.blob
            return None
        finally:
            if not whole:
                # In a thread: a host may read slowly. Not awaited: who cancels this does not wait.
                loop = asyncio.get_running_loop()
                loop.run_in_executor(None, self.carriers.drop, self.number, self.indices)

    async def _store(self, bus: Bus, made: Composed, left_s: float) -> None:
        blob = made.outgoing.blob
        work = [put_chunks(bus, made.outgoing, made.chunks, deadline_s=left_s)]
        work += [self.carriers.put(n, self.number, blob, left_s) for n in made.carried]
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            await asyncio.gather(*tasks)
        except CarrierFailed as failed:
            await asyncio.wait({tasks[0]}, timeout=ENDS_S)
            if tasks[0].done() and (own := tasks[0].exception()) is not None:
                raise own from failed  # process 0 could not either, and knows why
            self.carriers.rest(failed.index)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


# --------------------------------------------------------------------------------------------------
# The others.

Connect = Callable[[], AbstractAsyncContextManager[Bus]]

# Between two looks at what has come that process 0 waits for, in seconds.
LOOK_S = 0.2
_ERRANDS = ("put", "get", "give", "drop")


@dataclass(frozen=True, slots=True)
class Got:
    """Chunks that a carrier has fetched. `parts`: their checks, and each of them."""

    indices: tuple[int, ...]
    parts: tuple[memoryview, ...]


class Carrier:
    """A process's own connection to the hub, served by a thread with a loop of its own."""

    def __init__(
        self,
        connect: Connect,
        say: Callable[..., None],
        give: Callable[[int, "Got"], None],
    ) -> None:
        """`connect`: to the hub, until the context ends; raises Unavailable. `say`: to process 0;
        raises OSError where that is gone, which somebody else notices, too. `give`: to it, as much
        as has come of an errand."""
        self.connect = connect
        self.say = say
        self.give = give
        self.shares = KeptShares()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.bus: Bus | None = None
        self.working: dict[int, asyncio.Task[None]] = {}  # on errands, by their numbers
        self.said: tuple[Any, ...] = ()

    # --- any thread ----------------------------------------------------------------------------

    def keep(self, number: int, kept: KeptPayload) -> None:
        """Its share of a payload, until an errand says what becomes of it."""
        self.shares.keep(number, kept)

    @property
    def kept(self) -> dict[int, KeptPayload]:
        """What it keeps now, by order."""
        return self.shares.kept

    def told(self, what: str, number: int, *values: Any) -> None:
        """An errand. Raises BadFrame."""
        loop = self.loop
        if loop is None or what not in _ERRANDS:
            raise BadFrame(f"an errand {what[:40]!r} for one who has said nothing of errands")
        loop.call_soon_threadsafe(self._begin, what, number, values)

    def forget(self, upto: int) -> None:
        """The work for a run is over, and with it all that orders up to that one made."""
        self.shares.forget(upto)

    def run(self) -> None:
        """Serve, for as long as the process lives."""
        with suppress(OSError):
            asyncio.run(self.serve())

    # --- its own thread ------------------------------------------------------------------------

    async def serve(self) -> None:
        """Be connected, and say how it stands, for ever. Raises OSError once process 0 is gone."""
        self.loop = asyncio.get_running_loop()
        while True:
            try:
                async with self.connect() as self.bus:
                    while True:
                        traffic = self.bus.traffic
                        crossed = traffic.socket_bytes_out, traffic.socket_bytes_in
                        why = "" if self.bus.connected else "its connection to the hub is lost"
                        self._tell_state(self.bus.connected, why, *crossed)
                        await asyncio.sleep(BEAT_S)
            except (Unavailable, ValueError) as error:  # also where the address is none
                self._tell_state(False, str(error)[:300], 0, 0)
                await asyncio.sleep(CONNECT_AGAIN_S)

    def _tell_state(self, *state: Any) -> None:
        if state != self.said:
            self.said = state
            self.say(ERRAND, "state", *state)

    def _begin(self, what: str, number: int, values: tuple[Any, ...]) -> None:
        if what == "drop":
            if (working := self.working.get(number)) is not None:
                working.cancel()
            self.shares.drop(number)
            return
        works: dict[str, Callable[..., Any]] = {
            "put": self._put,
            "get": self._get,
            "give": self._give_kept,
        }
        # Begun there: an errand may be dropped before its task has its first turn.
        work = self._tried(number, lambda: works[what](number, *values))
        task = asyncio.get_running_loop().create_task(work)
        self.working[number] = task
        task.add_done_callback(lambda _: self.working.pop(number, None))

    async def _tried(self, number: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Whatever it raises, process 0 is told, which would wait for it for ever."""
        try:
            await work()
        except Exception as error:
            log.error("an errand failed", error=repr(error), exc_info=error)
            fault = f"{type(error).__name__}: {error}"[:300]
            with suppress(OSError):
                await asyncio.to_thread(self.say, ERRAND, "carried", number, fault)

    async def _put(
        self,
        number: int,
        subject: str,
        size: int,
        chunk_bytes: int,
        chunks: int,
        digest: str,
        left_s: float | None,
        patience_s: float | None = None,
    ) -> None:
        """Store its chunks, and say that they are, or why they are not."""
        kept, fault = self.shares.to_store(number), ""
        try:
            if kept is None or self.bus is None:
                raise ChunkError("it does not have that payload any more")
            blob = Blob(
                subject=subject, bytes=size, chunk_bytes=chunk_bytes, chunks=chunks, digest=digest
            )
            await put_chunks(
                self.bus,
                kept.outgoing(blob),
                kept.chunks,
                deadline_s=left_s,
                patience_s=patience_s,
            )
        except (BusError, ValueError) as error:
            fault = str(error)[:300] or type(error).__name__
            log.warning("its share is not stored", subject=subject, reason=fault)
        else:
            log.debug("its share is stored", subject=subject, chunks=len(kept.chunks))
        with suppress(OSError):
            await asyncio.to_thread(self.say, ERRAND, "carried", number, fault)

    async def _get(
        self,
        number: int,
        subject: str,
        size: int,
        chunk_bytes: int,
        chunks: int,
        digest: str,
        stream: str,
        start_seq: int,
        *wanted: int,
    ) -> None:
        """Fetch these chunks, and give them as they come; or say why they do not."""
        fault = ""
        try:
            if self.bus is None:
                raise ChunkError("it is not connected any more")
            blob = Blob(
                subject=subject, bytes=size, chunk_bytes=chunk_bytes, chunks=chunks, digest=digest
            )
            # Of the memory for all of it only what is filled is ever there.
            incoming = Incoming(blob, fresh)
            incoming.lend(set(range(chunks)).difference(wanted))
            getting = asyncio.ensure_future(get_chunks(self.bus, stream, incoming, start_seq))
            try:
                await self._give(number, incoming, set(wanted), getting)
            finally:
                getting.cancel()
        except (BusError, ValueError) as error:
            fault = str(error)[:300] or type(error).__name__
            log.warning("it cannot fetch its share", subject=subject, reason=fault)
            with suppress(OSError):
                await asyncio.to_thread(self.say, ERRAND, "carried", number, fault)

    async def _give_kept(self, number: int, order: int, chunk_bytes: int, *wanted: int) -> None:
        """Give these chunks of what it keeps since that order; or say why it does not."""
        kept = self.shares.of(order)
        try:
            if kept is None:
                raise ChunkError("it does not keep that any more")
            for first in range(0, len(wanted), GIVE_AT_ONCE):
                some = wanted[first : first + GIVE_AT_ONCE]
                await asyncio.to_thread(self.give, number, Got(some, kept.given(some, chunk_bytes)))
        except ChunkError as error:
            with suppress(OSError):
                await asyncio.to_thread(self.say, ERRAND, "carried", number, str(error)[:300])

    async def _give(
        self, number: int, incoming: Incoming, wanted: set[int], getting: asyncio.Future[None]
    ) -> None:
        """What is here, now and then, until `getting` has ended. Raises what that does."""
        ended = False
        while not ended:
            await asyncio.wait({getting}, timeout=LOOK_S)
            ended = getting.done()
            here = sorted(n for n in wanted if incoming.has(n))
            wanted.difference_update(here)
            if here:
                checks = b"".join(incoming.check_of(n) for n in here)
                parts = (memoryview(checks), *(incoming.place(n) for n in here))
                await asyncio.to_thread(self.give, number, Got(tuple(here), parts))
        getting.result()
