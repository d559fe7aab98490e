"""Who is a member, who was one and since when it is gone, and who is to get no more work.

A pure view: the edge feeds it what the buckets say and writes down what it returns. Notes outlive
both the member and the coordinator, so that a restarted coordinator still knows that a silent
process was the syncer of a run.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from pydantic import BaseModel, ConfigDict

from diloco_shared.protocol.records import LearnerSpeed, MemberRecord

# A member that is gone this many seconds leaves the list by itself, unless a run needs it back: a
# host that is rebooted, or a container that is moved to another one, has returned by then.
FORGET_S = 900.0
# One that a user drained: forgotten, it would be given work as soon as it comes back.
FORGET_DRAINED_S = 30 * 86_400.0
# A member renews its key every 1.5 s, and the key is good for 5 s (`process/membership.py`). A key
# that was written without a lifetime, by a site that is cut off now, stays for good. So many
# seconds without a renewal mean that nobody is there: six lifetimes, which no living member misses.
UNRENEWED_S = 30.0
# Where nobody's key is renewed for a lifetime, it is the server that is away, or this process that
# stood still: that says nothing of members.
UNHEARD_S = 5.0
# Members kept in mind; when there are more, those gone the longest are forgotten.
MEMBERS_MAX = 1000


class MemberNote(BaseModel):
    """What the coordinator remembers of a member; kept as JSON under the member's id."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    record: MemberRecord
    gone_since: float | None = None  # seconds since 1970; None while it lives
    drained: bool = False  # a user wants it to get no more work
    back_at: float = 0.0  # seconds since 1970: when it came, or came back

    @property
    def alive(self) -> bool:
        return self.gone_since is None

    @property
    def draining(self) -> bool:
        """By a user's wish or its own."""
        return self.drained or self.record.draining

    def since_s(self, now: float) -> float:
        """For how long it has been alive, or gone."""
        return max(now - (self.back_at if self.gone_since is None else self.gone_since), 0.0)

    def like(self, other: Self) -> bool:
        """The same but for what changes with every refresh: place on the tape, memory."""
        mine, its = {**vars(self)}, {**vars(other)}
        record, another = {**vars(mine.pop("record"))}, {**vars(its.pop("record"))}
        for name in ("tape_seq", "memory_bytes"):
            record[name] = another[name]
        return mine == its and record == another


def _forget_s(note: MemberNote) -> float:
    return FORGET_DRAINED_S if note.drained else FORGET_S


def _by_now(note: MemberNote, now: float) -> MemberNote:
    """By a clock that was ahead of ours, or by ours before it was set back, it speaks of what is to
    come: nobody would ever be gone for long. What it tells happened by now."""
    if max(note.gone_since or 0.0, note.back_at) <= now:
        return note
    gone_since = None if note.gone_since is None else min(note.gone_since, now)
    return note.model_copy(update={"gone_since": gone_since, "back_at": min(note.back_at, now)})


@dataclass(slots=True)
class Roll:
    """Every member known. `seen` and `silent` return the note to write down, if it changed."""

    notes: dict[str, MemberNote] = field(default_factory=dict)
    # Of whom a user is asking something: how many requests are under way.
    asked: Counter[str] = field(default_factory=Counter)

    def restore(self, note: MemberNote, now: float) -> None:
        """A note from before: it holds unless the member was seen meanwhile."""
        self.notes.setdefault(note.record.id, _by_now(note, now))

    def not_ahead(self, now: float) -> None:
        """The clock may have been set back since notes were made."""
        for member, note in self.notes.items():
            self.notes[member] = _by_now(note, now)

    def seen(self, record: MemberRecord, now: float) -> MemberNote | None:
        """A member's key is there."""
        before = self.notes.get(record.id)
        stays = before is not None and before.alive and before.record.boot == record.boot
        back_at = before.back_at if before is not None and stays else now
        drained = before is not None and before.drained
        note = MemberNote(record=record, drained=drained, back_at=back_at)
        self.notes[record.id] = note
        # Refreshes of an unchanged record are not worth a write, nor is a syncer's progress.
        same = before is not None and note.like(before)
        return None if same else note

    def silent(self, member: str, now: float) -> MemberNote | None:
        """A member's key is gone, or was not there when it should have been."""
        before = self.notes.get(member)
        if before is None or not before.alive:
            return None
        self.notes[member] = before.model_copy(update={"gone_since": now})
        return self.notes[member]

    def absent(self, living: set[str], now: float) -> list[MemberNote]:
        """Members believed alive of which there is no key: notes to write."""
        lost = [m for m, note in self.notes.items() if note.alive and m not in living]
        return [note for m in lost if (note := self.silent(m, now)) is not None]

    def drain(self, member: str, wanted: bool) -> MemberNote:
        """Give a member no more work, or let it have some again. KeyError if unknown."""
        self.notes[member] = self.notes[member].model_copy(update={"drained": wanted})
        return self.notes[member]

    @contextmanager
    def asking(self, member: str) -> Iterator[None]:
        """A user asks something of a member: nobody forgets it before that is written down."""
        self.asked[member] += 1
        try:
            yield
        finally:
            self.asked -= Counter([member])

    def forget(self, member: str, known: MemberNote | None = None) -> bool:
        """Whether nothing is known of it any more. It stays if a user has asked something of it
        since `known`, its note."""
        there = self.notes.get(member)
        if there is not None and known is not None and there.drained != known.drained:
            return False
        self.notes.pop(member, None)
        return True

    def left(self, member: str) -> None:
        """Its note is gone: somebody has forgotten it."""
        there = self.notes.get(member)
        if there is not None and not there.alive and member not in self.asked:
            self.forget(member)

    def surplus(self) -> list[str]:
        """Members above MEMBERS_MAX that may be forgotten: gone ones, the longest gone first, and
        last those that a user drained."""
        gone = sorted(
            (n.drained, n.gone_since, m) for m, n in self.notes.items() if n.gone_since is not None
        )
        return [m for *_, m in gone[: max(0, len(self.notes) - MEMBERS_MAX)]]

    def expired(self, now: float, needed: Collection[str]) -> list[str]:
        """Members that are gone for so long that nobody waits for them."""
        gone = (m for m, note in self.notes.items() if not note.alive and m not in needed)
        return [m for m in gone if self.notes[m].since_s(now) > _forget_s(self.notes[m])]

    @property
    def living(self) -> dict[str, MemberRecord]:
        return {m: n.record for m, n in self.notes.items() if n.alive}


@dataclass(frozen=True, slots=True)
class Renewal:
    """A member's key, as it was written last: its revision, and when that was heard of."""

    key: str
    revision: int
    at: float


@dataclass(slots=True)
class Renewals:
    """Who renews its key. All times are seconds of the coordinator's own monotonic clock.

    Silence is measured up to the newest renewal of anybody, the coordinator's own among them: time
    in which none was heard is nobody's silence.
    """

    heard: dict[str, Renewal] = field(default_factory=dict)  # by member
    newest: float = 0.0
    listening_since: float = 0.0

    def hear(self, member: str, key: str, revision: int, now: float) -> bool:
        """A key is there; whether that is news. A watch that begins again tells what it told."""
        before = self.heard.get(member)
        if before is not None and (before.key, before.revision) == (key, revision):
            return False
        if now - self.newest > UNHEARD_S:
            self.listening_since = now
        self.newest = now
        self.heard[member] = Renewal(key, revision, now)
        return True

    def overdue(self) -> list[str]:
        """Members whose keys are there, and who renew them no more."""
        return [
            member
            for member, renewal in self.heard.items()
            if self.newest - max(renewal.at, self.listening_since) > UNRENEWED_S
        ]

    def end(self, member: str) -> None:
        """Its key is gone."""
        self.heard.pop(member, None)

    def keep(self, members: Collection[str]) -> None:
        """Those of others are let go."""
        self.heard = {m: renewal for m, renewal in self.heard.items() if m in members}


# --------------------------------------------------------------------------------------------------
# How fast learners train, as they say themselves.

# A figure this old, in seconds, is not shown: a learner tells it every two.
SPEED_S_MAX = 10.0


@dataclass(slots=True)
class Speeds:
    """The newest word of each learner, and when it was heard."""

    heard: dict[str, tuple[float, LearnerSpeed]] = field(default_factory=dict)

    def hear(self, speed: LearnerSpeed, now: float) -> None:
        """Of MEMBERS_MAX learners at most: beyond them only those that are known are heard."""
        if speed.learner not in self.heard and len(self.heard) >= MEMBERS_MAX:
            self.heard = {m: h for m, h in self.heard.items() if now - h[0] <= SPEED_S_MAX}
            if len(self.heard) >= MEMBERS_MAX:
                return
        self.heard[speed.learner] = (now, speed)

    def of(self, learner: str, run: str, now: float) -> LearnerSpeed | None:
        """What a learner says of its work for a run; None if it said nothing for a while."""
        at, speed = self.heard.get(learner, (0.0, None))
        if speed is None or speed.run != run or now - at > SPEED_S_MAX:
            return None
        return speed
