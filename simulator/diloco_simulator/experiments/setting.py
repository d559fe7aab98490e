"""How the islands of a simulated run are: how fast, how far apart, and when they are there."""

from dataclasses import dataclass

from diloco_planner.bandwidth import BadSetting


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Learners die at random, each by itself, as in the goodput simulator: a Poisson process.

    A process that is struck is gone with all it had in memory; another one starts after an
    exponential time and recovers as the product does. Both are means in virtual seconds.
    """

    mtbi_s: float  # from a start to the next interruption
    away_s: float  # from an interruption to the next start

    def __post_init__(self) -> None:
        if not (0 < self.mtbi_s < float("inf") and 0 <= self.away_s < float("inf")):
            raise BadSetting("mtbi_s must be above 0 s, away_s at least 0 s")


@dataclass(frozen=True, slots=True)
class Loan:
    """Learners beyond the run's own, there for a time.

    At its end they step no more, and leave once their work is merged (the product's drain); or,
    without notice, they are taken at once, and what they have not given is lost.
    """

    learners: int
    begin_s: float
    end_s: float
    notice: bool = True

    def __post_init__(self) -> None:
        if self.learners < 1 or not 0 <= self.begin_s < self.end_s < float("inf"):
            raise BadSetting("a loan is of 1 learner or more, and begins before it ends")


@dataclass(frozen=True, slots=True)
class Setting:
    """Times in virtual seconds."""

    learners: int  # there from the beginning
    step_s: float = 1.0
    speeds: tuple[float, ...] = (1.0,)  # relative, repeated over learners
    one_way_s: float = 0.05
    jitter: float = 0.0  # of a step's time: uniform within this share of it, either way
    interruptions: Interruptions | None = None
    loan: Loan | None = None
    # Not as the product does, for comparison: a round asks only learners that have taken its steps.
    only_ready: bool = False
    over_time: bool = False  # also result in useful tokens and validation losses over time

    @property
    def learners_in_all(self) -> int:
        """With those on loan."""
        return self.learners + (self.loan.learners if self.loan else 0)

    def step_of(self, m: int) -> float:
        """Mean seconds per step of learner `m`."""
        return self.step_s / self.speeds[m % len(self.speeds)]
