"""How runs went, bounded: samples of loss and useful work, thinned as they grow old."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from diloco_shared.protocol.records import RunStatus

# Points of one run: enough for any chart. At twice as many every second one is dropped and the
# spacing doubles, so that a run of any length fits and its beginning is never lost.
SAMPLES_MAX = 500
# Spacing of samples at first, in seconds.
SPACING_S = 1.0
# Runs with a history; above that the one not sampled for the longest goes.
RUNS_MAX = 200
# Learners whose losses a sample has one by one: no chart tells more lines apart. Of more of them it
# has the least, the middle and the greatest loss.
LEARNERS_MAX = 32
# Values in all curves together, of about 60 bytes each: 7 MB of what the coordinator's mirror may
# have (`budget.memory.MIRROR`). Ten runs of eight learners have 750 samples each.
VALUES_MAX = 120_000
# Values of a sample beside the losses of its learners.
FIGURES = 8


@dataclass(slots=True)
class Curve:
    """Samples of one run in the order in which they were told, `spacing_s` apart.

    Times are the leaders': they go back where a leader's clock is behind that of the one before.
    """

    spacing_s: float = SPACING_S
    samples: list[dict[str, Any]] = field(default_factory=list)
    values: int = 0  # in all samples

    def add(self, status: RunStatus) -> bool:
        """Take a sample unless the last one is too recent; whether it was taken."""
        if self.samples and abs(status.at - self.samples[-1]["at"]) < self.spacing_s:
            return False
        self.samples.append(sample(status))
        self.values += _values(self.samples[-1])
        if len(self.samples) > 2 * SAMPLES_MAX:
            self.thin()
        return True

    def thin(self) -> None:
        """Every second one goes, and those to come are twice as far apart."""
        self.samples = self.samples[::2]
        self.values = sum(map(_values, self.samples))
        self.spacing_s *= 2


def sample(status: RunStatus) -> dict[str, Any]:
    """What is worth a point in a chart. Loss in nats per token, None before the first step.

    `loss` is of each learner, and `loss_range` is None; of more than LEARNERS_MAX learners there is
    `loss_range` alone.
    """
    losses = {m: shown.get("loss") for m, shown in status.learners.items()}
    many = len(losses) > LEARNERS_MAX
    return {
        "at": status.at,
        "steps": status.stamp.steps,
        "tokens_processed": status.tokens_processed,
        "tokens_useful": status.tokens_useful,
        "useful_share": useful_share(status),
        "alive": len(status.alive),
        "participating": len(status.participating),
        "loss": {} if many else {sys.intern(m): loss for m, loss in losses.items()},
        "loss_range": _range(losses.values()) if many else None,
    }


def _range(losses: Iterable[Any]) -> dict[str, float] | None:
    """Of those that are known; None while none is."""
    known = [x for x in losses if isinstance(x, int | float) and math.isfinite(x)]
    return {"min": min(known), "median": median(known), "max": max(known)} if known else None


def _values(sample: dict[str, Any]) -> int:
    return FIGURES + len(sample["loss"] or sample["loss_range"] or ())


def useful_share(status: RunStatus) -> float | None:
    """Useful over processed tokens: the share of the work that was merged; None before any."""
    if not status.tokens_processed:
        return None
    return min(1.0, status.tokens_useful / status.tokens_processed)


@dataclass(slots=True)
class Histories:
    """One curve a run. All of them have VALUES_MAX values at most: the largest is thinned first."""

    curves: dict[str, Curve] = field(default_factory=dict)
    values: int = 0  # of all curves

    def add(self, status: RunStatus) -> None:
        """Mutates the curve of the status's run, and thins that of another where there is no room
        for it."""
        curve = self.curves.pop(status.run, None) or Curve()
        before = curve.values
        curve.add(status)
        self.values += curve.values - before
        self.curves[status.run] = curve  # the most recently sampled is last
        while len(self.curves) > RUNS_MAX:
            self.forget(next(iter(self.curves)))
        while self.values > VALUES_MAX:
            largest = max(self.curves.values(), key=lambda c: c.values)
            before = largest.values
            largest.thin()
            self.values += largest.values - before

    def of(self, run: str) -> list[dict[str, Any]]:
        curve = self.curves.get(run)
        return [] if curve is None else list(curve.samples)

    def forget(self, run: str) -> None:
        if (curve := self.curves.pop(run, None)) is not None:
            self.values -= curve.values
