"""A learner that begins life after life costs the leader and the tape no more than any other."""

from typing import Any

import pytest

from diloco_cli.up.process import Restarts
from diloco_shared.protocol.messages import LifeCount
from diloco_syncer.history import counts as counts_module
from diloco_syncer.history.counts import Counts
from diloco_syncer.history.ledger import LIVES_MAX, Ledger
from diloco_syncer.members.claims import LIFE_AGAIN_S, LIVES_AT_ONCE
from diloco_syncer.status.status import status


def processed(driver: Any) -> int:
    """Tokens, as the leader shows them."""
    return status(driver.machine, driver.now, 0.0, bytes_up=0, bytes_down=0).tokens_processed


@pytest.mark.parametrize("joins", [False, True])
def test_who_begins_life_after_life_is_believed_no_more_i12(running: Any, joins: bool) -> None:
    """It is believed again some seconds later, and others are believed as before."""
    machine = running.machine
    for n in range(1, 200):
        if joins:
            running.join("b", n)
        running.step("b", 0, incarnation=n)
    assert machine.roster.newest("b") == LIVES_AT_ONCE - 1, "its first one counts as well"
    assert machine.refused["incarnation"] == 200 - LIVES_AT_ONCE
    assert len(machine.roster.counts.heard) == LIVES_AT_ONCE + 1
    running.join("c")
    running.step("c", 0, incarnation=1)
    assert machine.roster.newest("c") == 1
    running.wait(LIFE_AGAIN_S)
    if joins:
        running.join("b", 200)
    running.step("b", 0, incarnation=200)
    assert machine.roster.newest("b") == 200


def test_a_learner_that_its_keeper_starts_again_and_again_is_believed_each_time(
    running: Any,
) -> None:
    """And every token of every life is counted, though no round is recorded for minutes."""
    keeper, lives = Restarts(), 60
    for n in range(lives):
        keeper.started(running.now)
        running.now += keeper.died(running.now)
        running.steps["b"] = 0
        running.join("b", n)
        running.step("b", 2, incarnation=n)
    assert not running.machine.refused
    assert processed(running) == lives * 2 * running.spec.tokens_per_step
    of_b = [n for who, n in running.machine.roster.counts.heard if who == "b"]
    assert len(of_b) == LIVES_MAX and lives - 1 in of_b


def test_lives_that_are_counted_together_leave_every_token_in_its_class_i5(running: Any) -> None:
    counts, ledger, lives = Counts(), Ledger.empty(2), 3 * LIVES_MAX
    for n in range(lives):
        counts.saw(running.progress("b", 9, incarnation=n, tokens=900, c_tokens=(100 + n, 900)))
    assert len(counts.heard) == LIVES_MAX
    for count in counts.to_record(ledger):
        ledger.saw(count)
    first, second = ledger.tokens_P()
    behind = sum(100 + n for n in range(lives))  # each adoption of fragment 0
    assert first.in_flight == 100 + lives - 1 and second.in_flight == 900
    assert first.overwritten == 900 * lives - behind and second.overwritten == 0
    assert first.lost == behind - first.in_flight and second.lost == 900 * (lives - 1)
    assert ledger.processed == 900 * lives


def test_a_life_that_the_tape_tells_of_is_counted_with_no_other(running: Any) -> None:
    counts, ledger = Counts(), Ledger.empty(2)
    counts.saw(running.progress("b", 9))
    for count in counts.to_record(ledger):
        ledger.saw(count)
    for n in range(1, 2 * LIVES_MAX):
        counts.saw(running.progress("b", 1, incarnation=n), ledger.newest["b"])
    assert counts.heard["b", 0].tokens == 9 * running.spec.tokens_per_step


def test_a_life_that_a_record_on_its_way_tells_of_is_counted_with_no_other_i5(
    running: Any,
) -> None:
    """Else the tape would have it twice for good, and a budget of tokens would end early."""
    counts, ledger = Counts(), Ledger.empty(2)

    def lives(first: int, last: int) -> None:
        for n in range(first, last):
            counts.saw(
                running.progress("b", 9, incarnation=n, tokens=100, c_tokens=(0, 0)),
                ledger.newest.get("b", -1),
            )

    def applied(record: tuple[LifeCount, ...]) -> None:
        for count in record:
            ledger.saw(count)

    lives(0, LIVES_MAX)
    on_its_way = counts.to_record(ledger)
    lives(LIVES_MAX, LIVES_MAX + 2)
    applied(on_its_way)
    applied(counts.to_record(ledger))
    assert ledger.processed == 100 * (LIVES_MAX + 2)
    counts.heard.clear()
    counts.to_record(ledger)
    assert not counts.told, "nobody is remembered for whom there is nothing to tell"


def test_a_life_that_was_never_heard_of_takes_no_adoption_from_the_next_i5(running: Any) -> None:
    counts, ledger = Counts(), Ledger.empty(2)
    counts.over("b", 0)
    for n in range(1, LIVES_MAX + 1):
        counts.saw(running.progress("b", 9, incarnation=n, tokens=100, c_tokens=(40, 100)))
    assert dict(counts.heard["b", 0].adopted) == {0: 60, 1: 0}
    counts.over("c", 0)
    counts.saw(running.progress("c", 9, tokens=100, c_tokens=(40, 100)))
    for count in counts.to_record(ledger):
        ledger.saw(count)
    assert ledger.lives["c"][0].base_P == [60, 0]


def test_nobodys_many_lives_leave_another_one_out_of_a_record(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts_module, "LIVES_TOLD_MAX", 3)
    counts, ledger = Counts(), Ledger.empty(2)
    for n in range(6):
        counts.saw(running.progress("a", 1, incarnation=n))
    counts.saw(running.progress("z", 1))

    def told() -> list[tuple[str, int]]:
        record: tuple[LifeCount, ...] = counts.to_record(ledger)
        for count in record:
            ledger.saw(count)
        return [(count.learner, count.incarnation) for count in record]

    assert told() == [("a", 0), ("a", 1), ("z", 0)]
    assert [*told(), *told()] == [("a", n) for n in range(2, 6)]
    assert ledger.processed == 7 * running.spec.tokens_per_step
