"""The syncer's promises (I2, I3, I10, I11 …), one test each, by events in and effects out."""

import itertools
import math
from typing import Any

import pytest

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeEnd, TapeSetting, TapeTerm, TensorSpec
from diloco_syncer.events import (
    Append,
    Appended,
    BusBack,
    ContributionSeen,
    Drop,
    Ended,
    Install,
    Led,
    Malformed,
    Publish,
    PurgeUp,
    SendBeat,
    SendGrant,
    SendPull,
    Snapshot,
    Stage,
    Tell,
    Wanted,
)
from diloco_syncer.history.history import TapeFault

LAYOUT = (
    TensorSpec(name="a", shape=(8,), embedding=False),
    TensorSpec(name="b", shape=(6,), embedding=True),
)


def of(effects: list[Any], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def test_nothing_is_decided_before_the_term_is_on_the_tape(driver: Any) -> None:
    driver.auto = False
    (append,) = driver.give(Led("s", 1000.0, (-1, -1)))
    assert isinstance(append, Append) and isinstance(append.record, TapeTerm)
    assert driver.join("a") == []
    assert driver.machine.deadline is None
    driver.give(Appended(1, 1000.0))
    assert of(driver.join("a"), SendGrant)


def test_bootstrap_waits_for_enough_learners_then_names_one_initializer(driver: Any) -> None:
    driver.lead()
    driver.join("a")
    assert driver.machine.announcer.state(driver.now)[0] == "waiting"
    driver.join("b")
    beat = of(driver.effects, SendBeat)[-1].beat
    assert (beat.state, beat.initializer) == ("bootstrapping", "a")


def test_initial_parameters_become_version_0_of_every_fragment(running: Any) -> None:
    published = of(running.effects, Publish)
    assert [(p.fragment, p.version, p.prev_version) for p in published] == [(0, 0, -1), (1, 0, -1)]
    assert running.machine.history.versions == [0, 0]


def test_a_round_opens_only_after_h_over_p_steps(running: Any) -> None:
    running.step("a", 3)
    running.step("b", 3)
    assert not running.pulls
    running.step("a")
    assert not running.pulls, "quorum is 2: b has only 3 steps"
    running.step("b")
    (pull,) = running.pulls
    assert (pull.round, pull.fragment, pull.participants) == (0, 0, ("a", "b"))


def test_everyone_in_commits_at_once_and_publishes(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    (pull,) = running.pulls
    assert not of(running.answer(pull, "a"), Stage), "b is still awaited"
    effects = running.answer(pull, "b")
    assert [c.learner for c in of(effects, Stage)[0].contributions] == ["a", "b"]
    assert of(effects, Install) and of(effects, Publish)[0].version == 1
    (record,) = running.rounds
    assert [d.key for d in of(effects, Drop)] == [v.subject for v in record.verdicts]
    assert record.outcome == "committed"
    assert {v.learner: v.outcome for v in record.verdicts} == {"a": "merged", "b": "merged"}
    assert running.machine.history.tokens_useful > 0


def test_beats_announce_the_newest_version_of_every_fragment(running: Any) -> None:
    for versions in ((1, 0), (1, 1), (2, 1), (2, 2)):
        for learner in "ab":
            running.step(learner, 4)
        pull = running.pulls[-1]
        for learner in "ab":
            running.answer(pull, learner)
            running.adopted_at[learner][pull.fragment] = running.steps[learner]
        assert of(running.effects, SendBeat)[-1].beat.versions == versions


def test_no_round_commits_below_k_i3(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    running.answer(running.pulls[0], "a")
    running.wait(4.0)  # within the lease, past the pull's timeout
    (record,) = running.rounds
    assert record.outcome == "skipped"
    verdicts = {v.learner: v.outcome for v in record.verdicts}
    assert verdicts == {"a": "refused", "b": "missed"}
    assert running.machine.history.versions == [0, 0]


def test_a_hung_third_learner_costs_two_mean_transfers_not_the_timeout(driver: Any) -> None:
    driver.start("a", "b", "c")
    for learner in "abc":
        driver.step(learner, 4)
    pull = driver.pulls[0]
    driver.now += 0.25
    driver.answer(pull, "a")
    driver.answer(pull, "b")
    assert not driver.rounds, "c may still come"
    driver.wait(2.0)  # tau * step is 2 s, of which gamma leaves 1.6 s
    (record,) = driver.rounds
    assert record.outcome == "committed"
    assert {v.learner: v.outcome for v in record.verdicts}["c"] == "missed"
    assert record.sync_s < 1.7


def test_a_lost_pull_is_sent_again(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    assert len(running.pulls) == 1
    running.wait(1.2)
    assert len(running.pulls) == 3
    assert len({(p.term, p.round) for p in running.pulls}) == 1


@pytest.mark.parametrize(
    ("over", "kind"),
    [
        ({"config_hash": "f" * 32}, "config"),
        ({"fragment": 1}, "malformed"),
        ({"values": 3}, "malformed"),
        ({"codec": "fp32"}, "malformed"),
        ({"base": -1, "finite": True}, "stale"),
        ({"base": 5}, "ahead"),
        ({"step_to": 0}, "malformed"),
        ({"tokens_to": 10**9}, "tokens"),
        ({"finite": False}, "non-finite"),
        ({"norm": math.nan}, "non-finite"),  # nobody fetched it
    ],
)
def test_bad_contributions_change_nothing_and_are_counted_i11(
    running: Any, over: dict[str, Any], kind: str
) -> None:
    if kind == "stale":
        running.machine.history.versions[0] = 1
    running.step("a", 4)
    running.step("b", 4)
    pull = running.pulls[0]
    before = list(running.machine.history.versions)
    effects = running.answer(pull, "a", **over)
    assert of(effects, Drop)
    running.answer(pull, "b")
    (record,) = running.rounds
    assert record.outcome == "skipped"
    verdict = next(v for v in record.verdicts if v.learner == "a")
    assert verdict.outcome == "refused" and verdict.reason.startswith(kind + ":")
    assert running.machine.history.versions == before
    assert running.machine.history.refused[kind] == 1


def test_a_contribution_that_contradicts_its_own_reports_is_refused_i11(running: Any) -> None:
    """Within two leases and the pull's time, at the speed that it reports, and H steps."""
    running.step("a", 4), running.step("b", 4)
    pull = running.pulls[-1]
    reported, lease_s = running.steps["b"], running.spec.membership.lease_s
    reach = reported + int(2 * (lease_s + pull.timeout_s)) + running.spec.algorithm.sync_every_steps
    per_step = running.spec.tokens_per_step
    running.answer(pull, "a")
    running.answer(pull, "b", step_to=reach + 1, tokens_to=(reach + 1) * per_step)
    verdict = next(v for v in running.rounds[-1].verdicts if v.learner == "b")
    assert verdict.outcome == "refused" and verdict.reason.startswith("counters: ends at step")
    assert running.machine.history.refused["counters"] == 1


def test_work_that_was_merged_is_not_claimed_again_under_the_next_version(running: Any) -> None:
    """Counters that were too high are contradicted by the next ones that are not."""
    per_step = running.spec.tokens_per_step

    def outcome(**claims: int) -> str:
        running.step("b", 4), running.step("a", 4)
        pull = running.pulls[-1]
        running.answer(pull, "a")
        running.answer(pull, "b", **claims)
        for learner in ("a", "b"):
            running.adopted_at[learner][pull.fragment] = running.steps[learner]
        return next(v.reason for v in running.rounds[-1].verdicts if v.learner == "b")

    assert outcome(step_to=10, tokens_to=10 * per_step) == "in time", "within its reports' reach"
    assert outcome() == "in time", "another fragment"
    assert outcome().startswith("counters: begins at token")


def test_a_far_norm_is_refused_from_the_first_round_on(driver_of: Any) -> None:
    d = driver_of(quorum=2)
    d.start("a", "b", "c")
    for learner in ("a", "b", "c"):
        d.step(learner, 4)
    pull = d.pulls[-1]
    for learner, norm in (("a", 1.0), ("b", 1.0), ("c", 100.0)):
        d.answer(pull, learner, norm=norm)
    assert {v.learner: v.outcome for v in d.rounds[-1].verdicts} == {
        "a": "merged",
        "b": "merged",
        "c": "refused",
    }
    assert d.rounds[-1].verdicts[2].reason == (
        "outlier: norm per root step 50 is 100 times the round's median, per step 25 is 100 times"
    )


@pytest.mark.parametrize(
    ("over", "kind"),
    [({"epoch": 1}, "epoch"), ({"term": 7}, "term"), ({"incarnation": 5}, "incarnation")],
)
def test_what_answers_another_leader_or_comes_of_another_life_takes_no_place_i11(
    running: Any, over: dict[str, int], kind: str
) -> None:
    """An answer to a deposed leader may arrive just before the one to its successor."""
    running.step("a", 4)
    running.step("b", 4)
    pull = running.pulls[0]
    assert of(running.answer(pull, "a", **over), Drop)
    assert running.machine.refused[kind] == 1
    running.answer(pull, "a")
    running.answer(pull, "b")
    (record,) = running.rounds
    assert {v.learner: v.outcome for v in record.verdicts} == {"a": "merged", "b": "merged"}


@pytest.mark.parametrize("quorum", [1, 2])
def test_an_answer_that_was_refused_at_the_door_is_not_waited_for(driver: Any, quorum: int) -> None:
    """A learner answers once, so nothing else of it would come before the deadline of the pull."""
    driver.start("a", "b")
    driver.give(Wanted(paused=False, stopping=False, quorum=quorum))
    driver.step("a", 4)
    driver.step("b", 4)
    pull = driver.pulls[0]
    subject = driver.manifest(pull, "a").blob.subject
    driver.answer(pull, "b")
    assert not driver.rounds
    bad = Malformed("malformed", subject + ".m", "14 bytes for 7 values, not 36", subject)
    told = of(driver.give(bad), Tell)
    assert [t.kind for t in told][:1] == ["refused"] and driver.machine.refused["malformed"] == 1
    (record,) = driver.rounds
    assert record.outcome == ("committed" if quorum == 1 else "skipped")
    verdict = next(v for v in record.verdicts if v.learner == "a")
    assert (verdict.outcome, verdict.incarnation, verdict.tokens_to) == ("missed", 0, 0)
    assert verdict.reason == ("its answer was refused: malformed: 14 bytes for 7 values, not 36")


def test_a_sound_answer_that_follows_a_refused_one_in_time_is_merged_once_i2(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    pull = running.pulls[0]
    subject = running.manifest(pull, "a").blob.subject
    bad = Malformed("malformed", subject + ".m", "junk", subject)
    for answer in (bad, running.manifest(pull, "a"), bad, running.manifest(pull, "b")):
        seen = answer if answer is bad else ContributionSeen(answer, finite=True, norm=1.0)
        running.give(seen)
    (record,) = running.rounds
    assert [(v.learner, v.outcome) for v in record.verdicts] == [("a", "merged"), ("b", "merged")]
    assert record.verdicts[0].tokens_new == 4 * running.spec.tokens_per_step


@pytest.mark.parametrize("part", ["learner", "epoch", "fragment", "round", "term"])
def test_what_answers_no_open_pull_leaves_nobody_out(running: Any, part: str) -> None:
    running.step("a", 4)
    running.step("b", 4)
    pull = running.pulls[0]
    place = {
        "learner": "a",
        "epoch": pull.epoch,
        "fragment": pull.fragment,
        "round_": pull.round,
        "term": pull.term,
    }
    name = "round_" if part == "round" else part
    place[name] = "c" if part == "learner" else place[name] + 1
    subject = subjects.contribution("t", **place)
    running.give(Malformed("malformed", subject + ".m", "junk", subject))
    running.give(Malformed("wire", "a", "no contribution"))
    running.answer(pull, "b")
    assert not running.rounds
    running.answer(pull, "a")
    (record,) = running.rounds
    assert {v.learner: v.outcome for v in record.verdicts} == {"a": "merged", "b": "merged"}


def test_a_newer_life_that_answers_ends_the_wait_for_the_one_that_was_asked_i10(
    running: Any,
) -> None:
    """An older one does not: it may be overtaken by the one that was asked."""
    running.step("a", 4)
    running.step("b", 4)
    pull = running.pulls[0]
    running.answer(pull, "b")
    running.answer(pull, "a", incarnation=1)
    (record,) = running.rounds
    verdict = next(v for v in record.verdicts if v.learner == "a")
    assert (verdict.outcome, verdict.incarnation) == ("missed", 0)
    assert "incarnation 1 has taken its place" in verdict.reason


def test_malformed_messages_are_counted_and_told_ever_more_rarely(running: Any) -> None:
    told = [of(running.give(Malformed("wire", "x", "junk")), Tell) for _ in range(8)]
    assert running.machine.refused["wire"] == 8
    assert [bool(t) for t in told] == [True, True, False, True, False, False, False, True]


def test_a_late_contribution_is_dropped_and_counted(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    pull = running.pulls[0]
    late = running.manifest(pull, "a")
    running.answer(pull, "a")
    running.answer(pull, "b")
    effects = running.answer(pull, "a")
    assert of(effects, Drop)[0].key == late.blob.subject
    assert running.machine.refused["late"] == 1


def test_a_contribution_that_comes_twice_counts_once_i2(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    pull = running.pulls[0]
    running.answer(pull, "a")
    assert running.answer(pull, "a") == []
    other = running.manifest(pull, "a").blob.model_copy(update={"subject": "up.r.a.elsewhere"})
    assert of(running.answer(pull, "a", blob=other), Drop)
    assert running.machine.refused["second"] == 1
    running.answer(pull, "b")
    (record,) = running.rounds
    assert [v.learner for v in record.verdicts] == ["a", "b"]
    assert record.verdicts[0].tokens_new == 4 * running.spec.tokens_per_step


def test_pause_opens_nothing_and_resume_goes_on(running: Any) -> None:
    running.give(Wanted(paused=True, stopping=False, quorum=2))
    assert isinstance(running.tape[-1], TapeSetting)
    running.step("a", 4)
    running.step("b", 4)
    assert not running.pulls
    assert running.machine.announcer.state(running.now)[0] == "paused"
    running.give(Wanted(paused=False, stopping=False, quorum=2))
    assert running.pulls


def test_quorum_can_be_changed_on_a_live_run(running: Any) -> None:
    running.give(Wanted(paused=False, stopping=False, quorum=1))
    running.step("a", 4)
    running.wait(1.7)  # the grace window: gamma * tau steps of 1 s
    running.answer(running.pulls[0], "a")
    running.wait(3.0)
    assert running.rounds[0].quorum == 1 and running.rounds[0].outcome == "committed"


def finish(d: Any) -> None:
    for _ in range(200):
        if of(d.effects, Ended):
            return
        done = len(d.pulls)
        d.now += 0.1
        d.step("a", 1)
        d.step("b", 1)
        for pull in d.pulls[done:]:
            for learner in "ab":
                d.answer(pull, learner)
                d.adopted_at[learner][pull.fragment] = d.steps[learner]


def test_the_budget_ends_the_run_after_one_last_round_of_every_fragment(running: Any) -> None:
    finish(running)
    assert isinstance(running.tape[-1], TapeEnd)
    assert running.tape[-1].outcome == "finished"
    # 80 steps of 4 per round are 20 rounds; then each of 2 fragments once more.
    assert len(running.rounds) == 22
    assert running.rounds[19].stamp.fraction == 1.0
    assert running.machine.announcer.state(running.now)[0] == "finished"


def test_every_outer_step_knows_how_much_of_the_budget_was_used(running: Any) -> None:
    """The momentum's schedule follows it, and whoever executes the tape again must know it."""
    finish(running)
    staged = [s.fraction for s in of(running.effects, Stage)]
    before = [0.0, *(r.stamp.fraction for r in running.rounds)][: len(staged)]
    assert staged == pytest.approx(before)
    assert [r.outer_fraction for r in running.rounds] == staged
    assert staged[1] > 0 and staged[-1] == 1.0


def test_rounds_are_never_closer_than_h_over_p_steps(running: Any) -> None:
    finish(running)
    paced = running.rounds[:20]
    steps = [min(v.step_to for v in r.verdicts) for r in paced]
    assert all(b - a >= 4 for a, b in itertools.pairwise(steps)), steps


def test_another_makes_the_last_evaluation_when_its_evaluator_dies(running: Any) -> None:
    finish(running)
    announcer = running.machine.announcer
    assert announcer.evaluator == "a"
    for _ in range(6):  # a is silent for longer than its lease
        running.wait(1.0)
        running.step("b", 0)
    assert of(running.effects, SendBeat)[-1].beat.evaluator == "b"
    running.step("b", 0, state="finished")
    beat = of(running.effects, SendBeat)[-1].beat
    assert beat.evaluated and beat.evaluator == "b"


@pytest.mark.parametrize(("state", "last"), [("finished", False), ("draining", True)])
def test_an_evaluator_that_left_too_soon_made_no_evaluation(
    running: Any, state: str, last: bool
) -> None:
    finish(running)
    running.step("b", 0)
    versions = tuple(running.machine.history.versions)
    running.step("a", 0, state=state, adopted=versions if last else (0, 0))
    beat = of(running.effects, SendBeat)[-1].beat
    assert not beat.evaluated and beat.evaluator == "b"


def test_stop_without_learners_ends_at_once(running: Any) -> None:
    running.wait(6.0)
    running.give(Wanted(paused=False, stopping=True, quorum=2))
    assert isinstance(running.tape[-1], TapeEnd) and running.tape[-1].outcome == "stopped"


def test_silence_while_the_bus_was_away_evicts_nobody(running: Any) -> None:
    running.now += 30.0
    running.give(BusBack())
    assert len(running.machine.roster.live(running.now)) == 2


def test_who_was_lost_before_is_not_alive_because_the_bus_was_away(running: Any) -> None:
    running.now += 30.0
    running.step("a", 1)
    assert [m.learner for m in running.machine.roster.live(running.now)] == ["a"]
    running.give(BusBack())
    assert [m.learner for m in running.machine.roster.live(running.now)] == ["a"]


def test_a_record_that_cannot_follow_never_reaches_the_tape(running: Any) -> None:
    """All who read the tape would end at it for ever, and with them the run."""
    for learner in "ab":
        running.step(learner, 4)
    (open_round,) = running.machine.rounds.open
    open_round.n = 5
    running.answer(running.pulls[-1].model_copy(update={"round": 5}), "a")
    before = list(running.tape)
    with pytest.raises(TapeFault, match="round 5 where 0 was due"):
        running.answer(running.pulls[-1].model_copy(update={"round": 5}), "b")
    assert running.tape == before


def test_a_skipped_round_is_never_numbered_again(driver_of: Any) -> None:
    d = driver_of(overlap_steps=8, fragments=4, sync_every_steps=8)
    assert d.spec.algorithm.rounds_in_flight_max == 4
    idle = {"c_steps": (0,) * 4, "c_tokens": (0,) * 4, "adopted": (0,) * 4, "adopted_at": (0,) * 4}
    d.lead()
    for learner in "ab":
        d.join(learner)
    d.give(d.initial("a"))
    for _ in range(5):
        for learner in "ab":
            d.step(learner, 2, **idle)
    assert [r.outcome for r in d.rounds] == ["skipped"] * 5
    assert [r.round for r in d.rounds] == [0, 1, 2, 3, 4]


def test_no_two_rounds_of_one_fragment_are_open(driver_of: Any) -> None:
    """Though there may be as many in flight: the second would build on what it replaces."""
    d = driver_of(overlap_steps=8, fragments=1, sync_every_steps=4)
    assert d.spec.algorithm.rounds_in_flight_max == 2
    d.lead()
    for learner in "ab":
        d.join(learner)
        d.adopted_at[learner] = [0]
    d.give(d.initial("a"))
    for _ in range(4):
        for learner in "ab":
            d.step(learner, 4)
        assert [r.n for r in d.machine.rounds.open] == [0]


def test_two_rounds_in_flight_commit_in_order(driver_of: Any) -> None:
    d = driver_of(overlap_steps=8)
    assert d.spec.algorithm.rounds_in_flight_max == 2
    d.start("a", "b")
    for _ in range(2):
        d.step("a", 4)
        d.step("b", 4)
    first, second = d.pulls
    for learner in "ab":
        d.answer(second, learner)
    assert not d.rounds, "round 1 is ready, round 0 is not"
    for learner in "ab":
        d.answer(first, learner)
    assert [r.round for r in d.rounds] == [0, 1]


def test_snapshots_release_the_contributions_they_cover(running: Any) -> None:
    finish(running)
    purged = of(running.effects, PurgeUp)
    assert purged
    covered = [s.round for s in running.tape if s.kind == "snapshot"]
    assert [p.last_round for p in purged] == covered


def test_initial_parameters_stay_where_they_are_until_they_are_published(driver: Any) -> None:
    """If all disks were lost before, nobody else would have them."""
    m = driver.machine
    m.published, m.history.versions = (0, -1), [0, 0]
    m.history.owned, m.covered = (0, 1), -1
    assert m._free_up() == []
    m.published = (0, 0)
    assert m._free_up() == [PurgeUp(-1)]
    assert m._free_up() == [], "it is said once"


def test_a_snapshot_names_the_newest_closed_round_and_frees_what_it_covers_once_it_is_durable(
    driver: Any,
) -> None:
    keeping = driver.spec.keeping.model_copy(update={"snapshot_every_rounds": 2})
    driver.machine.spec = driver.spec.model_copy(update={"keeping": keeping})
    driver.start("a", "b")
    finish(driver)
    written, purged = of(driver.effects, Snapshot), of(driver.effects, PurgeUp)
    assert len(written) > 2
    for s in written:
        closed = [r.round for r in driver.tape[: s.covers] if r.kind == "round"]
        assert s.round == (closed[-1] if closed else -1)
    covered = [s.round for s in driver.tape if s.kind == "snapshot"]
    assert [p.last_round for p in purged] == covered


def test_pulls_name_only_learners_with_steps_on_the_fragment(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4, c_steps=(0, 4))
    assert not of(running.effects, SendPull), "one eligible of two needed: skipped unpulled"
    assert running.rounds[0].outcome == "skipped"
    assert {v.learner: v.outcome for v in running.rounds[0].verdicts}["b"] == "ineligible"


def test_a_usual_latecomer_is_waited_for_while_that_saves_more_than_it_costs(
    driver_of: Any,
) -> None:
    d = driver_of(quorum=1)
    d.start("a", "b")

    def b_answers_after(seconds: float, at_stake: int) -> str:
        d.step("a", 4)
        d.step("b", 4, c_steps=(at_stake, at_stake))
        pull = d.pulls[-1]
        base = d.machine.history.versions[pull.fragment]  # late or not, of before the round
        d.answer(pull, "a")
        d.wait(seconds)
        d.answer(pull, "b", base=base)
        d.adopted_at |= {learner: [d.steps[learner]] * 2 for learner in ("a", "b")}
        return next(v.outcome for v in d.rounds[-1].verdicts if v.learner == "b")

    # A step takes a second. The first time nobody knows yet how long b takes.
    assert [b_answers_after(2.4, at_stake=4) for _ in range(3)] == ["missed", "merged", "merged"]
    assert b_answers_after(2.4, at_stake=3) == "missed"


def test_nobody_who_trains_is_left_out_for_ever_i10(driver_of: Any) -> None:
    """A learner of slow steps answers after every close, and gives its late answers up."""
    d = driver_of(quorum=1)
    d.start("a", "b")
    outcomes = []
    for _ in range(8):
        d.step("a", 4)
        d.step("b", 2, step_s=2.0, c_steps=(2, 2))
        d.wait(1.7)  # the grace window
        pull = d.pulls[-1]
        d.answer(pull, "a")
        d.wait(2.2)
        if not d.rounds or d.rounds[-1].round != pull.round:
            d.answer(pull, "b")
        outcomes.append(next(v.outcome for v in d.rounds[-1].verdicts if v.learner == "b"))
    assert outcomes[0] == "missed" and "merged" in outcomes
