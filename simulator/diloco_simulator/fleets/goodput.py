"""An event-driven failure simulator: which share of its chips' time does a method use?

Every learner of every seed is a replica with its own clock. One pass of the loop takes each replica
to its own next event (an interruption, or a return that interrupts), in numpy over all replicas: as
many passes as the busiest one has events. Model and provenance of its numbers: goodput_model.py.

*Goodput* is the share of allocated chip-time that is spent stepping; *uptime* the share of time in
which at least one learner steps. With K = 1 no learner waits for another one, so learners are
independent; quorums and unequal speeds are in goodput_rounds.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_planner.bandwidth import BadSetting
from diloco_planner.goodput_model import METHODS, Failures, Method

Floats = NDArray[np.float64]
HORIZON_S = 40_000.0  # a dozen interruptions of the calmest learner of the table, per seed
# Returns that are outstanding at the start: none. Ten mean delays later their number is steady.
WARMUP_MEANS = 10.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One method at one size."""

    method: Method
    chips: int
    learners: int = 1

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BadSetting(f"method must be one of {', '.join(METHODS)}")
        if not 1 <= self.learners <= self.chips:
            raise BadSetting("learners must be at least 1, and at most as many as chips")

    @property
    def jobs(self) -> int:
        """Jobs that fail independently."""
        return self.learners if self.method == "decoupled" else 1


@dataclass(slots=True)
class Replicas:
    """Jobs on their own clocks, all arrays of length R but `returns_RxQ` (infinity: none)."""

    failures: Failures
    rate: Floats
    chips: Floats
    elastic: NDArray[np.bool_]
    rng: np.random.Generator
    now: Floats
    until_failure: Floats  # of stepping
    returns_RxQ: Floats

    @classmethod
    def fresh(
        cls,
        failures: Failures,
        chips: Floats,
        elastic: NDArray[np.bool_],
        rng: np.random.Generator,
    ) -> "Replicas":
        """At time 0, whole."""
        rate = chips / failures.mtbi_s
        start = rng.exponential(size=len(chips)) / rate
        # Doubled when full: Q follows the outstanding returns of the busiest replica.
        return cls(
            failures, rate, chips, elastic, rng, np.zeros(len(chips)), start,
            np.full((len(chips), 16), np.inf),
        )  # fmt: skip

    def delays(self, count: int) -> Floats:
        """Exponentiated Weibull by inversion, in seconds."""
        f = self.failures
        drawn = self.rng.random(count) ** (1 / f.return_power)
        return np.asarray(f.return_scale_s * (-np.log1p(-drawn)) ** (1 / f.return_shape))

    def step(self, who: NDArray[np.intp], work: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Step replicas `who` for `work` seconds, or up to their next event, with its stall.

        Returns the seconds stepped, those stood afterwards, and who was stopped by an event.
        """
        back = self.returns_RxQ[who].min(axis=1) - self.now[who]
        # A job that was not stepping when a slice came back takes it first of all.
        back = np.where(self.elastic[who], np.maximum(back, 0.0), np.inf)
        stepped = np.minimum(np.minimum(work, self.until_failure[who]), back)
        failed = (self.until_failure[who] <= stepped) & (work > stepped)
        grown = (back <= stepped) & ~failed & (work > stepped)
        self.now[who] += stepped
        self.until_failure[who] -= stepped
        stood = np.zeros(len(who))
        stood[grown] = self.failures.up_s
        if failed.any():
            stood[failed] = self._fail(who[failed])
        self.now[who] += stood
        # What has returned meanwhile was taken along.
        stopped = failed | grown
        late = who[stopped]
        self.returns_RxQ[late] = np.where(
            self.returns_RxQ[late] <= self.now[late, None], np.inf, self.returns_RxQ[late]
        )
        return stepped, stood, stopped

    def _fail(self, who: NDArray[np.intp]) -> Floats:
        """Interrupt `who`; how long each stands."""
        f = self.failures
        delay = self.delays(len(who))
        self.until_failure[who] = self.rng.exponential(size=len(who)) / self.rate[who]
        free = np.isinf(self.returns_RxQ[who])
        if not free.any(axis=1).all():
            self.returns_RxQ = np.hstack([self.returns_RxQ, np.full_like(self.returns_RxQ, np.inf)])
            free = np.isinf(self.returns_RxQ[who])
        self.returns_RxQ[who, free.argmax(axis=1)] = self.now[who] + delay
        recovery = f.recovery_s * (self.rng.random(len(who)) < f.state_loss)
        stood: Floats = np.where(self.elastic[who], f.down_s, delay) + recovery
        return stood

    def away(self, who: NDArray[np.intp]) -> Floats:
        """Share of the chips of `who` that is away while it steps."""
        out = np.isfinite(self.returns_RxQ[who]).sum(axis=1)
        share = out * self.failures.slice_chips / self.chips[who]
        return np.where(self.elastic[who], np.minimum(share, 1.0), 0.0)


@dataclass(slots=True)
class Lived:
    """What became of R replicas within the horizon; stalls as parallel arrays."""

    goodput: Floats
    stall_from: Floats
    stall_to: Floats
    stall_of: NDArray[np.intp]


def live(replicas: Replicas, warmup_s: float, horizon_s: float) -> Lived:
    """Run all replicas from 0 to `warmup_s + horizon_s`; the warm-up is not counted."""
    end = warmup_s + horizon_s
    useful = np.zeros(len(replicas.now))
    starts, ends, owners = [], [], []
    who = np.arange(len(replicas.now))
    while len(who):
        before = replicas.now[who]
        present = 1.0 - replicas.away(who)
        stepped, stood, stopped = replicas.step(who, end - before)
        counted = before + stepped - np.maximum(before, warmup_s)
        useful[who] += np.clip(counted, 0.0, stepped) * present
        halted = before + stepped
        starts.append(halted[stopped])
        ends.append(halted[stopped] + stood[stopped])
        owners.append(who[stopped])
        who = who[replicas.now[who] < end]
    return Lived(  # the warm-up is before 0
        useful / horizon_s,
        np.clip(np.concatenate(starts), warmup_s, end) - warmup_s,
        np.clip(np.concatenate(ends), warmup_s, end) - warmup_s,
        np.concatenate(owners),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Floats) -> "Estimate":
        """Student's t over independent seeds, kept within 0 and 1, as shares are."""
        mean, n = float(samples.mean()), len(samples)
        half = student(n - 1) * float(samples.std(ddof=1)) / n**0.5 if n > 1 else 1.0
        return cls(mean, max(0.0, mean - half), min(1.0, mean + half))


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t, by its expansion about the normal one (1 % off from 3 up)."""
    z, v = 1.959964, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def simulate(
    cells: Sequence[Cell],
    failures: Failures,
    *,
    seed: int = 0,
    seeds: int = 16,
    horizon_s: float = HORIZON_S,
) -> list[tuple[Estimate, Estimate]]:
    """Goodput and uptime of each cell, over `seeds` independent fleets drawn from `seed`."""
    if seeds < 1 or not horizon_s > 0:
        raise BadSetting("seeds must be at least 1, and the horizon above 0 s")
    jobs = np.array([cell.jobs for cell in cells])
    # One fleet per cell and seed; a fleet is its jobs.
    jobs_of_fleet = np.repeat(jobs, seeds)
    chips = np.repeat([cell.chips / cell.jobs for cell in cells], jobs * seeds)
    elastic = np.repeat([cell.method != "dp" for cell in cells], jobs * seeds)
    fleet = np.repeat(np.arange(len(jobs_of_fleet)), jobs_of_fleet)
    replicas = Replicas.fresh(failures, chips, elastic, np.random.default_rng(seed))
    lived = live(replicas, WARMUP_MEANS * failures.return_mean_s, horizon_s)
    goodput = np.bincount(fleet, lived.goodput) / jobs_of_fleet
    up = 1.0 - all_standing(lived, fleet, jobs_of_fleet) / horizon_s
    return [
        (Estimate.of(goodput[i : i + seeds]), Estimate.of(up[i : i + seeds]))
        for i in range(0, len(jobs_of_fleet), seeds)
    ]


def all_standing(lived: Lived, fleet: NDArray[np.intp], jobs_of_fleet: NDArray[np.intp]) -> Floats:
    """Seconds in which every job of a fleet stands at once, per fleet."""
    group = np.tile(fleet[lived.stall_of], 2)
    at = np.concatenate([lived.stall_from, lived.stall_to])
    change = np.repeat([1, -1], len(lived.stall_from))
    order = np.lexsort((at, group))
    group, at = group[order], at[order]
    # Every stall ends, so the running sum is 0 again where the next fleet begins.
    standing = np.cumsum(change[order])
    dead = np.where(standing == jobs_of_fleet[group], np.diff(at, append=0.0), 0.0)
    return np.bincount(group, dead, minlength=len(jobs_of_fleet)).astype(np.float64)


def named(goodput: Estimate, uptime: Estimate) -> dict[str, Any]:
    """Both as JSON, shares of 1."""
    return {
        "goodput": goodput.mean,
        "goodput_ci": [goodput.low, goodput.high],
        "uptime": uptime.mean,
        "uptime_ci": [uptime.low, uptime.high],
    }
