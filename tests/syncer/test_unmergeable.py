"""What the gate has let pass and no merge takes: it costs its place in a round, and no leader."""

from typing import Any

import pytest

from diloco_syncer.events import Append, Drop, Stage, Staged, StageFailed, Unstage


def of(effects: list[Any], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def staging(driver: Any, *learners: str) -> Stage:
    """A round of all of them that is being merged, and the answer to it is not given yet."""
    driver.start(*learners)
    for learner in learners:
        driver.step(learner, 4)
    driver.auto = False
    for learner in learners:
        driver.answer(driver.pulls[-1], learner)
    (stage,) = of(driver.effects, Stage)
    return stage


def test_what_cannot_be_merged_is_refused_and_the_rest_is_merged(driver_of: Any) -> None:
    d = driver_of(quorum=2)
    stage = staging(d, "a", "b", "c")
    failed = StageFailed(stage.epoch, stage.round, "b", "base -1 of b where the head is 0")
    again, subject = d.give(failed), stage.contributions[1].key
    (rest,) = of(again, Stage)
    assert [c.learner for c in rest.contributions] == ["a", "c"]
    assert [e.key for e in of(again, Drop)] == [subject]
    d.auto = True
    d.give(Staged(rest.epoch, rest.round, *["d" * 32] * 3))
    verdicts = {v.learner: v for v in d.rounds[-1].verdicts}
    assert [verdicts[m].outcome for m in "abc"] == ["merged", "refused", "merged"]
    assert verdicts["b"].reason == "unmergeable: base -1 of b where the head is 0"


@pytest.mark.parametrize(
    ("learner", "reason"),
    [("b", "the merge failed: 1 contributions, the policy"), ("", "the merge failed: who knows")],
)
def test_a_round_that_cannot_be_merged_is_skipped(
    driver_of: Any, learner: str, reason: str
) -> None:
    d = driver_of(quorum=2)
    stage = staging(d, "a", "b")
    effects = d.give(StageFailed(stage.epoch, stage.round, learner, "who knows"))
    assert sorted(e.key for e in of(effects, Drop)) == [c.key for c in stage.contributions]
    (append,) = of(effects, Append)
    assert (append.record.outcome, append.record.version) == ("skipped", 0)
    assert append.record.reason.startswith(reason[:35]), append.record.reason
    # What was chosen for it is not being merged any more: a repeat of it is too late.
    d.answer(d.pulls[-1], "a")
    assert d.machine.refused["late"] == 1


def test_a_failure_of_an_earlier_epoch_changes_nothing(driver_of: Any) -> None:
    d = driver_of(quorum=2)
    stage = staging(d, "a", "b")
    for epoch, n in ((stage.epoch + 1, stage.round), (stage.epoch, stage.round + 1)):
        assert d.give(StageFailed(epoch, n, "b", "void")) == [Unstage(epoch, n)]
