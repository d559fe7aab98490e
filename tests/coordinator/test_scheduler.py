"""Who works for which run, decision by decision, and promises for any cluster."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_coordinator.scheduler import MemberView, RunView, schedule

SYNCER = MemberView("s", "syncer", alive=True)


def learner(name: str, *, alive: bool = True, draining: bool = False) -> MemberView:
    return MemberView(name, "learner", alive, draining)


def run(name: str = "r", least: int = 1, most: int = 9, *, over: bool = False) -> RunView:
    return RunView(name, least, most, over)


def written(members: list[MemberView], runs: list[RunView], had: dict[str, str]) -> dict[str, str]:
    return {c.member: c.run for c in schedule(members, runs, had).changes}


def test_a_run_gets_one_syncer_and_its_learners() -> None:
    members = [SYNCER, MemberView("s2", "syncer", alive=True), learner("a"), learner("b")]
    assert written(members, [run()], {}) == {"s": "r", "a": "r", "b": "r"}


def test_a_run_waits_whole_until_enough_learners_are_free() -> None:
    plan = schedule([SYNCER, learner("a")], [run(least=2)], {})
    assert plan.changes == ()
    assert plan.waiting == {"r": "queued: 1 of 2 learners free"}


def test_the_older_run_is_served_first_and_the_younger_waits() -> None:
    plan = schedule([SYNCER, learner("a")], [run("old"), run("young")], {})
    assert {c.member: c.run for c in plan.changes} == {"s": "old", "a": "old"}
    assert plan.waiting == {"young": "queued: no free syncer"}


def test_learners_above_the_most_stay_free() -> None:
    assert written([SYNCER, learner("a"), learner("b")], [run(most=1)], {}) == {"s": "r", "a": "r"}


def test_an_assignment_outlives_the_death_of_its_member() -> None:
    had = {"s": "r", "a": "r"}
    plan = schedule([SYNCER, learner("a", alive=False)], [run()], had)
    assert plan.changes == ()
    assert plan.waiting == {"r": "0 of 1 learners alive"}


def test_a_dead_syncer_is_waited_for_and_not_replaced() -> None:
    dead = MemberView("s", "syncer", alive=False)
    members = [dead, MemberView("s2", "syncer", alive=True), learner("a")]
    plan = schedule(members, [run()], {"s": "r", "a": "r"})
    assert plan.changes == ()
    assert plan.waiting == {"r": "syncer s is gone: the run goes on once it is back"}


def test_a_run_that_began_takes_newcomers_even_below_its_least() -> None:
    had = {"s": "r", "a": "r"}
    members = [SYNCER, learner("a", draining=True), learner("b")]
    plan = schedule(members, [run(least=2)], had)
    assert {c.member: c.run for c in plan.changes} == {"a": "", "b": "r"}
    assert plan.changes[0].reason == "a is draining"
    assert plan.waiting == {"r": "1 of 2 learners alive"}


def test_a_run_that_is_over_gives_its_members_to_the_next() -> None:
    had = {"s": "old", "a": "old"}
    runs = [run("old", over=True), run("next")]
    assert written([SYNCER, learner("a")], runs, had) == {"s": "next", "a": "next"}


def test_a_forgotten_member_loses_its_place() -> None:
    plan = schedule([SYNCER, learner("b")], [run(most=1)], {"s": "r", "a": "r"})
    assert {c.member: c.run for c in plan.changes} == {"a": "", "b": "r"}


def test_coordinators_and_supervisors_work_for_no_run() -> None:
    members = [
        MemberView("c", "coordinator", alive=True),
        MemberView("v", "supervisor", alive=True),
    ]
    assert written(members, [run()], {}) == {}


MEMBERS = st.lists(
    st.builds(
        MemberView,
        st.sampled_from("abcdefgh"),
        st.sampled_from(["learner", "learner", "syncer"]),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda m: m.id,
)
RUNS = st.lists(
    st.builds(RunView, st.sampled_from("xyz"), st.integers(1, 3), st.integers(3, 5), st.booleans()),
    unique_by=lambda r: r.name,
)
ASSIGNED = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["", "x", "y", "gone"]))


@given(MEMBERS, RUNS, ASSIGNED)
def test_promises(members: list[MemberView], runs: list[RunView], had: dict[str, str]) -> None:
    plan = schedule(members, runs, had)
    now = {**had, **{c.member: c.run for c in plan.changes}}
    by_id = {m.id: m for m in members}
    # Applied, it is stable.
    assert schedule(members, runs, now).changes == ()
    live = {r.name: r for r in runs if not r.over}
    for member, name in now.items():
        if not name:
            continue
        # Nobody works for a run that is over, and nobody who drains or is unknown works.
        assert name in live and not by_id[member].draining
        # Only the living get new work.
        assert had.get(member) == name or by_id[member].alive
    for change in plan.changes:
        assert change.reason
    for name, wish in live.items():
        new = [c.member for c in plan.changes if c.run == name]
        mine = [m for m, r in now.items() if r == name]
        learners = [m for m in mine if by_id[m].role == "learner"]
        if any(by_id[m].role == "learner" for m in new):
            assert len(learners) <= wish.learners_max
            assert any(by_id[m].role == "syncer" for m in mine)
        if any(by_id[m].role == "syncer" for m in new):
            assert len(learners) >= wish.learners_min
        assert name in plan.waiting or any(by_id[m].role == "syncer" for m in mine)
