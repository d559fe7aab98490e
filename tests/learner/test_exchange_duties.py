"""The exchange beside training: pause, donation, evaluation, reports, epochs, the end."""

import math

import pytest
from learner.desk import SPEC, Desk, anchor, beat, donate, last_progress, only, pull, stamp

from diloco_learner.events import (
    Adopt,
    BeatSeen,
    Checkpoint,
    Contribute,
    Evaluate,
    Evaluated,
    GiveState,
    Leave,
    PublicationMoved,
    SendProgress,
    StateGone,
    Stepped,
    Tell,
    TimePassed,
)
from diloco_learner.exchange.exchange import FINISH_S_MAX, PROGRESS_S_MIN
from diloco_learner.recovery.donating import SILENCE_S
from diloco_shared.protocol.messages import Progress, Restored
from diloco_shared.protocol.pace import LAST_EVALUATION_S
from diloco_shared.spec.run import RunSpec

# --- pause, donation, evaluation, checkpoints ----------------------------------------------------


def test_a_paused_learner_holds_adopts_answers_and_reports() -> None:
    desk = Desk()
    desk.step(2)
    desk.tell(pull(0))
    effects = desk.tell(beat(state="paused"))
    assert not desk.exchange.may_step
    assert [c.step_to for c in only(effects, Contribute)] == [2]
    assert last_progress(effects).state == "paused"
    assert only(desk.tell(anchor(1, 1)), Adopt) == [Adopt(0, 1, 1)]
    assert last_progress(desk.pass_time(1.0)).state == "paused"
    assert last_progress(desk.tell(beat())).state == "stepping"
    assert desk.exchange.may_step


def test_state_is_given_once_per_nonce_when_the_donor_is_there() -> None:
    desk = Desk()
    assert not only(desk.tell(donate(versions=(0, 1, 0))), GiveState)
    assert not only(desk.step(), GiveState)
    desk.tell(anchor(1, 1), donate(versions=(0, 1, 0)))
    (given,) = only(desk.step(), GiveState)
    assert (given.donate.nonce, given.versions, given.step) == ("n1", (0, 1, 0), 2)
    desk.tell(donate(versions=(0, 1, 0)))
    assert not only(desk.step(), GiveState)


def test_only_the_granted_incarnation_of_a_trained_learner_gives_state() -> None:
    desk = Desk()
    desk.tell(beat(state="paused"), donate())
    assert not only(desk.tell(donate()), GiveState)  # no step since it began
    desk.tell(beat(), donate("x", donor="b"), donate("y", donor_incarnation=1))
    desk.tell(donate("z", newcomer="a"))
    given = only(desk.step(), GiveState)
    assert [g.donate.nonce for g in given] == ["n1"]


def test_a_request_of_another_epoch_is_not_served() -> None:
    desk = Desk()
    desk.step()
    desk.tell(donate(epoch=1, versions=(-1, -1, -1)))
    assert not only(desk.step(), GiveState)


def test_a_request_that_is_no_longer_repeated_is_settled() -> None:
    desk = Desk()
    desk.step()
    desk.tell(donate(versions=(0, 0, 1)))
    desk.now += SILENCE_S + 1
    desk.tell(anchor(2, 1))
    assert not only(desk.step(), GiveState)


def test_the_evaluator_evaluates_version_0_and_every_crossing() -> None:
    desk = Desk()
    desk.tell(beat(evaluator="a"))
    assert only(desk.step(4), Evaluate) == [Evaluate(stamp(), (0, 0, 0), final=False)]
    desk.tell(anchor(0, 1, round_=0))
    assert not only(desk.step(), Evaluate)
    desk.tell(anchor(1, 1, round_=1))
    assert only(desk.step(), Evaluate) == [Evaluate(stamp(1), (1, 1, 0), final=False)]


def test_a_successor_evaluates_what_comes_and_repeats_nothing() -> None:
    desk = Desk()
    assert not only(desk.step(), Evaluate)
    desk.tell(beat(evaluator="b"))
    assert not only(desk.step(), Evaluate)
    desk.tell(beat(evaluator="a"))
    assert not only(desk.step(), Evaluate)
    desk.tell(anchor(0, 1, round_=1))
    assert len(only(desk.step(), Evaluate)) == 1


def test_a_checkpoint_every_so_many_own_steps() -> None:
    desk = Desk()
    assert only(desk.step(15), Checkpoint) == [Checkpoint(0, 10, (0, 0, 0), final=False)]
    desk.tell(StateGone())
    assert only(desk.step(10), Checkpoint) == [Checkpoint(0, 20, (0, 0, 0), final=False)]


def test_moments_are_of_no_epoch_that_a_restore_may_have_begun() -> None:
    """Its anchors may come over another connection than the beat that says so. Kept as of that
    epoch, moments of before would be taken for newer than those that the run went back to."""
    desk = Desk()
    desk.step(9)
    desk.tell(*(anchor(p, 0, epoch=1) for p in range(3)))
    (kept,) = only(desk.step(), Checkpoint)
    assert (kept.epoch, kept.step) == (0, 10)
    desk.tell(donate(epoch=1))
    assert not only(desk.step(), GiveState), "nobody else is to go on with them"
    other = Desk()
    other.step(5)
    other.tell(*(anchor(p, 0, epoch=1) for p in range(3)))
    (last,) = only(other.exchange.withdraw("the process is told to stop"), Checkpoint)
    assert (last.epoch, last.final) == (0, True)
    back = Restored(epoch=1, serial=1, source="r.1/000001")
    (leave,) = only(desk.tell(beat(epoch=1, term=2, restored=back)), Leave)
    assert leave.outcome == "restored"


def test_moments_are_of_an_epoch_that_a_beat_tells_of_without_a_restore() -> None:
    """A hub that was put back began it: they outlive that."""
    desk = Desk()
    desk.step(9)
    desk.tell(*(anchor(p, 0, epoch=1) for p in range(3)), donate(epoch=1))
    desk.tell(beat(epoch=1, term=2))
    effects = desk.step()
    (given,) = only(effects, GiveState)
    assert given.donate.epoch == 1
    desk.tell(StateGone())
    (kept,) = only(desk.step(), Checkpoint)
    assert kept.epoch == 1


def test_of_several_shards_all_must_have_spoken_in_an_epoch_that_moments_are_of() -> None:
    spec = RunSpec.model_validate(
        {**SPEC.model_dump(), "algorithm": {"fragments": 4, "sync_every_steps": 12, "shards": 2}}
    )
    for terms, epoch in (((1, 0), 0), ((1, 1), 1)):
        desk = Desk(spec)
        desk.tell(beat(epoch=1, term=sum(terms), terms=terms, versions=(0, -1, 0, -1)))
        (last,) = only(desk.exchange.withdraw("the process is told to stop"), Checkpoint)
        assert last.epoch == epoch


def test_a_checkpoint_waits_for_the_copy_that_is_on_its_way() -> None:
    desk = Desk()
    assert len(only(desk.step(10), Checkpoint)) == 1
    assert not only(desk.step(15), Checkpoint), "the one of step 20 waits"
    desk.tell(donate())
    (given,) = only(desk.step(), GiveState)
    assert given.step == 10, "a newcomer does not wait: it is given the one of step 10"
    assert not only(desk.step(), Checkpoint)
    desk.tell(StateGone())
    assert only(desk.step(), Checkpoint) == [Checkpoint(0, 28, (0, 0, 0), final=False)]


def test_the_end_waits_for_no_copy() -> None:
    desk = Desk()
    desk.step(10)
    (last,) = only(desk.tell(beat(state="stopped")) + desk.tell(TimePassed()), Checkpoint)
    assert last.final


# --- reports -------------------------------------------------------------------------------------


def test_progress_follows_steps_but_not_faster_than_50_a_second() -> None:
    desk = Desk()
    sent = 0
    for _ in range(1000):
        desk.now += 0.005
        sent += len(only(desk.tell(Stepped(64, 2.0, 0.005, 0.0, None)), SendProgress))
    assert 200 <= sent <= 5 / PROGRESS_S_MIN + 1


def test_a_heartbeat_is_due_however_long_a_step_takes() -> None:
    desk = Desk()
    first = last_progress(desk.tell(TimePassed()))
    assert (first.state, first.step) == ("stepping", 0) and math.isnan(first.loss)
    assert desk.exchange.deadline == desk.now + SPEC.membership.heartbeat_s
    assert not desk.pass_time(0.5)
    assert only(desk.pass_time(0.5), SendProgress)


def test_the_first_step_compiles_and_does_not_count_for_the_average() -> None:
    desk = Desk()
    for seconds in (30.0, 1.0, 1.0):
        desk.now += seconds
        effects = desk.tell(Stepped(64, 2.0, seconds, 0.25, None))
    p = last_progress(effects)
    assert (p.step_s, p.wait_s, p.loss, p.tokens) == (1.0, 0.25, 2.0, 192)
    assert p == Progress.model_validate(p.model_dump())


def test_a_step_in_which_the_process_stood_still_is_not_how_long_steps_take() -> None:
    """By that average it would wait for hours for rounds that merge what it has done."""
    desk = Desk()
    for seconds in (30.0, 1.0, 3600.0):
        desk.now += seconds
        effects = desk.tell(Stepped(64, 2.0, seconds, 0.25, None))
    assert last_progress(effects).step_s == pytest.approx(1.9)
    for _ in range(40):
        desk.now += 50.0
        effects = desk.tell(Stepped(64, 2.0, 50.0, 0.25, None))
    assert last_progress(effects).step_s > 45, "a step that takes as long each time does count"


# --- epochs, the end -----------------------------------------------------------------------------


def test_a_new_epoch_voids_what_was_adopted_until_its_keyframes_are_here() -> None:
    desk = Desk()
    desk.step(6)
    desk.tell(anchor(0, 9), pull(1), beat(stamp=stamp(5)))
    effects = desk.tell(beat(epoch=1, term=2, versions=(3, 3, 2), stamp=stamp(0)))
    assert only(effects, Tell)[0].kind == "epoch-entered"
    p = last_progress(effects)
    assert (p.state, p.epoch, p.adopted, p.c_steps) == ("recovering", 1, (-1,) * 3, (0,) * 3)
    assert not desk.exchange.may_step and desk.exchange.position()[0] == 4.0
    assert not only(desk.tell(anchor(0, 10)), Adopt)
    effects = desk.tell(*(anchor(q, 3, epoch=1) for q in range(3)), pull(1))
    assert only(effects, Adopt) == [Adopt(1, q, 3, anew=True) for q in range(3)]
    assert not only(effects, Contribute)
    assert desk.exchange.may_step
    desk.tell(pull(1, term=2, epoch=1))
    (answer,) = only(desk.step(), Contribute)
    assert (answer.epoch, answer.base, answer.step_from, answer.step_to) == (1, 3, 6, 7)
    assert only(desk.tell(anchor(0, 4, epoch=1)) + desk.step(), Adopt) == [Adopt(1, 0, 4)]


def test_who_trains_begins_anew_where_the_run_has_not_begun_and_it_is_asked() -> None:
    """The hub was put back from before the beginning: somebody must send initial parameters."""
    asked = {"state": "bootstrapping", "versions": (-1,) * 3, "stamp": stamp(0)}
    desk = Desk()
    desk.step(6)
    desk.tell(beat(**asked, initializer="a"))
    assert not desk.exchange.left, "a beat of before it began, which was overtaken"
    assert not only(desk.tell(beat(**asked, epoch=1, term=2, initializer="b")), Leave)
    (leave,) = only(desk.tell(beat(**asked, epoch=1, term=2, initializer="a")), Leave)
    assert leave.outcome == "restored" and "before the run began" in leave.reason


def test_who_trains_begins_anew_where_a_shard_has_not_begun_and_it_is_asked() -> None:
    """The hub was put back from when one of two shards had begun, and the other one had not."""
    spec = RunSpec.model_validate(
        {**SPEC.model_dump(), "algorithm": {"fragments": 4, "sync_every_steps": 12, "shards": 2}}
    )
    asked = {"state": "bootstrapping", "versions": (-1, 0, -1, 0), "stamp": stamp(0), "epoch": 1}
    desk = Desk(spec)
    desk.step(6)
    desk.tell(beat(**asked, term=2, terms=(1, 1), initializer="b"), anchor(1, 0, epoch=1))
    assert not desk.exchange.left, "another one is asked"
    (leave,) = only(desk.tell(beat(**asked, term=2, terms=(1, 1), initializer="a")), Leave)
    assert leave.outcome == "restored"


def test_a_new_epoch_is_reported_soon_also_where_nothing_else_changes() -> None:
    desk = Desk()
    desk.step(6)
    desk.tell(beat(epoch=1, term=2, versions=(3, 3, 2), stamp=stamp(0)))
    desk.now += PROGRESS_S_MIN
    p = last_progress(desk.tell(beat(epoch=2, term=3, versions=(3, 3, 2), stamp=stamp(0))))
    assert (p.state, p.epoch) == ("recovering", 2)


def test_at_the_end_it_adopts_everything_evaluates_checkpoints_and_leaves() -> None:
    desk = Desk()
    desk.step(2)
    end = beat(state="finished", versions=(1, 1, 0), evaluator="a", stamp=stamp(1))
    assert not only(desk.tell(end), Leave)
    assert not desk.exchange.may_step
    assert last_progress(desk.pass_time(1.0)).state == "stepping"  # stays the evaluator
    desk.tell(anchor(0, 1, round_=0))
    effects = desk.tell(anchor(1, 1, round_=1))
    last = Evaluate(stamp(1), (1, 1, 0), final=True)
    assert [e for e in effects if not isinstance(e, SendProgress)] == [Adopt(0, 1, 1), last]
    assert [type(e) for e in desk.pass_time(1.0)] == [SendProgress], "it stays until it is told"
    earlier = Evaluate(stamp(), (0, 0, 0), final=False)
    assert only(desk.tell(Evaluated(earlier)), Leave) == []
    effects = desk.tell(Evaluated(last))
    assert [type(e) for e in effects] == [Checkpoint, SendProgress, Leave]
    assert effects[0] == Checkpoint(0, 2, (1, 1, 0), final=True)
    assert last_progress(effects).state == "finished"
    assert only(effects, Leave)[0].outcome == "finished"
    assert desk.tell(pull(5), TimePassed(), anchor(2, 9), end) == []


def test_the_others_stand_by_until_the_last_evaluation_is_made() -> None:
    """Its evaluator may die over it: then one of them is named."""
    desk = Desk()
    end = {"state": "finished", "versions": (0, 0, 0)}
    assert not only(desk.tell(beat(**end, evaluator="b")), Leave)
    (last,) = only(desk.tell(beat(**end, evaluator="a")), Evaluate)
    assert last.final and only(desk.tell(Evaluated(last)), Leave)

    desk = Desk()
    desk.tell(beat(**end, evaluator="b"))
    effects = desk.tell(beat(**end, evaluator="b", evaluated=True))
    assert only(effects, Leave) and not only(effects, Evaluate)

    desk = Desk()  # nobody says that it was made: not for ever
    desk.tell(beat(**end, evaluator="b"))
    assert only(desk.pass_time(FINISH_S_MAX), Leave)


def test_a_last_evaluation_that_hangs_does_not_hold_it_for_ever() -> None:
    desk = Desk()
    desk.tell(beat(state="finished", versions=(0, 0, 0), evaluator="a"))
    assert not only(desk.pass_time(LAST_EVALUATION_S - 1), Leave)
    assert desk.exchange.deadline <= desk.now + 1
    effects = desk.pass_time(1.0)
    assert only(effects, Tell)[0].kind == "evaluation-failed"
    assert only(effects, Leave)[0].outcome == "finished"


def test_an_evaluator_that_must_leave_does_not_say_that_it_has_finished() -> None:
    """Else nobody would evaluate: who has finished has told the last evaluation."""
    desk = Desk()
    (last,) = only(desk.tell(beat(state="finished", evaluator="a")), Evaluate)
    assert last.final
    effects = desk.exchange.withdraw("the process is told to stop")
    assert [type(e) for e in effects] == [Tell, Checkpoint, SendProgress, Leave]
    told = only(effects, Tell)[0]
    assert (told.kind, told.data) == ("evaluation-failed", {"learner": "a", "final": True})
    assert last_progress(effects).state == "draining"

    desk = Desk()  # the end has come, and it has not heard of it
    desk.tell(beat(state="finishing", evaluator="a"))
    effects = desk.exchange.withdraw("the process is told to stop")
    assert last_progress(effects).state == "draining" and not only(effects, Tell)


@pytest.mark.parametrize(
    "told",
    [
        beat(state="running", evaluator="a"),
        beat(state="finished", evaluator="b"),
        beat(state="finished", evaluator="a", evaluated=True),
    ],
)
def test_whoever_owes_no_last_evaluation_finishes_when_it_must_leave(told: BeatSeen) -> None:
    desk = Desk()
    effects = desk.tell(told)
    if not desk.exchange.left:
        effects = desk.exchange.withdraw("the process is told to stop")
    assert last_progress(effects).state == "finished" and not only(effects, Tell)


def test_of_a_run_that_was_stopped_before_it_had_parameters_nothing_is_owed() -> None:
    desk = Desk()
    none = (-1, -1, -1)
    effects = desk.tell(beat(epoch=1, state="stopped", versions=none, evaluator="a"))
    assert only(effects, Leave) and last_progress(effects).state == "finished"


def test_of_several_shards_one_may_be_over_while_the_run_rests() -> None:
    algorithm = SPEC.algorithm.model_copy(update={"shards": 3})
    desk = Desk(SPEC.model_copy(update={"algorithm": algorithm}))
    desk.tell(beat(state="starved", evaluator="a", terms=(1, 1, 1)))
    assert last_progress(desk.exchange.withdraw("it is told to stop")).state == "draining"


def test_a_publication_that_never_comes_does_not_hold_it_for_ever() -> None:
    desk = Desk()
    desk.tell(beat(state="stopped", versions=(0, 0, 1), evaluator="a"))
    assert not only(desk.pass_time(FINISH_S_MAX - 1), Leave)
    desk.tell(beat(state="stopped", versions=(0, 0, 1), evaluator="a"))  # no new patience
    assert desk.exchange.deadline <= desk.now + 1
    effects = desk.pass_time(1.0)
    assert only(effects, Tell)[0].kind == "left-behind"
    assert not only(effects, Evaluate)
    assert only(effects, Leave)[0].outcome == "stopped"


def test_a_last_publication_is_waited_for_as_long_as_more_of_it_comes() -> None:
    """Of a model of billions of values, behind a link that many share, it takes minutes."""
    desk = Desk()
    desk.tell(PublicationMoved())
    assert desk.exchange.finish_by == math.inf, "the run has not ended"
    desk.tell(beat(state="finished", versions=(0, 0, 1), evaluator="a"))
    for _ in range(5):
        assert not only(desk.pass_time(FINISH_S_MAX - 1), Leave)
        desk.tell(PublicationMoved())
    effects = desk.tell(anchor(2, 1))
    assert only(effects, Adopt) and only(effects, Evaluate)
    desk.tell(beat(state="finished", versions=(0, 0, 2), evaluator="a"))
    assert only(desk.pass_time(FINISH_S_MAX), Tell)[0].kind == "left-behind"


def test_versions_of_another_epoch_do_not_complete_the_end() -> None:
    desk = Desk()
    desk.tell(beat(state="finished", versions=(1, 1, 1)))
    effects = desk.tell(*(anchor(q, 1, epoch=1) for q in range(3)))
    assert len(only(effects, Adopt)) == 3 and not only(effects, Leave)
    effects = desk.tell(beat(epoch=1, state="finished", versions=(1, 1, 1)))
    assert only(effects, Leave)


def test_a_newer_incarnation_supersedes_at_once() -> None:
    """I10: two processes never act as one learner."""
    desk = Desk()
    desk.step()
    desk.tell(pull(0), beat(incarnations={"a": 2, "b": 5}))
    assert desk.exchange.may_step
    effects = desk.tell(beat(term=0, incarnations={"a": 3}))
    assert effects == [Leave("superseded", "incarnation 3 of a has joined")]
    assert desk.tell(Stepped(64, 2.0, 1.0, 0.0, None)) == []


def test_beats_that_were_overtaken_or_belong_to_others_change_nothing() -> None:
    """I11."""
    desk = Desk()
    desk.tell(beat(term=2, versions=(2, 1, 1)))
    for late in (
        beat(term=1, state="paused", versions=(3, 3, 3)),
        beat(term=2, state="paused", versions=(1, 1, 1)),
        beat(term=2, state="paused", versions=(2, 1)),
    ):
        desk.tell(late)
        assert desk.exchange.may_step
    assert desk.exchange.ignored.total() == 3
    desk.tell(beat(term=2, state="finished", versions=(2, 1, 1)), beat(term=2, versions=(2, 1, 1)))
    assert not desk.exchange.may_step
