"""Which bytes of a payload each process of an island has, and so which chunks it carries itself.

    payload      | header | scales of all devices | quanta of all devices        |
    process 0    ..........                       .................
    process 1              (elsewhere) ...........                  ..............
    chunks       |    0    |    1    |    2    |    3    |    4    |    5    |  6  |

A chunk that lies within one stretch of a process's bytes is hashed and stored by that process, over
its own connection to the hub. Process 0 stores all others: those of the header, those that lie over
the borders of stretches, and those of processes without a connection. It is given what it lacks of
them. The digest of a payload is made of the checks of its chunks, so that nothing else is gathered
and nobody who reads the payload can tell how many stored it. All processes find the same shares of
the same shapes and shardings: only values are sent.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diloco_learner.hosts.parts import Buffer, Span
from diloco_shared.protocol.chunks import (
    CHECK_BYTES,
    ChunkError,
    Outgoing,
    Pieces,
    checks_of,
    chunk_count,
    composed,
    scatter_checks,
)
from diloco_shared.protocol.messages import Blob

# What a payload is of. How many of each a process keeps at most, each a share as large as it is:
# as many contributions as one may owe to process 0 (`following_io`), as many initial fragments as
# are under way (`recoverer_io`), and one copy of the moments. The oldest is forgotten above it.
CONTRIBUTION, FRAGMENT, MOMENTS = "contribution", "fragment", "moments"
KEPT_MAX = {CONTRIBUTION: 64, FRAGMENT: 3, MOMENTS: 1}
# Orders whose shares are of no use any more: as many are remembered as a process may have told of,
# and not hashed yet (`following_io`), twice over, since some of them are never kept.
DROPPED_MAX = 128

# Bytes of a payload: the first one, and the one after the last.
Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lying:
    """How arrays lie behind a header in a payload, one array after the other.

    By array: `counts`, its values that are sent (behind them it is filled up); `widths`, bytes of
    each; `spans`, by process the parts that it gives.
    """

    head: int  # bytes
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    spans: tuple[Mapping[int, Sequence[Span]], ...]

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.head + sum(n * w for n, w in zip(self.counts, self.widths, strict=True))

    def stretches(self, process: int) -> list[Stretch]:
        """Of every part that a process gives, in their order: empty where it only fills up."""
        return [stretch for stretch, _ in self._parts(process)]

    def pieces(self, process: int, given: Iterable[Buffer]) -> list[tuple[int, memoryview]]:
        """Where the parts that a process gives begin, without what fills them up."""
        return [
            (start, memoryview(part).cast("B")[: stop - start])
            for ((start, stop), _), part in zip(self._parts(process), given, strict=True)
        ]

    def split(self, process: int, given: Buffer) -> list[memoryview]:
        """The parts of a process, which come one after the other. Raises ValueError."""
        whole, found, at = memoryview(given).cast("B"), [], 0
        for _, size in self._parts(process):
            found.append(whole[at : at + size])
            at += size
        if at != len(whole):
            raise ValueError(f"{len(whole)} bytes came of process {process}, which gives {at}")
        return found

    def _parts(self, process: int) -> Iterator[tuple[Stretch, int]]:
        """(its stretch, its bytes with those that fill up) of every part."""
        at = self.head
        for count, width, spans in zip(self.counts, self.widths, self.spans, strict=True):
            for ((start, stop),) in spans.get(process, ()):
                stretch = at + min(start, count) * width, at + min(stop, count) * width
                yield stretch, (stop - start) * width
            at += count * width


@dataclass(frozen=True, slots=True)
class PayloadShare:
    """What a process has of a payload: whole `chunks`, and the `rest`, which process 0 is given."""

    chunks: tuple[int, ...]
    rest: tuple[Stretch, ...]

    @property
    def answer_bytes(self) -> int:
        """What process 0 is given: a check of each chunk, and the rest."""
        return CHECK_BYTES * len(self.chunks) + sum(stop - start for start, stop in self.rest)


def share_of(stretches: Iterable[Stretch], size: int, chunk_bytes: int) -> PayloadShare:
    """Of these bytes of a payload of `size`."""
    chunks, rest = list[int](), list[Stretch]()
    for start, stop in _touching(stretches):
        first = chunk_count(start, chunk_bytes)
        end = chunk_count(stop, chunk_bytes) if stop == size else stop // chunk_bytes
        if first >= end:
            rest.append((start, stop))
            continue
        chunks += range(first, end)
        borders = (start, first * chunk_bytes), (min(end * chunk_bytes, size), stop)
        rest += [(a, b) for a, b in borders if a < b]
    return PayloadShare(tuple(chunks), tuple(rest))


def _touching(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same bytes in as few stretches as there are, in order."""
    found = list[Stretch]()
    for start, stop in sorted(s for s in stretches if s[0] < s[1]):
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return found


# --------------------------------------------------------------------------------------------------
# The same contribution at a process that carries its share, and at process 0.


@dataclass(frozen=True, slots=True)
class KeptPayload:
    """What a process keeps of a payload until it is told the whole's digest, or to let go.

    `of`: what the payload is of. All but contributions are kept until nobody needs them any more:
    what a carrier cannot store, it can give (`given`).
    """

    payload: Pieces
    chunks: tuple[int, ...]
    checks: bytes  # of these chunks
    of: str = CONTRIBUTION

    def given(self, chunks: Sequence[int], chunk_bytes: int) -> tuple[memoryview, ...]:
        """The checks of some of its chunks, and these chunks. ChunkError for one that it lacks."""
        if absent := set(chunks).difference(self.chunks):
            raise ChunkError(f"it does not keep chunk {min(absent)}")
        at = {chunk: n * CHECK_BYTES for n, chunk in enumerate(self.chunks)}
        checks = b"".join(self.checks[at[n] : at[n] + CHECK_BYTES] for n in chunks)
        parts = (self.payload[n * chunk_bytes : (n + 1) * chunk_bytes] for n in chunks)
        return memoryview(checks), *parts

    def outgoing(self, blob: Blob) -> Outgoing:
        """For its own chunks alone. Raises ChunkError where the payload is another one."""
        if blob.bytes != len(self.payload):
            raise ChunkError(f"{blob.bytes} bytes are told of a payload of {len(self.payload)}")
        return Outgoing(
            blob, self.payload, scatter_checks(blob.chunks, [(self.chunks, self.checks)])
        )


def kept(
    lying: Lying,
    process: int,
    given: Iterable[Buffer],
    chunk_bytes: int,
    of: str = CONTRIBUTION,
) -> tuple[KeptPayload, list[memoryview]]:
    """What a process keeps of the parts that it has, and what it answers. Hashes its chunks."""
    share = share_of(lying.stretches(process), lying.size, chunk_bytes)
    payload = Pieces(lying.size, lying.pieces(process, given))
    checks = checks_of(payload, share.chunks, chunk_bytes)
    rest = [payload[start:stop] for start, stop in share.rest]
    return KeptPayload(payload, share.chunks, checks, of), [memoryview(checks), *rest]


@dataclass(frozen=True, slots=True)
class Composed:
    """A payload as process 0 has it. `chunks`: that it stores itself; `carried`: by process, those
    that others store."""

    outgoing: Outgoing
    chunks: tuple[int, ...]
    carried: Mapping[int, tuple[int, ...]]


def compose(
    subject: str,
    lying: Lying,
    header: bytes,
    own: tuple[int, Iterable[Buffer]],
    answers: Mapping[int, Buffer],
    carriers: Iterable[int],
    chunk_bytes: int,
) -> Composed:
    """Put together in process 0: hashes the chunks that it stores.

    `own`: its number and parts; `answers`: what the others gave, `carriers` as `kept` says, and the
    rest of them their parts. Raises ValueError for an answer that is none.
    """
    process, given = own
    pieces: list[tuple[int, Buffer]] = [(0, header), *lying.pieces(process, given)]
    carried, checks = dict[int, tuple[int, ...]](), list[tuple[Sequence[int], Buffer]]()
    for other, answer in answers.items():
        if other not in carriers:
            pieces += lying.pieces(other, lying.split(other, answer))
            continue
        share = share_of(lying.stretches(other), lying.size, chunk_bytes)
        theirs = memoryview(answer).cast("B")
        if len(theirs) != share.answer_bytes:
            raise ValueError(
                f"{len(theirs)} bytes came of process {other}, which answers {share.answer_bytes}"
            )
        at = CHECK_BYTES * len(share.chunks)
        checks.append((share.chunks, theirs[:at]))
        for start, stop in share.rest:
            pieces.append((start, theirs[at : at + stop - start]))
            at += stop - start
        if share.chunks:
            carried[other] = share.chunks
    payload = Pieces(lying.size, pieces)
    chunks = chunk_count(lying.size, chunk_bytes)
    elsewhere = {index for share in carried.values() for index in share}
    mine = tuple(index for index in range(chunks) if index not in elsewhere)
    checks.append((mine, checks_of(payload, mine, chunk_bytes)))
    return Composed(
        composed(subject, payload, scatter_checks(chunks, checks), chunk_bytes), mine, carried
    )


class KeptShares:
    """What a process keeps to carry it, by order. Different threads may call it: what one hashes,
    and keeps once that is done, another one may have been told to drop meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: dict[int, KeptPayload] = {}
        self.dropped: deque[int] = deque(maxlen=DROPPED_MAX)
        self.over = 0  # orders up to this one belong to work that is over

    def keep(self, number: int, kept: KeptPayload) -> None:
        """Until it is said what becomes of it; not what is of no use already."""
        with self.lock:
            if not kept.chunks or number <= self.over or number in self.dropped:
                return
            self.kept[number] = kept
            same = sorted(n for n, other in self.kept.items() if other.of == kept.of)
            for old in same[: -KEPT_MAX[kept.of]]:
                del self.kept[old]

    def of(self, number: int) -> KeptPayload | None:
        """What it keeps since that order."""
        with self.lock:
            return self.kept.get(number)

    def to_store(self, number: int) -> KeptPayload | None:
        """The same; a contribution is let go with this: nobody asks for it once more."""
        with self.lock:
            kept = self.kept.get(number)
            if kept is not None and kept.of == CONTRIBUTION:
                del self.kept[number]
            return kept

    def drop(self, number: int) -> None:
        """What that order made is of no use any more, whether it is here yet or not."""
        with self.lock:
            if self.kept.pop(number, None) is None and number > 0:  # else of something to fetch
                self.dropped.append(number)

    def forget(self, upto: int) -> None:
        """So is all that orders up to that one made."""
        with self.lock:
            self.over = max(self.over, upto)
            self.kept.clear()
