"""Events as people see them: the newest that the stream told.

A learner with credentials of its own tells them in a subject of its own, of which the stream keeps
so many. Here no more of them are kept either, and a flood of them is left out unread: what one
learner says pushes out what it said itself, and nothing of others. Where most of it are
evaluations of one run, these are thinned, so that the curve keeps its beginning, and all else that
the learner said stays. Nor does one kind of a run's events push out another kind: where all are too
many, those give way of which there are most. What tells when learners stepped counts as one kind: a
beginning whose losses are gone would make a learner step for ever. A coordinator that starts finds
the newest ones alone in the stream. Pure.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile

import structlog

from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Event
from diloco_shared.protocol.telling import OF_LANES, misses, not_ones_own
from diloco_shared.protocol.wire import WireError, decode

log = structlog.get_logger()

# Events kept for people: some hours of a lively run. The stream on disk is bounded likewise.
EVENTS_MAX = 20_000
EVENTS_BYTES_MAX = 64 << 20
# Where there are more, this part of them goes at once.
AT_ONCE = 100
# Of one learner with credentials of its own: of its evaluations most of a day's, at one a minute.
# Beyond that those of its longest run are thinned.
BY_ONE_MAX = 1000
# A run with fewer evaluations is thinned no further: half of them would make little room.
THINNED_MIN = 100
# Beyond that so many a second are read, in the long run: nobody has more to say.
BY_ONE_PER_S = 2.0
# An event is a line or two and a few figures. Sixteen learners find room in the stream with all
# that they may say, at its largest, and most say far less.
EVENT_BYTES_MAX = 16 << 10
# How deep an event's data go: losses by their names lie two deep. What makes JSON gives up at some
# hundred, and then nobody would be shown any event.
DEPTH_MAX = 8
# Whole numbers of 64 bits, with or without a sign.
INT_MIN, INT_MAX = -(2**63), 2**64 - 1
# Seconds since 1970, in the year 5138: pages and terminals show dates up to there.
AT_MAX = 1e11
NAMED_BYTES_MAX = 16 * BY_ONE_MAX * EVENT_BYTES_MAX

# In the place of a kind, for all those together that tell when learners stepped. No kind is empty.
_LANES = ""


@dataclass(slots=True)
class _Share:
    """What one learner may still say: `left` events, as of `at`."""

    left: float
    at: float
    left_out: int = 0
    kept: int = 0

    def takes(self, now: float) -> bool:
        self.left = min(BY_ONE_MAX, self.left + BY_ONE_PER_S * max(now - self.at, 0.0))
        self.at = now
        if self.left < 1:
            self.left_out += 1
            return False
        self.left -= 1
        return True


class Events:
    """`kept`: (sequence in the stream, event), oldest first."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, Event]] = deque()
        self.newest = 0  # sequence that was read last
        # How often the stream lost its end, and where it began anew the last time.
        self.lost, self.again_from = 0, 0
        self._read: dict[int, int] = {}  # sequence -> what tells its message from another (_digest)
        self._shares: dict[str, _Share] = {}  # of learners: as many as the hub has let in

    def take(
        self, seq: int, subject: str, payload: bytes, now: float, runs: Collection[str]
    ) -> bool:
        """Whether it is one to show. `now`: seconds of a clock that only goes on."""
        said = _digest(subject, payload)
        if seq <= self.newest:
            if self._read.get(seq) == said:
                return False  # a repeat after a reconnect
            self._lose(seq)
        self.newest = seq
        self._read[seq] = said
        if len(self._read) > EVENTS_MAX:
            del self._read[next(iter(self._read))]
        teller = subjects.told_by(subject)
        share = self._shares.setdefault(teller, _Share(BY_ONE_MAX, now)) if teller else None
        if share is not None and not share.takes(now):
            if share.left_out & (share.left_out - 1) == 0:
                log.warning("too many events", learner=teller, left_out=share.left_out)
            return False
        try:
            event = _read(subject, payload, teller)
        except WireError as error:
            log.warning("unreadable event", seq=seq, told_by=teller, error=str(error))
            return False
        if teller and event.run not in runs and event.run != subjects.CLUSTER:
            return (
                False  # of a run that is deleted: the stream keeps it until the learner says more
            )
        if event.kind == "run-created":
            # What was told of such a run before is of a deleted one of its name: what its learners
            # told is kept until they say more, and who was cut off tells it once all else is gone.
            self.forget(event.run)
        if share is not None:
            if share.kept >= BY_ONE_MAX:
                self._let_go(teller)
            share.kept += 1
        self._make_room()
        self.kept.append((seq, event))
        return True

    def _make_room(self) -> None:
        """Where there are too many, the oldest of those go of which there are most."""
        if len(self.kept) < EVENTS_MAX:
            return
        there = Counter(map(self._list, self.kept))
        most = max(there, key=lambda what: there[what])
        # Some at once: counting takes milliseconds.
        going = (seq for seq, event in self.kept if self._list((seq, event)) == most)
        gone = set(islice(going, min(there[most], EVENTS_MAX // AT_ONCE + 1)))
        if most[1] == _LANES:
            # Learners with credentials of their own tell some of it in lists of their own.
            until = max(gone)
            gone |= {seq for seq, e in self.kept if seq <= until and _of_lanes(e, most[0])}
        self._keep([item for item in self.kept if item[0] not in gone])

    def _list(self, item: tuple[int, Event]) -> tuple[str, str]:
        """What an event has its place among: those of one kind of a run, or of one learner. None of
        them pushes out others."""
        event = item[1]
        if event.source in self._shares:
            return "", event.source
        return event.run, _LANES if event.kind in OF_LANES else event.kind

    def _let_go(self, teller: str) -> None:
        """Room for one more of a learner: its longest curve is thinned, or else the oldest goes."""
        told = [item for item in self.kept if item[1].source == teller]
        if gone := _between(told):
            self._keep(item for item in self.kept if item[0] not in gone)
        elif told:
            self.kept.remove(told[0])
            self._shares[teller].kept -= 1

    def after(self, seq: int, run: str = "") -> list[tuple[int, Event]]:
        """Those with a greater sequence, oldest first; of one run, or of all."""
        newer = list(takewhile(lambda item: item[0] > seq, reversed(self.kept)))
        return [item for item in reversed(newer) if not run or item[1].run == run]

    def mark(self, seq: int) -> str:
        """What tells the message of this sequence from others, for every coordinator alike; ""
        where that is not known here: it is of the EVENTS_MAX newest alone."""
        said = self._read.get(seq)
        return "" if said is None else f"{said:016x}"

    def going_on(self, after: int, mark: str = "") -> int:
        """The cursor to go on from, for a reader that has read up to `after` and asks anew.

        Beyond the newest event it is of a stream that has lost its end since. The reader goes on
        where the stream began anew, or from its beginning where nobody here saw that happen. Where
        the message at `after` has another `mark` than the one that the reader has read, the stream
        has lost its end and has grown beyond that place again. Nobody knows how much of what the
        reader has read was lost: it begins anew.
        """
        if mark and self.mark(after) not in ("", mark):
            return 0
        return after if after <= self.newest else max(self.again_from - 1, 0)

    def _lose(self, seq: int) -> None:
        """A killed server may have lost what it had acknowledged: its sequences come again.

        What was told from there on is not in the stream any more.
        """
        log.warning("the event stream lost its end", told_before=self.newest, begins_again_at=seq)
        self.lost, self.again_from = self.lost + 1, seq
        self._read = {s: said for s, said in self._read.items() if s < seq}
        self._keep(item for item in self.kept if item[0] < seq)

    def forget(self, run: str, made_again: float = math.inf) -> None:
        """It is deleted. Where another has its name, of then, what that one tells stays: it may
        have been read before its record. It begins with an event, by the clock of its record. That
        one may be lost, as with a message server that is killed: then clocks alone tell."""
        made = (
            seq
            for seq, e in reversed(self.kept)
            if (e.run, e.kind) == (run, "run-created") and e.at >= made_again
        )
        begins = next(made, None)

        def stays(seq: int, event: Event) -> bool:
            if event.run != run:
                return True
            return event.at >= made_again if begins is None else seq >= begins

        self._keep([item for item in self.kept if stays(*item)])

    def _keep(self, items: Iterable[tuple[int, Event]]) -> None:
        """These alone."""
        self.kept = deque(items)
        there = Counter(event.source for _, event in self.kept)
        for teller, share in self._shares.items():
            share.kept = min(share.kept, there[teller])


def _of_lanes(event: Event, run: str) -> bool:
    return event.run == run and event.kind in OF_LANES


def _digest(subject: str, payload: bytes) -> int:
    """Of 64 bits. The same in every process, which `hash` is not: readers hand it back."""
    said = blake2b(subject.encode() + b"\n" + payload, digest_size=8)
    return int.from_bytes(said.digest(), "big")


def _between(told: Iterable[tuple[int, Event]]) -> set[int]:
    """Sequences of about every second evaluation of the run that has most; none if it has few.

    What is left lies evenly over the steps, and the first and the newest are among it.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for seq, event in told:
        if event.kind == "evaluation":
            curves.setdefault(event.run, []).append((seq, float(event.data["steps"])))
    longest = max(curves.values(), key=len, default=[])
    if len(longest) < THINNED_MIN:
        return set()
    steps = [at for _, at in longest]
    apart = 2 * (max(steps) - min(steps)) / len(steps)
    last, gone = steps[0], set[int]()
    for seq, at in longest[1:-1]:
        if abs(at - last) < apart:  # steps go back where the run does
            gone.add(seq)
        else:
            last = at
    return gone


def _read(subject: str, payload: bytes, teller: str) -> Event:
    """Raises WireError for one that cannot be read or shown, or stands elsewhere than it says."""
    if len(payload) > EVENT_BYTES_MAX:
        raise WireError(f"of {len(payload)} bytes, an event has at most {EVENT_BYTES_MAX}")
    event = decode(payload, Event)
    where = subjects.event_by(event.source) if teller else subjects.event(event.run, event.kind)
    if subject != where:
        raise WireError(f"of {where}, but it stands at {subject}")
    if fault := _unsayable(event.data):
        raise WireError(f"{event.kind} with data that JSON cannot say: {fault}")
    if fault := misses(event.kind, event.data):
        raise WireError(f"{event.kind} {fault}")
    if teller and (fault := not_ones_own(event.kind, event.data, teller)):
        raise WireError(f"{event.kind} {fault}")
    if event.at > AT_MAX:
        raise WireError(f"told at {event.at:.3g} s, a time that no clock shows")
    if teller and "actor" in event.data:  # whose request it was: nobody's of a learner's
        data = {key: value for key, value in event.data.items() if key != "actor"}
        event = event.model_copy(update={"data": data})
    return event


def _unsayable(value: object, depth: int = 0) -> str:
    """What of an event's data JSON cannot say, or nobody wants to read; "" if it is all plain.

    One such event in a list would leave everybody without the list.
    """
    if depth > DEPTH_MAX:
        return f"values within values, {DEPTH_MAX} deep and more"
    match value:
        case None | bool() | float():
            return ""  # what is not finite is shown as none
        case int():
            return "" if INT_MIN <= value <= INT_MAX else "a number of more than 64 bits"
        case str():
            return "half a character" if any("\ud800" <= c <= "\udfff" for c in value) else ""
        case list() | tuple():
            return _first(_unsayable(v, depth + 1) for v in value)
        case dict() if all(isinstance(key, str) and not _unsayable(key) for key in value):
            return _first(_unsayable(v, depth + 1) for v in value.values())
        case dict():
            return "a name that is no text"
    return f"a value of type {type(value).__name__}"


def _first(faults: Iterable[str]) -> str:
    return next(filter(None, faults), "")
