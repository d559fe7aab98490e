"""Members in the syncer's eyes (I10): admitted, silent, giving state, and what they weigh."""

from typing import Any

import pytest

from diloco_shared.budget import Size
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    COUNT_MAX,
    Beat,
    Blob,
    Join,
    LifeCount,
    PublicationManifest,
    Stamp,
    Verdict,
)
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import layout_of
from diloco_syncer.events import (
    BusBack,
    JoinSeen,
    ProgressSeen,
    Publish,
    SendBeat,
    SendDonate,
    SendGrant,
    Stage,
    Tell,
    Wanted,
)
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.members import admission as admission_module
from diloco_syncer.members import roster as roster_module
from diloco_syncer.members.layouts import WORD_S
from diloco_syncer.members.roster import GONE_S, LEFT_S, REFUSED_MAX
from diloco_syncer.rounds.rounds import DESERTED
from diloco_syncer.status.status import size, status


def of(effects: list[Any], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def test_silence_beyond_the_lease_makes_weight_zero_i10(running: Any) -> None:
    running.step("a", 4)
    running.wait(5.5)
    assert running.machine.announcer.state(running.now)[0] == "starved"
    running.step("a", 4)
    assert not running.pulls, "K = 2, one alive"
    lost = [t.data["learner"] for t in of(running.effects, Tell) if t.kind == "learner-lost"]
    assert "b" in lost
    running.step("b", 8)
    assert running.pulls[0].participants == ("a", "b")


def test_an_older_incarnation_is_refused_i10(running: Any) -> None:
    running.join("b", incarnation=1)
    before = running.machine.roster.members["b"]
    running.give(ProgressSeen(running.progress("b", 50, incarnation=0)))
    assert running.machine.roster.members["b"] is before
    assert running.machine.refused["incarnation"] == 1
    asked = running.join("b", incarnation=0)
    assert not of(asked, SendGrant), "though the life before it was let in under this nonce"
    beat = of(running.wait(1.0), SendBeat)[-1].beat
    assert beat.incarnations["b"] == 1


@pytest.mark.parametrize("sent", [False, True])
def test_nobody_waits_for_a_life_that_another_has_replaced(driver_of: Any, sent: bool) -> None:
    """What that life has sent before is merged all the same, if others are waited for."""
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    driver.step("a", 4)
    driver.step("b", 4)
    pull = driver.pulls[0]
    assert pull.participants == ("a", "b")
    driver.join("b", incarnation=1)
    if sent:
        driver.answer(pull, "b")
    driver.answer(pull, "a")
    (record,) = driver.rounds
    assert record.outcome == "committed", "without another second"
    of_b = {v.learner: (v.incarnation, v.outcome) for v in record.verdicts}["b"]
    assert of_b == (0, "merged" if sent else "missed")


@pytest.mark.parametrize("others", [True, False])
def test_nobody_waits_for_silent_ones_while_others_could_make_the_next_round(
    driver_of: Any, others: bool
) -> None:
    """With nobody else the pull has its time: an answer may outlive its sender's signs of life."""
    driver = driver_of(quorum=1, pull_timeout_s_min=60.0)
    driver.start("a", "b")
    driver.step("a", 4)
    driver.step("b", 4)
    pull = driver.pulls[0]
    assert pull.participants == ("a", "b")
    driver.join("b", incarnation=1)  # that leaves the silent one
    for n in range(2):
        driver.wait(4.0)
        if others:
            driver.step("b", 4, incarnation=1)
        assert len(driver.rounds) == (others and n == 1)
    if not others:
        driver.answer(pull, "a")
    first = driver.rounds[0]
    assert first.outcome == ("skipped" if others else "committed")
    if others:
        assert first.reason == f"{DESERTED}: 0 contributions, 1 needed"
        assert driver.pulls[-1].round == 1 and driver.pulls[-1].participants == ("b",)


def test_silent_ones_are_awaited_while_somebody_live_may_still_answer(driver_of: Any) -> None:
    driver = driver_of(quorum=2, pull_timeout_s_min=60.0)
    driver.start("a", "b", "c", "d")
    for learner in "abcd":
        driver.step(learner, 4)
    pull = driver.pulls[0]
    driver.answer(pull, "b")
    for _ in range(2):
        driver.wait(4.0)
        for learner in "bc":
            driver.step(learner, 4)
    assert not driver.rounds, "c lives, and has not answered"
    driver.answer(pull, "c")
    driver.wait(4.0)
    assert driver.rounds[0].outcome == "committed"


def test_a_shard_that_has_not_begun_follows_the_epoch_of_another(driver_of: Any) -> None:
    """The other one lost its state and began again; learners wait until all are in one epoch."""
    driver = driver_of(shards=2)
    driver.lead()
    driver.join("a")
    assert driver.machine.history.epoch == 0
    ahead = Join(learner="a", incarnation=1, nonce="n", config=driver.config, epoch=2)
    stranger = ahead.model_copy(update={"learner": "x", "config": {}})
    driver.give(JoinSeen(stranger))
    assert driver.machine.history.epoch == 0, "who is not let in tells nothing"
    driver.give(JoinSeen(ahead))
    assert driver.machine.history.epoch == 2
    assert not of(driver.effects, Publish), "there is nothing to publish yet"
    again = of(driver.give(JoinSeen(ahead)), SendGrant)[-1].grant
    assert again.accepted and again.epoch == 2


def test_a_newcomer_gets_a_healthy_donor_which_is_asked_until_it_trains(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    for learner in "ab":
        running.answer(running.pulls[0], learner)
    effects = running.join("c")
    grant = of(effects, SendGrant)[0].grant
    assert grant.accepted and grant.donor in ("a", "b") and grant.versions == (1, 0)
    assert of(effects, SendDonate)[0].donate.newcomer == "c"
    running.step("a")
    assert of(running.wait(2.1), SendDonate)
    running.step("c", 1)
    assert not of(running.wait(2.1), SendDonate)


def test_a_join_that_comes_twice_gets_the_first_grant_again_and_takes_no_second_donor(
    running: Any,
) -> None:
    running.step("a", 4)
    running.step("b", 4)
    first = of(running.join("c"), SendGrant)[0].grant
    assert first.donor in ("a", "b")
    again = running.join("c")
    assert [e.grant for e in of(again, SendGrant)] == [first]
    assert not of(again, SendDonate) and not of(again, Tell)


def test_no_more_grants_are_remembered_than_their_limit_the_oldest_goes_i12(
    running: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(admission_module, "GRANTS_MAX", 2)
    for name in ("c", "d", "e"):
        running.join(name)
    assert list(running.machine.admission.grants) == ["d-0", "e-0"]


@pytest.mark.parametrize(("shards", "accepted"), [(1, False), (2, True)])
def test_nobody_is_let_into_a_run_that_is_over_but_for_other_shards(
    driver_of: Any, shards: int, accepted: bool
) -> None:
    driver = driver_of(shards=shards)
    driver.start("a", "b")
    driver.machine.history.outcome = "stopped"
    grant = of(driver.join("c"), SendGrant)[0].grant
    assert grant.accepted is accepted
    assert accepted or "the run is over (stopped)" in grant.reason


def test_a_donor_that_failed_is_not_named_again_and_none_is_said_so(running: Any) -> None:
    running.step("a", 4)

    def ask(nonce: str, *failed: str) -> Any:
        join = Join(
            learner="c",
            incarnation=0,
            nonce=nonce,
            config=running.config,
            failed_donors=failed,
        )
        return of(running.give(JoinSeen(join)), SendGrant)[0].grant

    assert ask("n1").donor == "a", "b has taken no step yet"
    grant = ask("n2", "a")
    assert grant.accepted and grant.donor == ""


def test_how_large_the_run_is_told_by_those_who_are_let_in(driver: Any) -> None:
    """The streams' limits follow it; so a stranger must not."""
    driver.lead()

    def ask(learner: str, layout: str, parameters: int) -> int:
        config = driver.config | {"layout": layout * 32}
        join = Join(
            learner=learner, incarnation=0, nonce=learner, config=config, parameters=parameters
        )
        driver.give(JoinSeen(join))
        return size(driver.machine).parameters

    assert ask("a", "e", 10**12) == 0, "one alone is not believed where two are needed"
    assert ask("b", "e", 5000) == 5000, "who has the same tensors has as many parameters"
    assert ask("c", "f", 10**12) == 5000
    assert size(driver.machine) == Size(5000, 2)


def test_the_first_word_about_the_layout_binds_nobody_once_more_say_another(driver: Any) -> None:
    driver.lead()
    grants = [
        of(driver.join(learner, layout=layout * 32), SendGrant)[0].grant.accepted
        for learner, layout in (("thief", "f"), ("a", "e"), ("b", "e"), ("a", "e"), ("c", "g"))
    ]
    assert grants == [True, False, True, True, False]


def test_whoever_has_no_layout_or_another_configuration_says_nothing_of_the_layout(
    driver: Any,
) -> None:
    """It is refused, and so would be, for ever, one alone that comes after it."""
    driver.lead()
    for learner, changed in (("x", {"seed": "77", "layout": "f" * 32}), ("y", {"layout": ""})):
        driver.join(learner, **changed)
        assert driver.machine.admission.layouts.told == {}
    assert of(driver.join("a", layout="e" * 32), SendGrant)[0].grant.accepted


def test_the_word_of_one_that_is_gone_binds_nobody(driver: Any) -> None:
    driver.lead()
    assert of(driver.join("thief", layout="f" * 32), SendGrant)[0].grant.accepted
    assert not of(driver.join("a", layout="e" * 32), SendGrant)[0].grant.accepted
    driver.wait(driver.spec.membership.lease_s + WORD_S)
    assert of(driver.join("a", 1, layout="e" * 32), SendGrant)[0].grant.accepted


def test_of_a_preset_the_specification_says_the_layout_and_how_large_it_is(driver: Any) -> None:
    model = {"preset": "nano"}
    spec = RunSpec.model_validate({**driver.spec.model_dump(), "model": model})
    driver.spec, driver.machine = spec, Machine(spec, History(spec))
    expected = layout_of(spec.model, spec.algorithm.fragments)
    driver.lead()
    assert size(driver.machine).parameters == sum(expected.sizes)
    grant = of(driver.join("thief"), SendGrant)[0].grant
    assert not grant.accepted and "layout: here " in grant.reason
    assert of(driver.join("a", layout=expected.digest()), SendGrant)[0].grant.accepted


def test_another_layout_is_refused(running: Any) -> None:
    """A model of another shape under the same name, on a learner whose code differs."""
    grant = of(running.join("c", layout="f" * 32), SendGrant)[0].grant
    assert not grant.accepted and "layout: here " in grant.reason


def test_before_there_are_parameters_the_first_to_join_sets_the_layout(driver: Any) -> None:
    driver.lead()
    driver.join("a", layout="e" * 32)
    assert not of(driver.join("b"), SendGrant)[0].grant.accepted
    assert of(driver.join("c", layout="e" * 32), SendGrant)[0].grant.accepted


def test_another_configuration_is_refused_naming_the_differing_keys(running: Any) -> None:
    effects = running.join("c", **{"algorithm.fragments": "9"})
    grant = of(effects, SendGrant)[0].grant
    assert not grant.accepted
    assert "algorithm.fragments: here 2, there 9" in grant.reason


def test_newcomers_at_once_get_donors_of_their_own(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    donors = {of(running.join(name), SendGrant)[0].grant.donor for name in ("c", "d")}
    assert donors == {"a", "b"}


def test_a_draining_learner_is_merged_but_not_waited_for_nor_a_donor(driver_of: Any) -> None:
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    driver.step("b", 2, state="draining")
    assert driver.machine.roster.stepping(driver.now)[0].learner == "a"
    driver.step("a", 4)
    assert driver.pulls[-1].participants == ("a", "b"), "grace is over: nobody else steps"
    driver.answer(driver.pulls[-1], "b")
    driver.answer(driver.pulls[-1], "a")
    assert [v.outcome for v in driver.rounds[-1].verdicts] == ["merged", "merged"]
    assert of(driver.join("c"), SendGrant)[0].grant.donor == "a"


def test_who_holds_is_not_asked_again_for_what_is_merged_already_i2(driver_of: Any) -> None:
    """What it gave is published, but has not reached it when the fragment comes round again."""
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    driver.step("b", 2, state="draining")
    for participants in (("a", "b"), ("a", "b"), ("a",)):  # both fragments, and the first again
        driver.step("a", 4)
        driver.step("b", 0, state="draining")
        pull = driver.pulls[-1]
        assert pull.participants == participants
        for learner in participants:
            driver.answer(pull, learner)
    left_out = {v.learner: v for v in driver.rounds[-1].verdicts}["b"]
    assert (left_out.outcome, "merged" in left_out.reason) == ("ineligible", True)


def test_a_new_leader_lets_no_life_in_that_the_tape_knows_to_be_over_i10(running: Any) -> None:
    running.join("b", incarnation=1)
    running.step("a", 4)
    running.step("b", 4, incarnation=1)
    for learner, incarnation in (("a", 0), ("b", 1)):
        running.answer(running.pulls[0], learner, incarnation=incarnation)
    successor = Machine(running.spec, History(running.spec))
    for seq, record in enumerate(running.tape, 1):
        successor.history.apply(record, seq)
    successor = Machine(running.spec, successor.history)
    successor.handle(ProgressSeen(running.progress("b", 50, incarnation=0)), 0.0)
    assert "b" not in successor.roster.members


@pytest.mark.parametrize(
    ("weighting", "share"), [("quality", 1 / 3), ("tokens", 1 / 3), ("equal", 1 / 2)]
)
def test_contributions_weigh_what_the_run_says(
    driver_of: Any, weighting: str, share: float
) -> None:
    driver = driver_of(weighting=weighting)
    driver.start("a", "b")
    driver.step("a", 4)
    driver.step("b", 8)
    (pull,) = driver.pulls
    driver.answer(pull, "a")
    a, b = of(driver.answer(pull, "b"), Stage)[0].contributions
    assert a.weight / (a.weight + b.weight) == pytest.approx(share)


def test_who_is_still_in_an_older_epoch_is_not_asked(driver_of: Any) -> None:
    """It has nothing to give until it has adopted the new one's anchors."""
    driver = driver_of(quorum=1)
    driver.start("a", "b")
    driver.step("a", 0, epoch=2)  # of records that were lost: epoch 3 begins
    for _ in range(5):
        driver.step("a", 1, epoch=3)
        driver.step("b", 1, epoch=0)
    (pull,) = driver.pulls
    assert (pull.epoch, pull.participants) == (3, ("a",))
    driver.answer(pull, "a")
    (record,) = driver.rounds
    assert {v.learner: v.outcome for v in record.verdicts}["b"] == "ineligible"


def test_a_life_that_is_silent_for_very_long_is_over_on_the_tape_i5(running: Any) -> None:
    """Its work in flight is lost, and no manifest or beat names it any more."""
    running.step("a", 4)
    running.step("b", 4)
    for learner in "ab":
        running.answer(running.pulls[0], learner)
    history, roster = running.machine.history, running.machine.roster
    assert set(history.last_merged[0]) == {"a", "b"}
    for _ in range(round(GONE_S) + 2):
        running.wait(1.0)
        running.step("a", 0)
    assert "b" not in roster.members and "b" not in roster.recoveries.heard
    running.machine.history.quorum = 1
    for _ in range(6):
        pulls = len(running.pulls)
        running.step("a", 4)
        running.wait(60.0)
        for pull in running.pulls[pulls:][:1]:
            running.answer(pull, "a")
    assert any(c.learner == "b" and c.left for r in running.rounds for c in r.counts)
    assert "b" not in history.ledger.lives
    assert set(history.last_merged[0]) == {"a"}
    for tokens in history.ledger.tokens_P():
        assert sum(tokens.model_dump().values()) == history.ledger.processed
    # Towards the fragment 0 all of b's work was merged before.
    assert [tokens.lost for tokens in history.ledger.tokens_P()] == [0, 2048]


def test_who_comes_back_after_its_life_was_over_is_told_to_begin_another(running: Any) -> None:
    for _ in range(round(GONE_S) + 2):
        running.wait(1.0)
        running.step("a", 0)
    beat = of(running.wait(1.0), SendBeat)[-1].beat
    assert set(beat.incarnations) == {"a"}
    running.step("b", 1)
    assert "b" not in running.machine.roster.members
    beat = of(running.wait(1.0), SendBeat)[-1].beat
    assert beat.incarnations["b"] == 1, "a newer life than the one that spoke"
    assert not of(running.join("b", incarnation=0), SendGrant), "not refused for good"
    assert of(running.join("b", incarnation=1), SendGrant)[0].grant.accepted
    running.step("b", 0, incarnation=1)
    assert "b" in running.machine.roster.members


def test_who_has_left_is_forgotten_soon_and_may_come_back(running: Any) -> None:
    running.step("b", 0, state="finished")
    for _ in range(round(LEFT_S) + 2):
        running.wait(1.0)
        running.step("a", 0)
    assert "b" not in running.machine.roster.members
    assert not running.machine.roster.gone
    assert of(running.join("b", incarnation=1), SendGrant)[0].grant.accepted


def test_a_leader_forgets_whom_its_tape_knows_and_it_never_heard(running: Any) -> None:
    running.step("a", 4)
    running.step("b", 4)
    for learner in "ab":
        running.answer(running.pulls[0], learner)
    successor = Machine(running.spec, running.machine.history)
    roster = successor.roster
    roster.tidy(0.0)
    assert not roster.gone
    roster.tidy(GONE_S + 1)
    assert set(roster.gone) == {"a", "b"}
    told = roster.counts.unrecorded(running.machine.history.ledger)
    assert [(c.learner, c.left) for c in told] == [("a", True), ("b", True)]


def test_there_is_a_limit_to_learners_at_once_i12(running: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(roster_module, "MEMBERS_MAX", 2)
    grant = of(running.join("c"), SendGrant)[0].grant
    assert not grant.accepted and "as many as it can take" in grant.reason
    running.step("c", 1)
    assert "c" not in running.machine.roster.members
    running.wait(5.5)
    running.step("a", 1)
    assert of(running.join("c"), SendGrant)[0].grant.accepted, "b is silent: there is room"
    running.wait(1.0)
    assert len(running.machine.roster.members) <= 3


def test_messages_about_as_many_learners_as_there_may_be_fit_one_message_i12() -> None:
    """Whatever their names: NATS takes 1 MB by default."""
    names = [f"{n:063d}" for n in range(MEMBERS_MAX)]
    beat = Beat(
        run="r" * 63,
        epoch=9,
        term=9,
        state="running",
        reason="x" * 500,
        versions=(10**6,) * 256,
        stamp=Stamp(round=10**6, steps=10**7, fraction=0.123456789, fraction_per_step=1e-7),
        live=tuple(names),
        incarnations=dict.fromkeys([*names, *(f"{n:x>63}" for n in range(REFUSED_MAX))], 10**6),
    )
    assert len(encode(beat)) < 1_000_000
    verdict = Verdict(
        learner=names[0],
        incarnation=10**6,
        outcome="merged",
        reason="",
        weight=1234.5678901234,
        base=10**6,
        step_from=10**7,
        step_to=10**7,
        tokens_from=10**12,
        tokens_to=10**12,
        norm=0.12345678901234567,
        tokens_new=10**12,
        subject=subjects.contribution("r" * 63, names[0], 9, 100, 10**6, 9),
        digest="0" * 32,
    )
    count = LifeCount(
        learner=names[0],
        incarnation=10**6,
        tokens=10**12,
        adopted=tuple((p, 10**12) for p in range(24)),
    )
    assert (len(encode(verdict)) + len(encode(count))) * MEMBERS_MAX < 1_000_000
    assert len(encode_merged(names)) < 1_000_000


def encode_merged(names: list[str]) -> bytes:
    blob = Blob(subject="dn.r.0.0.0.1", bytes=1, chunk_bytes=1, chunks=1, digest="0" * 32)
    return encode(
        PublicationManifest(
            run="r",
            epoch=0,
            term=1,
            round=0,
            fragment=0,
            version=1,
            prev_version=0,
            codec="fp32",
            values=1,
            anchor_digest="0" * 32,
            config_hash="0" * 32,
            participants=tuple(names),
            last_merged={name: (10**6, 10**6, 10**6) for name in names},
            stamp=Stamp(round=0, steps=0, fraction=0.0, fraction_per_step=0.0),
            blob=blob,
        )
    )


def test_a_lower_quorum_also_frees_the_round_that_has_enough_of_it_now(running: Any) -> None:
    """Nobody may answer any more: what has come must not wait for the pull's own deadline."""
    running.step("a", 4)
    running.step("b", 4)
    running.answer(running.pulls[0], "a")
    (waiting,) = [r for r in running.machine.rounds.open if r.kept]
    before = waiting.deadline
    running.give(Wanted(paused=False, stopping=False, quorum=1))
    assert waiting.deadline < before
    running.wait(waiting.deadline - running.now + 0.1)
    assert running.rounds[0].outcome == "committed"


def test_answers_that_an_outage_held_back_say_nothing_of_later_ones(running: Any) -> None:
    """Else the next rounds would wait for a hung learner as long as the bus was away."""
    running.step("a", 4)
    running.step("b", 4)
    (waiting,) = [r for r in running.machine.rounds.open if r.n == running.pulls[0].round]
    running.now += 0.2
    running.give(BusBack())
    running.answer(running.pulls[0], "a")
    assert list(waiting.kept) == ["a"]
    rounds = running.machine.rounds
    assert rounds.timings.transfer.or_zero == 0.0
    assert running.machine.roster.members["a"].answer.or_zero == 0.0


def test_a_report_of_more_tokens_than_its_steps_can_have_is_refused_i11(running: Any) -> None:
    """Two such lives are more than any message can count: no leader could show the run."""
    processed = running.machine.history.ledger.processed
    for learner in "ab":
        running.step(learner, 1, tokens=COUNT_MAX)
    assert running.machine.refused["malformed"] == 2
    shown = status(running.machine, running.now, 0.0, bytes_up=0, bytes_down=0)
    assert shown.tokens_processed == processed


def test_what_a_silent_learner_had_in_flight_is_shown_as_lost_i5(running: Any) -> None:
    """And as read again: nothing of it was merged."""
    for learner in "ab":
        running.step(learner, 4)
    running.wait(5.5)
    running.step("b", 0)
    of_a = 4 * running.spec.tokens_per_step
    shown = status(running.machine, running.now, 0.0, bytes_up=0, bytes_down=0)
    assert shown.alive == ("b",)
    assert {(t.lost, t.in_flight) for t in shown.tokens_by_fragment} == {(of_a, of_a)}
    assert (shown.tokens.lost, shown.tokens.in_flight) == (of_a, of_a)
    assert shown.tokens_reread == of_a
