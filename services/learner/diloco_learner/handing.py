"""What goes out of this learner's inner state, one copy at a time.

A copy is as large as moments and counts, on the host. So a donation and an own checkpoint wait for
what is on its way: each is made at the first boundary at which nothing is. Requests are repeated
meanwhile. The part of a run-wide checkpoint cannot wait, since nothing of after the mark may be in
it: while a copy is on its way, which was made before the mark, that one is the part too.
"""

from dataclasses import dataclass, field

from diloco_learner.counters import Counters
from diloco_learner.events import Checkpoint, GiveState, KeepPart
from diloco_learner.giving import Giving
from diloco_learner.marks import Marks


@dataclass(frozen=True, slots=True)
class Copy:
    """When the copy that is on its way was made."""

    epoch: int
    step: int
    versions: tuple[int, ...]


@dataclass(slots=True)
class Handing:
    """`every`: steps between own checkpoints. Mutated only through the exchange."""

    giving: Giving
    every: int
    marks: Marks = field(default_factory=Marks)
    copy: Copy | None = None  # on its way
    due: bool = False  # an own checkpoint

    def part(self, epoch: int, c: Counters) -> list[KeepPart]:
        """A checkpoint was begun: this is where the cut goes through this learner.

        Called before anything of later is adopted.
        """
        if not (number := self.marks.take()):
            return []
        made = self.copy or self._made(epoch, c)
        return [KeepPart(number, made.epoch, made.step, made.versions)]

    def give(self, epoch: int, c: Counters, now: float) -> list[GiveState]:
        """The request that has waited longest, if it can be served from the state as it is."""
        donate = None if self.copy else self.giving.due(epoch, c, now)
        if donate is None:
            return []
        made = self._made(epoch, c)
        return [GiveState(donate, made.versions, made.step)]

    def keep(self, epoch: int, c: Counters, *, stepped: bool) -> list[Checkpoint]:
        """An own checkpoint, where one is due."""
        self.due = self.due or (stepped and c.step % self.every == 0)
        if self.copy or not self.due:
            return []
        self.due = False
        made = self._made(epoch, c)
        return [Checkpoint(epoch, made.step, made.versions, final=False)]

    def gone(self) -> None:
        """What was on its way has arrived, or was given up."""
        self.copy = None

    def _made(self, epoch: int, c: Counters) -> Copy:
        self.copy = Copy(epoch, c.step, tuple(c.adopted_P))
        return self.copy
