"""Which mark of a run-wide checkpoint another shard than the first believes that there is.

The first shard of several sets marks, and learners carry their numbers to the others, which must
set theirs before they record a round that came after. A number that no tape has would begin a
checkpoint that nobody makes, and with it all below it were passed. So a number counts once the
first shard shows it, or the user has asked for it. Until then no round is recorded: what shows a
mark comes a moment behind the learners that have met it. Of whoever tells of a mark that is not
shown in time, nothing is waited for again. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

# In seconds. The first shard shows a mark twice a second, and so often it is looked for.
PATIENCE_S = 5.0
# Learners remembered that told of what there was not: more than a run can have.
DOUBTED_MAX = 1024


@dataclass(slots=True)
class Marks:
    """Of one leader's term."""

    shown: int = 0  # newest that there is, by the first shard or the user's wish
    seen: int = 0  # newest of them that a learner has met
    # Learner -> the newest that it has met and is not shown, and until when it is waited for.
    held: dict[str, tuple[int, float]] = field(default_factory=dict)
    doubted: dict[str, None] = field(default_factory=dict)  # in order

    @property
    def newest(self) -> int:
        """The newest that there is or may be: no round is recorded before it."""
        return max([self.seen, *(mark for mark, _ in self.held.values())])

    @property
    def deadline(self) -> float | None:
        """When `expire` is due."""
        return min((until for _, until in self.held.values()), default=None)

    def met(self, learner: str, number: int, now: float) -> None:
        """A learner that had met this mark sent something."""
        if number <= self.shown:
            self.seen = max(self.seen, number)
        elif learner not in self.doubted:
            mark, until = self.held.get(learner, (0, now + PATIENCE_S))
            self.held[learner] = (max(mark, number), until)

    def show(self, number: int) -> None:
        """The first shard has this mark, or the user has asked for it."""
        self.shown = max(self.shown, number)
        for learner, (mark, _) in list(self.held.items()):
            if mark <= self.shown:
                self.seen = max(self.seen, mark)
                del self.held[learner]

    def expire(self, now: float) -> Iterator[tuple[str, int]]:
        """Who told of a mark that was not shown in time, and which."""
        for learner, (mark, until) in list(self.held.items()):
            if now >= until:
                del self.held[learner]
                self.doubted[learner] = None
                if len(self.doubted) > DOUBTED_MAX:
                    del self.doubted[next(iter(self.doubted))]
                yield learner, mark
