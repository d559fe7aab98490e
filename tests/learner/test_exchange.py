"""The exchange: what a learner does at its step boundaries, scenario by scenario."""

import math
from typing import Any, TypeVar

import pytest

from diloco_learner.events import (
    Adopt,
    AnchorReady,
    BeatSeen,
    Checkpoint,
    Contribute,
    DonateSeen,
    Evaluate,
    ExchangeEffect,
    ExchangeEvent,
    GiveState,
    Leave,
    Merged,
    PullSeen,
    SendProgress,
    Stepped,
    Tell,
    TimePassed,
)
from diloco_learner.exchange import FINISH_S_MAX, PROGRESS_S_MIN, Exchange
from diloco_learner.giving import SILENCE_S
from diloco_learner.pulls import ANSWERED_MAX, PENDING_MAX
from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import Beat, Cursor, Donate, Progress, Pull, Stamp

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 3, "sync_every_steps": 12},
        "budget": {"steps": 120},
        "evaluation": {"every_steps": 8},
        "keeping": {"checkpoint_every_steps": 10},
    }
)
E = TypeVar("E")


def stamp(round_: int = -1) -> Stamp:
    return Stamp(
        round=round_, steps=4 * (round_ + 1), fraction=(round_ + 1) / 30, fraction_per_step=1 / 120
    )


def beat(**change: Any) -> BeatSeen:
    b = Beat(
        run="r",
        epoch=0,
        term=1,
        state="running",
        reason="as planned",
        versions=(0, 0, 0),
        stamp=stamp(),
        live=("a", "b"),
    )
    return BeatSeen(b.model_copy(update=change))


def pull(round_: int, *, term: int = 1, epoch: int = 0, timeout_s: float = 5.0) -> PullSeen:
    return PullSeen(
        Pull(
            epoch=epoch,
            term=term,
            round=round_,
            fragment=round_ % 3,
            participants=("a", "b"),
            timeout_s=timeout_s,
        )
    )


def anchor(
    p: int, version: int, *, epoch: int = 0, round_: int = -1, merged: tuple[int, int] = (-1, -1)
) -> AnchorReady:
    return AnchorReady(epoch, p, version, round_, stamp(round_), {"a": merged, "b": (3, 99)})


def donate(nonce: str = "n1", newcomer: str = "b", **change: Any) -> DonateSeen:
    d = Donate(
        donor="a",
        donor_incarnation=2,
        newcomer=newcomer,
        newcomer_incarnation=1,
        nonce=nonce,
        epoch=0,
        versions=(0, 0, 0),
    )
    return DonateSeen(d.model_copy(update=change))


class Desk:
    """An exchange, its clock and its step count."""

    def __init__(self, spec: RunSpec = SPEC) -> None:
        self.now = 100.0
        self.exchange = Exchange(spec, "a", 2, 0, (0, 0, 0), stamp(), self.now)

    def tell(self, *events: ExchangeEvent) -> list[ExchangeEffect]:
        return [e for event in events for e in self.exchange.handle(event, self.now)]

    def step(self, times: int = 1, tokens: int = 64) -> list[ExchangeEffect]:
        effects: list[ExchangeEffect] = []
        for _ in range(times):
            assert self.exchange.may_step
            self.now += 1.0
            cursor = Cursor(shard=7, sequences=self.exchange.counters.step + 1)
            effects += self.tell(Stepped(tokens, 2.5, 1.0, 0.0, cursor))
        return effects

    def pass_time(self, seconds: float) -> list[ExchangeEffect]:
        self.now += seconds
        return self.tell(TimePassed())


def only(effects: list[ExchangeEffect], kind: type[E]) -> list[E]:
    return [e for e in effects if isinstance(e, kind)]


def last_progress(effects: list[ExchangeEffect]) -> Progress:
    return only(effects, SendProgress)[-1].progress


# --- pulls and adoption --------------------------------------------------------------------------


def test_a_pull_is_answered_at_the_next_step_boundary_and_once() -> None:
    """I2."""
    desk = Desk()
    desk.step(3)
    assert not only(desk.tell(pull(0)), Contribute)
    (answer,) = only(desk.step(), Contribute)
    assert answer == Contribute(
        epoch=0,
        term=1,
        round=0,
        fragment=0,
        base=0,
        step_from=0,
        step_to=4,
        tokens_from=0,
        tokens_to=256,
        cursor=Cursor(shard=7, sequences=4),
        deadline=108.0,
    )
    assert not only(desk.tell(pull(0), pull(0)) + desk.step(5), Contribute)
    assert desk.exchange.ignored["pull answered before"] == 2


def test_adoption_comes_before_the_answer_and_resets_only_its_fragment() -> None:
    desk = Desk()
    desk.step(4)
    desk.tell(pull(1), anchor(0, 1, round_=0))
    effects = desk.step()
    acts = [e for e in effects if isinstance(e, Adopt | Contribute)]
    assert acts[0] == Adopt(0, 0, 1)
    assert isinstance(acts[1], Contribute) and (acts[1].step_from, acts[1].step_to) == (0, 5)
    p = last_progress(effects)
    assert (p.c_steps, p.c_tokens) == ((0, 5, 5), (0, 320, 320))
    assert (p.adopted, p.adopted_at) == ((1, 0, 0), (5, 0, 0))


def test_a_fragment_adopted_just_now_is_contributed_after_a_step_of_its_own() -> None:
    desk = Desk()
    desk.step(4)
    desk.tell(pull(0), anchor(0, 1, round_=0))
    assert not only(desk.step(), Contribute)
    (answer,) = only(desk.step(), Contribute)
    assert (answer.base, answer.step_from, answer.step_to) == (1, 5, 6)


def test_only_the_newest_anchor_is_adopted_and_never_an_older_one() -> None:
    """I1."""
    desk = Desk()
    desk.tell(anchor(0, 2), anchor(0, 3), anchor(0, 1))
    assert only(desk.step(), Adopt) == [Adopt(0, 0, 3)]
    desk.tell(anchor(0, 3), anchor(0, 2))
    assert not only(desk.step(), Adopt)


def test_a_pull_that_is_over_or_not_ours_is_not_answered() -> None:
    desk = Desk()
    desk.step()
    others = Pull(epoch=0, term=1, round=4, fragment=1, participants=("b",), timeout_s=9.0)
    unknown = pull(5).pull.model_copy(update={"fragment": 3})
    desk.tell(pull(3, timeout_s=0.5), PullSeen(others), PullSeen(unknown), pull(6, epoch=1))
    assert not only(desk.step(3), Contribute)


def test_a_repeat_carries_the_time_that_is_left() -> None:
    desk = Desk()
    desk.step()
    desk.tell(pull(0, timeout_s=9.0), pull(0, timeout_s=2.0), pull(0, timeout_s=4.0))
    (answer,) = only(desk.step(), Contribute)
    assert answer.deadline == 103.0


def test_a_new_leader_asks_again_and_its_predecessor_no_more() -> None:
    desk = Desk()
    desk.step()
    desk.tell(pull(0, term=1), pull(1, term=2), pull(2, term=1))
    (answer,) = only(desk.step(), Contribute)
    assert (answer.term, answer.round) == (2, 1)
    desk.tell(pull(1, term=3))
    (answer,) = only(desk.step(), Contribute)
    assert (answer.term, answer.round) == (3, 1)


def test_a_step_longer_than_the_round_misses_it() -> None:
    desk = Desk()
    desk.step()
    desk.tell(pull(0, timeout_s=1.0))
    assert not only(desk.step(), Contribute)


def test_memory_of_pulls_is_bounded_and_forgets_no_answer() -> None:
    """I2 and I12."""
    desk = Desk()
    desk.step()
    rounds = ANSWERED_MAX + 10
    answered = [
        a.round for n in range(rounds) for a in only(desk.tell(pull(n)) + desk.step(), Contribute)
    ]
    assert answered == list(range(rounds))
    again = [only(desk.tell(pull(n)) + desk.step(), Contribute) for n in range(rounds)]
    assert not any(again)
    desk.tell(*(pull(n) for n in range(1000, 1000 + 3 * PENDING_MAX)))
    assert len(desk.exchange.pulls.pending) == PENDING_MAX
    assert len(desk.exchange.pulls.answered) <= ANSWERED_MAX


# --- what was merged -----------------------------------------------------------------------------


def test_a_merge_is_told_once_with_the_cursor_of_its_contribution() -> None:
    desk = Desk()
    desk.step(4)
    desk.tell(pull(0))
    desk.step()
    assert not only(desk.tell(anchor(0, 1, round_=0, merged=(1, 0))), Merged)
    merged = Merged(0, 0, Cursor(shard=7, sequences=5))
    assert only(desk.tell(anchor(0, 2, round_=3, merged=(2, 0))), Merged) == [merged]
    assert not only(desk.tell(anchor(0, 3, round_=6, merged=(2, 0))), Merged)


def test_a_later_merge_decides_earlier_contributions() -> None:
    desk = Desk()
    desk.step()
    for round_ in (0, 3):
        desk.tell(pull(round_))
        desk.step()
    (merged,) = only(desk.tell(anchor(0, 2, round_=3, merged=(2, 3))), Merged)
    assert merged.round == 3
    assert not only(desk.tell(anchor(0, 3, round_=6, merged=(2, 0))), Merged)


# --- the schedule --------------------------------------------------------------------------------


def test_the_place_on_the_schedule_is_the_runs_and_never_goes_back() -> None:
    desk = Desk()
    desk.step(3)
    assert desk.exchange.position() == pytest.approx((3.0, 3 / 120))
    desk.step(4)
    assert desk.exchange.position()[0] == 4.0  # capped at the next round's
    desk.tell(beat(stamp=stamp(1)))
    assert desk.exchange.position()[0] == 8.0
    desk.step(2)
    desk.tell(anchor(0, 1, round_=0))
    desk.step()
    assert desk.exchange.position()[0] == 11.0


def test_a_budget_estimated_lower_does_not_move_the_schedule_back() -> None:
    desk = Desk()
    desk.step(4)
    place = desk.exchange.position()
    slower = stamp(0).model_copy(update={"fraction": place[1] / 2})
    desk.tell(beat(stamp=slower))
    assert desk.exchange.position() == place


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
    assert only(desk.step(25), Checkpoint) == [
        Checkpoint(10, (0, 0, 0), final=False),
        Checkpoint(20, (0, 0, 0), final=False),
    ]


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
    assert only(effects, Adopt) == [Adopt(1, q, 3) for q in range(3)]
    assert not only(effects, Contribute)
    assert desk.exchange.may_step
    desk.tell(pull(1, term=2, epoch=1))
    (answer,) = only(desk.step(), Contribute)
    assert (answer.epoch, answer.base, answer.step_from, answer.step_to) == (1, 3, 6, 7)


def test_at_the_end_it_adopts_everything_evaluates_checkpoints_and_leaves() -> None:
    desk = Desk()
    desk.step(2)
    end = beat(state="finished", versions=(1, 1, 0), evaluator="a", stamp=stamp(1))
    assert not only(desk.tell(end), Leave)
    assert not desk.exchange.may_step
    assert last_progress(desk.pass_time(1.0)).state == "stepping"  # stays the evaluator
    desk.tell(anchor(0, 1, round_=0))
    effects = desk.tell(anchor(1, 1, round_=1))
    kinds = [type(e) for e in effects]
    assert kinds == [Adopt, Evaluate, Checkpoint, SendProgress, Leave]
    assert effects[1] == Evaluate(stamp(1), (1, 1, 0), final=True)
    assert effects[2] == Checkpoint(2, (1, 1, 0), final=True)
    assert last_progress(effects).state == "finished"
    assert only(effects, Leave)[0].outcome == "finished"
    assert desk.tell(pull(5), TimePassed(), anchor(2, 9), end) == []


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
