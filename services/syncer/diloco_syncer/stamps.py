"""How far a run is once a round is closed (design section 5): by steps, tokens or seconds."""

import math

from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import Stamp


def stamp_after(
    spec: RunSpec, round_: int, at: float, *, tokens: int, started: float, least: float
) -> Stamp:
    """The progress after `round_` at wall time `at`.

    `tokens` are processed by then, the run `started` then, and it was at `least` so far before.
    """
    steps_per_round = spec.algorithm.steps_per_round
    steps, budget = (round_ + 1) * steps_per_round, spec.budget
    if budget.steps is not None:
        rounds = math.ceil(budget.steps / steps_per_round)
        fraction = min((round_ + 1) / rounds, 1.0)
        return Stamp(
            round=round_,
            steps=steps,
            fraction=fraction,
            fraction_per_step=1 / (rounds * steps_per_round),
        )
    if budget.tokens is not None:
        used = tokens / budget.tokens
    else:
        assert budget.seconds is not None
        used = max(at - started, 0.0) / budget.seconds
    fraction = min(max(used, least), 1.0)
    return Stamp(round=round_, steps=steps, fraction=fraction, fraction_per_step=fraction / steps)
