"""Which learners there are, as their progress tells: alive, stepping, how far.

Liveness is silence measured against the lease. Steps are counted within one incarnation, from a
baseline that is set anew when a round opens.

Whoever has left, or been silent for very long, is forgotten (`tidy`): what is known of members
follows from how many there are, not from how many there ever were. A life that is forgotten for its
silence is over: the next record says so (`Counts.over`), the ledger settles what it had under way,
and should it speak again it is told to begin a new one. For how long the number of a life must be
remembered, `Ledger.newest` says.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Self

from diloco_shared.protocol.messages import LifeCount, Progress
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_shared.spec.run import RunSpec
from diloco_syncer.history.counts import Counts
from diloco_syncer.history.history import History
from diloco_syncer.members.claims import LIFE_AGAIN_S, LIVES_AT_ONCE, Claims
from diloco_syncer.members.pace import LifePace
from diloco_syncer.members.recoveries import Recoveries
from diloco_syncer.rounds.grace import Average

# A life that is silent for so many seconds is over, and forgotten: two hundred leases, far longer
# than a restart, a repaired link or a checkpoint takes. Whoever comes back later begins anew.
GONE_S = 600.0
# One that has said that it leaves is shown for so many seconds.
LEFT_S = 120.0
# Lives told that they are over or replaced: those that spoke within so many seconds, the newest.
REFUSED_S, REFUSED_MAX = 60.0, 256


@dataclass(slots=True)
class Member:
    """One learner's newest incarnation."""

    learner: str
    incarnation: int
    seen_at: float
    baseline: int  # its step when the newest round opened
    pace_from: int = 0  # the step from which it paces the next opening
    nonce: str = ""
    progress: Progress | None = None
    merged_round: int = -1
    answer: Average = field(default_factory=Average)  # pull to arrival, those too late included
    missed: int = 0  # pulls in a row that it did not answer in time
    spent: int = 0  # of those, the ones up to the newest that was waited for in vain
    in_vain: int = 0  # waits for it in vain, since it last answered in time
    pace: LifePace = field(default_factory=LifePace)

    def round_opened(self, steps_needed: int) -> None:
        """A round opens: this learner's steps count anew.

        Pacing credits one that has not quite taken its steps (its report is on the way, or it is
        a little slower), else learners of equal speed would take turns being first and rounds
        would come early. The credit is limited, so that a slow learner paces soon once it is the
        only one left.
        """
        due_at = self.pace_from + steps_needed
        self.pace_from = max(self.step, min(due_at, self.step + max(1, steps_needed // 2)))
        self.baseline = self.step

    @property
    def stepping(self) -> bool:
        return self.progress is not None and self.progress.state == "stepping"

    @property
    def starting(self) -> bool:
        """Whether it is on its way to its first step."""
        return self.progress is None or self.progress.state in ("joining", "recovering")

    @property
    def left(self) -> bool:
        """Whether it has said goodbye."""
        return self.progress is not None and self.progress.state == "finished"

    @property
    def answers(self) -> bool:
        """Whether it gives what it is asked for: a draining one still does."""
        return self.stepping or (self.progress is not None and self.progress.state == "draining")

    @property
    def step(self) -> int:
        return 0 if self.progress is None else self.progress.step


@dataclass(frozen=True, slots=True)
class Present:
    """Who is live, sorted by id: looked up with every event, so not sought anew each time."""

    live: tuple[Member, ...]
    names: tuple[str, ...]
    oldest: float  # since when the most silent one is; none falls silent before its lease is over
    # Those that train, by epoch; None: of any.
    stepping: dict[int | None, tuple[Member, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Roster:
    """All learners heard of since this leader began."""

    lease_s: float
    members: dict[str, Member] = field(default_factory=dict)
    # Lives over for their silence: the newest of them. learner -> incarnation
    gone: dict[str, int] = field(default_factory=dict)
    # Who spoke with an incarnation that is over: learner -> when.
    refused: dict[str, float] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    # Goodbyes that the leader before has shown: learner -> the life that said it. The tape tells of
    # one with the next round alone, and a run that is paused closes none.
    farewells: dict[str, int] = field(default_factory=dict)
    # Who may begin one more life now.
    lives: Claims = field(default_factory=lambda: Claims(LIVES_AT_ONCE, LIFE_AGAIN_S))
    since: float = 0.0  # when this leader began: nobody is silent for longer
    wall_offset: float = 0.0  # from `now` to seconds since 1970
    recoveries: Recoveries = field(default_factory=Recoveries)
    # Another one led before, to whom learners that speak at once may have spoken.
    took_over: bool = False
    present: Present | None = None  # None: somebody came, went, or does something else by now

    @classmethod
    def of(cls, spec: RunSpec, history: History) -> Self:
        """Nobody heard of yet; no life older than what the tape knows is ever let in again."""
        took_over = history.term > 0
        return cls(spec.membership.lease_s, recoveries=Recoveries(history), took_over=took_over)

    @property
    def history(self) -> History | None:
        return self.recoveries.history

    def newest(self, learner: str) -> int:
        """The newest incarnation known, also of one that left; -1 for none."""
        member = self.members.get(learner)
        return max(self._taped(learner), member.incarnation if member else -1)

    def _taped(self, learner: str) -> int:
        """The newest incarnation of a learner that the tape tells of; -1 for none."""
        return self.history.ledger.newest.get(learner, -1) if self.history else -1

    def over(self, learner: str, incarnation: int, now: float) -> str:
        """Why a life may not speak any more, or "": it will be told so."""
        known, gone = self.newest(learner), self.gone.get(learner, -1)
        if incarnation >= known and incarnation > gone:
            return ""
        self.refused.pop(learner, None)
        self.refused[learner] = now
        if len(self.refused) > REFUSED_MAX:
            del self.refused[next(iter(self.refused))]
        if incarnation < known:
            return f"incarnation {incarnation} is superseded by {known}"
        return f"incarnation {incarnation} was silent for more than {GONE_S:.0f} s"

    def too_soon(self, learner: str, incarnation: int, now: float) -> bool:
        """Whether this is one life too many within so short a time. If not, it counts as begun."""
        return incarnation > self.newest(learner) and not self.lives.counts(learner, now)

    def full(self, learner: str, now: float) -> bool:
        """Whether there is no place for one more learner."""
        return learner not in self.members and len(self.live(now)) >= MEMBERS_MAX

    def incarnations(self, now: float) -> dict[str, int]:
        """What beats tell: by learner, which life may speak. Of all alive, and of refused ones."""
        told = {m.learner: m.incarnation for m in self.live(now)}
        for learner, at in self.refused.items():
            if now - at <= REFUSED_S:
                told[learner] = max(self.newest(learner), self.gone.get(learner, -1) + 1)
        return told

    def join(self, learner: str, incarnation: int, nonce: str, now: float) -> Member:
        """Admit an incarnation (not older than the newest known); idempotent."""
        member = self.members.get(learner)
        if member is None or member.incarnation != incarnation:
            pace = LifePace(since=(now, 0), earlier=False)
            member = Member(learner, incarnation, now, baseline=0, pace=pace)
            self.members[learner] = member
        member.nonce, member.seen_at = nonce, now
        self.present = None
        return member

    def progress(self, progress: Progress, now: float) -> str | None:
        """Take in a progress report; why not, or None.

        A learner unknown to this leader joined under an earlier one: its steps count from here.
        """
        if why := self.over(progress.learner, progress.incarnation, now):
            return why
        if self.full(progress.learner, now):
            return f"there are {MEMBERS_MAX} learners"
        if self.too_soon(progress.learner, progress.incarnation, now):
            return f"it has begun more than {LIVES_AT_ONCE} lives within seconds"
        member = self.members.get(progress.learner)
        if member is None or member.incarnation != progress.incarnation:
            step = progress.step
            # No step was taken before it was heard of, where neither the tape knows its life nor an
            # earlier leader can have heard of it; however long it was cut off since.
            earlier = self.took_over or progress.incarnation <= self._taped(progress.learner)
            pace = LifePace(since=(now, step if earlier else 0), earlier=earlier)
            member = Member(
                progress.learner, progress.incarnation, now, step, pace_from=step, pace=pace
            )
            self.members[progress.learner] = member
            self.present = None
        self.counts.saw(progress, self._taped(progress.learner))
        self.recoveries.spoke(progress, now + self.wall_offset)
        old = member.progress
        if old is not None and (progress.step < old.step or old.state == "finished"):
            return None  # overtaken on the way: the newer one is already here
        same = old is not None and (old.state, old.epoch) == (progress.state, progress.epoch)
        if not same or not self.alive(member, now):
            self.present = None
        member.progress, member.seen_at = progress, now
        member.pace.saw(progress, now)
        return None

    def alive(self, member: Member, now: float) -> bool:
        return now - member.seen_at <= self.lease_s

    def silent(self, learner: str, incarnation: int, now: float) -> bool:
        """Whether a life has let its lease run out; one not heard of yet has a lease to speak."""
        member = self.members.get(learner)
        if member is None or member.incarnation != incarnation:
            return now - self.since > self.lease_s
        return not self.alive(member, now)

    def _present(self, now: float) -> Present:
        found = self.present
        if found is None or not now - found.oldest <= self.lease_s:
            live = tuple(m for _, m in sorted(self.members.items()) if self.alive(m, now))
            names = tuple(m.learner for m in live)
            oldest = min((m.seen_at for m in live), default=float("inf"))
            self.present = found = Present(live, names, oldest)
        return found

    def live(self, now: float) -> Sequence[Member]:
        """Learners within their lease, sorted by id."""
        return self._present(now).live

    def names(self, now: float) -> tuple[str, ...]:
        """Ids of `live`."""
        return self._present(now).names

    def holders(self, now: float) -> tuple[str, ...]:
        """Ids of those whose leases of data are theirs: of `live`, and of lives of the tape that
        have yet to speak to this leader and have a lease to do it. Up to MEMBERS_MAX."""
        names, unheard = self.names(now), self.expected(now)
        if not unheard:
            return names
        room = MEMBERS_MAX - len(names)
        return tuple(sorted({*names, *unheard[max(len(unheard) - room, 0) :]}))

    def coming(self, now: float) -> list[str]:
        """Who was let in and does not train yet."""
        return [
            m.learner
            for m in self.members.values()
            if now - m.seen_at <= self.lease_s
            and (m.progress is None or m.progress.state == "recovering")
        ]

    def expected(self, now: float) -> list[str]:
        """Who has yet to speak to this leader, and has a lease to do it."""
        return list(self.unheard()) if now - self.since <= self.lease_s else []

    def unheard(self) -> dict[str, int]:
        """Learners of the tape that have not said a word to this leader and have not left, each
        with its newest life."""
        here, said = self.members, self.farewells
        return {m: n for m, n in self._taped_alive() if m not in here and n > said.get(m, -1)}

    def _taped_alive(self) -> Iterator[tuple[str, int]]:
        """Learners of the tape, each with its newest life, unless the tape has its goodbye."""
        lives = self.history.ledger.lives.items() if self.history else ()
        return ((m, max(of)) for m, of in lives if not of[max(of)].left)

    def goodbyes(self, counts: Iterable[LifeCount]) -> dict[str, int]:
        """What a next leader must be told, since the tape does not tell it: learner -> its newest
        life, which is over. `counts`: what the tape lacks. Up to MEMBERS_MAX."""
        said = self.farewells | {c.learner: c.incarnation for c in counts if c.left}
        lacks = [m for m, n in self._taped_alive() if said.get(m, -1) >= max(n, self.newest(m))]
        return {m: said[m] for m in lacks[-MEMBERS_MAX:]}

    def stepping(self, now: float, epoch: int | None = None) -> Sequence[Member]:
        """Live learners that train, sorted by id; those of one epoch only, if it is given.

        One of an older epoch has nothing to give until it has adopted the new one's anchors.
        """
        present = self._present(now)
        found = present.stepping.get(epoch)
        if found is None:
            of_epoch = [
                m
                for m in present.live
                if m.stepping and (epoch is None or (m.progress and m.progress.epoch == epoch))
            ]
            found = present.stepping[epoch] = tuple(of_epoch)
        return found

    def forgive(self, alive: tuple[str, ...], now: float) -> None:
        """Silence until now is the bus's fault: leases of those that were alive start again."""
        self.since, self.present = now, None
        for learner in alive:
            if learner in self.members:
                self.members[learner].seen_at = now

    def tidy(self, now: float) -> None:
        """Forget who has left, and who has been silent for so long that it counts as gone."""
        silent = sorted(
            (m for m in self.members.values() if not self.alive(m, now)), key=lambda m: m.seen_at
        )
        excess = len(self.members) - MEMBERS_MAX
        for m in silent:
            if now - m.seen_at > (LEFT_S if m.left else GONE_S) or excess > 0:
                excess -= 1
                self.drop(m.learner)
                if not m.left:
                    self._gone(m.learner, m.incarnation)
        self._unheard(now)
        self.refused = {n: at for n, at in self.refused.items() if now - at <= REFUSED_S}

    def _unheard(self, now: float) -> None:
        """Who has not said a word to this leader in all that time is gone as well."""
        if now - self.since > GONE_S:
            for learner, newest in list(self._taped_alive()):
                if learner not in self.members:
                    self._gone(learner, newest)

    def _gone(self, learner: str, incarnation: int) -> None:
        self.counts.over(learner, incarnation)
        self.gone.pop(learner, None)
        self.gone[learner] = incarnation
        if len(self.gone) > MEMBERS_MAX:
            del self.gone[next(iter(self.gone))]

    def drop(self, learner: str) -> None:
        """Forget a learner; of its incarnation the tape tells."""
        self.members.pop(learner, None)
        self.recoveries.forget(learner)
        self.present = None

    def step_s(self, now: float) -> float:
        """xi_step: the fastest live learner's seconds per step; 0 while unknown.

        By its word, and by the leader's clock: else one that says that its steps take no time
        would leave no time to anybody.
        """
        return min((m.pace.least_s(now) for m in self._timed(now)), default=0.0)

    def usual_step_s(self, now: float) -> float:
        """Seconds of a step of half of those who train, or more; 0 while unknown."""
        return median_low([m.pace.borne_out_s(now) for m in self._timed(now)] or [0.0])

    def _timed(self, now: float) -> list[Member]:
        """Who trains and has said how long its steps take."""
        return [m for m in self.stepping(now) if m.step and m.pace.said_s > 0]
