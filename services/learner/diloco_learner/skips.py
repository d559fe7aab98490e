"""Inner steps that were skipped because their loss or gradient was not a finite number.

A skipped step counts as a step with its tokens: its data is consumed, and the intervals that
contributions tell must meet without a gap. It changes neither parameters nor moments.
"""

import math
from dataclasses import dataclass

# Skipped steps in a row that end a learner, unless adopting every fragment anew takes longer: that
# mends parameters that have overflowed. Bad data never comes in such rows; a rate too high does.
SKIPS_MAX = 20
# Between two events that tell of skipped steps, in seconds.
TELL_S = 60.0


class Diverged(Exception):
    """No step has brought a finite number for a long while, and no adoption has mended it."""


@dataclass(slots=True)
class Skips:
    """Of one incarnation. `every_steps`: inner steps in which every fragment is adopted anew."""

    every_steps: int
    total: int = 0
    in_a_row: int = 0
    untold: int = 0
    told_at: float = -math.inf

    @property
    def in_a_row_max(self) -> int:
        """So many are still borne."""
        return max(SKIPS_MAX, self.every_steps)

    def stepped(self, loss: float) -> bool:
        """A step's loss is known; whether that step was skipped. Raises Diverged."""
        if math.isfinite(loss):
            self.in_a_row = 0
            return False
        self.total += 1
        self.in_a_row += 1
        self.untold += 1
        if self.in_a_row > self.in_a_row_max:
            raise Diverged(
                f"{self.in_a_row} steps in a row were skipped: their loss or their gradient is "
                "not a finite number, also after every fragment was adopted anew. If all learners "
                "end like this, lower inner.learning_rate or inner.clip_norm. If this one alone "
                "does, look at its data and its device: it starts again with a healthy learner's "
                "moments"
            )
        return True

    def tell(self, step: int, now: float) -> str:
        """What to tell of steps up to `step`, or "": at most one text in TELL_S seconds."""
        if not self.untold or now < self.told_at + TELL_S:
            return ""
        many = "one step was" if self.untold == 1 else f"{self.untold} steps were"
        self.untold, self.told_at = 0, now
        return (
            f"{many} skipped, the last of them step {step}: the loss or the gradient is not a "
            f"finite number. Parameters and moments are as before; {self.total} skipped so far, "
            f"more than {self.in_a_row_max} in a row would end this learner"
        )
