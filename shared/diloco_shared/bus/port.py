"""The bus: all that the services need of NATS, small enough to be faked faithfully.

Three carriers. Core subjects: at most once, nothing kept. Streams: kept on disk, per-subject
sequences, conditional append. Key-value buckets: compare-and-set, per-key lifetime, watch.
Implementation: `bus.nats.bus.NatsBus`. The simulator has one in memory, held to the same tests.
"""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from diloco_shared.protocol.chunks import Incoming, Outgoing


class BusError(Exception):
    """Base of everything a bus raises."""


class Conflict(BusError):
    """A compare-and-set or conditional append lost: somebody else was first."""


class StreamFull(BusError):
    """The stream has reached its byte limit; nothing was stored."""


class TooFewNodes(BusError):
    """The hub has not as many nodes as a stream shall have copies; nothing was changed."""


class Unavailable(BusError):
    """No answer, or no server: for an append the outcome is unknown."""


class Refused(BusError):
    """The server answered no for another reason; the text says which."""


class NoStream(Refused):
    """There is no such stream."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One core message. `reply` is empty unless an answer is wanted."""

    subject: str
    payload: bytes
    reply: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """One stream message and its place."""

    subject: str
    payload: bytes
    headers: dict[str, str]
    seq: int


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A file-backed stream that refuses new messages when full and deletes nothing by itself."""

    name: str
    subjects: tuple[str, ...]
    bytes_max: int
    # Set for EVENTS only: the newest are worth more than the oldest there.
    drop_oldest: bool = False
    # Of what one writer may take of a stream that many share; 0: as much as fits.
    subject_messages_max: int = 0  # the oldest of a subject go
    message_bytes_max: int = 0  # a larger one is refused
    age_s_max: float = 0.0  # an older one goes
    # On disk when it is acknowledged. Not for what can be made again: the server may then lose the
    # last it acknowledged when it is killed (milliseconds) or loses its power (up to two minutes).
    synced: bool = True
    # Copies, each on another node of the hub; what is acknowledged is on more than half of them.
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a stream holds, how many bytes it may (0: no limit), and how many copies it has."""

    bytes: int
    messages: int
    first_seq: int
    last_seq: int
    bytes_max: int = 0
    replicas: int = 1


class Held(NamedTuple):
    """What some messages of a stream take of its limit, and how many they are."""

    bytes: int = 0
    messages: int = 0

    def and_one(self, size: int) -> "Held":
        """With one more message, of `size` bytes."""
        return Held(self.bytes + size, self.messages + 1)


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Bytes of all streams together: what they hold, and what they were promised.

    `bytes_max` 0: the server does not tell; then only asking for a stream shows its limit.
    """

    bytes: int
    reserved: int
    bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key's value; `value` is None in a watch when the key was deleted or expired."""

    key: str
    value: bytes | None
    revision: int
    # In a watch: the bucket may have been put back from a backup, or made anew, since the key was
    # told last. Its revision may be lower than what was known of it.
    anew: bool = False


@dataclass(slots=True)
class Traffic:
    """What crossed this bus. Counted by several threads: through the methods only."""

    # Payloads: what the users of the bus sent and were given.
    bytes_out: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    messages_in: int = 0
    # At the sockets, lanes included: NATS' own lines, repeats and pings too. Before encryption.
    socket_bytes_out: int = 0
    socket_bytes_in: int = 0
    # Deliveries dropped because a subscriber was slower than its limit, by subject filter.
    dropped: dict[str, int] = field(default_factory=dict)
    # What came and was not taken, by what it is (chunk, manifest, message) and a fixed set of
    # reasons; among good ones it would show nowhere else.
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def sent(self, size: int) -> None:
        """One message with `size` bytes of payload was handed over."""
        with self._lock:
            self.messages_out += 1
            self.bytes_out += size

    def received(self, size: int) -> None:
        """One message with `size` bytes of payload came."""
        with self._lock:
            self.messages_in += 1
            self.bytes_in += size

    def crossed_socket(self, *, out: int = 0, into: int = 0) -> None:
        """Bytes that a socket took and gave."""
        with self._lock:
            self.socket_bytes_out += out
            self.socket_bytes_in += into

    def count_dropped(self, subject: str) -> None:
        """A delivery for the subscriber of `subject` was dropped."""
        with self._lock:
            self.dropped[subject] = self.dropped.get(subject, 0) + 1

    def count_refused(self, what: str, reason: str, count: int = 1) -> None:
        """That many chunks, manifests or messages were not taken."""
        with self._lock:
            self.refused[what, reason] += count


@dataclass(slots=True)
class TransferProgress:
    """How far a payload got; written by whoever carries it, read by whoever gives up on it."""

    stored: int = 0  # chunks
    trouble: str = ""  # the last one
    full: str = ""  # what was refused since the last chunk that was stored: there is no room
    # Chunk -> the life of the server that acknowledged it, and the one that did so last: what an
    # earlier one acknowledged may be lost, if it was killed or had no disk left.
    took: dict[int, str] = field(default_factory=dict)
    life: str = ""
    next_seq: int = 1  # everything of the payload below this stream sequence was seen
    queued: bool = False  # other payloads are before it
    number: int = 0  # of the send, whose chunks are known by it however often each is sent

    def message_id(self, outgoing: Outgoing, index: int) -> str:
        """The same for every attempt at a chunk, and another one for every send of it."""
        return f"{self.number}/{outgoing.message_id(index)}"

    def no_room(self, text: str) -> None:
        """The stream, or the server's disk, is full."""
        self.full = text

    def room(self) -> None:
        """Something was stored."""
        self.full = ""

    def chunk(self, index: int, life: str) -> None:
        """The server, in this life, acknowledged a chunk."""
        self.stored += 1
        self.took[index], self.life = life, life
        self.room()

    def doubtful(self) -> list[int]:
        """Chunks that an earlier life of the server acknowledged than the last that was heard."""
        return sorted(index for index, life in self.took.items() if life != self.life)


class Lanes(Protocol):
    """A leaner way for chunks than one message after the other. See `lanes.NatsLanes`."""

    async def send(
        self,
        outgoing: Outgoing,
        chunks: Sequence[int],
        progress: TransferProgress,
        *,
        window: int,
        chunk_timeout_s: float,
    ) -> None:
        """Store these chunks, repeating what gets no answer until cancelled. Raises Refused."""

    async def receive(self, stream: str, incoming: Incoming, progress: TransferProgress) -> None:
        """One pass over what the stream holds from `progress.next_seq` on. Raises Unavailable."""


Handler = Callable[[Delivery], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Stray:
    """A reader of a stream that was none of ours."""

    stream: str
    name: str
    why: str


Sweep = Callable[[Collection[str]], Awaitable[list[Stray]]]


class Bus(Protocol):
    """See the module's docstring. Every call raises `Unavailable` rather than wait for ever."""

    traffic: Traffic
    # None: chunks go by `append` and `fetch`.
    lanes: Lanes | None

    @property
    def connected(self) -> bool: ...

    @property
    def named(self) -> bool:
        """Whether every process here has credentials of its own, so that the server knows who
        writes; else all share one secret, as releases up to 0.2 do."""

    @property
    def life(self) -> str:
        """Names the server's life, as of the newest connection: another one once it was started."""

    @property
    def several_nodes(self) -> bool:
        """Whether the server is one of a hub's nodes: then what it has acknowledged is not lost
        with its life, and another life may be no more than another node."""

    @property
    def ails(self) -> str:
        """Why the hub keeps nothing although we are connected to it; "" if it does."""

    # core -----------------------------------------------------------------------------------
    async def publish(self, subject: str, payload: bytes) -> None:
        """Send and forget. Silently lost while disconnected (the caller repeats)."""

    def subscribe(
        self, subject: str, *, limit: int = 1024
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        """Iterate deliveries from now on; past `limit` waiting ones the oldest are dropped."""

    async def request(self, subject: str, payload: bytes, *, timeout_s: float = 2.0) -> bytes:
        """One answer; Unavailable when nobody listens or time runs out."""

    def serve(self, subject: str, handler: Handler) -> AbstractAsyncContextManager[None]:
        """Answer requests on `subject` with `handler` until the context ends."""

    # streams --------------------------------------------------------------------------------
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create, or update the limit of, a stream; idempotent.

        Copies are added where the stream has fewer, and never taken away. Raises TooFewNodes.
        """

    async def delete_stream(self, name: str) -> None:
        """Remove a stream and all in it; no error when absent."""

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
        """Store; return the stream sequence.

        `msg_id` drops a repeat over this bus within two minutes (the first one's sequence is
        returned). It may be one that others know: what they store under it is no repeat of ours.
        `expect_last` is the stream sequence that the newest message *of this subject* must have
        (0: none yet), else Conflict. It is checked before `msg_id`: with both, a repeat of what
        was stored is a Conflict. Raises StreamFull, Unavailable, Refused too.
        """

    def read(
        self, stream: str, subject: str, *, start_seq: int = 1, batch: int = 64
    ) -> AbstractAsyncContextManager[AsyncIterator[Stored]]:
        """Iterate, without end, messages matching `subject` with seq >= start_seq, in order.

        Survives disconnects and server restarts: resumes after the last one yielded. At least
        once: a message may come twice after a reconnect.
        """

    async def fetch(
        self, stream: str, subject: str, *, start_seq: int = 1, limit: int | None = None
    ) -> list[Stored]:
        """Messages matching `subject` that are there now, in order; at most `limit`.

        Not for huge ranges: all of them are held in memory.
        """

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message whose subject is exactly `subject`."""

    async def purge(self, stream: str, subject: str, *, below_seq: int | None = None) -> int:
        """Delete messages matching `subject` (only those with seq < below_seq); the count."""

    async def stream_info(self, stream: str) -> StreamInfo:
        """Sizes; Refused when there is no such stream."""

    async def held(
        self,
        stream: str,
        subject: str,
        *,
        messages_max: int,
        start_seq: int = 1,
        below_seq: int | None = None,
    ) -> dict[str, Held]:
        """By subject, what those messages hold that match `subject`: of the oldest `messages_max`
        from `start_seq` on, and below `below_seq`. Where that is given, of all those, or
        Unavailable: for who goes on from there.

        Counted as the stream counts: payload, headers, subject, and what frames a message. Reads
        the headers of each: for who looks rarely."""

    async def heads(
        self, stream: str, subject: str, *, messages_max: int, messages_min: int = 1
    ) -> list[Stored]:
        """What `fetch` finds, with headers and without payloads: of the oldest `messages_max`.

        Nothing, and little is asked, where there are fewer than `messages_min`.
        """

    async def storage(self) -> StorageInfo:
        """What all streams hold and were promised."""

    def sweeping(self) -> AbstractAsyncContextManager[Sweep]:
        """Yields what removes, from some streams, readers that no process of ours makes: that last
        though nobody reads, or deliver to somebody. For whoever has all rights.

        The sooner it is entered, the fewer of them it does not know of.
        """

    # key-value ------------------------------------------------------------------------------
    async def ensure_bucket(self, bucket: str, *, replicas: int = 1) -> None:
        """Create a bucket with history 1 and per-key lifetimes; idempotent. As `ensure_stream`."""

    async def kv_get(self, bucket: str, key: str) -> KeyEntry | None: ...

    async def kv_create(
        self, bucket: str, key: str, value: bytes, *, ttl_s: float | None = None
    ) -> int:
        """Create; the revision. Conflict when the key lives; see `kv_update`."""

    async def kv_put(
        self, bucket: str, key: str, value: bytes, *, ttl_s: float | None = None
    ) -> int:
        """Write whatever is there; the revision."""

    async def kv_update(
        self, bucket: str, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
    ) -> int:
        """Write if the revision is still `revision`, else Conflict; the new revision.

        Unavailable, too, while an earlier write of the key waits for nodes of the hub.
        """

    async def kv_delete(self, bucket: str, key: str, *, revision: int | None = None) -> int:
        """Mark its end; the revision of that. No error if there is no such key.

        `revision`: Conflict unless it is still the key's.
        """

    async def kv_all(self, bucket: str, key: str = ">") -> dict[str, KeyEntry]:
        """Every live key; `key`: those alone that fit it, as "run.>" does all keys of a run."""

    def kv_watch(
        self, bucket: str, key: str = ">"
    ) -> AbstractAsyncContextManager[AsyncIterator[KeyEntry]]:
        """Current values first, then every change; deletions and expiries as value None.

        Watches and polls (every two seconds), since a watch is blind after a server restart:
        a change between two polls may be seen once with its newest value.
        """

    async def close(self) -> None: ...
