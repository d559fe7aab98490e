"""Phases of a recovery out of its times."""

from diloco_shared.protocol.records import RecoveryRecord, phases, recovery_view

WHOLE = RecoveryRecord(
    learner="b",
    incarnation=1,
    lost_at=100.0,
    detected_at=105.0,
    restarted_at=101.0,
    joined_at=103.5,
    donor_at=103.5,
    transferred_at=104.25,
    stepping_at=106.0,
    contributed_at=108.0,
    donor="a",
    source="donor",
    rounds=5,
)


def test_each_phase_counts_from_the_one_before() -> None:
    assert phases(WHOLE.model_dump()) == {
        "detected": 5.0,
        "restarted": 1.0,
        "joined": 2.5,
        "donor_chosen": 0.0,
        "transferred": 0.75,
        "stepping": 1.75,
        "first_contribution": 2.0,
        "total": 8.0,
    }


def test_without_a_donor_the_state_counts_from_the_join_and_a_newcomer_has_lost_nothing() -> None:
    alone = WHOLE.model_copy(update={"donor_at": 0.0, "lost_at": 0.0, "detected_at": 0.0})
    found = phases(alone.model_dump())
    assert found["transferred"] == 0.75 and found["donor_chosen"] is None
    assert found["detected"] is None and found["restarted"] is None
    assert found["total"] == 7.0


def test_what_has_not_happened_yet_has_no_time() -> None:
    begun = RecoveryRecord(learner="b", incarnation=1, lost_at=100.0, detected_at=105.0)
    view = recovery_view(begun.model_dump())
    assert view["rounds"] is None and not view["complete"]
    assert view["phases_s"]["detected"] == 5.0 and view["phases_s"]["total"] is None
    assert recovery_view(WHOLE.model_dump())["rounds"] == 5
    at_once = WHOLE.model_copy(update={"rounds": 0})
    assert recovery_view(at_once.model_dump())["rounds"] == 0
