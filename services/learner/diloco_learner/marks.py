"""Marks of run-wide checkpoints: this learner's state is kept before it adopts anything of later.

After Chandy and Lamport: beats and publications carry the newest mark that the syncer had set when
they were made. The first of either that shows a new mark is where the cut goes through this
learner.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Marks:
    """Of one incarnation. Numbers only grow; 0 stands for none."""

    met: int = -1
    due: int = 0  # met, and nothing is kept yet
    settled: int = 0  # the part is durable, or it never will be

    def meet(self, number: int) -> None:
        """A message carries this mark. What was set before this learner began is not its own."""
        if 0 <= self.met < number:
            self.due = number
        self.met = max(self.met, number)

    def take(self) -> int:
        """The mark to keep a part for now; 0 for none."""
        due, self.due = self.due, 0
        return due
