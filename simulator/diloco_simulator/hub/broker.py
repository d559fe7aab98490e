"""A NATS server's behaviour in memory, synchronous and without a network.

Streams with per-subject sequences, conditional appends, byte limits, per-message lifetimes with
markers, purge, and core subscriptions with wildcards. Many `memory_bus.MemoryBus` clients share
one broker. Time is `clock`; without one it is the running loop's, and expiry then happens by
itself.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal

from diloco_shared.bus.nats.wire import head_bytes
from diloco_shared.bus.port import (
    BusError,
    Conflict,
    Delivery,
    Held,
    NoStream,
    Refused,
    StorageInfo,
    Stored,
    StreamFull,
    StreamInfo,
    TooFewNodes,
    Unavailable,
)
from diloco_shared.protocol import subjects
from diloco_simulator.hub.stream import MemoryStream, size

# As the embedded server is configured.
PAYLOAD_BYTES_MAX = 2 << 20
_DUPLICATE_WINDOW_S = 120.0

# What happens to one message of one client: delivered; lost on the way there; carried out, but
# the answer is lost.
Fate = Literal["deliver", "lose_request", "lose_answer"]
# (client, operation, subject) -> fate. Operations: publish, request, append, api.
Fault = Callable[[str, str, str], Fate]


class Unacknowledged(Unavailable):
    """What was given to a node that leads and has lost the others, or to a disk that is full."""


# A few subjects each of a few dozen members and fragments.
matches = lru_cache(maxsize=65536)(subjects.matches)


def overlap(a: str, b: str) -> bool:
    """Whether some subject matches both patterns."""
    left, right = a.split("."), b.split(".")
    for x, y in zip(left, right, strict=False):
        if ">" in (x, y):
            return True
        if x != y and "*" not in (x, y):
            return False
    return len(left) == len(right)


class MemoryBroker:
    """The shared state. `fault` decides the fate of every message; None delivers all."""

    def __init__(
        self, *, clock: Callable[[], float] | None = None, fault: Fault | None = None
    ) -> None:
        self.fault = fault
        self.on_store: Callable[[str, Stored], None] = lambda stream, message: None
        self.life = 1  # the next one may have lost what this one acknowledged
        self.squeezed = False  # its storage is used up: nothing is taken, and that is said
        # Its disk is full: what a stream is given gets no answer, and such a stream takes nothing
        # more until the server is started anew (diloco_syncer/streams/fullness_io.py).
        self.disk_full = False
        self.unwritten: set[str] = set()  # such streams
        self.storage_max = 0  # bytes that all streams may be given together; 0: no limit
        self.nodes = 1  # that could each keep a copy of a stream
        self.named = False  # every process has credentials of its own
        # They elect another leader: connections and core messages stay, streams take nothing and
        # tell nothing. Or, if it `tells`, the node that led is there and has lost the others: it
        # goes on telling what it has, and what it is given waits for them, by subject.
        self.leaderless = self.tells = False
        self._proposed: dict[str, list[Callable[[], int]]] = {}
        self._clock = clock
        # Stream -> where it ended each time that it lost its tail, since the world began.
        self.ends: dict[str, list[int]] = {}
        # Subjects of what it has lost so, by stream; it may have some of them again.
        self.lacks: dict[str, set[str]] = {}
        self._time: Callable[[], float] | None = None  # the clock, once it was read
        self._streams: dict[str, MemoryStream] = {}
        self._gone: dict[str, int] = {}  # where streams ended that its last disk had
        self._by_subject: dict[str, MemoryStream] = {}  # found so far, of these streams
        self._subscribers: dict[int, tuple[str, Callable[[Delivery], None]]] = {}
        # Who is told of a subject, found so far, of these subscribers.
        self._told: dict[str, list[Callable[[Delivery], None]]] = {}
        self._next_id = 0
        self._watchers: dict[str, list[asyncio.Future[None]]] = {}  # by stream, in their order
        self._expires_at = math.inf  # nothing does before

    def now(self) -> float:
        if self._time is None:
            self._time = self._clock or asyncio.get_running_loop().time
        return self._time()

    def fate(self, client: str, operation: str, subject: str) -> Fate:
        return self.fault(client, operation, subject) if self.fault else "deliver"

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # --- core ---------------------------------------------------------------------------------

    def publish(self, delivery: Delivery) -> int:
        """Deliver to every matching subscriber; how many there were."""
        subject = delivery.subject
        found = self._told.get(subject)
        if found is None:
            there = self._subscribers.values()
            found = [put for pattern, put in there if matches(pattern, subject)]
            self._told[subject] = found
        for put in found:
            put(delivery)
        return len(found)

    def subscribe(self, pattern: str, put: Callable[[Delivery], None]) -> int:
        number = self.next_id()
        self._subscribers[number] = (pattern, put)
        self._told.clear()
        return number

    def unsubscribe(self, number: int) -> None:
        self._subscribers.pop(number, None)
        self._told.clear()

    # --- streams ------------------------------------------------------------------------------

    def ensure(self, config: dict[str, Any]) -> None:
        """Create a stream, or change one. `config`: as JetStream's API has it.

        A limit is raised and never lowered; copies are added and never taken away. Raises
        TooFewNodes, StreamFull, and Refused where subjects overlap with another stream's.
        """
        name = config["name"]
        there = self._streams[name].config if name in self._streams else {}
        copies = max(config.get("num_replicas", 1), there.get("num_replicas", 1))
        if copies > self.nodes:
            raise TooFewNodes(f"create stream {name}: {copies} copies on {self.nodes} nodes")
        config = {**config, "num_replicas": copies}
        if min(config.get("max_bytes", -1), there.get("max_bytes", -1)) > 0:  # a raised one stays
            config["max_bytes"] = max(config["max_bytes"], there["max_bytes"])
        if there:  # how a stream persists cannot be changed
            config["persist_mode"] = there.get("persist_mode", "default")
        for other, stream in self._streams.items():
            if other != name and any(
                overlap(a, b) for a in config["subjects"] for b in stream.config["subjects"]
            ):
                raise Refused(f"create stream {name}: subjects overlap with stream {other}")
        if self.storage_max > 0:
            before = self._streams[name].bytes_max if name in self._streams else 0
            wanted = self.storage().reserved - before + max(config.get("max_bytes", 0), 0)
            if self.storage_max < wanted:
                raise StreamFull(f"create stream {name}: insufficient storage resources available")
        if name in self._streams:
            self._streams[name].config = config
            self._streams[name].fit([*self._streams[name].last_by_subject])
        else:
            self._streams[name] = MemoryStream(config)
        self._by_subject.clear()
        self.wake()

    def lose_leader(self, *, tells: bool = False) -> None:
        """Until the nodes are `elected` again; `tells`: see above."""
        self.leaderless, self.tells = True, tells

    def elected(self, kept: Callable[[], bool] = lambda: True) -> None:
        """The nodes have a leader again. Of what had waited for that, some is `kept`."""
        self.leaderless = self.tells = False
        waited, self._proposed = self._proposed, {}
        for store in (store for stores in waited.values() for store in stores):
            with suppress(BusError):  # nobody waits for its answer
                if kept():
                    store()
        self.wake()

    def check_leader(self, subject: str, *, alone: bool) -> None:
        """Raises Unavailable where none answers. `alone`: one that has lost the others may."""
        if self.leaderless and not (alone and self.tells):
            raise Unavailable(f"nobody listens on {subject}: the hub's nodes have no leader")

    def _propose(self, subject: str, store: Callable[[], int], *, on_condition: bool) -> None:
        """To nodes that are away. Raises Conflict, as a server does for a second one of a kind."""
        if on_condition and subject in self._proposed:
            raise Conflict(f"append on {subject}: wrong last sequence: another one is on its way")
        self._proposed.setdefault(subject, []).append(store)

    def narrow(self, name: str, bytes_max: int) -> None:
        """An operator gives a stream another limit; what it holds stays."""
        stream = self._named(name)
        stream.config = {**stream.config, "max_bytes": bytes_max}

    def delete_stream(self, name: str) -> None:
        self._streams.pop(name, None)
        self._by_subject.clear()
        self.wake()

    def append(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str],
        msg_id: str | None,
        expect_last: int | None,
    ) -> int:
        """Store one message; its sequence. See `bus.Bus.append`."""
        self.expire()
        if self.squeezed:
            raise StreamFull(f"append on {subject}: no space left on the device")
        if subject.startswith(f"{subjects.HUB_KEYS}."):  # as the account of a hub translates it
            subject = subjects.KEYS + subject.removeprefix(subjects.HUB_KEYS)
        stream = self._of_subject(subject).config["name"]
        if self.disk_full or stream in self.unwritten:
            self.unwritten.add(stream)
            raise Unacknowledged(f"no answer on {subject}: no space left on the device")
        store = partial(self._store, subject, payload, headers, msg_id, expect_last)
        if self.leaderless and self.tells:
            self._propose(subject, store, on_condition=expect_last is not None)
            raise Unacknowledged(f"no answer on {subject}: the node that leads is alone")
        return store()

    def _store(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str],
        msg_id: str | None = None,
        expect_last: int | None = None,
    ) -> int:
        stream = self._of_subject(subject)
        if 0 < stream.config.get("max_msg_size", -1) < len(payload) + head_bytes(headers):
            raise Refused(f"append on {subject}: message size exceeds maximum allowed")
        if "Nats-TTL" in headers and not stream.config.get("allow_msg_ttl"):
            raise Refused(f"append on {subject}: per-message TTL is disabled")
        last = stream.last_by_subject.get(subject, 0)
        if expect_last is not None and expect_last != last:
            raise Conflict(f"append on {subject}: wrong last sequence: {last}")
        now = self.now()
        if msg_id is not None and msg_id in stream.ids:
            seq, when = stream.ids[msg_id]
            if now - when < _DUPLICATE_WINDOW_S:
                return seq
        message = Stored(subject, payload, headers, stream.last_seq + 1)
        self._make_room(stream, message)
        stream.last_seq = message.seq
        stream.messages[message.seq] = message
        stream.last_by_subject[subject] = message.seq
        stream.bytes += size(message)
        if msg_id is not None:
            stream.ids[msg_id] = (message.seq, now)
            _forget_ids(stream, now)
        if "Nats-TTL" in headers:
            self._schedule_expiry(stream, message.seq, _seconds(headers["Nats-TTL"]))
        elif age_ns := stream.config.get("max_age", 0):
            self._expire_at(stream, message.seq, now + age_ns / 1e9)
        self.on_store(stream.config["name"], message)
        self.wake(stream.config["name"])
        return message.seq

    def last(self, name: str, subject: str) -> Stored | None:
        stream = self._named(name)
        seq = stream.last_by_subject.get(subject)
        return None if seq is None else stream.messages[seq]

    def at(self, name: str, seq: int) -> Stored | None:
        return self._named(name).messages.get(seq)

    def messages(self, name: str) -> tuple[dict[int, Stored], int]:
        """By sequence, to be read only; and the sequence that comes next."""
        stream = self._named(name)
        return stream.messages, stream.last_seq + 1

    def select(self, name: str, subject: str, start_seq: int) -> Iterator[Stored]:
        """Matching messages with seq >= start_seq, in order."""
        stream = self._named(name)
        first, end = max(start_seq, stream.first_seq), stream.last_seq + 1
        # Of a bucket that is written again and again few sequences are left.
        there = range(first, end) if end - first < len(stream.messages) else [*stream.messages]
        for seq in there:
            message = stream.messages.get(seq)
            if message is not None and seq >= first and matches(subject, message.subject):
                yield message

    def purge(self, name: str, subject: str, below_seq: int | None) -> int:
        """Remove messages on `subject` with a sequence below `below_seq` (None: all); how many.

        Raises Refused while the stream's disk is full.
        """
        stream = self._named(name)
        if name in self.unwritten:
            raise Refused(f"purge {name}: no space left on device")
        gone = [
            seq
            for seq, message in stream.messages.items()
            if matches(subject, message.subject) and (below_seq is None or seq < below_seq)
        ]
        for seq in gone:
            message = stream.remove(seq)
            if not stream.synced:
                stream.purged.append(message)
        return len(gone)

    def restart(self) -> None:
        """Its disk has room, and the server is started anew."""
        self.life += 1
        self.disk_full = False
        self.unwritten.clear()
        for stream in self._streams.values():
            stream.remember()

    def lose(self, name: str, count: int, *, synced: bool = False) -> int:
        """A power cut takes the newest that were acknowledged and not on disk: how many of `count`
        there were to lose. None of a stream that is synced, unless the disk itself loses what it
        had `synced`.

        Their sequences come again, and repeats of them are new.
        """
        self.life += 1
        stream = self._named(name)
        if stream.synced and not synced:
            return 0
        gone = list(stream.messages)[-count:] if count else []
        lacks = self.lacks.setdefault(name, set())
        for seq in reversed(gone):
            lacks.add(stream.messages[seq].subject)
            stream.remove(seq)
        if gone:
            stream.last_seq = gone[0] - 1
            self.ends.setdefault(name, []).append(stream.last_seq)
            stream.remember()
            stream.forget_purged()
            self.wake(name)
        return len(gone)

    def take_back(self, name: str, count: int) -> int:
        """A power cut undoes a purge that was not on disk: of what was purged last, up to `count`
        are there again, as far as there is room; how many. None of a stream that is synced."""
        stream = self._named(name)
        back = stream.take_back(count)
        if age_ns := stream.config.get("max_age", 0):
            for message in back:  # counted anew, as nobody knows how old each is
                self._expire_at(stream, message.seq, self.now() + age_ns / 1e9)
        if back:
            self.wake(name)
        return len(back)

    # --- backups ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted(self._streams)

    def config(self, name: str) -> dict[str, Any] | None:
        """How a stream is set up; None: there is none."""
        self.expire()
        return dict(self._streams[name].config) if name in self._streams else None

    def saved(self, name: str) -> Any:
        """All that there is of a stream, for `load`."""
        return self._named(name)

    def wipe(self) -> None:
        """Its disk is gone: what comes next is a server that knows nothing, and has room."""
        self.restart()
        self.squeezed = self.leaderless = self.tells = False
        self._proposed.clear()
        self._gone = {name: stream.last_seq for name, stream in self._streams.items()}
        self._streams.clear()
        self._by_subject.clear()

    def load(self, saved: Any, config: dict[str, Any]) -> None:
        """A stream as it was saved."""
        stream: MemoryStream = saved
        name, stream.config = config["name"], config
        stream.remember()
        stream.purged.clear()
        self._streams[name] = stream
        self._by_subject.clear()
        if stream.last_seq < self._gone.get(name, 0):
            self.ends.setdefault(name, []).append(stream.last_seq)
        for seq, when in list(stream.expiries.items()):
            self._schedule_expiry(stream, seq, max(when - self.now(), 0.0))
        self.wake(name)

    def info(self, name: str) -> StreamInfo:
        stream = self._named(name)
        sequences = (stream.first_seq, stream.last_seq)
        copies = stream.config["num_replicas"]
        return StreamInfo(stream.bytes, len(stream.messages), *sequences, stream.bytes_max, copies)

    def held(
        self,
        name: str,
        subject: str,
        messages_max: int,
        start_seq: int = 1,
        below_seq: int | None = None,
    ) -> dict[str, Held]:
        found: dict[str, Held] = {}
        messages = (
            m
            for m in self._named(name).messages.values()
            if m.seq >= start_seq
            and (below_seq is None or m.seq < below_seq)
            and matches(subject, m.subject)
        )
        for message in islice(messages, messages_max):
            found[message.subject] = found.get(message.subject, Held()).and_one(size(message))
        return found

    def storage(self) -> StorageInfo:
        streams = self._streams.values()
        reserved = sum(stream.bytes_max for stream in streams)
        return StorageInfo(sum(s.bytes for s in streams), reserved, self.storage_max)

    def exists(self, name: str) -> bool:
        return name in self._streams

    # --- time and change ----------------------------------------------------------------------

    def expire(self) -> None:
        """Remove what has outlived its lifetime, leaving markers. Called before every read."""
        if (now := self.now()) < self._expires_at or self.leaderless:  # nodes agree on that, too
            return
        self._expires_at = math.inf
        for name, stream in self._streams.items():
            for _, seq in sorted((when, s) for s, when in stream.expiries.items() if when <= now):
                self._mark(stream, stream.remove(seq))
                self.wake(name)
            self._expires_at = min([self._expires_at, *stream.expiries.values()])

    def _mark(self, stream: MemoryStream, gone: Stored) -> None:
        """Tell that the last message of a subject has outlived its lifetime, where a stream does.
        Nothing follows a marker, nor what has removed all of a subject."""
        marker_ns = stream.config.get("subject_delete_marker_ttl", 0)
        if not marker_ns or gone.subject in stream.last_by_subject:
            return
        if "Nats-Marker-Reason" in gone.headers or gone.headers.get("KV-Operation") == "PURGE":
            return
        ttl = _duration(marker_ns // 1_000_000_000)
        headers = {"Nats-Marker-Reason": "MaxAge", "Nats-TTL": ttl, "Nats-Rollup": "sub"}
        self._store(gone.subject, b"", headers)

    def changed(self, stream: str) -> "asyncio.Future[None]":
        """Done by the next change of a stream, there or not."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.setdefault(stream, []).append(change)
        return change

    def wake(self, stream: str = "") -> None:
        """Let those who wait for a change of a stream look again; "": everybody."""
        for name in [stream] if stream else list(self._watchers):
            for change in self._watchers.pop(name, ()):
                if not change.done():
                    change.set_result(None)

    def _expire_at(self, stream: MemoryStream, seq: int, when: float) -> None:
        """By whoever looks first after it: nobody is told."""
        stream.expiries[seq] = when
        self._expires_at = min(self._expires_at, when)

    def _schedule_expiry(self, stream: MemoryStream, seq: int, ttl_s: float) -> None:
        self._expire_at(stream, seq, self.now() + ttl_s)
        if self._clock is None:
            # A timer may fire within the clock's resolution before its time.
            asyncio.get_running_loop().call_later(ttl_s + 0.001, self.expire)

    # --- parts --------------------------------------------------------------------------------

    def _named(self, name: str) -> MemoryStream:
        self.expire()
        if name not in self._streams:
            raise NoStream(f"stream {name}: stream not found")
        return self._streams[name]

    def _of_subject(self, subject: str) -> MemoryStream:
        if (known := self._by_subject.get(subject)) is not None:
            return known
        for stream in self._streams.values():
            if any(matches(pattern, subject) for pattern in stream.config["subjects"]):
                self._by_subject[subject] = stream
                return stream
        raise Unavailable(f"nobody listens on {subject}")

    def _make_room(self, stream: MemoryStream, message: Stored) -> None:
        """Before it is stored; raises StreamFull."""
        # Of a bucket that is written again and again the one before is the only one.
        before = stream.last_by_subject.get(message.subject)
        replaced = before if stream.per_subject == 1 else None
        freed = 0 if replaced is None else size(stream.messages[replaced])
        if stream.bytes_max and stream.bytes - freed + size(message) > stream.bytes_max:
            if stream.config.get("discard") != "old":
                raise StreamFull(f"append on {message.subject}: maximum bytes exceeded")
            while stream.messages and stream.bytes + size(message) > stream.bytes_max:
                stream.remove(next(iter(stream.messages)))
        if replaced in stream.messages:
            stream.remove(replaced)
        elif stream.per_subject > 1:
            for seq in stream.of(message.subject)[: 1 - stream.per_subject]:
                stream.remove(seq)


def _duration(seconds: int) -> str:
    """As a server writes it: 59s, 1m0s, 1h0m0s."""
    minutes, s = divmod(seconds, 60)
    h, m = divmod(minutes, 60)
    return f"{h}h{m}m{s}s" if h else f"{m}m{s}s" if m else f"{s}s"


def _seconds(duration: str) -> float:
    """Of one that is written so."""
    parts = re.findall(r"([\d.]+)([hms])", duration)
    return sum(float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


def _forget_ids(stream: MemoryStream, now: float) -> None:
    """Ids are remembered in order of time: drop the expired ones at the front."""
    while stream.ids:
        oldest = next(iter(stream.ids))
        if now - stream.ids[oldest][1] < _DUPLICATE_WINDOW_S:
            return
        del stream.ids[oldest]
