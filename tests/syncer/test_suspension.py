"""A leader that cannot renew its lease opens no round; what is open goes on (the tape fences)."""

from typing import Any

from diloco_syncer.events import Suspended


def test_no_round_opens_while_the_lease_is_not_renewed(running: Any) -> None:
    running.give(Suspended("cannot renew"))
    for _ in range(6):
        running.now += 1.0
        running.step("a")
        running.step("b")
    assert not running.machine.rounds.open and not running.pulls
    assert running.machine.announcer.state(running.now) == ("starved", "starved: cannot renew")
    running.give(Suspended(""))
    running.step("a", 0)
    assert running.pulls or running.machine.rounds.open


def test_a_round_that_is_open_goes_on(running: Any) -> None:
    for _ in range(4):
        running.now += 1.0
        running.step("a")
        running.step("b")
    running.wait(1.0)
    pull = running.pulls[-1]
    running.give(Suspended("cannot renew"))
    running.answer(pull, "a")
    running.answer(pull, "b")
    assert [r.round for r in running.rounds] == [0]
