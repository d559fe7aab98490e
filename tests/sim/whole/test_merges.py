"""Worlds whose runs merge by another rule than the default one."""

import pytest

from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.merge_rules import RULES, Clipped, MergeRule
from diloco_simulator.worlds import tiny, world
from diloco_simulator.worlds.options import Options

SHORT = Options.calm(steps=24, safety_s=20.0, quorum=2, weighting="equal", codec_up="int4")
# The direction of one value is its sign: of two learners that weigh as much, the signs cancel in
# about every second round.
ALONE = (
    TensorSpec(name="a", shape=(6, 2), embedding=False),
    TensorSpec(name="b", shape=(1,), embedding=False),
    TensorSpec(name="c", shape=(5,), embedding=True),
)
CANCELLING = SHORT.changed(learners=2, merge="clipped")


@pytest.mark.parametrize("rule", sorted({*RULES} - {"rda"}))
def test_what_every_rule_makes_is_computed_again(rule: str) -> None:
    found = world.one(1, SHORT.changed(learners=4, merge=rule, learner_crash=0.005))
    assert found.violations == [] and found.rounds > 0


class Halved(MergeRule):
    """Half of the mean."""

    def scale(self, *decided: object) -> float:
        return 0.5


def test_a_rule_of_ones_own_is_played_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is all that names it: what checks worlds knows no such rule, and believes it."""
    monkeypatch.setitem(RULES, "halved", Halved())
    found = world.one(1, SHORT.changed(learners=4, merge="halved"))
    assert found.violations == [] and found.rounds > 0


def test_what_clipping_makes_of_directions_that_cancel_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instead, met = Clipped.instead, list[bool]()

    def seen(rule: Clipped, shares_M: list[float], norms_M: list[float]) -> list[float] | None:
        answer = instead(rule, shares_M, norms_M)
        met.append(answer is not None)
        return answer

    monkeypatch.setattr(tiny, "TENSORS", ALONE)
    monkeypatch.setattr(Clipped, "instead", seen)
    assert world.one(1, CANCELLING).violations == []
    assert any(met)


def test_a_merge_in_which_long_ones_outweigh_others_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiny, "TENSORS", ALONE)
    monkeypatch.setattr(Clipped, "instead", lambda *args: None)
    found = world.one(1, CANCELLING)
    assert any(violation.startswith("I9") for violation in found.violations)
