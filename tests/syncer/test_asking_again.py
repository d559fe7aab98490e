"""A newcomer that asks for state after state costs its donors a few of them, and no more."""

from typing import Any

import pytest
from syncer.conftest import LAYOUT, Driver

from diloco_shared.protocol.messages import Join
from diloco_syncer.events import JoinSeen, SendDonate, SendGrant
from diloco_syncer.members.admission import DONOR_AGAIN_S_MAX, DONORS_AT_ONCE, GRANTS_EACH
from diloco_syncer.members.donations import LIMIT_S


def joined(driver: Driver, learner: str, n: int, incarnation: int = 0, failed: str = "") -> str:
    """The donor that a join is answered with, under a nonce of its own."""
    join = Join(
        learner=learner,
        incarnation=incarnation,
        nonce=f"{learner}-{n}",
        config=driver.config,
        failed_donors=tuple(failed),
    )
    effects = driver.give(JoinSeen(join))
    return [e.grant.donor for e in effects if isinstance(e, SendGrant)][-1]


@pytest.fixture
def training(running: Driver) -> Driver:
    """a and b train, and can give."""
    running.step("a", 4)
    running.step("b", 4)
    for learner in "ab":
        running.answer(running.pulls[0], learner)
    return running


def test_who_joins_again_and_again_is_given_few_donors_i12(training: Any) -> None:
    """Others get theirs, and it gets one more after a while."""
    donors = [joined(training, "c", n) for n in range(100)]
    assert all(donors[:DONORS_AT_ONCE]) and not any(donors[DONORS_AT_ONCE:])
    asked = {e.donate.nonce for e in training.effects if isinstance(e, SendDonate)}
    assert len(asked) == DONORS_AT_ONCE
    assert joined(training, "d", 0)
    for _ in range(40):
        training.wait(LIMIT_S / 30)
        training.step("a")
        training.step("b")
    assert joined(training, "c", 100) and not joined(training, "c", 101)


def test_of_a_large_model_too_it_is_given_a_donor_each_hour(training: Any) -> None:
    """A donation of seven billion parameters may take six days."""
    training.machine.history.sizes_P = (7 * 10**9, 0)
    donors = [joined(training, "c", n) for n in range(DONORS_AT_ONCE + 1)]
    assert all(donors[:-1]) and not donors[-1]
    for _ in range(40):
        training.wait(DONOR_AGAIN_S_MAX / 40)
        training.step("a")
        training.step("b")
    assert joined(training, "c", 100, incarnation=1), "its first life is over"
    assert not joined(training, "c", 101, incarnation=1)


def test_nobodys_joins_push_out_what_another_was_granted(training: Any) -> None:
    joined(training, "d", 0)
    for n in range(2000):
        joined(training, "c", n)
    grants = training.machine.admission.grants
    assert list(grants)[-1 - GRANTS_EACH :] == [
        "d-0",
        *(f"c-{n}" for n in range(2000 - GRANTS_EACH, 2000)),
    ]


def test_who_is_cut_off_in_the_middle_gets_a_donor_in_its_next_life(training: Any) -> None:
    assert joined(training, "c", 0) and joined(training, "c", 1, failed="a") == "b"
    training.step("c", 0, state="recovering")
    assert joined(training, "c", 2, incarnation=1)


def test_whose_work_is_merged_is_given_donors_as_before(training: Any) -> None:
    for n in range(DONORS_AT_ONCE):
        joined(training, "c", n)
    assert not joined(training, "c", 50)
    merged = training.machine.history.last_merged
    merged[0]["c"] = (0, 7, -1)
    assert joined(training, "c", 51, incarnation=1)
    for n in range(60, 60 + DONORS_AT_ONCE - 1):
        assert joined(training, "c", n, incarnation=1)
    assert not joined(training, "c", 70, incarnation=1), "once for each time"
    merged[1]["c"] = (1, 8, -1)
    assert joined(training, "c", 71, incarnation=1)
    assert len(LAYOUT) == len(merged)


def test_a_state_is_awaited_under_its_newest_nonce_until_its_newcomer_trains(
    training: Any,
) -> None:
    admission = training.machine.admission
    first = joined(training, "c", 0), "c-0"
    assert admission.states() == ({first}, set())
    second = joined(training, "c", 1), "c-1"
    assert admission.states() == ({second}, {first})
    training.step("c", 1)
    assert admission.states() == (set(), {first, second})


def test_what_was_sent_to_who_trains_is_in_use_unless_it_asks_anew(training: Any) -> None:
    """Whoever is not heard of may be back, and its first word may be late."""
    admission, now = training.machine.admission, training.now
    joined(training, "c", 0)
    assert admission.using(now) == {"a", "b"}, "c waits for its state"
    asked = admission.donations.under_way.copy()
    admission.donations.under_way.clear()
    assert admission.using(now) == {"a", "b"}, "of an earlier leader"
    admission.donations.under_way |= asked
    training.step("c", 1)
    assert admission.using(now) == {"a", "b", "c"}
    joined(training, "c", 1, incarnation=1)
    assert admission.using(now) == {"a", "b"}
    assert admission.using(now + training.spec.membership.lease_s + 1.0) == set()
