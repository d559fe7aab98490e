"""How runs went, bounded: samples of loss and useful work, thinned as they grow old."""

from dataclasses import dataclass, field
from typing import Any

from diloco_shared.protocol.records import RunStatus

# Points of one run: enough for any chart. At twice as many every second one is dropped and the
# spacing doubles, so that a run of any length fits and its beginning is never lost.
SAMPLES_MAX = 500
# Spacing of samples at first, in seconds.
SPACING_S = 1.0
# Runs with a history; above that the one not sampled for the longest goes.
RUNS_MAX = 200


@dataclass(slots=True)
class Curve:
    """Samples of one run in the order in which they were told, `spacing_s` apart.

    Times are the leaders': they go back where a leader's clock is behind that of the one before.
    """

    spacing_s: float = SPACING_S
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, status: RunStatus) -> bool:
        """Take a sample unless the last one is too recent; whether it was taken."""
        if self.samples and abs(status.at - self.samples[-1]["at"]) < self.spacing_s:
            return False
        self.samples.append(sample(status))
        if len(self.samples) > 2 * SAMPLES_MAX:
            self.samples = self.samples[::2]
            self.spacing_s *= 2
        return True


def sample(status: RunStatus) -> dict[str, Any]:
    """What is worth a point in a chart. Loss in nats per token, None before the first step."""
    return {
        "at": status.at,
        "steps": status.stamp.steps,
        "tokens_processed": status.tokens_processed,
        "tokens_useful": status.tokens_useful,
        "useful_share": useful_share(status),
        "alive": len(status.alive),
        "participating": len(status.participating),
        "loss": {m: shown.get("loss") for m, shown in status.learners.items()},
    }


def useful_share(status: RunStatus) -> float | None:
    """Useful over processed tokens: the share of the work that was merged; None before any."""
    if not status.tokens_processed:
        return None
    return min(1.0, status.tokens_useful / status.tokens_processed)


@dataclass(slots=True)
class Histories:
    """One curve a run."""

    curves: dict[str, Curve] = field(default_factory=dict)

    def add(self, status: RunStatus) -> None:
        """Mutates the curve of the status's run."""
        curve = self.curves.pop(status.run, None) or Curve()
        curve.add(status)
        self.curves[status.run] = curve  # the most recently sampled is last
        while len(self.curves) > RUNS_MAX:
            self.curves.pop(next(iter(self.curves)))

    def of(self, run: str) -> list[dict[str, Any]]:
        curve = self.curves.get(run)
        return [] if curve is None else list(curve.samples)

    def forget(self, run: str) -> None:
        self.curves.pop(run, None)
