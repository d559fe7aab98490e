"""Used against budget, as the API shows it."""

from coordinator.conftest import member, spec, status

from diloco_coordinator.runs.budgets import used
from diloco_coordinator.runs.membership import Roll
from diloco_shared.protocol.records import MemberRecord, RunRecord, StreamUse


def record(**changes: object) -> RunRecord:
    body = spec() | changes
    return RunRecord(name="demo", spec=body, desired="running", quorum=1, created_at=0.0)


def test_streams_and_members_are_shown_against_what_they_may() -> None:
    streams = {"DN": StreamUse(bytes=5, limit=1 << 26)}
    people = [
        member("a").model_copy(update={"memory_bytes": 77}),
        member("s", "syncer"),
    ]
    found = used(record(), status(streams=streams), people)
    assert found is not None
    assert found["streams"]["DN"]["used"] == 5 and found["streams"]["DN"]["limit"] == 1 << 26
    assert found["streams"]["UP"]["used"] is None and found["streams"]["UP"]["needed"] > 0
    assert found["memory"]["a"]["used"] == 77 and found["memory"]["a"]["budget"] > 430e6
    assert found["memory"]["s"]["used"] is None


def test_more_learners_need_more() -> None:
    few, many = (used(record(), status(alive=tuple(f"l{n}" for n in range(m))), []) for m in (1, 9))
    assert few is not None and many is not None
    assert many["streams"]["UP"]["needed"] > 4 * few["streams"]["UP"]["needed"]


def test_a_model_of_ones_own_is_budgeted_once_its_size_is_known() -> None:
    own = record(model={"factory": "my_models:make"})
    small, large = (used(own, status(parameters=n), []) for n in (0, 10**9))
    assert small is not None and large is not None
    assert large["streams"]["DN"]["needed"] > 100 * small["streams"]["DN"]["needed"]


def test_what_nobody_could_build_has_no_budget() -> None:
    assert used(record(model={"preset": "of a later version"}), None, []) is None


def test_a_members_memory_alone_is_not_worth_writing_down() -> None:
    roll = Roll()
    assert roll.seen(member("a"), 1.0) is not None
    larger: MemberRecord = member("a").model_copy(update={"memory_bytes": 10**9, "tape_seq": 5})
    assert roll.seen(larger, 2.0) is None
    assert roll.notes["a"].record.memory_bytes == 10**9
