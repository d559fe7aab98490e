"""Room in UP and STATE that one learner takes from all others, and the leader takes back.

The server sees to it that a site writes in its own names alone, and not how much: rounds and
newcomers are parts of these streams' subjects, so one learner can fill either stream. Both are
budgeted for what honest learners send (diloco_shared/budget/streams.py). Where one of them is
crowded, what is there is counted, and what is more than a learner can have sent honestly goes:

- On UP, contributions to the rounds that were opened, and whose contributions the leader has not
  removed yet, are nobody's surplus, as long as no round has more of them than a learner sends when
  leaders change: they pile up while no snapshot can be written. Nor are answers that came after
  those to their round were removed, to as many rounds as a learner has under way at once: a slow
  link delivers them late; nor, once a run has gone back to a checkpoint, those to rounds since. Of
  the rest each live learner has an equal share of the stream, and all others together have one: of
  what the run needs, where the stream is smaller. Where all contributions are kept, what was asked
  for takes a learner's share. Of several shards each looks after its own fragments. What lies where
  no honest learner writes is taken by the first one: each purges what is of its fragments, and so
  it would stay for good.
- On STATE there is only what the leader asked a donor for, and snapshots of syncers. What nobody
  waits for any more goes, too (purging_io.py), and its donor has no fault in it.

Bytes are those of the stream: headers take room, too. And a message counts as much as one of an
honest learner has on average at least: else millions of empty ones would fill a stream, and those
that are counted would be next to nothing.

Who fills more places than can be removed one by one loses its own contributions by it, among them
some that were merged: a standby that had not executed their rounds yet takes a snapshot of the
leader, as a slow one does.

Only on a hub whose processes have credentials of their own: else anybody may write in any name.
"""

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import structlog

from diloco_shared import ambient
from diloco_shared.budget import overhead
from diloco_shared.budget.job import Job, assumed
from diloco_shared.budget.overhead import chunks, contribution, initial, layout_bytes
from diloco_shared.budget.streams import INTERVALS
from diloco_shared.bus.port import Held
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.spec.codecs import bytes_of
from diloco_shared.spec.fragmentation import Layout
from diloco_syncer.context import RunContext
from diloco_syncer.events import Tell
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.status.status_writer_io import StatusWriter
from diloco_syncer.streams.purging_io import other_syncers
from diloco_syncer.streams.room import CROWDED

log = structlog.get_logger()

# Of a number in a subject.
DIGITS_MAX = 18
# Between two looks, in seconds: a stream of 64 MiB is filled in less, and emptied again then.
LOOK_S = 1.0
# So many times as long as a look took nothing is looked at: the server reads each message's headers
# for it, and a stream may be crowded for hours.
REST = 9.0
# Messages that are counted at a look, beyond two for each chunk that fits: all of honest learners',
# and so many more that whoever sends small ones is found by them.
MESSAGES_MAX = 100_000
# Of a state: it has two messages beside its chunks, and even so it is far from half of the stream.
STATE_MESSAGE_BYTES, STATE_MESSAGES_MIN = CHUNK_BYTES // 4, 64
# Places of one learner on a stream that are removed one by one at a look.
REMOVED_MAX = 100
# Contributions of a round that a learner may have on UP: each new leader asks for one more, and
# what broke off on the way is sent anew.
ANSWERS_MAX = 4
# Of so many rounds, one may have more than an answer of a learner where all of them are kept: each
# new leader asks for those under way.
REPEATED = 4
# Names that nobody knows and whose contributions count as asked for: of learners that died before
# any was merged, and of those that have just come. A site has many more names.
STRANGERS_MAX = 8


def first_set_bytes(history: History, job: Job) -> int:
    """Of the initial parameters of a shard's fragments on UP, which one learner sends and another
    may send again; as budgeted by `job`, as long as nobody has told how large they are."""
    sizes: Sequence[int]
    if history.layout:
        sizes, layout, least = history.sizes_P, layout_bytes(history.layout), message_bytes(history)
    else:
        sizes, layout, least = job.sizes, job.layout, overhead.MESSAGE_EXTRA

    def counted(size: int) -> int:
        return max(initial(size, layout), (chunks(4 * size) + 1) * least)

    return 2 * sum(counted(sizes[p]) for p in history.owned)  # as budgeted


Place = tuple[str, str, str]  # epoch, fragment and round, as the subject has them


@dataclass(frozen=True, slots=True)
class Asked:
    """The contributions that a shard's leader asked for."""

    epoch: int
    rounds: range  # those whose contributions were not removed
    late: int  # how many others a learner may still have been answering
    before: int  # how many it may have answered before history began again
    kept: bool  # contributions stay for good
    answers_P: tuple[int, ...]  # bytes of a learner's answers to one round, at most, by fragment
    owned: tuple[int, ...]

    @classmethod
    def of(cls, history: History, rounds: range, before: int) -> Self:
        """`rounds`: those that were opened, and whose contributions were not removed; `before`: as
        many of an earlier epoch may be on UP."""
        algorithm = history.spec.algorithm
        each_P = tuple(
            ANSWERS_MAX * contribution(algorithm.codec_up, size) for size in history.sizes_P
        )
        kept = history.spec.keeping.contributions == "all"
        late = algorithm.rounds_in_flight_max
        return cls(history.epoch, rounds, late, before, kept, each_P, tuple(history.owned))

    @property
    def unasked_max(self) -> int:
        """Bytes of contributions that an honest learner may have beyond those, at most."""
        return 2 * self.late * max(self.answers_P)

    def most(self, epoch: str, fragment: str, round_: str) -> int:
        """Bytes that a learner may have there, all epochs together: a round of an earlier one may
        be on the tape. Told by parts of a subject, as anybody may write them."""
        n, age = _number(round_), self.epoch - _number(epoch)
        if n < 0 or not 0 <= age <= self.epoch or (not age and n >= self.rounds.stop):
            return 0
        if fragment != str(self.owned[n % len(self.owned)]):
            return 0
        return self.answers_P[int(fragment)]

    def expected(self, size: Mapping[Place, int]) -> dict[Place, int]:
        """What of these places, all of one learner, is answers to rounds."""
        of_round = defaultdict[int, dict[Place, int]](dict)
        for place in size:
            if self.most(*place):
                of_round[int(place[2])][place] = size[place]
        honest = {
            n: there
            for n, there in of_round.items()
            if sum(there.values()) <= self.most(*next(iter(there)))
        }
        others = sorted((n for n in honest if n not in self.rounds), reverse=True)
        repeated = self._repeated(honest) if self.kept else ()
        excess = {*others[self.late + self.before :], *repeated}
        return {place: each for n in honest.keys() - excess for place, each in honest[n].items()}

    def _repeated(self, honest: Mapping[int, Mapping[Place, int]]) -> list[int]:
        """Rounds with more than an answer, beyond as many as leaders can have asked for anew: where
        all contributions are kept, more than one to each would take the others' room."""

        def once(n: int) -> int:  # in each epoch that had such a round
            epochs = {epoch for epoch, _, _ in honest[n]}
            each = self.answers_P[self.owned[n % len(self.owned)]] // ANSWERS_MAX
            return each * len(epochs)

        found = sorted(n for n, there in honest.items() if sum(there.values()) > once(n))
        return found[max(len(self.rounds), len(honest)) // REPEATED + 2 * self.late :]


def _number(word: str) -> int:
    """-1: none, as the product writes them."""
    number = int(word) if word.isdecimal() and len(word) <= DIGITS_MAX else -1
    return number if str(number) == word else -1


def message_bytes(history: History) -> int:
    """Of the messages of a contribution, chunks and manifest, on average at least; of what comes
    before parameters are known, as budgeted for any message."""
    if not history.layout:
        return overhead.MESSAGE_EXTRA
    codec = history.spec.algorithm.codec_up
    sizes = [bytes_of(codec, size) for size in _sizes(history)]
    each = min(size // (chunks(size) + 1) for size in sizes)
    return max(overhead.MESSAGE_EXTRA, each)


def _sizes(history: History) -> Sequence[int]:
    return Layout.build(history.layout, history.fragments).sizes


@dataclass(slots=True)
class _Counted:
    """What some subjects hold together."""

    bytes: int = 0
    messages: int = 0

    def add(self, held: Held) -> None:
        self.bytes += held.bytes
        self.messages += held.messages

    def size(self, message_bytes: int) -> int:
        """In bytes, of which a message has so many at least."""
        return max(self.bytes, self.messages * message_bytes)


@dataclass(frozen=True, slots=True)
class Hoard:
    """What one learner has on UP, in bytes, where nobody asked for it, and where the leader did."""

    surplus: Mapping[Place, int]
    asked: Mapping[Place, int]
    excused: int = 0  # of the surplus: initial parameters that were sent more often

    @classmethod
    def of(
        cls,
        places: Mapping[Place, _Counted],
        asked: Asked | None,
        excused: int,
        message_bytes: int,
    ) -> Self:
        """`excused`: bytes of initial parameters that one learner may hold."""
        size = {place: counted.size(message_bytes) for place, counted in places.items()}
        first = {place: size[place] for place in size if place[0] == "init"}
        expected = {place: size[place] for place in first if sum(first.values()) <= excused}
        if asked is not None:
            expected |= asked.expected({p: size[p] for p in size.keys() - first.keys()})
        left = {p: size[p] for p in size.keys() - expected.keys()}
        return cls(left, expected, excused if first.keys() & left.keys() else 0)

    @property
    def size(self) -> int:
        return max(sum(self.surplus.values()) - self.excused, 0)

    def filters(self, owned: Collection[int]) -> dict[str, int]:
        """What of it goes: filters behind the learner's name -> bytes. What was asked for stays,
        unless the rest lies at more places than can be removed one by one."""
        fragments = {p for _, p, _ in self.asked}
        within = {(epoch, p) for epoch, p, _ in self.asked}
        found = defaultdict[str, int](int)
        for (epoch, p, round_), size in self.surplus.items():
            if p not in fragments:
                found[f"*.{p}.>"] += size
            elif epoch == "init" or (epoch, p) not in within:
                found[f"{epoch}.{p}.>"] += size
            else:
                found[f"{epoch}.{p}.{round_}.>"] += size
        if len(found) <= max(REMOVED_MAX, len(owned)):
            return dict(found)
        everything = sum(self.surplus.values()) + sum(self.asked.values())
        return {f"*.{p}.>": everything // len(owned) for p in owned}


def greedy(
    held: Mapping[str, Held],
    share: int,
    live: Collection[str],
    *,
    known: Collection[str] | None = None,
    asked: Asked | None = None,
    excused: Callable[[str], int] = lambda learner: 0,
    message_bytes: int = 0,
) -> dict[str, Hoard]:
    """Learners that hold more of UP than their share, beyond what they were asked for.

    `held`: by subject. `known`: learners of the run, that live or did; None: nobody can tell yet,
    nor who else is alive.
    `excused`: bytes of initial parameters that a learner may hold.
    """
    by = defaultdict[str, defaultdict[Place, _Counted]](lambda: defaultdict(_Counted))
    for subject, what in held.items():
        _, _, learner, epoch, fragment, round_ = [*subject.split("."), "", "", ""][:6]
        by[learner][epoch, fragment, round_].add(what)
    may = _believed(by, {*known, *live}) if known is not None else by.keys()
    hoards = {
        m: Hoard.of(there, asked, excused(m), message_bytes)
        if m in may
        else Hoard.of(there, None, 0, message_bytes)
        for m, there in by.items()
    }

    def may_hold(hoard: Hoard) -> int:
        if asked is None or not asked.kept:
            return share
        return max(share - sum(hoard.asked.values()), asked.unasked_max)

    found = {m: h for m, h in hoards.items() if m in live and h.size > may_hold(h)}
    if known is None:
        return found
    others = sorted((h.size, m) for m, h in hoards.items() if m not in live)
    left = sum(size for size, _ in others)
    while left > share:  # the largest: one that is only gone may have contributed before
        size, learner = others.pop()
        found[learner] = hoards[learner]
        left -= size
    return found


def _believed(by: Mapping[str, Mapping[Place, _Counted]], known: Collection[str]) -> set[str]:
    """Who may have been asked: whoever is known, and a few others, those that hold least. One site
    has many names, and need not join under any."""

    def holds(learner: str) -> tuple[int, str]:
        return sum(counted.bytes for counted in by[learner].values()), learner

    others = sorted(by.keys() - set(known), key=holds)
    return {*known, *others[:STRANGERS_MAX]}


def unreached(held: Mapping[str, Held], fragments: int) -> dict[str, int]:
    """Learners that wrote on UP where no purge of a shard reaches, and how much they hold there."""
    found = defaultdict[str, int](int)
    for subject, what in held.items():
        parts = subject.split(".")
        whole = len(parts) > (5 if parts[3] == "init" else 6)
        if not (whole and parts[4] in map(str, range(fragments))):
            found[parts[2]] += what.bytes
    return dict(found)


def unasked(
    held: Mapping[str, Held],
    limit: int,
    asked: Collection[tuple[str, str]],
    syncers: Collection[str],
) -> dict[str, dict[str, int]]:
    """What of STATE nobody asked for: donor -> filter of subjects -> bytes.

    `asked`: (donor, nonce) of the leader's grants. A state that takes half of the stream, which has
    room for those of all newcomers, is none either.
    """
    states = defaultdict[tuple[str, str, str], _Counted](_Counted)
    for subject, what in held.items():
        donor, newcomer, nonce = [*subject.split("."), "", "", ""][2:5]
        states[donor, newcomer, nonce].add(what)
    found = defaultdict[str, dict[str, int]](dict)
    message_bytes = min(STATE_MESSAGE_BYTES, limit // STATE_MESSAGES_MIN)
    for (donor, newcomer, nonce), counted in states.items():
        whole = counted.size(message_bytes) <= limit // 2
        if donor not in syncers and not ((donor, nonce) in asked and whole):
            found[donor][f"{donor}.{newcomer}.{nonce}.>"] = counted.bytes
    kept = {d for d, newcomer, nonce in states if f"{d}.{newcomer}.{nonce}.>" not in found[d]}
    return {
        donor: parts if donor in kept else {f"{donor}.>": sum(parts.values())}
        for donor, parts in found.items()
        if parts
    }


class Floods:
    """Of one leader's term."""

    def __init__(
        self,
        context: RunContext,
        machine: Machine,
        status_writer: StatusWriter,
        outbox: Outbox,
        removed: Callable[[], int],
        still_ours: Callable[[], Awaitable[None]],
    ) -> None:
        """`removed`: the newest round whose contributions are no longer on UP. `still_ours`: as a
        purge of UP asks (purging_io.py): a hub that was put back may need what was removed."""
        self.run, self.me, self.shard = context.spec.name, context.me, context.shard
        self.control = context.control
        self.machine = machine
        self.storage = status_writer.storage
        self.outbox = outbox
        self.removed, self.still_ours = removed, still_ours
        self.rest_until = -math.inf  # monotonic seconds

    async def keep(self) -> None:
        """Look for ever."""
        if self.control.named:
            await again_and_again(self.look, "who fills streams", LOOK_S)

    async def look(self) -> None:
        """Look once, unless the last look took too long, or another may lead. Raises BusError."""
        began = ambient.monotonic()
        if began < self.rest_until or self.machine.lapse:
            return
        try:
            await self._look()
        finally:
            ended = ambient.monotonic()
            self.rest_until = ended + REST * (ended - began) - LOOK_S

    async def _look(self) -> None:
        for kind, surplus in (("UP", self._up), ("STATE", self._state)):
            use = self.storage.streams.get(kind)
            if use is None or not use.limit or use.bytes <= CROWDED * use.limit:
                continue
            if kind == "STATE" and self.shard:
                continue  # the first shard looks after all of it
            stream = subjects.run_stream(self.run, kind)
            most = MESSAGES_MAX + 2 * use.limit // CHUNK_BYTES
            held = await self.control.held(
                stream, f"{kind.lower()}.{self.run}.>", messages_max=most
            )
            for learner, filters in (await surplus(held, use.limit)).items():
                await self._take_back(kind, learner, filters)

    async def _up(self, held: Mapping[str, Held], limit: int) -> dict[str, dict[str, int]]:
        history, live = self.machine.history, self.machine.roster.names(ambient.monotonic())
        mine = {s: h for s, h in held.items() if _of_fragments(s, history.owned)}
        needed = self.storage.needed.get("UP")
        found = {} if needed is None else self._greedy(mine, self._share(limit, needed, live), live)
        filters = {m: hoard.filters(history.owned) for m, hoard in found.items()}
        if not self.shard:
            strays = unreached(held, history.spec.algorithm.fragments)
            filters |= {learner: {">": size} for learner, size in strays.items()}
        return {m: {f"{m}.{f}": size for f, size in some.items()} for m, some in filters.items()}

    def _greedy(
        self, mine: Mapping[str, Held], share: int, live: Collection[str]
    ) -> dict[str, Hoard]:
        history, roster = self.machine.history, self.machine.roster
        return greedy(
            mine,
            share,
            live,
            known=None if self._early else {*roster.members, *history.ledger.newest},
            asked=self._asked(),
            excused=self._excused,
            message_bytes=message_bytes(history),
        )

    def _share(self, limit: int, needed: int, live: Collection[str]) -> int:
        """Of a stream that is smaller than the run needs, honest learners fill more than their part
        by themselves: then it is of what is needed."""
        learners = len(live) if limit >= needed else self.storage.budgeted.learners
        return max(limit, needed) // (max(learners, 2) * self.machine.spec.algorithm.shards)

    @property
    def _early(self) -> bool:
        """A new leader has not heard of all yet."""
        roster = self.machine.roster
        return ambient.monotonic() - roster.since <= roster.lease_s

    @property
    def _job(self) -> Job:
        """The run as its streams are planned for."""
        return assumed(self.machine.spec, **self.storage.budgeted._asdict())

    def _excused(self, learner: str) -> int:
        """Bytes of initial parameters: of whoever was asked for them, which may come late. An
        earlier leader may have asked anybody, and what that one sent stays until contributions are
        removed."""
        history, appointed = self.machine.history, learner in self.machine.announcer.appointed
        anybody = self.removed() < 0 if history.layout else self._early
        return first_set_bytes(history, self._job) if appointed or anybody else 0

    def _asked(self) -> Asked | None:
        history = self.machine.history
        if not history.layout:
            return None
        opened = max((r.n for r in self.machine.rounds.open), default=history.next_round - 1)
        return Asked.of(history, range(self.removed() + 1, opened + 1), self._before())

    def _before(self) -> int:
        """Rounds of earlier epochs whose contributions may be on UP: of a run that went back, until
        some of its rounds since were removed."""
        history, keeping = self.machine.history, self.machine.spec.keeping
        if not history.epoch or self.removed() >= 0:
            return 0
        if keeping.contributions == "all":
            return self._job.rounds
        return INTERVALS * keeping.snapshot_every_rounds

    async def _state(self, held: Mapping[str, Held], limit: int) -> dict[str, dict[str, int]]:
        syncers = {self.me} | {
            member.id
            for shard in range(self.machine.spec.algorithm.shards)
            for member in await other_syncers(self.control, self.run, shard, self.me)
        }
        awaited, over = self.machine.admission.states()
        return unasked(held, limit, awaited | over, syncers)

    async def _take_back(self, kind: str, learner: str, filters: Mapping[str, int]) -> None:
        """Purge what is under these filters, and name the learner."""
        size = sum(filters.values())
        await self.still_ours()
        for part in _some(filters):
            await self._purge(kind, part)
        log.warning("flood", stream=kind, learner=learner, bytes=size)
        if kind == "UP":
            text = f"{learner} filled UP with more than it can have to send ({size} bytes)"
        else:
            text = (
                f"{learner} has {size} bytes on STATE that this leader did not ask for; the one "
                "before it may have"
            )
        text += ": they are removed. If it goes on, revoke its site"
        data = {"learner": learner, "stream": kind, "bytes": size}
        self.outbox.tell(Tell("flood", text, data))

    async def _purge(self, kind: str, part: str) -> None:
        """What is under a filter. Chunks of a state lie at the place that its filter is below."""
        places = [part, part.removesuffix(".>")] if kind == "STATE" else [part]
        for place in places:
            where = f"{kind.lower()}.{self.run}.{place}"
            await self.control.purge(subjects.run_stream(self.run, kind), where)


def _of_fragments(subject: str, owned: Collection[int]) -> bool:
    parts = subject.split(".")
    return len(parts) > 4 and parts[4] in map(str, owned)


def _some(filters: Mapping[str, int]) -> Iterator[str]:
    """The largest first; the rest at the next look."""
    yield from sorted(filters, key=lambda f: -filters[f])[:REMOVED_MAX]
