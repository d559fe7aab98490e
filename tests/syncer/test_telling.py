"""What the leader tells of one learner pushes out no events of others (I12)."""

from collections import Counter
from typing import Any

import pytest
from syncer.contexts import context

from diloco_shared import ambient
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import SendBeat, Tell
from diloco_syncer.members import claims
from diloco_syncer.members.claims import ABOUT_ONE, TOLD_AGAIN_S, TOLD_AT_ONCE, Telling
from diloco_syncer.messages.outbox_io import EVENTS_MAX, Outbox


def about(learner: str, kind: str = "join") -> Tell:
    return Tell(kind, f"{kind} of {learner}", {"learner": learner})


async def test_a_learner_that_joins_again_and_again_pushes_out_nobodys_events(running: Any) -> None:
    """It is refused, or let in; it falls silent, and comes back with another life."""
    out = Outbox(context(running.spec, MemoryBus(MemoryBroker(), "s")))
    out.tell(Tell("end", "the first event"))
    running.effects.clear()
    for n in range(1, 2 * EVENTS_MAX // 5):
        running.join("b", n, codec_up="another")
        running.join("b", 2 * n)
        running.step("b", 0, incarnation=2 * n + 1)
        running.step("a", 0)
        running.wait(11.0)
    of_b = [e for e in running.effects if isinstance(e, Tell) and "b" in e.data.values()]
    assert len(of_b) > EVENTS_MAX and {e.kind for e in of_b} == ABOUT_ONE - {"flood"}
    for event in of_b:
        out.tell(event)
    told = [out.events.get_nowait().kind for _ in range(out.events.qsize())]
    assert told[0] == "end"
    assert all(n <= TOLD_AT_ONCE + 1 for n in Counter(told).values())


def test_what_was_left_out_is_counted_and_told_later() -> None:
    said = Telling()
    for _ in range(TOLD_AT_ONCE):
        assert said.take(about("b"), 0.0) == about("b")
    assert [said.take(about("b"), 1.0) for _ in range(3)] == [None] * 3
    assert said.take(about("c"), 1.0) == about("c"), "of each learner by itself"
    assert said.take(about("b", "flood"), 1.0) == about("b", "flood"), "and of each kind"
    later = said.take(about("b"), TOLD_AGAIN_S)
    assert later and later.text == "join of b (3 such events before it were left out)"
    assert not said.left_out


def lost_for_good(said: Telling, now: float) -> Tell:
    """The loss that is left out after a link went up and down at once."""
    for _ in range(TOLD_AT_ONCE):
        assert said.take(about("b", "learner-lost"), now) is not None
        assert said.take(about("b", "learner-alive"), now) is not None
    last = about("b", "learner-lost")
    assert said.take(last, now) is None
    return last


def test_who_was_told_lost_is_told_alive_whatever_was_told_of_it() -> None:
    said = Telling()
    for _ in range(TOLD_AT_ONCE - 1):
        said.take(about("b", "learner-lost"), 0.0)
    for _ in range(TOLD_AT_ONCE):
        said.take(about("b", "learner-alive"), 0.0)
    assert said.take(about("b", "learner-lost"), 0.0) is not None
    assert said.take(about("b", "learner-alive"), 0.0) == about("b", "learner-alive")


def test_who_is_told_lost_is_told_alive_also_where_a_later_loss_was_left_out() -> None:
    """A leader tells twice of whom it never met."""
    said = Telling()
    for _ in range(TOLD_AT_ONCE):
        said.take(about("b", "learner-lost"), 0.0)
        said.take(about("b", "learner-alive"), 0.0)
    assert said.take(about("b", "learner-lost"), TOLD_AGAIN_S) is not None
    assert said.take(about("b", "learner-lost"), TOLD_AGAIN_S) is None
    assert said.due(3 * TOLD_AGAIN_S) == [], "it is known as lost"
    assert said.take(about("b", "learner-alive"), TOLD_AGAIN_S) is not None


def test_who_was_not_told_lost_is_not_told_alive() -> None:
    """Its words for that may last longer than those for losses."""
    said = Telling()
    for _ in range(TOLD_AT_ONCE):
        said.take(about("b", "learner-lost"), 0.0)
        said.take(about("b", "learner-alive"), 0.0)
    said.words.used_until.pop("learner-alive b", None)
    assert said.take(about("b", "learner-lost"), 0.0) is None
    assert said.take(about("b", "learner-alive"), 0.0) is None
    assert said.due(TOLD_AGAIN_S) == [], "it is alive"


def test_a_loss_that_was_left_out_is_told_once_there_are_words_again() -> None:
    said = Telling()
    last = lost_for_good(said, 0.0)
    assert said.due(TOLD_AGAIN_S - 1.0) == []
    assert said.due(TOLD_AGAIN_S) == [last], "it stands for itself: nothing else was left out"
    assert said.due(9 * TOLD_AGAIN_S) == [], "once"
    assert said.take(about("b", "learner-alive"), 9 * TOLD_AGAIN_S) is not None


async def test_a_leader_tells_with_its_beat_of_a_loss_that_was_left_out(
    monkeypatch: pytest.MonkeyPatch, running: Any
) -> None:
    out, now = Outbox(context(running.spec, MemoryBus(MemoryBroker(), "s"))), [0.0]
    monkeypatch.setattr(ambient, "monotonic", lambda: now[0])
    lost_for_good(out.telling, 0.0)
    running.effects.clear()
    running.wait(5.0)
    beat = next(e for e in running.effects if isinstance(e, SendBeat))
    await out.send(beat)
    assert out.events.empty()
    now[0] = TOLD_AGAIN_S
    await out.send(beat)
    assert out.events.get_nowait().kind == "learner-lost"


def test_what_concerns_the_run_is_always_told() -> None:
    said = Telling()
    for tell in (Tell("epoch", "another one"), about("b", "returned")):
        assert all(said.take(tell, 0.0) == tell for _ in range(100))


def test_no_more_is_counted_than_its_limit_i12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "WORDS_MAX", 2)
    said = Telling()
    for learner in "abc":
        for _ in range(TOLD_AT_ONCE + 1):
            said.take(about(learner), 0.0)
            said.take(about(learner, "learner-lost"), 0.0)
    assert list(said.left_out) == ["join c", "learner-lost c"]
    assert list(said.lost) == ["b", "c"]
