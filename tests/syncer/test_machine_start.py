"""A term's beginning and a run's: what is taken once, what is given back, what is told again."""

import itertools
from typing import Any

import pytest
from tests.syncer.conftest import LAYOUT, spec

from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.protocol.messages import (
    Join,
    LifeCount,
    TapeEnd,
    TapeEpoch,
    TapeInit,
    TensorSpec,
)
from diloco_shared.protocol.pace import BYTES_PER_S_MIN
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_syncer.events import (
    Append,
    Appended,
    Drop,
    Effect,
    Ended,
    InitMoved,
    InitSeen,
    JoinSeen,
    Led,
    ProgressSeen,
    SendBeat,
    Tell,
)
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.machine import Machine
from diloco_syncer.status.announce import INITIALIZER_S


def parameters(driver: Any, learner: str, **over: Any) -> InitSeen:
    """A learner's initial parameters, complete and sound but for `over`."""
    fields: dict[str, Any] = {
        "learner": learner,
        "incarnation": 0,
        "config_hash": config_hash(driver.spec),
        "layout": LAYOUT,
        "subjects": tuple(f"up.t.{learner}.init.0.{p}" for p in range(2)),
        "digests": ("0" * 32, "1" * 32),
        "sizes": Layout.build(LAYOUT, 2).sizes,
        "finite": True,
    }
    return InitSeen(**{**fields, **over})


def dropped(effects: list[Effect]) -> list[str]:
    return [e.key for e in effects if isinstance(e, Drop)]


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"layout": LAYOUT[:1]}, "1 tensors cannot fill 2 fragments"),
        ({"layout": ()}, "0 tensors cannot fill"),
        ({"layout": (LAYOUT[0], LAYOUT[0])}, "two tensors share a name"),
        ({"layout": (TensorSpec(name="a", shape=(0,), embedding=False),)}, "tensors"),
        ({"sizes": (8, 7)}, "fragment 1 is of another size"),
        ({"sizes": (0, 0)}, "fragment 0 is of another size"),
        ({"finite": False}, "not finite"),
        ({"config_hash": "0" * 32}, "another configuration"),
    ],
)
def test_initial_parameters_that_no_run_can_begin_with_bind_no_leader(
    driver: Any, over: dict[str, Any], why: str
) -> None:
    """I11: a record of them on the tape would end every leader that reads it."""
    driver.lead()
    driver.join("a")
    driver.join("b")
    effects = driver.give(parameters(driver, "a", **over))
    assert not any(isinstance(r, TapeInit) for r in driver.tape)
    (told,) = [e for e in effects if isinstance(e, Tell) and e.kind == "refused"]
    assert why in told.text, told.text
    driver.give(parameters(driver, "b"))
    assert driver.machine.history.initialised, "somebody else's are taken"


def test_a_preset_begins_with_its_own_tensors_alone(driver: Any) -> None:
    spec = RunSpec.model_validate({**driver.spec.model_dump(), "model": {"preset": "nano"}})
    driver.spec, driver.machine = spec, Machine(spec, History(spec))
    driver.lead()
    effects = driver.give(parameters(driver, "a"))
    (told,) = [e for e in effects if isinstance(e, Tell) and e.kind == "refused"]
    assert "not the tensors of this model" in told.text


def test_a_tape_that_nobody_can_begin_with_says_so() -> None:
    history = History(spec())
    record = TapeInit(
        run="t",
        config_hash=history.config_hash,
        layout=(),
        anchor_digests=("0" * 32,) * 2,
        subjects=("u",) * 2,
        learner="a",
        incarnation=0,
        at=1.0,
    )
    with pytest.raises(TapeFault, match="cannot be cut"):
        history.apply(record, 1)


def test_who_sent_them_under_an_earlier_leader_is_asked_first(driver: Any) -> None:
    driver.lead()
    driver.give(InitMoved(("b", "stranger"), "", 0, 0))
    driver.join("a")
    driver.join("b")
    announcer = driver.machine.announcer
    assert announcer.initializer == "b" and announcer.appointed == {"b"}
    driver.wait(2 * INITIALIZER_S)
    assert "stranger" not in announcer.appointed


def test_initial_parameters_that_are_not_taken_are_given_back(driver: Any) -> None:
    """I12: else a second learner's would stay in the leader's memory for the whole run."""
    driver.lead()
    driver.join("a")
    driver.join("b")
    refused = parameters(driver, "b", finite=False)
    assert dropped(driver.give(refused)) == list(refused.subjects)
    driver.auto = False
    first, second = parameters(driver, "a"), parameters(driver, "b")
    (append,) = [e for e in driver.give(first) if isinstance(e, Append)]
    assert dropped(driver.give(second)) == list(second.subjects)
    assert dropped(driver.give(first)) == [], "a repeat of those that are on their way to the tape"
    driver.give(Appended(2, 1000.0))
    assert isinstance(append.record, TapeInit)
    assert driver.machine.history.initialised
    assert dropped(driver.give(second)) == list(second.subjects)


def test_initial_parameters_that_come_before_the_term_is_on_the_tape_are_not_lost(
    driver: Any,
) -> None:
    """The bus drops a repeat for two minutes: they would come too late."""
    driver.auto = False
    driver.lead()
    driver.join("a")
    first, second = parameters(driver, "a"), parameters(driver, "b")
    assert dropped(driver.give(first)) == []
    assert dropped(driver.give(second)) == list(first.subjects), "one set is kept"
    seen = driver.give(Appended(1, 1000.0))
    assert [e.record.learner for e in seen if isinstance(e, Append)] == ["b"]


def test_everybody_alive_is_asked_in_turn_for_the_initial_parameters(driver: Any) -> None:
    """One of them may be the only one that can."""
    driver.lead()
    for learner in "abc":
        driver.join(learner)
    asked = []
    for _ in range(round(3.5 * INITIALIZER_S)):
        driver.now += 1.0
        for learner in "abc":
            driver.step(learner, 0, state="joining")
        asked.append(driver.machine.announcer.initializer)
    asked = [name for name, _ in itertools.groupby(asked)]
    assert asked == ["a", "b", "c", "a"]


def test_whoever_sends_them_is_not_passed_over_as_long_as_they_move(driver: Any) -> None:
    """However large they are; once nothing moves, it is another's turn."""
    driver.lead()
    for learner in "ab":
        driver.join(learner)

    def second() -> None:
        driver.now += 1.0
        for learner in "ab":
            driver.step(learner, 0, state="joining")

    pause = round(INITIALIZER_S - 1)
    for n in range(10 * pause):
        if n % pause == 0:
            there = n * BYTES_PER_S_MIN
            driver.give(InitMoved(("a",), "a", min(there, 30_000_000), max(there - 30_000_000, 0)))
        second()
        assert driver.machine.announcer.initializer == "a"
    for _ in range(round(INITIALIZER_S) - pause + 5):
        second()
    assert driver.machine.announcer.initializer == "b"


@pytest.mark.parametrize(
    ("each", "most"),
    [
        (100, INITIALIZER_S),  # a message now and then
        (-100, INITIALIZER_S),  # likewise, once half of it has come
        (CHUNK_BYTES, 2 * INITIALIZER_S),  # a chunk now and then
        (10 * CHUNK_BYTES, 4 * INITIALIZER_S),  # more than all parameters are
    ],
)
def test_who_stores_something_now_and_then_is_passed_over(
    driver: Any, each: int, most: float
) -> None:
    """It holds the beginning of the run up for no longer than a slow link takes for all of it."""
    driver.lead()
    for learner in "ab":
        driver.give(
            JoinSeen(
                Join(
                    learner=learner,
                    incarnation=0,
                    nonce=learner,
                    config=driver.config,
                    parameters=2 * CHUNK_BYTES,
                )
            )
        )
    announcer = driver.machine.announcer
    for n in range(round(most) + 2):
        if announcer.initializer == "b":
            break
        if n % 60 == 0:
            first = 0 if each > 0 else 8 * CHUNK_BYTES
            driver.give(InitMoved(("a",), "a", first + abs(each) * (n // 60 + 1), 0))
        driver.now += 1.0
        for learner in "ab":
            driver.step(learner, 0, state="joining")
    assert announcer.initializer == "b"


def asked_for(driver: Any, parameters: int, lives: Any, ticks: int) -> list[str]:
    """Of whom initial parameters are wanted, second by second, while a, begun anew in between,
    sends at the speed of the slowest link worth using. `lives`: seconds that each life has."""
    driver.lead()
    for learner in "ab":
        join = Join(
            learner=learner,
            incarnation=0,
            nonce=learner,
            config=driver.config,
            parameters=parameters,
        )
        driver.give(JoinSeen(join))
    asked = []
    for n in range(1, ticks):
        life, of_life = divmod(n, lives)
        stored = min(of_life * BYTES_PER_S_MIN, 4 * parameters)
        if n % 10 == 0:
            driver.give(InitMoved(("a",), "a", stored, 0, life))
        driver.now += 1.0
        for learner in "ab":
            driver.step(learner, 0, state="joining")
        asked.append(driver.machine.announcer.initializer)
    return asked


def test_who_begins_anew_late_in_its_upload_is_not_passed_over(driver: Any) -> None:
    """What an earlier life sent is no limit to what this one sends."""
    parameters = round(10 * INITIALIZER_S * BYTES_PER_S_MIN / 4)
    lives = round(9 * INITIALIZER_S)
    assert set(asked_for(driver, parameters, lives, 3 * lives)) == {"a"}


def test_life_after_life_holds_the_beginning_up_for_no_longer_than_two(driver: Any) -> None:
    """Each sends as fast as the slowest link, and none to the end."""
    whole = round(3 * INITIALIZER_S)
    parameters = whole * BYTES_PER_S_MIN // 8
    asked = asked_for(driver, parameters, 20, 5 * whole)
    assert asked[2 * whole] == "a"
    assert "b" in asked


def test_what_others_send_and_what_came_before_is_no_initializers_progress(driver: Any) -> None:
    driver.lead()
    for learner in "ab":
        driver.join(learner)
    announcer = driver.machine.announcer
    driver.give(InitMoved(("b",), "b", 10**9, 0))
    assert (announcer.initializer, announcer.came) == ("a", 0)
    driver.give(InitMoved(("a",), "a", 0, 10**6))
    assert announcer.came == 10**6
    for _ in range(round(INITIALIZER_S) + 2):
        driver.now += 1.0
        for learner in "ab":
            driver.step(learner, 0, state="joining")
    driver.give(InitMoved(("a", "b"), "b", 10, 10**6 + 5))
    assert (announcer.initializer, announcer.came) == ("b", 15)


def test_a_run_is_initialised_once(driver: Any) -> None:
    driver.lead()
    driver.join("a")
    driver.join("b")
    driver.auto = False
    seen = driver.give(parameters(driver, "a")) + driver.give(parameters(driver, "b"))
    assert [type(e.record) for e in seen if isinstance(e, Append)] == [TapeInit]
    assert not driver.machine.to_append


def test_whoever_leads_after_the_end_tells_it(driver: Any) -> None:
    """The leader that wrote the end may die before anybody heard of it (liveness)."""
    history = History(driver.spec)
    history.apply(TapeEnd(term=1, outcome="finished", reason="", versions=(3, 3), at=9.0), 1)
    driver.machine = Machine(driver.spec, history)
    effects = driver.give(Led("s2", 1000.0, (3, 3)))
    assert [e.beat.state for e in effects if isinstance(e, SendBeat)] == ["finished"]
    assert [e.outcome for e in effects if isinstance(e, Ended)] == ["finished"]
    assert driver.tape == [], "nothing follows the end on the tape"


def test_whoever_leads_after_the_end_names_an_evaluator_before_it_has_heard_of_any(
    driver: Any,
) -> None:
    """Where nobody is named, nobody stays."""
    history = History(driver.spec)
    for learner in ("a", "b"):
        history.ledger.saw(LifeCount(learner=learner, incarnation=0, tokens=5))
    history.apply(TapeEnd(term=1, outcome="finished", reason="", versions=(3, 3), at=9.0), 1)
    driver.machine = Machine(driver.spec, history)
    driver.give(Led("s2", 1000.0, (3, 3)))
    driver.step("b", 1)
    driver.wait(1.0)
    named = [e.beat.evaluator for e in driver.effects if isinstance(e, SendBeat)]
    assert {*named} == {"a"}, "it stays the same as long as it may speak"
    driver.wait(5.0)
    driver.step("b", 1)
    driver.wait(1.0)
    assert [e.beat.evaluator for e in driver.effects if isinstance(e, SendBeat)][-1] == "b"


def test_who_has_just_come_back_at_the_end_makes_the_last_evaluation(driver: Any) -> None:
    """Where nobody is named, nobody stays; and whoever recovers does not train yet."""
    history = History(driver.spec)
    history.apply(TapeEnd(term=1, outcome="stopped", reason="", versions=(3, 3), at=9.0), 1)
    driver.machine = Machine(driver.spec, history)
    driver.give(Led("s2", 1000.0, (3, 3)))
    driver.step("a", 0, state="finished")
    driver.step("b", 0, state="recovering")
    driver.wait(1.0)
    assert [e.beat.evaluator for e in driver.effects if isinstance(e, SendBeat)][-1] == "b"


def test_who_speaks_before_its_term_is_on_the_tape_is_heard_as_after_that(running: Any) -> None:
    """An earlier leader had heard of it: else all its steps would seem to be just taken."""
    running.machine = Machine(running.spec, running.machine.history)
    running.auto, running.now = False, 10_000.0
    running.lead()
    long = running.progress("a", 500).model_copy(update={"step_s": 60.0})
    running.give(ProgressSeen(long))
    assert running.machine.roster.usual_step_s(running.now + 1.0) == 60.0
    assert not running.machine.leading


def test_an_epoch_that_the_tape_lost_is_left_behind(running: Any) -> None:
    """Learners in an epoch above the tape's would else wait for ever for a leader to follow."""
    running.step("a", 1, epoch=2, adopted=(5, 4))
    (epoch,) = [r for r in running.tape if isinstance(r, TapeEpoch)]
    assert epoch.epoch == 3
    assert "a is in epoch 2, the tape in 0" in epoch.reason
