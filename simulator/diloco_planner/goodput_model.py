"""What interrupts a fleet, and closed forms of what that costs.

Chips are interrupted as Poisson processes and return after an exponentiated Weibull delay (paper,
goodput simulator). A job is interrupted while it steps: what fails during a reconfiguration is
dropped by that reconfiguration, and what returns during one is taken along by it.

- *dp*: one job over all chips, not elastic. It stands until the chip has returned.
- *elastic*: one job. It stands `down_s` to go on without a slice, and `up_s` to take it back.
- *decoupled*: M elastic jobs of N / M chips. Only the learner that is struck stands.

The paper prints no value of its simulator but the mean time between interruptions. Two were fitted
to its row of elastic data-parallel goodput (88, 80, 69, 58, 40 %): `down_s` and `up_s`, by least
squares of the event-driven simulator over those five cells on a grid of 2 and 3 s (1.4 points
remain). The row pins their sum; from (9, 23) to (15, 14) s the residual grows by 0.15 points only.
The mean return delay is set by the one published cell without elasticity (27 % at 1.2 million
chips); the other methods hardly depend on it. Slice size and the shape of the delay are assumed.
No Decoupled cell was used: all of them are predictions.
"""

from dataclasses import dataclass, fields
from math import comb, gamma, sqrt
from typing import Literal, get_args

from diloco_planner.bandwidth import BadSetting

YEAR_S = 365.25 * 86400.0
Method = Literal["dp", "elastic", "decoupled"]
METHODS: tuple[str, ...] = get_args(Method)
SIZES = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
# Published goodput in per cent (Tables 1 and 11), at a mean time between interruptions of one year.
PUBLISHED: dict[tuple[Method, int, int], float] = {
    ("dp", 1, 1_200_000): 27.0,
    **{("elastic", 1, n): g for n, g in zip(SIZES, (88.0, 80.0, 69.0, 58.0, 40.0), strict=True)},
    ("decoupled", 2, 1_200_000): 70.0,
    ("decoupled", 4, 1_200_000): 82.0,
    ("decoupled", 8, 1_200_000): 88.0,
    ("decoupled", 16, 1_200_000): 93.0,
    ("decoupled", 8, 2_400_000): 80.0,
}


@dataclass(frozen=True, slots=True)
class Failures:
    """How chips fail and return, and what a reconfiguration takes; times in seconds."""

    mtbi_s: float = YEAR_S  # per chip; the paper's
    down_s: float = 11.0  # fitted to the elastic row
    up_s: float = 20.0  # fitted to the elastic row
    return_mean_s: float = 72.0  # set by the cell without elasticity
    return_shape: float = 0.6  # c of the exponentiated Weibull: a long tail (assumed)
    return_power: int = 2  # a of it: few return at once (assumed)
    slice_chips: int = 256  # leave and return together (assumed)
    # Of interruptions that take the whole learner's state, and what fetching it then costs.
    state_loss: float = 0.0
    recovery_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise BadSetting(f"{field.name} must be a number of at least 0")
        for name in ("mtbi_s", "return_shape", "return_power", "slice_chips"):
            if not getattr(self, name) > 0:
                raise BadSetting(f"{name} must be above 0")
        if self.state_loss > 1:
            raise BadSetting("state_loss must be a share, at most 1")

    @property
    def return_scale_s(self) -> float:
        """Scale of the exponentiated Weibull with this mean.

        Its mean for a whole `a` is that of the latest of `a` Weibull delays.
        """
        a, c = self.return_power, self.return_shape
        latest: float = sum(
            (-1.0) ** (k + 1) * comb(a, k) * float(k) ** (-1 / c) for k in range(1, a + 1)
        )
        return self.return_mean_s / (gamma(1 + 1 / c) * latest)

    def rate(self, chips: float) -> float:
        """Interruptions per second of a job of `chips`."""
        return chips / self.mtbi_s

    @property
    def lost_s(self) -> float:
        """Mean recovery per interruption."""
        return self.state_loss * self.recovery_s


def job_goodput(failures: Failures, chips: float, *, elastic: bool = True) -> float:
    """Share of time that one job steps, in the mean field.

    Per second of stepping, `rate` interruptions cost `down_s` each; as many chips return, of which
    the share that finds the job stepping (G itself) costs `up_s`: 1/G = 1 + rate (down + G up).
    """
    rate = failures.rate(chips)
    if not elastic:
        return 1 / (1 + rate * (failures.return_mean_s + failures.lost_s))
    linear = 1 + rate * (failures.down_s + failures.lost_s)
    # rate·up·G² + linear·G - 1 = 0, by the form that does not cancel when rate·up is small.
    root = sqrt(linear * linear + 4 * rate * failures.up_s)
    return 2 / (linear + root) / (1 + absent(failures))


def absent(failures: Failures) -> float:
    """Chips that are away per chip that is there, while jobs step."""
    return failures.slice_chips * failures.return_mean_s / failures.mtbi_s


def uptime(goodput: float, learners: int) -> float:
    """Share of time that at least one of `learners` steps, failing independently."""
    return 1.0 - (1.0 - goodput) ** learners
