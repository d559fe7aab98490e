"""The inner learning rate of every step, computed apart from what was published (*rates*).

It is a function of the progress of the run. A learner knows that from the newest stamp that has
reached it, and goes on by its own steps until the next one, for one round at most. From outside it
is not known which heartbeats it has believed. So the rate must be that of one of few places: not
before what it has adopted itself, nor beyond what reached it and one more round.
"""

import math
from dataclasses import dataclass

from diloco_shared.protocol.messages import Stamp
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.promises import Report

RATES = "rates"
# Of two ways to compute one rate in double precision.
ROUNDING = 1e-9


@dataclass(slots=True)
class Place:
    """Of a run, as one life may know it within an epoch."""

    epoch: int
    least: Stamp  # of what it has adopted
    most: Stamp  # of what has reached it
    share: float = 0.0  # of the budget: beyond what reached it, and never back within an epoch
    steps: int = 0  # its own since `least`

    def hears(self, stamp: Stamp, each: int) -> None:
        """And goes on from there for one round, by what a step was until then."""
        self.share = max(self.share, stamp.fraction + each * stamp.fraction_per_step)

    def least_steps(self, each: int) -> int:
        return self.least.steps + min(self.steps, each)


class Rates:
    """Of all learners of a run."""

    def __init__(self, report: Report, spec: RunSpec) -> None:
        self.report = report
        self.spec = spec
        a = spec.algorithm
        self.each = a.sync_every_steps * a.shards // a.fragments  # steps of a round
        self.single = a.shards == 1
        self.places: dict[str, Place] = {}

    def begins(self, life: str, epoch: int, stamp: Stamp) -> None:
        """A process has what it needs to train."""
        self.places[life] = place = Place(epoch, stamp, stamp)
        place.hears(stamp, self.each)

    def told(self, life: str, epoch: int, stamp: Stamp) -> None:
        """A heartbeat, or a publication, was delivered to this life."""
        place = self.places[life]
        if epoch != place.epoch:
            return
        place.hears(stamp, self.each)
        if stamp.steps > place.most.steps:
            place.most = stamp
        if not self.single:
            self._behind(place, stamp)

    def enters(self, life: str, epoch: int, stamp: Stamp) -> None:
        """By what was just delivered it knows of a new epoch: the run may have gone back."""
        place = self.places[life]
        place.epoch, place.most = epoch, stamp
        if self.single:
            place.least, place.steps, place.share = stamp, 0, 0.0
        else:
            self._behind(place, stamp)
        place.hears(stamp, self.each)

    def _behind(self, place: Place, stamp: Stamp) -> None:
        """Of several shards the slowest counts, and one that is behind may not have spoken yet.
        Each says how much of the budget is used as of its own rounds: the one that is behind may
        say more than the others."""
        fraction = min(stamp.fraction, place.least.fraction)
        if stamp.steps < place.least_steps(self.each):
            place.least, place.steps = stamp, 0
        # Be it of as many steps: in an epoch that replaces a lost history less may be used by then.
        place.least = place.least.model_copy(update={"fraction": fraction})

    def adopted(self, life: str, epoch: int, stamp: Stamp) -> None:
        """It has adopted a fragment: of one shard it knows now how far the run is."""
        place = self.places[life]
        if self.single and epoch == place.epoch and stamp.steps > place.least.steps:
            place.least, place.steps = self._known(place, stamp), 0

    def _known(self, place: Place, stamp: Stamp) -> Stamp:
        """What it goes by now: by what it has heard of a later round, too, and that may be less.
        A hub that lost records has rounds closed once more, when more of the budget is used."""
        heard = place.most
        if heard.steps > stamp.steps and heard.fraction < stamp.fraction:
            return stamp.model_copy(update={"fraction": heard.fraction})
        return stamp

    def stepped(self, life: str) -> None:
        self.places[life].steps += 1

    def steps(self, life: str, rate: float) -> None:
        """It begins a step with that rate."""
        self.report.looked(RATES)
        place = self.places[life]
        first, last = place.least_steps(self.each), place.most.steps + self.each
        if not any(self._so(place, n, rate) for n in range(first, last + 1)):
            where = f"between {first} and {last} steps of the run"
            self.report(RATES, f"{life} steps with a rate of {rate:.6g}, {where}")

    def _so(self, place: Place, n: int, rate: float) -> bool:
        """Whether that is the rate where the run has taken `n` steps."""
        inner, budget = self.spec.inner, self.spec.budget
        peak = inner.learning_rate * self.spec.algorithm.inner_rate_factor
        if inner.warmup_steps:
            peak *= min((n + 1) / inner.warmup_steps, 1.0)
        if budget.steps is not None:
            most = n / (math.ceil(budget.steps / self.each) * self.each)
            # Before a round is closed nobody says how much of the budget a step is.
            least = 0.0 if place.least.round < 0 and n <= self.each else most
        else:
            least, most = place.least.fraction, place.share
        lowest, highest = (peak * self._cosine(share) for share in (most, least))
        return lowest * (1 - ROUNDING) <= rate <= highest * (1 + ROUNDING)

    def _cosine(self, share: float) -> float:
        """From 1 at the beginning to `final_fraction` at the end of the budget."""
        low = self.spec.inner.final_fraction
        return low + (1 - low) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
