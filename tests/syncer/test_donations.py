"""A donor is asked again after a while, and no longer than its newcomer needs it."""

from types import SimpleNamespace
from typing import Any

from diloco_shared.protocol.messages import Donate
from diloco_syncer.members.donations import LIMIT_S, REPEAT_S, Donations


def donate(newcomer: str) -> Donate:
    return Donate(
        donor="a",
        donor_incarnation=0,
        newcomer=newcomer,
        newcomer_incarnation=0,
        nonce=f"{newcomer}-0",
        epoch=0,
        versions=(0, 0),
    )


def recovering(*newcomers: str) -> Any:
    member = SimpleNamespace(incarnation=0, stepping=False)
    return SimpleNamespace(members=dict.fromkeys(newcomers, member))


def test_the_next_one_to_ask_is_woken_for() -> None:
    donations, roster = Donations(), recovering("b", "c")
    assert donations.deadline is None
    donations.ask(donate("b"), 0, 10.0)
    assert donations.deadline == 10.0
    assert donations.due(roster, 10.0) == [donate("b")]
    later = 10.0 + REPEAT_S / 2
    donations.ask(donate("c"), 0, later)
    assert donations.due(roster, later) == [donate("c")]
    assert donations.deadline == 10.0 + REPEAT_S
    assert donations.due(roster, 10.0 + REPEAT_S) == [donate("b")]


def test_it_is_asked_up_to_the_limit_and_not_at_it() -> None:
    donations, roster = Donations(), recovering("b")
    donations.ask(donate("b"), 0, 0.0)
    until = donations.under_way["b"].until
    assert until >= LIMIT_S
    assert donations.due(roster, until - 0.1) == [donate("b")]
    assert donations.due(roster, until) == [] and donations.deadline is None
    assert "b" in donations.under_way, "it may still be on its way"
    roster.members["b"].stepping = True
    assert donations.due(roster, until) == [] and not donations.under_way
