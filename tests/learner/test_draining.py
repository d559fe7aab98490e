"""Draining: nothing of a learner's work is wasted when it is told to leave a run that goes on."""

from learner.desk import SPEC, Desk, anchor, beat, last_progress, only, pull

from diloco_learner.events import Checkpoint, Contribute, Leave, SendProgress
from diloco_learner.exchange.counters import Counters
from diloco_learner.recovery.draining import DRAIN_S_MIN, Draining


def draining(steps: int = 2) -> Desk:
    desk = Desk()
    desk.tell(beat())
    desk.step(steps)
    desk.exchange.drain("not assigned any more", desk.now)
    assert last_progress(desk.pass_time(0.0)).state == "draining"
    return desk


def test_it_steps_no_more_and_leaves_once_every_fragment_has_taken_its_work() -> None:
    desk = draining()
    assert not desk.exchange.may_step
    for p in range(3):
        # Each is asked for when its turn comes: as at any other step boundary.
        (given,) = only(desk.tell(pull(p)), Contribute)
        assert (given.fragment, given.step_from, given.step_to) == (p, 0, 2)
        effects = desk.tell(anchor(p, 1, round_=p, merged=(2, p)))
        assert bool(only(effects, Leave)) == (p == 2)
    (leave,) = only(effects, Leave)
    assert leave.outcome == "drained" and "none of its work is left unmerged" in leave.reason
    # Its last words come in this order: moments, finished, good-bye.
    assert [type(e) for e in effects[-3:]] == [Checkpoint, SendProgress, Leave]
    assert last_progress(effects).state == "finished"
    assert only(effects, Checkpoint)[0].final


def test_one_that_has_done_nothing_since_it_adopted_leaves_at_once() -> None:
    desk = Desk()
    desk.tell(beat())
    desk.exchange.drain("assigned elsewhere", desk.now)
    assert only(desk.pass_time(0.0), Leave)


def test_one_that_has_only_skipped_steps_leaves_at_once() -> None:
    """No round takes these: it would wait for the longest time, and say that work was lost."""
    desk = Desk()
    desk.tell(beat())
    desk.step()
    desk.step(2, skipped=True)
    desk.exchange.drain("assigned elsewhere", desk.now)
    (leave,) = only(desk.pass_time(0.0), Leave)
    assert "none of its work is left unmerged" in leave.reason


def test_where_nobody_merges_it_does_not_wait() -> None:
    desk = draining()
    (leave,) = only(desk.tell(beat(state="paused")), Leave)
    assert "work on 3 fragments is lost, the run is paused" in leave.reason


def test_a_starved_run_is_waited_for_as_long_as_a_lease() -> None:
    """The last learner of a run has no round to wait for; the others of another may be late."""
    lease_s = SPEC.membership.lease_s
    desk = draining()
    assert not only(desk.tell(beat(state="starved")), Leave)
    assert desk.exchange.deadline <= desk.now + lease_s
    assert not only(desk.pass_time(lease_s - 1), Leave)
    # It has recovered: what comes later is another time of waiting.
    assert not only(desk.tell(beat(state="running")), Leave)
    assert not only(desk.tell(beat(state="starved")), Leave)
    assert not only(desk.pass_time(lease_s - 1), Leave)
    (leave,) = only(desk.pass_time(1.0), Leave)
    assert "work on 3 fragments is lost, the run is starved" in leave.reason


def test_it_waits_no_longer_than_the_others_could_need() -> None:
    desk = draining()
    assert not only(desk.pass_time(DRAIN_S_MIN - 1), Leave)
    # Twelve steps of a second each, three times over, are less than the least.
    assert desk.exchange.deadline <= desk.now + 1
    (leave,) = only(desk.pass_time(1.0), Leave)
    assert "no round came" in leave.reason


def test_a_slow_run_is_given_time_for_a_round_of_every_fragment() -> None:
    d, counters = Draining(10.0), Counters([0])
    d.begin("told", 0.0, round_s=100.0)
    counters.stepped(1)
    running = beat().beat
    assert d.over(running, counters, 299.0) == "" and d.over(running, counters, 300.0)


def test_the_end_of_the_run_comes_first() -> None:
    desk = draining()
    (leave,) = only(desk.tell(beat(state="finished")), Leave)
    assert leave.outcome == "finished"


def test_one_that_has_not_heard_its_syncer_yet_waits_for_it() -> None:
    d, counters = Draining(10.0), Counters([0])
    counters.stepped(1)
    d.begin("told", 0.0, round_s=1.0)
    assert d.over(None, counters, DRAIN_S_MIN - 1) == ""
    assert "there is no syncer" in d.over(None, counters, DRAIN_S_MIN)
