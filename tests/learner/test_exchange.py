"""The exchange: what a learner does at its step boundaries, scenario by scenario."""

from dataclasses import replace

import pytest
from learner.desk import SPEC, Desk, anchor, beat, last_progress, only, pull, stamp

from diloco_learner.events import (
    Adopt,
    Contribute,
    Merged,
    PullSeen,
    TimePassed,
    Unmerged,
)
from diloco_learner.exchange.pulls import ANSWERED_TIMES, PENDING_MAX, PENDING_MIN, pending_max
from diloco_shared.protocol.messages import Cursor, Pull
from diloco_shared.spec.run import RunSpec

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


def test_what_came_during_a_step_is_acted_on_at_its_end() -> None:
    """Not a step later: that step's work would be overwritten unmerged."""
    desk = Desk()
    desk.step(4)
    # In whatever order it came: everything complete is adopted first.
    assert not only(desk.tell(pull(1), anchor(0, 1, round_=0)), Adopt | Contribute)
    adopt, answer = only(desk.tell(TimePassed()), Adopt | Contribute)
    assert adopt == Adopt(0, 0, 1)
    assert (answer.fragment, answer.step_from, answer.step_to) == (1, 0, 4)
    assert not only(desk.tell(TimePassed()) + desk.step(), Adopt | Contribute)


def test_an_answer_builds_on_what_is_adopted_and_not_on_what_is_announced() -> None:
    desk = Desk()
    desk.step()
    desk.tell(beat(versions=(1, 1, 1)), pull(0))
    (answer,) = only(desk.step(), Contribute)
    assert (answer.base, answer.step_from) == (0, 0)


def test_a_fragment_adopted_just_now_is_contributed_after_a_step_of_its_own() -> None:
    desk = Desk()
    desk.step(4)
    desk.tell(pull(3), anchor(0, 1, round_=0))
    assert not only(desk.step(), Contribute)
    (answer,) = only(desk.step(), Contribute)
    assert (answer.base, answer.step_from, answer.step_to) == (1, 5, 6)


def test_steps_that_were_all_skipped_are_no_answer() -> None:
    """They change nothing: with the weight of all others they would only shorten the merge."""
    desk = Desk()
    desk.step()  # nobody knows yet that it was skipped
    desk.step(3, skipped=True)
    desk.tell(pull(0))
    effects = desk.step(2, skipped=True)
    assert not only(effects, Contribute)
    assert last_progress(effects).c_steps == (0, 0, 0), "nobody need ask it"
    (answer,) = only(desk.step(), Contribute)
    assert (answer.step_from, answer.step_to) == (0, 7)
    assert last_progress(desk.step()).c_steps == (8, 8, 8)
    desk.tell(anchor(0, 1, round_=0))
    desk.step()
    desk.tell(pull(3))
    (answer,) = only(desk.step(), Contribute)
    assert (answer.step_from, answer.step_to) == (9, 10), "what was skipped before counts no more"


def test_a_round_that_was_published_without_it_is_not_answered_any_more() -> None:
    """Its step was longer than the round: the answer would be dropped, and teach a wrong time."""
    desk = Desk()
    desk.step(4)
    desk.tell(pull(0), anchor(0, 1, round_=0))
    assert only(desk.step(), Adopt) == [Adopt(0, 0, 1)]
    assert not desk.exchange.pulls.pending
    desk.tell(pull(0))
    assert desk.exchange.ignored["pull of a round that is over"] == 1
    assert not only(desk.step(), Contribute), "a repeat that was overtaken asks for nothing"
    desk.tell(pull(3))
    (answer,) = only(desk.step(), Contribute)
    assert (answer.round, answer.base) == (3, 1)


def test_a_publication_shows_every_round_before_it_to_be_over() -> None:
    """Rounds end in order: that of another fragment was skipped, or is still to arrive."""
    desk = Desk()
    desk.step(4)
    desk.tell(pull(0), pull(1), pull(2), anchor(1, 1, round_=1))
    assert [a.round for a in only(desk.step(), Contribute)] == [2]


def test_a_keyframe_that_no_round_made_tells_by_its_stamp_which_rounds_are_over() -> None:
    desk = Desk()
    desk.step(4)
    keyframe = replace(anchor(0, 1), stamp=stamp(3))
    assert keyframe.round == -1
    desk.tell(pull(2), pull(4), keyframe)
    assert [a.round for a in only(desk.step(), Contribute)] == [4]


def test_a_new_leader_or_epoch_may_ask_for_a_round_of_that_number_again() -> None:
    """Of a tape that lost its last records."""
    desk = Desk()
    desk.step(4)
    desk.tell(anchor(0, 1, round_=3))
    desk.step()
    desk.tell(pull(2, term=2))
    assert [a.round for a in only(desk.step(), Contribute)] == [2]
    desk.tell(*(anchor(p, 1, epoch=1, round_=1) for p in range(3)))
    desk.step(2)
    desk.tell(pull(2, epoch=1))
    assert [a.round for a in only(desk.step(), Contribute)] == [2]


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
    most = ANSWERED_TIMES * PENDING_MIN
    rounds = most + 10
    answered = [
        a.round for n in range(rounds) for a in only(desk.tell(pull(n)) + desk.step(), Contribute)
    ]
    assert answered == list(range(rounds))
    again = [only(desk.tell(pull(n)) + desk.step(), Contribute) for n in range(rounds)]
    assert not any(again)
    desk.tell(*(pull(n) for n in range(1000, 1000 + 3 * PENDING_MIN)))
    assert len(desk.exchange.pulls.pending) == PENDING_MIN
    assert len(desk.exchange.pulls.answered) <= most


def test_all_rounds_in_flight_may_wait_for_a_long_step() -> None:
    """However many the run keeps in flight: what is forgotten is not merged."""
    overlap = {"fragments": 12, "sync_every_steps": 12, "overlap_steps": 12}
    spec = RunSpec.model_validate({**SPEC.model_dump(), "algorithm": overlap})
    assert spec.algorithm.rounds_in_flight_max == 12
    desk = Desk(spec)
    desk.step()
    desk.tell(*(pull(n, timeout_s=90.0, fragments=12) for n in range(12)))
    assert [a.round for a in only(desk.step(), Contribute)] == list(range(12))


@pytest.mark.parametrize(("in_flight", "most"), [(1, 8), (4, 8), (5, 10), (10**12, PENDING_MAX)])
def test_as_many_pulls_wait_as_the_run_keeps_rounds_in_flight(in_flight: int, most: int) -> None:
    assert pending_max(in_flight) == most


# --- what was merged -----------------------------------------------------------------------------


def test_a_merge_is_told_once_with_the_cursor_of_its_contribution() -> None:
    desk = Desk()
    desk.step(4)
    desk.tell(pull(0))
    desk.step()
    assert not only(desk.tell(anchor(0, 1, merged=(1, 0))), Merged | Unmerged)
    merged = Merged(0, 0, Cursor(shard=7, sequences=5))
    assert only(desk.tell(anchor(0, 2, round_=3, merged=(2, 0))), Merged) == [merged]
    assert not only(desk.tell(anchor(0, 3, round_=6, merged=(2, 0))), Merged)


def test_a_later_merge_decides_earlier_contributions() -> None:
    desk = Desk()
    desk.step()
    for round_ in (0, 3):
        desk.tell(pull(round_))
        desk.step()
    decided = only(desk.tell(anchor(0, 2, round_=3, merged=(2, 3))), Merged | Unmerged)
    assert decided == [Unmerged(0, 0), Merged(0, 3, Cursor(shard=7, sequences=3))]
    assert not only(desk.tell(anchor(0, 3, round_=6, merged=(2, 0))), Merged | Unmerged)


def test_a_publication_at_or_past_the_round_decides_even_if_it_names_another() -> None:
    desk = Desk()
    desk.step()
    desk.tell(pull(3))
    desk.step()
    assert not only(desk.tell(anchor(0, 1, round_=0, merged=(2, 0))), Merged | Unmerged)
    assert only(desk.tell(anchor(0, 2, round_=3, merged=(2, 0))), Unmerged) == [Unmerged(0, 3)]


def test_the_first_publication_of_an_epoch_decides_what_was_sent_in_older_ones() -> None:
    desk = Desk()
    desk.step()
    for round_ in (0, 3):
        desk.tell(pull(round_))
        desk.step()
    # A keyframe that no round made: round 0 is in it, round 3 died with the epoch.
    decided = only(desk.tell(anchor(0, 1, epoch=1, merged=(2, 0))), Merged | Unmerged)
    assert decided == [Merged(0, 0, Cursor(shard=7, sequences=2)), Unmerged(0, 3)]


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


@pytest.mark.parametrize(("shards", "known"), [(1, True), (3, False)])
def test_a_round_that_is_closed_once_more_tells_how_much_is_used_by_then(
    shards: int, known: bool
) -> None:
    """A hub that lost records has it closed again; of several shards each has its own fraction."""
    algorithm = SPEC.algorithm.model_copy(update={"shards": shards})
    desk = Desk(SPEC.model_copy(update={"algorithm": algorithm}))
    first = beat(stamp=stamp(0), terms=(1,) * shards)
    desk.tell(first)
    desk.step(3)
    again = stamp(0).model_copy(update={"fraction": 0.5})
    desk.tell(beat(stamp=again, terms=(1,) * shards))
    place = desk.exchange.position()
    assert (place[1] >= 0.5) == known
    desk.tell(first)
    assert desk.exchange.position() == place, "what was closed first says no more"
