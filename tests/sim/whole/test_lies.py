"""I11 in worlds of whole processes: what is bad is sent, and never merged."""

import pytest

from diloco_simulator.worlds import world
from diloco_simulator.worlds.options import Options
from diloco_syncer.checkpoints.checkpoints import CheckpointDecisions
from diloco_syncer.events import MarkFound
from diloco_syncer.rounds import rounds
from diloco_syncer.rounds.gate import Refusal

# So short that a world takes seconds.
SHORT = Options.calm(steps=18, safety_s=25.0, learners=2, quorum=1)
MARKED = SHORT.changed(
    steps=26, safety_s=30.0, shards=2, garbage=0.5, checkpoints=2, checkpoint_every_steps=8
)


def test_contributions_that_lie_and_strangers_change_nothing() -> None:
    found = world.one(1, SHORT.changed(garbage=0.5))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["lies"] and found.counts["strangers"] and found.counts["refused: told"]


def test_a_base_before_the_first_version_ends_no_leader() -> None:
    found = world.one(2, SHORT.changed(garbage=0.5))
    assert found.violations == [] and found.counts["lies about bases"]


def test_a_checkpoint_that_nobody_has_begun_spoils_none() -> None:
    found = world.one(3, MARKED)
    assert found.violations == [] and found.counts["lies about marks"]
    assert found.counts["checkpoint complete"] >= 4


def test_a_shard_that_believes_in_any_mark_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def believes(decisions: CheckpointDecisions, event: MarkFound) -> str:
        decisions.found = max(decisions.found, decisions.claims.newest)
        decisions.claims.found(decisions.found)
        return ""

    monkeypatch.setattr(CheckpointDecisions, "marked", believes)
    assert any("of after part" in violation for violation in world.one(3, MARKED).violations)


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
