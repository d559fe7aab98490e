"""What one leader has heard of learners, from the events that have reached it.

How far a life is, a leader knows by its word alone; and whether it goes on, by its silence. Mostly
both can be told from outside. Where not, all is told that may be: `silent` says None.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_shared.protocol.messages import Grant, Progress
from diloco_simulator.checkers.fates import Fates, Known, Life, Word

# Who is silent for longer, in seconds of the leader's clock, may be taken for gone for good: when
# that is done, nobody shows. What such a life tells then may be refused.
GONE_S = 550.0


@dataclass(slots=True)
class Spoke:
    """A learner's newest life, and when it was heard of last: between these two moments."""

    incarnation: int
    step: int
    at_least: float
    at_most: float


@dataclass(slots=True)
class Heard:
    """By one process that leads one shard."""

    fragments: int
    lease_s: float
    since: float = -math.inf  # nobody is silent for longer
    lives: dict[Life, Known] = field(default_factory=dict)
    spoke: dict[str, Spoke] = field(default_factory=dict)  # by learner
    nonces: set[str] = field(default_factory=set)  # of joins that were granted
    # When the newest report came, and what was known before that moment.
    told_at: float = -math.inf
    before: list[Word] = field(default_factory=list)
    doubted: set[Life] = field(default_factory=set)  # what they told may have been refused
    # Who may have been taken for gone before its link was cut; and for each time at which that was
    # so of all that it had not heard of, whom it had heard of.
    given_up: set[Life] = field(default_factory=set)
    but_these: list[set[Life]] = field(default_factory=list)

    def progress(self, p: Progress, newest: Mapping[str, int], now: float) -> bool:
        """A report has come. `newest`: each learner's newest life on the tape.

        False where nobody need believe it: a newer life has replaced this one, or it is a
        stranger's, of another layout.
        """
        life, spoke = (p.learner, p.incarnation), self.spoke.get(p.learner)
        known = max(newest.get(p.learner, -1), spoke.incarnation if spoke else -1)
        if len(p.c_tokens) != self.fragments or p.incarnation < known:
            return False
        if self.gone(life, now) and p.incarnation == known:
            self.doubted.add(life)
        if spoke is None or spoke.incarnation != p.incarnation:
            spoke = self.spoke[p.learner] = Spoke(p.incarnation, p.step, now, now)
        if p.step >= spoke.step:  # else it was overtaken on the way
            spoke.step, spoke.at_least, spoke.at_most = p.step, now, now
        if now > self.told_at:
            self.told_at, self.before = now, self.words()
        of = self.lives.get(life, Known(0, (0,) * self.fragments))
        adopted = {q: p.tokens - since for q, since in enumerate(p.c_tokens)}
        self.lives[life] = of.hears(p.tokens, adopted, p.state == "finished")
        return True

    def granted(self, grant: Grant, now: float) -> None:
        """It lets a life in. One that asks again may be given the answer of before."""
        spoke = self.spoke.get(grant.learner)
        if spoke is None or spoke.incarnation != grant.incarnation:
            self.spoke[grant.learner] = Spoke(grant.incarnation, -1, now, now)
        else:
            spoke.at_least = spoke.at_least if grant.nonce in self.nonces else now
            spoke.at_most = now
        self.nonces.add(grant.nonce)

    def forgives(self, now: float) -> None:
        """Its link was cut: who spoke before that has a lease from now on, and who had let its own
        run out has none. Which of the two a life is depends on when the link was cut."""
        heard_of = {(learner, spoke.incarnation) for learner, spoke in self.spoke.items()}
        self.given_up |= {life for life in heard_of if self.gone(life, now)}
        if -math.inf < self.since < now - GONE_S:
            self.but_these.append(heard_of)
        self.since = now
        for spoke in self.spoke.values():
            spoke.at_most = now

    def silent(self, life: Life, now: float) -> bool | None:
        """Whether a life has let its lease run out; one not heard of yet has a lease to speak."""
        spoke = self.spoke.get(life[0])
        if spoke is None or spoke.incarnation != life[1]:
            return now - self.since > self.lease_s
        if now - spoke.at_most > self.lease_s:
            return True
        return False if now - spoke.at_least <= self.lease_s else None

    def gone(self, life: Life, now: float) -> bool:
        """Whether a life of before may be taken for gone: not while nobody leads."""
        spoke = self.spoke.get(life[0])
        if life in self.given_up or any(life not in heard_of for heard_of in self.but_these):
            return True
        heard_of = spoke is not None and spoke.incarnation == life[1]
        since = spoke.at_least if spoke is not None and heard_of else self.since
        return since > -math.inf and now - since > GONE_S

    def left(self, learner: str) -> bool:
        """Whether its newest life has said goodbye to this leader."""
        spoke = self.spoke.get(learner)
        known = self.lives.get((learner, spoke.incarnation)) if spoke else None
        return known is not None and known.left

    def missing(self, taped: Fates, now: float, goodbyes: Mapping[str, int]) -> set[str]:
        """Learners of which somebody is to be told: they have trained, as far as the tape and their
        own words tell, and have said nothing for a lease, and no goodbye. Whoever has just begun to
        lead, or whose link was cut, tells nothing yet: all have a lease to speak.

        `goodbyes`: newest lives that said it to any leader; the next one may know of it.
        """
        if not now - self.since > self.lease_s:
            return set()
        known = taped.hears(self.words())
        newest = {m: spoke.incarnation for m, spoke in self.spoke.items()}
        return {
            life[0]
            for life in known.lives
            if life[1] >= newest.get(life[0], -1) and not known.over(life)
            if life[1] > goodbyes.get(life[0], -1) and self.silent(life, now)
        }

    def replaced(self, life: Life) -> bool:
        """Whether a newer one has taken its place."""
        spoke = self.spoke.get(life[0])
        return spoke is not None and spoke.incarnation > life[1]

    def words(self) -> list[Word]:
        """What it knows of every life, beside the tape."""
        return [
            (life, known.tokens, dict(enumerate(known.adopted)), known.left)
            for life, known in self.lives.items()
        ]

    def earlier(self, now: float) -> list[Word]:
        """What it knew before all that came at this moment."""
        return self.words() if now > self.told_at else self.before
