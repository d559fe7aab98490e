"""What the leader tells of one learner pushes out no events of others (I12)."""

from collections import Counter
from typing import Any

import pytest
from syncer.contexts import context

from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import Tell
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
    assert list(said.left_out) == ["join b", "join c"]
