"""I11 in worlds of whole processes: what is bad is sent, and never merged."""

import pytest

from diloco_simulator.worlds import world
from diloco_simulator.worlds.options import Options
from diloco_syncer.rounds import rounds
from diloco_syncer.rounds.gate import Refusal

# So short that a world takes seconds.
SHORT = Options.calm(steps=18, safety_s=25.0, learners=2, quorum=1)


def test_contributions_that_lie_and_strangers_change_nothing() -> None:
    found = world.one(1, SHORT.changed(garbage=0.5))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["lies"] and found.counts["strangers"] and found.counts["refused: told"]


def test_what_is_not_finite_is_refused() -> None:
    found = world.one(2, SHORT.changed(nan=0.3))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["refused: non-finite"] >= 1


def test_a_syncer_that_takes_whatever_comes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*args: object, **kwargs: object) -> Refusal | None:
        return None

    monkeypatch.setattr(rounds, "judge", blind)
    found = world.one(2, SHORT.changed(nan=0.3))
    assert any(violation.startswith("I11") for violation in found.violations)
