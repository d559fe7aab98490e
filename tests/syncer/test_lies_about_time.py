"""What a learner says of its steps, how long they take and how many there are, costs others little.

Rounds wait by these figures. Each fleet here is played second by second against a whole machine.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from syncer.conftest import Driver, spec

from diloco_shared.protocol.messages import Pull
from diloco_syncer.events import SendPull, TimePassed
from diloco_syncer.rounds.round import Phase

DAY_S = 86_400.0
NEVER = math.inf


@dataclass
class Fleet:
    """Learners that step, answer and adopt; what they say of it may be something else."""

    driver: Driver
    steps_s: dict[str, float]  # how long a step takes
    answers_s: dict[str, float]  # from a pull to the answer
    said: dict[str, dict[str, Any]] = field(default_factory=dict)  # in reports, instead
    tick_s: float = 1.0
    at_steps: bool = False  # whether they answer at the end of a step alone
    late: str = ""  # answers each pull once its round is over
    closed: int = 0

    def __post_init__(self) -> None:
        self.driver.start(*self.steps_s)

    def run(self, rounds: int, ticks: int) -> list[dict[str, str]]:
        """Until so many rounds are over, or the ticks: each one's outcomes by learner."""
        for _ in range(ticks):
            if len(self.driver.rounds) >= rounds:
                break
            self.tick()
        return [{v.learner: v.outcome for v in r.verdicts} for r in self.driver.rounds]

    def tick(self) -> None:
        d = self.driver
        d.now += self.tick_s
        d.give(TimePassed())
        for learner, step_s in self.steps_s.items():
            new = int(d.now / step_s + 1e-9) - d.steps[learner]
            d.step(learner, new, **{"step_s": step_s} | self.said.get(learner, {}))
            self._answer(learner, stepped=new > 0)
            self._adopt()

    def _answer(self, learner: str, *, stepped: bool) -> None:
        d = self.driver
        for r in [r for r in d.machine.rounds.open if r.phase is Phase.PULLING]:
            due = d.now >= r.pulled_at + self.answers_s[learner]
            if due and learner in r.unanswered and (stepped or not self.at_steps):
                d.answer(self._pull(r.n), learner)

    def _pull(self, n: int) -> Pull:
        return next(
            e.pull for e in self.driver.effects if isinstance(e, SendPull) and e.pull.round == n
        )

    def _adopt(self) -> None:
        for record in self.driver.rounds[self.closed :]:
            self.closed += 1
            if self.late:
                self.driver.answer(self._pull(record.round), self.late, base=record.version - 1)
            for learner, at in self.driver.adopted_at.items():
                # Who never answers never says that it has adopted anything: all is at stake.
                if record.outcome == "committed" and self.answers_s[learner] < NEVER:
                    at[record.fragment] = self.driver.steps[learner]

    @property
    def pulled_for_s(self) -> list[float]:
        """For how long each round is pulled at most, as the first pull of each says."""
        first = {pull.round: pull.timeout_s for pull in reversed(self.driver.pulls)}
        return [first[n] for n in sorted(first)]


# --------------------------------------------------------------------------------------------------
# Steps that take long in words.


def long(lease_s: float = 5.0) -> Driver:
    """A syncer of a run that goes on for hundreds of rounds."""
    told = spec().model_dump()
    told["budget"] = {"steps": 10**6}
    told["membership"]["lease_s"] = lease_s
    return Driver(type(spec()).model_validate(told))


def liar(driver: Driver, **said: Any) -> Fleet:
    """Learners a and b are well; c steps as they do, says something else, and never answers."""
    return Fleet(driver, dict.fromkeys("abc", 1.0), {"a": 0, "b": 0, "c": NEVER}, {"c": said})


@pytest.mark.parametrize("said_s", [3600.0, DAY_S])
@pytest.mark.parametrize("step_s", [1.0, 30.0])
def test_where_it_is_needed_a_round_has_the_usual_limit_of_a_pull(
    driver_of: Any, said_s: float, step_s: float
) -> None:
    fleet = liar(driver_of(quorum=3), step_s=said_s)
    fleet.steps_s["c"], fleet.tick_s = step_s, 4.0
    outcomes = fleet.run(2, 1000)
    assert [o["c"] for o in outcomes] == ["missed"] * 2
    limit_s = fleet.driver.spec.algorithm.pull_timeout_s_max
    first_s, second_s = fleet.pulled_for_s[:2]
    assert first_s <= limit_s
    assert second_s <= limit_s + 4 * fleet.tick_s, "and what the others' answers took"


def test_a_lone_learner_may_not_hold_the_first_round_before_others_are_there(
    driver_of: Any,
) -> None:
    driver = driver_of(quorum=1)
    driver.start("c")
    driver.wait(1.0)
    driver.step("c", 4, step_s=DAY_S)
    (pull,) = driver.pulls
    assert pull.timeout_s <= driver.spec.algorithm.pull_timeout_s_max


@pytest.mark.parametrize(("late", "times"), [("", 2.0), ("c", 2.5)])
def test_where_the_others_are_enough_they_are_hardly_held_up(late: str, times: float) -> None:
    """It answers never, or too late: the others wait for it now and then, and no longer."""
    rounds_s = 100 * 4.0  # what a hundred rounds take without it
    fleet = liar(long(), step_s=DAY_S)
    fleet.late = late
    outcomes = fleet.run(100, 10_000)
    assert len(outcomes) == 100 and all(o["a"] == o["b"] == "merged" for o in outcomes)
    assert fleet.driver.now < times * rounds_s


def test_a_standstill_for_its_sake_is_said(driver_of: Any) -> None:
    fleet = liar(driver_of(quorum=3), step_s=DAY_S)
    fleet.driver.machine.rounds.stopped = True  # a fault: nothing opens
    fleet.run(1, 200)
    assert fleet.driver.machine.announcer.state(fleet.driver.now)[0] == "stuck"


# --------------------------------------------------------------------------------------------------
# Steps that take no time in words.


@pytest.mark.parametrize("said_s", [1e-6, 1e-300])
def test_a_slower_learner_has_its_time_though_another_one_says_that_it_needs_none(
    driver_of: Any, said_s: float
) -> None:
    fleet = Fleet(
        driver_of(),
        dict.fromkeys("abc", 16.0),
        {"a": 0.0, "b": 12.0, "c": 0.0},
        {"c": {"step_s": said_s}},
    )
    outcomes = fleet.run(6, 1000)
    assert [o["b"] for o in outcomes] == ["merged"] * 6


# --------------------------------------------------------------------------------------------------
# Honest learners whose steps do take long.


def test_learners_whose_steps_take_twenty_minutes_are_awaited() -> None:
    fleet = Fleet(
        long(lease_s=120.0),
        {"a": 1200.0, "b": 1200.0, "c": 1080.0},
        dict.fromkeys("abc", 0.0),
        tick_s=60.0,
        at_steps=True,
    )
    outcomes = fleet.run(3, 400)
    assert [set(o.values()) for o in outcomes] == [{"merged"}] * 3
    assert fleet.pulled_for_s[0] >= 4 * 1200.0


def test_one_whose_steps_take_twenty_minutes_is_merged_with_one_twenty_times_as_fast() -> None:
    fleet = Fleet(
        long(lease_s=60.0),
        {"a": 60.0, "b": 1200.0},
        dict.fromkeys("ab", 0.0),
        tick_s=30.0,
        at_steps=True,
    )
    outcomes = fleet.run(6, 1000)
    assert outcomes[0] == {"a": "merged", "b": "merged"}
    assert [o["b"] for o in outcomes].count("merged") >= 3, "it answers at a step's end alone"
