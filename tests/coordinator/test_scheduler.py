"""Who works for which run, decision by decision, and promises for any cluster."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_coordinator.runs.reasons import Why
from diloco_coordinator.runs.scheduler import (
    GRACE_S,
    RETURN_S,
    MemberView,
    Plan,
    RunView,
    needed,
    schedule,
)

SYNCER = MemberView("s", "syncer", alive=True)


def learner(
    name: str, *, alive: bool = True, draining: bool = False, since_s: float = 100.0
) -> MemberView:
    return MemberView(name, "learner", alive, draining, since_s=since_s)


def run(
    name: str = "r",
    least: int = 1,
    most: int = 9,
    *,
    over: bool = False,
    syncers: int = 1,
    leader: str = "",
    shards: int = 1,
) -> RunView:
    return RunView(name, least, most, over, syncers, (leader,), shards)


def written(members: list[MemberView], runs: list[RunView], had: dict[str, str]) -> dict[str, str]:
    return {c.member: c.run for c in schedule(members, runs, had).changes}


def lacks(plan: Plan) -> dict[str, list[str]]:
    return {run: [why.code for why in whys] for run, whys in plan.waiting.items()}


def syncers(*names: str) -> list[MemberView]:
    return [MemberView(name, "syncer", alive=True) for name in names]


def test_a_run_gets_as_many_syncers_as_it_wants_and_its_learners() -> None:
    members = [*syncers("s", "s2", "s3"), learner("a"), learner("b")]
    assert written(members, [run()], {}) == {"s": "r", "a": "r", "b": "r"}
    two = run(syncers=2)
    assert written(members, [two], {}) == {"s": "r", "s2": "r", "a": "r", "b": "r"}


def test_every_run_gets_a_leader_before_any_gets_a_standby() -> None:
    members = [*syncers("s", "s2"), learner("a"), learner("b")]
    runs = [run("old", most=1, syncers=2), run("young", syncers=2)]
    assert written(members, runs, {}) == {"s": "old", "a": "old", "s2": "young", "b": "young"}


def test_a_run_that_waits_for_a_syncer_gets_anothers_standby_and_not_its_leader() -> None:
    members = [*syncers("s", "s2"), learner("a"), learner("b")]
    had = {"s": "old", "s2": "old", "a": "old"}
    runs = [run("old", most=1, syncers=2, leader="s2"), run("young")]
    assert written(members, runs, had) == {"s": "young", "b": "young"}


def test_a_run_waits_whole_until_enough_learners_are_free() -> None:
    plan = schedule([SYNCER, learner("a")], [run(least=2)], {})
    assert plan.changes == ()
    assert lacks(plan) == {"r": ["learners-missing"]}


def test_a_run_that_was_led_before_goes_on_with_fewer_learners() -> None:
    members = [*syncers("s"), learner("a")]
    assert written(members, [run(least=2, leader="gone")], {}) == {"s": "r", "a": "r"}


def test_the_older_run_is_served_first_and_the_younger_waits() -> None:
    plan = schedule([SYNCER, learner("a")], [run("old"), run("young")], {})
    assert {c.member: c.run for c in plan.changes} == {"s": "old", "a": "old"}
    assert lacks(plan) == {"young": ["syncers-missing"]}


def test_learners_above_the_most_stay_free() -> None:
    assert written([SYNCER, learner("a"), learner("b")], [run(most=1)], {}) == {"s": "r", "a": "r"}


def test_an_assignment_outlives_the_death_of_its_member() -> None:
    had = {"s": "r", "a": "r"}
    plan = schedule([SYNCER, learner("a", alive=False)], [run()], had)
    assert plan.changes == ()
    assert lacks(plan) == {"r": ["learners-missing"]}


def test_the_dead_count_against_nothing() -> None:
    """Whoever is gone for longer than a moment blocks nobody: a container under a new name."""
    had = {"s": "r", "a": "r"}
    moment = [SYNCER, learner("a", alive=False, since_s=GRACE_S - 1), learner("b")]
    assert written(moment, [run(most=1)], had) == {}
    gone = [SYNCER, learner("a", alive=False, since_s=GRACE_S), learner("b")]
    assert written(gone, [run(most=1)], had) == {"b": "r"}


def test_whoever_comes_back_goes_on_if_there_is_room_and_else_is_free() -> None:
    had = {"s": "r", "a": "r", "b": "r"}
    back = [SYNCER, learner("a", since_s=1.0), learner("b")]
    assert written(back, [run(most=2)], had) == {}
    plan = schedule(back, [run(most=1)], had)
    assert [(c.member, c.run) for c in plan.changes] == [("a", "")], "the last to come goes"


DEAD = MemberView("s", "syncer", alive=False)


@pytest.mark.parametrize(
    ("members", "wanted", "had", "why"),
    [
        ([], run(), {}, Why("syncers-missing", "queued: no free syncer")),
        ([SYNCER], run(shards=2), {}, Why("syncers-missing", "queued: 1 of 2 syncers free")),
        ([SYNCER], run(), {}, Why("learners-missing", "queued: 0 of 1 learners free")),
        ([SYNCER], run(), {"s": "r"}, Why("learners-missing", "0 of 1 learners alive")),
        (
            [DEAD, learner("a")],
            run(),
            {"s": "r", "a": "r"},
            Why("syncers-gone", "syncer s is gone: the run goes on once it is back"),
        ),
    ],
)
def test_what_a_run_lacks_is_said_in_a_sentence_and_in_a_word(
    members: list[MemberView], wanted: RunView, had: dict[str, str], why: Why
) -> None:
    assert schedule(members, [wanted], had).waiting == {"r": (why,)}


def test_a_run_does_not_begin_with_the_dead() -> None:
    members = [SYNCER, learner("a", alive=False), learner("b")]
    plan = schedule(members, [run(least=2)], {"a": "r"})
    assert (plan.changes, lacks(plan)) == ((), {"r": ["learners-missing"]})


def test_the_only_syncers_of_a_run_that_have_its_state_are_not_forgotten() -> None:
    dead = MemberView("s", "syncer", alive=False)
    assert needed([dead, learner("a", alive=False)], [run()], {"s": "r", "a": "r"}) == {"s"}
    able = MemberView("s2", "syncer", alive=True)
    had = {"s": "r", "s2": "r"}
    assert needed([dead, able], [run()], had) == set()
    unable = MemberView("s2", "syncer", alive=True, unfit="a contribution is gone")
    assert needed([dead, unable], [run()], had) == {"s"}
    assert needed([dead], [run(over=True)], {"s": "r"}) == set(), "a run that is over needs nobody"
    of_other = MemberView("s2", "syncer", alive=True, shard=1)
    assert needed([dead, of_other], [run(shards=2)], had) == {"s"}


def test_a_forced_end_holds_nobody_and_a_syncer_that_comes_back_ends_it_properly() -> None:
    had = {"s": "old", "s2": "old", "a": "old"}
    dead = MemberView("s", "syncer", alive=False, since_s=100.0)
    unfit = MemberView("s2", "syncer", alive=True, unfit="no snapshot", since_s=100.0)
    ended = RunView("old", 1, 9, True, forced=True)
    members = [dead, unfit, learner("a")]
    assert written(members, [ended, run("next")], had) == {"s2": "next", "a": "next"}
    back = MemberView("s", "syncer", alive=True, since_s=1.0)
    assert written([back, unfit, learner("a")], [ended], had) == {"s2": "", "a": ""}
    stays = MemberView("s", "syncer", alive=True, since_s=RETURN_S)
    assert written([stays], [ended], {"s": "old"}) == {"s": ""}, "it had its time"


def test_a_dead_syncer_keeps_its_place_and_another_stands_by() -> None:
    dead = MemberView("s", "syncer", alive=False)
    members = [dead, MemberView("s2", "syncer", alive=True), learner("a")]
    plan = schedule(members, [run()], {"s": "r", "a": "r"})
    assert {c.member: c.run for c in plan.changes} == {"s2": "r"}
    assert lacks(plan) == {"r": ["syncers-gone"]}
    assert schedule(members, [run()], {"s": "r", "a": "r", "s2": "r"}).waiting == {}


def test_a_run_that_nobody_can_lead_says_why() -> None:
    members = [
        MemberView("s", "syncer", alive=False),
        MemberView("s2", "syncer", alive=True, unfit="a contribution is gone"),
        learner("a"),
    ]
    plan = schedule(members, [run()], {"s": "r", "s2": "r", "a": "r"})
    assert plan.changes == ()
    assert plan.waiting == {
        "r": (
            Why("syncers-gone", "syncer s is gone: the run goes on once it is back"),
            Why("syncers-unfit", "s2 cannot lead: a contribution is gone"),
        )
    }


def test_a_run_that_began_takes_newcomers_even_below_its_least() -> None:
    had = {"s": "r", "a": "r"}
    members = [SYNCER, learner("a", draining=True), learner("b")]
    plan = schedule(members, [run(least=2)], had)
    assert {c.member: c.run for c in plan.changes} == {"a": "", "b": "r"}
    assert lacks(plan) == {"r": ["learners-missing"]}


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
        since_s=st.sampled_from([0.0, GRACE_S - 1, GRACE_S, 1000.0]),
        fit=st.booleans(),
    ),
    unique_by=lambda m: m.id,
)
RUNS = st.lists(
    st.builds(
        RunView,
        st.sampled_from("xyz"),
        st.integers(1, 3),
        st.integers(3, 5),
        st.booleans(),
        st.integers(1, 3),
        st.sampled_from([(), *((name,) for name in "abcdefgh")]),
    ),
    unique_by=lambda r: r.name,
)


def moved(members: list[MemberView], plan: Plan) -> list[MemberView]:
    """As they are once the plan is carried out; who has other work is not fit for it yet."""
    new = {c.member: c.shard for c in plan.changes}
    return [replace(m, shard=new[m.id], fit=False) if m.id in new else m for m in members]


ASSIGNED = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["", "x", "y", "gone"]))


@given(MEMBERS, RUNS, ASSIGNED)
def test_promises(members: list[MemberView], runs: list[RunView], had: dict[str, str]) -> None:
    plan = schedule(members, runs, had)
    now = {**had, **{c.member: c.run for c in plan.changes}}
    by_id = {m.id: m for m in members}
    # Applied, it is stable.
    assert schedule(moved(members, plan), runs, now).changes == ()
    live = {r.name: r for r in runs if not r.over}
    for member, name in now.items():
        if not name:
            continue
        # Nobody works for a run that is over, and nobody who is unknown works.
        assert name in live
        # Who drains works only where nobody else could lead.
        mine = [m for m in members if m.role == "syncer" and had.get(m.id) == name == now[m.id]]
        able = [m.id for m in mine if m.alive and m.fit]
        assert not by_id[member].draining or (
            member in [m.id for m in mine] and not {*able} - {member}
        )
        # Only the living get new work.
        assert had.get(member) == name or by_id[member].alive
    for change in plan.changes:
        assert change.reason
    for name, wish in live.items():
        new = [c.member for c in plan.changes if c.run == name]
        mine = [m for m, r in now.items() if r == name]
        learners = [m for m in mine if by_id[m].role == "learner"]
        if any(by_id[m].role == "learner" for m in new):
            counted = [m for m in learners if by_id[m].alive or by_id[m].since_s < GRACE_S]
            assert len(counted) <= wish.learners_max
            assert any(by_id[m].role == "syncer" for m in mine)
        mine_before = [m for m, r in had.items() if r == name and m in by_id]
        begun = any(by_id[m].role == "syncer" for m in mine_before)
        if any(by_id[m].role == "syncer" for m in new):
            counted = [m for m in learners if by_id[m].alive or by_id[m].since_s < GRACE_S]
            assert begun or wish.leaders or len(counted) >= wish.learners_min
            stay = [by_id[m] for m in mine if not by_id[m].draining]
            assert sum(m.role == "syncer" and m.alive for m in stay) <= wish.syncers
        assert name in plan.waiting or any(by_id[m].role == "syncer" for m in mine)


def test_every_shard_gets_a_leader_before_any_gets_a_standby() -> None:
    members = [*syncers("s", "s2", "s3", "s4", "s5"), learner("a")]
    sharded = run(syncers=2, shards=2)
    plan = schedule(members, [sharded], {})
    given_ = {c.member: c.shard for c in plan.changes if c.member != "a"}
    assert given_ == {"s": 0, "s2": 1, "s3": 0, "s4": 1}, "and nobody more than it wants"
    few = schedule([SYNCER, learner("a")], [sharded], {})
    assert (few.changes, lacks(few)) == ((), {"r": ["syncers-missing"]})
    # One of them died for good, and a free one is there: it takes that shard.
    had = {"s": "r", "s2": "r", "a": "r"}
    members = [
        MemberView("s", "syncer", alive=True, shard=0),
        MemberView("s2", "syncer", alive=False, shard=1),
        *syncers("s3"),
        learner("a"),
    ]
    plan = schedule(members, [run(shards=2)], had)
    assert [(c.member, c.shard) for c in plan.changes] == [("s3", 1)]


def test_a_shard_whose_syncers_are_gone_for_long_gets_the_standby_of_another() -> None:
    """Under a new name: the old one never comes back, and nobody leads its shard."""

    def plan(gone_s: float, *more: MemberView) -> list[tuple[str, str, int]]:
        members = [
            MemberView("s", "syncer", alive=True, shard=0),
            MemberView("s2", "syncer", alive=True, shard=0),
            MemberView("old", "syncer", alive=False, shard=1, since_s=gone_s),
            learner("a"),
            *more,
        ]
        had = dict.fromkeys([m.id for m in members if m.id != "free"], "r")
        found = schedule(members, [run(shards=2, leader="s")], had)
        return [(c.member, c.run, c.shard) for c in found.changes]

    assert plan(GRACE_S - 1) == []
    assert plan(GRACE_S) == [("s2", "r", 1)]
    assert plan(GRACE_S, MemberView("free", "syncer", alive=True)) == [("free", "r", 1)]


@given(MEMBERS, st.lists(st.integers(0, 1), min_size=8, max_size=8), ASSIGNED)
def test_shards_are_given_once(
    members: list[MemberView], shards: list[int], had: dict[str, str]
) -> None:
    members = [replace(m, shard=s) for m, s in zip(members, shards, strict=False)]
    runs = [run("x", shards=2, syncers=2), run("y", shards=2, least=2)]
    plan = schedule(members, runs, had)
    now = {**had, **{c.member: c.run for c in plan.changes}}
    there = moved(members, plan)
    assert schedule(there, runs, now).changes == ()
    for r in runs:
        mine = [m for m in there if m.role == "syncer" and now.get(m.id) == r.name]
        stay = [m for m in mine if not m.draining]
        gone_for_long = [
            s
            for s in (0, 1)
            if mine and not any((m.alive or m.since_s < GRACE_S) for m in stay if m.shard == s)
        ]
        spare = [s for s in (0, 1) if sum(m.alive for m in stay if m.shard == s) > 1]
        assert not (gone_for_long and spare)
        # Of whoever had the state of a shard one stays.
        for s in (0, 1):
            knew = [
                m.id
                for m in members
                if m.role == "syncer"
                and had.get(m.id) == r.name
                and m.shard == s
                and m.alive
                and m.fit
            ]
            assert not knew or any(m.id in knew and m.shard == s for m in mine)


def test_a_run_that_cannot_be_read_keeps_whom_it_has_and_gets_nobody() -> None:
    """Nobody here can tell what it wants: its members work for it by another release's word."""
    gone = replace(SYNCER, alive=False, since_s=GRACE_S)
    members = [gone, learner("a"), learner("b", draining=True), learner("c")]
    had = {"s": "r", "a": "r", "b": "r"}
    unread = replace(run(), unread=True)
    assert written(members, [unread], had) == {"b": ""}, "whom a user drains may go"
    assert needed(members, [unread], had) == {"s"}
    assert written(members, [replace(unread, over=True)], had) == dict.fromkeys(had, "")


# --------------------------------------------------------------------------------------------------
# Syncers that drain.


def at_work(name: str, shard: int = 0, **more: Any) -> MemberView:
    """A syncer that leads, or could at once."""
    return replace(MemberView(name, "syncer", alive=True, shard=shard, fit=True), **more)


def test_a_leader_that_drains_stays_until_a_successor_has_its_state() -> None:
    """The only spare syncer is the standby of another shard: it begins with nothing, and nobody
    sends it the snapshot of a syncer that has left."""
    members = [
        at_work("s0"),
        at_work("s0b"),
        at_work("s1", 1, draining=True),
        learner("a"),
    ]
    had = dict.fromkeys([m.id for m in members], "r")
    runs = [replace(run(shards=2), leaders=("s0", "s1"))]
    plan = schedule(members, runs, had)
    assert [(c.member, c.run, c.shard) for c in plan.changes] == [("s0b", "r", 1)]
    assert plan.changes[0].reason == "takes over run r, shard 1, whose syncers drain"
    # It reads: the other one leads on.
    members[1] = at_work("s0b", 1, fit=False)
    plan = schedule(members, runs, had)
    assert plan.changes == ()
    assert plan.staying == {"s1": "hands over run r, shard 1 to s0b"}
    # It has read all.
    members[1] = at_work("s0b", 1)
    plan = schedule(members, runs, had)
    assert [(c.member, c.run) for c in plan.changes] == [("s1", "")]
    assert plan.changes[0].reason == "s1 is draining, and s0b can do without it"
    assert plan.staying == {}


def test_a_standby_that_does_not_have_the_state_yet_is_no_successor() -> None:
    had = dict.fromkeys(["s", "s2"], "r")
    runs = [run(syncers=2, leader="s")]
    leader = at_work("s", draining=True)
    for other in (
        at_work("s2", fit=False),
        at_work("s2", fit=False, unfit="a contribution is gone"),
        at_work("s2", alive=False, since_s=1.0),
    ):
        assert written([leader, other], runs, had) == {}
    assert written([leader, at_work("s2")], runs, had) == {"s": ""}
    assert written([leader, at_work("s2", 1)], [run(shards=2)], had) == {}, "of another shard"
    # A standby is missed by nobody as long as the leader is there, and a run that is over by none.
    members = [at_work("s"), at_work("s2", draining=True, fit=False)]
    assert written(members, runs, had) == {"s2": ""}
    assert written([leader], [run(over=True)], {"s": "r"}) == {"s": ""}


def test_who_drains_counts_as_absent_and_gets_a_successor() -> None:
    members = [at_work("s", draining=True), *syncers("s2", "s3")]
    assert written(members, [run(leader="s")], {"s": "r"}) == {"s2": "r"}
    two = run(syncers=2, leader="s")
    assert written(members, [two], {"s": "r"}) == {"s2": "r", "s3": "r"}
    # Dead, it still is who has the state; and gets one beside it at once.
    dead = at_work("s", draining=True, alive=False, since_s=0.0, fit=False)
    plan = schedule([dead, *syncers("s2")], [run(leader="s")], {"s": "r"})
    assert {c.member: c.run for c in plan.changes} == {"s2": "r"} and plan.staying == {}


def test_the_only_syncer_stays_and_says_so() -> None:
    plan = schedule([at_work("s", draining=True), learner("a")], [run()], {"s": "r", "a": "r"})
    assert (plan.changes, plan.waiting) == ((), {})
    assert plan.staying == {"s": "nobody can take over run r: start another syncer"}
    unread = replace(run(), unread=True)
    assert written([at_work("s", draining=True)], [unread], {"s": "r"}) == {}


def test_of_several_that_drain_the_leader_stays() -> None:
    members = [at_work(name, draining=True) for name in ("s", "s2", "s3")]
    had = dict.fromkeys(["s", "s2", "s3"], "r")
    assert written(members, [run(leader="s2")], had) == {"s": "", "s3": ""}


def test_a_successor_is_not_taken_away_again() -> None:
    """Two leaders drain, and there is one successor: it stays where it was given first."""
    members = [at_work("s0", draining=True), at_work("s1", 1, draining=True), *syncers("s2")]
    had, runs = {"s0": "r", "s1": "r"}, [run(shards=2)]
    plan = schedule(members, runs, had)
    assert [(c.member, c.shard) for c in plan.changes] == [("s2", 0)]
    assert schedule(members, runs, had | {"s2": "r"}).changes == ()
    # Nor is the one of two standbys that has the state.
    members = [at_work("s0"), at_work("a0", fit=False), at_work("s1", 1, draining=True)]
    had = dict.fromkeys(["s0", "a0", "s1"], "r")
    plan = schedule(members, [run(shards=2, leader="gone")], had)
    assert [(c.member, c.shard) for c in plan.changes] == [("a0", 1)]
