"""Worlds in which a learner skips all its steps for a while, right after it adopted a fragment."""

from collections.abc import Iterator

import pytest

from diloco_learner.exchange.counters import Counters
from diloco_learner.training.train import Pause, TrainLoop
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played

pytestmark = pytest.mark.whole

# Steps: fewer than end a learner, and two rounds of every fragment.
BAD = 12


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first adoption of fragment 0 after eight sound steps, of one learner."""
    step = TrainLoop._step
    begun: dict[int, int] = {}

    def poisoned(self: TrainLoop) -> Iterator[Pause]:
        c = self.exchange.counters
        if c.step >= 8 and c.step_at_P[0] == c.step and self.exchange.learner.endswith("0"):
            begun.setdefault(id(self), c.step)
        self.injected.poison = c.step - begun.get(id(self), -BAD) < BAD
        yield from step(self)

    monkeypatch.setattr(TrainLoop, "_step", poisoned)


def world() -> WorldResult:
    return played(Case(2, Options.calm(learners=2, quorum=1, steps=36, safety_s=30.0)))


@pytest.mark.usefixtures("bad")
def test_who_skips_all_its_steps_answers_no_round() -> None:
    found = world()
    assert found.violations == [] and found.rounds > 0
    assert found.counts["learners: a step skipped"] == BAD


@pytest.mark.usefixtures("bad")
def test_who_answers_with_skipped_steps_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whom a sound step before the adoption stands for the newest one."""

    def a_step_late(self: Counters, p: int) -> int:
        return max(self.c_steps(p) - (self.skipped - self.skipped_at_P[p]), 0)

    monkeypatch.setattr(Counters, "c_sound", a_step_late)
    assert any("steps that were all skipped" in v for v in world().violations)
