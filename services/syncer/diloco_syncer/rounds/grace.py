"""How long to wait: moving averages and the adaptive grace window (paper section 3.3, Eq. 3)."""

from dataclasses import dataclass, field

# Weight of the newest sample. Unpublished; others use 0.125 to 0.5. A quarter forgets a slow
# round within about eight.
NEWEST_SHARE = 0.25
# So many usual times to answer a pull leaves, before it is given up: times scatter by about half,
# and one that has doubled is no fault yet.
TIMES = 4


@dataclass(slots=True)
class Average:
    """Exponential moving average in seconds; None before the first sample."""

    value: float | None = None

    def update(self, sample_s: float) -> None:
        """Take in a sample, in seconds: the first as it is, others with weight NEWEST_SHARE."""
        if self.value is None:
            self.value = sample_s
        else:
            self.value += NEWEST_SHARE * (sample_s - self.value)

    @property
    def or_zero(self) -> float:
        return 0.0 if self.value is None else self.value


@dataclass(slots=True)
class Timings:
    """The syncer's xi, all in seconds.

    quorum: due to quorum. sync: pull to published. transfer: pull to one contribution's arrival.
    publish: last contribution to published.
    """

    quorum: Average = field(default_factory=Average)
    sync: Average = field(default_factory=Average)
    transfer: Average = field(default_factory=Average)
    publish: Average = field(default_factory=Average)


def grace_s(
    *, factor: float, overlap_steps: int, step_s: float, timings: Timings, limit_s: float
) -> float:
    """Eq. 3: clamp(gamma * (tau * xi_step - xi_quorum - xi_sync), 0, limit_s), in seconds."""
    slack_s = overlap_steps * step_s - timings.quorum.or_zero - timings.sync.or_zero
    return min(max(factor * slack_s, 0.0), limit_s)


def stragglers_s(*, factor: float, overlap_steps: int, step_s: float, timings: Timings) -> float:
    """Once K contributions are in: how long after the round was due the rest may still come.

    What Eq. 3 leaves after publication: waiting is free while the merged fragment still arrives
    before learners need it.
    """
    return max(factor * (overlap_steps * step_s - timings.publish.or_zero), 0.0)


def pull_timeout_s(*, transfer_s: float, skips: int, least_s: float, limit_s: float) -> float:
    """Four usual transfers, at least `least_s`, doubled for every skip in a row, up to a limit.

    Or for every round in a row that somebody missed, where those are more.

    Where four transfers take longer than the limit, they are given that time: else no contribution
    would ever arrive.
    """
    usual_s = max(least_s, TIMES * transfer_s)
    doublings = min(skips, 32)  # beyond this the limit has long been reached
    return float(max(usual_s, min(usual_s * 2**doublings, limit_s)))
