"""What lives have reported and no tape record says yet: laid over the ledger, put on the next one.

Bounded by the learners that spoke since the newest round: a life that is over is forgotten once the
tape knows all of it. Where no round comes for long, a learner may begin many lives. LIVES_MAX of
them are kept apart, as in the ledger, and the older ones are counted as one life: they are over, so
that nothing but their sums matters.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_shared.protocol.messages import LifeCount, Progress
from diloco_syncer.history.ledger import LIVES_MAX, Adoptions, Ledger, countable

# Lives, and adoptions of all of them together, on one record: 240 kB of the 1 MiB that a message
# may have, and sixteen adoptions of each of 512 learners. Where an epoch begins all adopt every
# fragment anew; what finds no place waits for the next records.
LIVES_TOLD_MAX, ADOPTIONS_TOLD_MAX = 1024, 8192


def count_of(progress: Progress) -> LifeCount:
    """A progress report as the ledger counts it: tokens in all, and at each adoption."""
    return LifeCount(
        learner=progress.learner,
        incarnation=progress.incarnation,
        tokens=progress.tokens,
        adopted=tuple((p, progress.tokens - c) for p, c in enumerate(progress.c_tokens)),
        left=progress.state == "finished",
    )


def _adopted(known: Adoptions, more: Adoptions, both: Callable[[int, int], int]) -> Adoptions:
    """At each adoption that either tells of; a life that fell silent unheard tells of none."""
    at = dict(known)
    for p, n in more:
        at[p] = both(at[p], n) if p in at else n
    return tuple(sorted(at.items()))


@dataclass(slots=True)
class Counts:
    """The newest count of every life heard of."""

    heard: dict[tuple[str, int], LifeCount] = field(default_factory=dict)
    # Learner -> its newest life that a record names, which may be on its way to the tape. Of those
    # in `heard` alone.
    told: dict[str, int] = field(default_factory=dict)

    def saw(self, progress: Progress, taped: int = -1) -> None:
        """Take in a report; one that was overtaken on the way changes nothing.

        `taped`: the newest life of that learner that the tape tells of.
        """
        key, count = (progress.learner, progress.incarnation), count_of(progress)
        known = self.heard.get(key)
        if known is not None:
            count = LifeCount(
                learner=count.learner,
                incarnation=count.incarnation,
                tokens=max(known.tokens, count.tokens),
                adopted=_adopted(known.adopted, count.adopted, max),
                left=known.left or count.left,
            )
        self.heard[key] = count
        if known is None:
            self._fold(progress.learner, taped)

    def _fold(self, learner: str, taped: int) -> None:
        """Where a learner has too many lives that no record tells of, the two oldest become one.

        Their tokens add up, and so do those at their adoptions: each class gets what it had.
        """
        known = max(taped, self.told.get(learner, -1))
        lives = sorted(n for who, n in self.heard if who == learner and n > known)
        if len(lives) <= LIVES_MAX:
            return
        first, second = self.heard[learner, lives[0]], self.heard.pop((learner, lives[1]))
        self.heard[learner, lives[0]] = LifeCount(
            learner=learner,
            incarnation=lives[0],
            tokens=countable(first.tokens + second.tokens),
            adopted=_adopted(first.adopted, second.adopted, lambda a, b: countable(a + b)),
        )

    def over(self, learner: str, incarnation: int) -> None:
        """Nothing more will come of this life: the next record says so."""
        known = self.heard.get((learner, incarnation))
        count = known or LifeCount(learner=learner, incarnation=incarnation, tokens=0, adopted=())
        self.heard[(learner, incarnation)] = count.model_copy(update={"left": True})

    def unrecorded(self, ledger: Ledger) -> tuple[LifeCount, ...]:
        """What the ledger does not know, sorted; forgets lives it need not hear of again."""
        found = []
        for (learner, incarnation), count in sorted(self.heard.items()):
            life = ledger.lives.get(learner, {}).get(incarnation)
            newest = ledger.newest.get(learner, -1)
            if life is None and incarnation <= newest:
                del self.heard[(learner, incarnation)]  # settled for good
                continue
            base_P = life.base_P if life is not None else [0] * ledger.fragments
            adopted = tuple((p, at) for p, at in count.adopted if at > base_P[p])
            known = life is not None and life.tokens >= count.tokens and life.left >= count.left
            if adopted or not known:
                found.append(count.model_copy(update={"adopted": adopted}))
            elif incarnation < newest:
                del self.heard[(learner, incarnation)]
        return tuple(found)

    def to_record(self, ledger: Ledger) -> tuple[LifeCount, ...]:
        """As much of it as one record holds: once the tape has that, the rest is what it lacks.

        The oldest life of every learner comes first, then the next one of each: nobody's many
        lives leave another one's out.
        """
        turns, before = list[tuple[int, LifeCount]](), Counter[str]()
        for count in self.unrecorded(ledger):
            turns.append((before[count.learner], count))
            before[count.learner] += 1
        told, left = list[LifeCount](), ADOPTIONS_TOLD_MAX
        for _, count in sorted(turns, key=lambda turn: turn[0])[:LIVES_TOLD_MAX]:
            adopted = count.adopted[:left]
            left -= len(adopted)
            told.append(count.model_copy(update={"adopted": adopted}))
        told.sort(key=lambda count: (count.learner, count.incarnation))
        newest = self.told | {c.learner: c.incarnation for c in told}
        known = self.told
        self.told = {m: max(newest.get(m, -1), known.get(m, -1)) for m, _ in self.heard}
        return tuple(told)
