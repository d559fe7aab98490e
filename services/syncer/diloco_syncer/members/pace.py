"""How long a learner's steps take: what it says of them, and what the leader's own clock sees.

A report tells both how long a step takes and how many were taken. The second says by when it comes
what the first should be; so a learner that is quick or slow in words alone contradicts itself.
"""

from collections import deque
from dataclasses import dataclass, field

from diloco_shared.protocol.messages import Progress

# Reports with new steps that are looked at: enough that a hiccup of one step counts little, few
# enough that a learner that has become faster is known as such within so many of its steps.
REPORTS = 16
# What had waited on its way arrives at once: so many seconds of reports count as one, the newest. A
# dozen steps that were heard of within a moment would else be quick ones.
AT_ONCE_S = 0.5
# The first steps compile, or were only handed to the device: they take longer than any later one.
FIRST_STEPS = 2
# What a learner says may differ from what is seen by this factor. It counts computing alone, the
# leader's clock counts all that lies between two steps too: data, an evaluation, a report's way.
MARGIN = 1.5
# Whole steps that the leader's clock must have seen before its word counts for less: one that has
# heard of a learner once, as after a takeover, has seen next to no time pass.
STEPS_MIN = 2


@dataclass(slots=True)
class LifePace:
    """Of one life: when its newest steps were heard of, oldest first, and which ones those were."""

    heard: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=REPORTS + 1))
    said_s: float = 0.0  # seconds of a step, by its own word; 0: not known
    # When the leader came to know of the life, and which step was its newest then: 0 of one that
    # began under this leader.
    since: tuple[float, int] | None = None
    earlier: bool = True  # it may have begun before that: an earlier leader may have heard of it

    def saw(self, progress: Progress, now: float) -> None:
        """A report, newer than those before it."""
        self.said_s = progress.step_s
        began_at, began = self.since or (now, progress.step)
        if self.earlier and now - began_at < AT_ONCE_S:
            began = max(began, progress.step)
        self.since = began_at, began
        if progress.state != "stepping":
            self.heard.clear()
        if not self.heard or progress.step > self.heard[-1][1]:
            self._hear(progress.step, now)
        if self.settled:
            while self.heard[0][1] < FIRST_STEPS:
                self.heard.popleft()

    def _hear(self, step: int, now: float) -> None:
        at_once = self.heard and now - self.heard[-1][0] < AT_ONCE_S
        self.heard.append((self.heard.pop()[0] if at_once else now, step))

    @property
    def settled(self) -> bool:
        """Whether its first steps lie behind it."""
        return bool(self.heard) and self.heard[-1][1] > FIRST_STEPS

    def seen_s(self, now: float) -> float | None:
        """Seconds of a step by the leader's clock; None while it does not step.

        The time since its newest step counts: so that one that stands still is not quick. All steps
        are counted together: so that two reports sent at once do not make a quick step.
        """
        if not self.heard or (len(self.heard) == 1 and now - self.heard[0][0] < AT_ONCE_S):
            return None  # nobody knows how many steps these moments were
        (began_at, first), (_, newest) = self.heard[0], self.heard[-1]
        return (now - began_at) / max(newest - first, 1)

    def least_s(self, now: float) -> float:
        """Seconds of a step: its word, unless its steps are seen to take longer."""
        seen_s = self.seen_s(now) if self.settled else None
        return max(self.said_s, (seen_s or 0.0) / MARGIN)

    def borne_out_s(self, now: float) -> float:
        """Seconds of a step: its word, as far as the leader's clock bears it out either way."""
        least_s = self.least_s(now)
        for began in (self.heard[0], self.since) if self.heard else ():
            if began and (steps := self.heard[-1][1] - began[1]) >= STEPS_MIN:
                return min(least_s, (now - began[0]) / steps * MARGIN)
        return least_s
