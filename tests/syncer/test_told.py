"""What a leader tells of a run reads as sentences: people see them in `diloco events`."""

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_syncer.events import Malformed, ProgressSeen, Tell
from diloco_syncer.history.follow_io import executed
from diloco_syncer.machine import Machine
from diloco_syncer.members.admission import Admission
from diloco_syncer.members.roster import GONE_S
from diloco_syncer.rounds.gate import WHY_REFUSED, Refusals
from diloco_syncer.rounds.rounds import NO_ANSWERS
from diloco_syncer.status.status import goodbyes_in, status


def texts(effects: list[Any], kind: str) -> list[str]:
    return [e.text for e in effects if isinstance(e, Tell) and e.kind == kind]


def test_a_beginning_is_told_in_sentences(driver: Any) -> None:
    driver.lead()
    (leads,) = texts(driver.effects, "term")
    assert leads.endswith(" leads the run now (term 1)")
    driver.join("a")
    driver.join("b")
    driver.give(driver.initial("a"))
    assert texts(driver.effects, "join") == [
        f"{x} joined (life 0); no other learner can give it its optimizer state" for x in "ab"
    ]
    (begins,) = texts(driver.effects, "init")
    assert begins == "a sent the first parameters, and the run begins with them"


def test_who_falls_silent_is_told_with_what_follows(running: Any) -> None:
    running.step("a", 4)
    running.wait(5.5)
    running.step("b", 4)
    lost = texts(running.effects, "learner-lost")
    assert lost and lost[0].startswith("nothing was heard of a for ")
    assert lost[0].endswith(" s: the others are merged without it")


def succeeded(running: Any, *learners: str, speaks: str = "") -> None:
    """Another machine leads, as soon as a round has merged these learners; it hears of one of them
    before that, for the last time."""
    for learner in learners:
        running.step(learner, 4)
    for learner in learners:
        running.answer(running.pulls[0], learner)
    assert running.rounds
    running.machine = Machine(running.spec, running.machine.history)
    if speaks:
        running.step(speaks)
        running.now += 60.0  # until its lease is renewed, and its record is on the tape
    running.lead()


def test_a_new_leader_tells_once_whom_it_never_heard_of(driver: Any) -> None:
    """A learner that dies as leaders change is lost like any other."""
    driver.start("a", "b", "c")
    succeeded(driver, "a", "b", "c")
    driver.effects.clear()
    for seconds in (4.0, 4.0, 4.0):
        driver.step("a")
        driver.give(ProgressSeen(driver.progress("c", 4, state="finished")))
        driver.wait(seconds)
        if driver.now < 5.0:
            assert not texts(driver.effects, "learner-lost"), "it has a lease to speak"
    lost = texts(driver.effects, "learner-lost")
    assert len(lost) == 1
    assert lost[0].startswith("b was not heard of since this leader began, ")
    assert lost[0].endswith(" s ago: the others are merged without it")
    driver.step("b")
    driver.step("b")
    assert texts(driver.effects, "learner-alive").count("b is alive") == 1
    driver.wait(6.5)
    again = [t for t in texts(driver.effects, "learner-lost") if " of b for " in t]
    assert len(again) == 1


def test_whose_last_words_came_before_its_leader_led_is_lost_like_any_other(running: Any) -> None:
    succeeded(running, "a", "b", speaks="b")
    running.effects.clear()
    running.step("a")
    running.wait(4.0)
    running.step("a")
    running.wait(4.0)
    lost = texts(running.effects, "learner-lost")
    assert len(lost) == 1 and lost[0].startswith("b was not heard of since this leader began, ")


def test_who_says_goodbye_is_not_lost(driver: Any) -> None:
    """Nor after a report that its last one has overtaken on the way."""
    driver.start("a", "b", "c")
    driver.step("b", 4)
    driver.step("b", 0, state="finished")
    driver.step("b", 0)
    driver.wait(4.0)
    driver.step("a")
    driver.wait(4.0)
    (lost,) = texts(driver.effects, "learner-lost")
    assert lost.startswith("nothing was heard of c ")


def shown_goodbyes(driver: Any) -> dict[str, int]:
    return goodbyes_in(status(driver.machine, driver.now, 0.0, bytes_up=0, bytes_down=0))


def test_a_goodbye_outlives_the_leader_that_heard_it(driver: Any) -> None:
    """The tape tells of it with the next round alone, and there is none while a run is paused."""
    driver.start("a", "b", "c")
    succeeded(driver, "a", "b", "c")
    for term in range(3):
        if not term:
            driver.step("b", 0, state="finished")
        said = shown_goodbyes(driver)
        assert said == {"b": 0}
        driver.machine = Machine(driver.spec, driver.machine.history)
        driver.machine.roster.farewells = said
        driver.effects.clear()
        driver.lead()
        assert driver.machine.roster.holders(driver.now) == ("a", "c")
        driver.wait(6.0)
        assert [lost.split()[0] for lost in texts(driver.effects, "learner-lost")] == ["a", "c"]
    driver.join("b", 1)
    driver.step("b", 1, incarnation=1)
    said = shown_goodbyes(driver)
    assert said == {}, "it is back"


def test_whose_goodbye_no_record_tells_is_settled_all_the_same_i5(running: Any) -> None:
    succeeded(running, "a", "b")
    running.machine.roster.farewells = {"b": 0}
    running.now += GONE_S + 1.0
    running.step("a", 0)
    running.wait(1.0)
    assert running.machine.roster.counts.heard["b", 0].left


def test_after_the_end_of_a_run_nobody_is_told_as_lost(running: Any) -> None:
    succeeded(running, "a", "b")
    running.effects.clear()
    running.machine.history.outcome = "finished"
    running.wait(20.0)
    assert not texts(running.effects, "learner-lost")


@pytest.mark.parametrize(
    ("shard", "donor", "says"),
    [
        (0, "b", "b gives it its optimizer state"),
        (0, "", "no other learner can give it its optimizer state"),
        (1, "", "the leader of shard 0 says who gives it its optimizer state"),
    ],
)
def test_a_join_says_who_gives_the_optimizer_state(shard: int, donor: str, says: str) -> None:
    admission: Any = SimpleNamespace(history=SimpleNamespace(shard=shard))
    assert Admission._whence(admission, donor) == says


def test_a_refused_contribution_is_told_with_its_reason_and_how_often() -> None:
    refused = Refusals()
    told = [t for _ in range(4) for t in texts(refused.contribution("late", "a"), "refused")]
    assert told == [
        "a contribution of a was refused as late (the first so far)",
        "a contribution of a was refused as late (2 such refusals so far)",
        "a contribution of a was refused as late (4 such refusals so far)",
    ]
    assert refused.contribution("", "a") == []


def test_every_kind_of_refusal_without_a_verdict_has_words() -> None:
    assert {*NO_ANSWERS, "late", "second", "uninvited"} == set(WHY_REFUSED)


@pytest.mark.parametrize(
    ("source", "what"), [("a", "what a sent"), ("up.r.a.0.m", "a message on up.r.a.0.m")]
)
def test_a_message_that_cannot_be_read_is_told_by_its_source(source: str, what: str) -> None:
    (told,) = texts(Refusals().message(Malformed("wire", source, "junk")), "refused")
    assert told == f"{what} was refused as wire: junk (the first so far)"


@pytest.mark.parametrize(
    ("records", "seq", "says"),
    [
        (0, 0, "the run's tape is empty, so this syncer had nothing to execute"),
        (1, 1, "this syncer has executed 1 record of the run's tape, up to record 1"),
        (27, 54, "this syncer has executed 27 records of the run's tape, up to record 54"),
    ],
)
def test_what_a_new_leader_has_executed_is_a_sentence(records: int, seq: int, says: str) -> None:
    assert executed(records, seq) == says
