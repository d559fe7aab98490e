"""What lives have reported and no tape record says yet: laid over the ledger, put on the next one.

Bounded by the learners that spoke since the newest round: a life that is over is forgotten once the
tape knows all of it.
"""

from dataclasses import dataclass, field

from diloco_shared.protocol.messages import LifeCount, Progress
from diloco_syncer.ledger import Ledger


def count_of(progress: Progress) -> LifeCount:
    """A progress report as the ledger counts it: tokens in all, and at each adoption."""
    return LifeCount(
        learner=progress.learner,
        incarnation=progress.incarnation,
        tokens=progress.tokens,
        adopted=tuple((p, progress.tokens - c) for p, c in enumerate(progress.c_tokens)),
        left=progress.state == "finished",
    )


@dataclass(slots=True)
class Counts:
    """The newest count of every life heard of."""

    heard: dict[tuple[str, int], LifeCount] = field(default_factory=dict)

    def saw(self, progress: Progress) -> None:
        """Take in a report; one that was overtaken on the way changes nothing."""
        key, count = (progress.learner, progress.incarnation), count_of(progress)
        known = self.heard.get(key)
        if known is not None:
            adopted = tuple(map(max, known.adopted, count.adopted))
            count = LifeCount(
                learner=count.learner,
                incarnation=count.incarnation,
                tokens=max(known.tokens, count.tokens),
                adopted=adopted,
                left=known.left or count.left,
            )
        self.heard[key] = count

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
