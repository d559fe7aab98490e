"""Inner learning rate as a function of the *run's* progress.

Fast, slow and newly joined learners so stand at the same place of the schedule, and all end with
the run (docs/explanation/algorithm.md, The outer optimizer).
"""

import math

from diloco_shared.protocol.messages import Stamp
from diloco_shared.spec.run import Inner

Position = tuple[float, float]  # (steps of the run, fraction of the budget)


def position(
    stamp: Stamp, steps_since: int, steps_cap: int, floor: Position | None = None
) -> Position:
    """Where the run stands for a learner that took `steps_since` steps since it saw `stamp`.

    Capped at what the next round will say, and never behind an earlier position (`floor`).
    """
    ahead = min(steps_since, steps_cap)
    steps = float(stamp.steps + ahead)
    fraction = min(stamp.fraction + ahead * stamp.fraction_per_step, 1.0)
    if floor is not None:
        steps, fraction = max(steps, floor[0]), max(fraction, floor[1])
    return steps, fraction


def inner_rate(inner: Inner, peak: float, steps: float, fraction: float) -> float:
    """Linear warm-up over `warmup_steps` of the run, times a cosine over the budget.

    Falls from `peak` to `final_fraction * peak` as `fraction` goes from 0 to 1.
    """
    warm = 1.0 if inner.warmup_steps == 0 else min((steps + 1) / inner.warmup_steps, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))
    return peak * warm * (inner.final_fraction + (1 - inner.final_fraction) * cosine)
