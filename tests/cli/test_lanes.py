"""Lanes: what each learner was doing when."""

import ast
import inspect
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import diloco_cli.lanes
from diloco_cli import tally
from diloco_cli.lanes import Span, lanes
from diloco_cli.lanes import whole as whole_of
from diloco_shared.protocol.telling import OF_LANES, OF_THE_HUB

Row = dict[str, Any]


def told(kind: str, at: float, source: str = "syncer-1", **data: Any) -> Row:
    return {"kind": kind, "at": at, "source": source, "data": data}


def test_the_coordinator_keeps_together_what_lanes_are_made_of() -> None:
    """Each kind that is named here is in the list by which it does so, and no other is."""
    tree = ast.parse(inspect.getsource(diloco_cli.lanes) + inspect.getsource(tally.fault_of))
    words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert {word for word in words if word in OF_THE_HUB | OF_LANES} == OF_LANES


def fault(what: str, at: float, kind: str, target: str) -> Row:
    data = {"id": "f", "kind": kind, "target": target}
    return {"kind": f"fault-{what}", "at": at, "source": target, "data": data}


def activities(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(s.activity, s.began, s.ended) for s in spans]


def test_a_killed_learner_is_down_then_recovers(events: list[Row]) -> None:
    found = lanes(events, until=50.0, lease_s=5.0)
    assert list(found) == ["a", "b", "c"]
    assert activities(found["b"]) == [
        ("joining", 0.0, 10.0),
        ("stepping", 10.0, 20.0),
        ("down", 20.0, 26.0),
        ("recovering", 26.0, 30.0),
        ("stepping", 30.0, 50.0),
    ]
    assert activities(found["a"]) == [("joining", 0.0, 10.0), ("stepping", 10.0, 50.0)]


def test_a_learner_lost_without_a_fault_was_silent_before_it_was_missed() -> None:
    events = [
        told("join", 0.0, learner="a"),
        told("began", 1.0, "a", learner="a"),
        told("learner-lost", 20.0, learner="a"),
        told("learner-alive", 30.0, learner="a"),
    ]
    found = lanes(events, until=40.0, lease_s=5.0)["a"]
    assert activities(found) == [
        ("joining", 0.0, 1.0),
        ("stepping", 1.0, 15.0),
        ("down", 15.0, 30.0),
        ("stepping", 30.0, 40.0),
    ]


def setting(at: float, value: int, name: str = "paused") -> Row:
    return told("setting", at, name=name, value=value)


def test_who_steps_is_paused_with_its_run_and_the_dead_are_not() -> None:
    events = [
        told("began", 1.0, "a", learner="a"),
        told("began", 1.0, "b", learner="b"),
        fault("applied", 2.0, "kill", "b"),
        setting(3.0, 1),
        setting(4.0, 2, "quorum"),
        setting(7.0, 0),
    ]
    found = lanes(events, until=9.0)
    assert activities(found["a"]) == [
        ("stepping", 1.0, 3.0),
        ("paused", 3.0, 7.0),
        ("stepping", 7.0, 9.0),
    ]
    assert activities(found["b"])[-1] == ("down", 2.0, 9.0)


def test_who_comes_back_or_begins_while_the_run_is_paused_does_not_step() -> None:
    events = [
        *(told("began", 1.0, name, learner=name) for name in "abd"),
        fault("applied", 2.0, "kill", "a"),
        fault("applied", 2.0, "hang", "b"),
        told("learner-lost", 2.5, learner="d"),
        setting(3.0, 1),
        told("join", 4.0, learner="a"),
        told("recovered", 5.0, learner="a"),
        fault("healed", 5.0, "hang", "b"),
        told("began", 5.0, "c", learner="c"),
        told("learner-alive", 5.0, learner="d"),
        setting(7.0, 0),
    ]
    found = lanes(events, until=9.0)
    for name in "abcd":
        assert activities(found[name])[-2:] == [("paused", 5.0, 7.0), ("stepping", 7.0, 9.0)]


def test_a_hang_ends_when_it_heals_although_the_learner_was_lost_meanwhile() -> None:
    events = [
        told("began", 1.0, "a", learner="a"),
        fault("applied", 5.0, "hang", "a"),
        told("learner-lost", 10.0, learner="a"),
        fault("healed", 15.0, "hang", "a"),
        told("learner-alive", 15.1, learner="a"),
    ]
    found = lanes(events, until=20.0, lease_s=5.0)["a"]
    assert activities(found) == [
        ("stepping", 1.0, 5.0),
        ("hung", 5.0, 15.0),
        ("stepping", 15.0, 20.0),
    ]


def test_faults_that_leave_a_learner_stepping_and_events_about_nobody_change_nothing() -> None:
    events = [
        told("recovered", 0.0, "syncer-1"),
        told("began", 1.0, "a", learner="a"),
        fault("applied", 2.0, "slow", "a"),
        fault("applied", 2.0, "kill", "syncer-1"),
        fault("healed", 3.0, "slow", "a"),
        told("evaluation", 4.0, "a", val_loss=1.0),
    ]
    assert activities(lanes(events, until=5.0)["a"]) == [("stepping", 1.0, 5.0)]
    assert list(lanes(events, until=5.0)) == ["a"]


def test_nothing_follows_a_leave_until_the_learner_joins_again() -> None:
    events = [
        told("began", 1.0, "a", learner="a"),
        told("leave", 5.0, "a"),
        told("learner-lost", 9.0, learner="a"),
        told("join", 12.0, learner="a"),
    ]
    found = lanes(events, until=20.0, lease_s=5.0)["a"]
    assert activities(found) == [("stepping", 1.0, 5.0), ("recovering", 12.0, 20.0)]


KINDS = [
    "join",
    "began",
    "recovered",
    "learner-lost",
    "learner-alive",
    "leave",
    "applied",
    "healed",
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from("ab"),
            st.sampled_from(["kill", "hang", "slow"]),
            st.integers(0, 4),
        ),
        max_size=30,
    )
)
def test_spans_follow_each_other_and_never_overlap(steps: list[tuple[str, str, str, int]]) -> None:
    at, events = 0.0, []
    for kind, learner, inflicted, pause in steps:
        at += pause
        if kind in ("applied", "healed"):
            events.append(fault(kind, at, inflicted, learner))
        else:
            events.append(told(kind, at, learner, learner=learner))
    for name, spans in lanes(events, until=at + 1, lease_s=3.0).items():
        assert all(span.ended <= after.began for span, after in pairwise(spans))
        assert all(s.began <= s.ended <= at + 1 and s.learner == name for s in spans)


NEXT = {
    "": [("join",)],
    "joining": [("began",)],
    "stepping": [("learner-lost",), ("applied", "kill"), ("applied", "hang"), ("leave",)],
    "down": [("learner-alive",), ("join",)],
    "killed": [("join",)],
    "recovering": [("recovered",)],
    "hung": [("healed", "hang")],
    "left": [("join",)],
}
BECOMES = {
    "learner-lost": "down",
    "kill": "killed",
    "hang": "hung",
    "leave": "left",
    "learner-alive": "stepping",
    "began": "stepping",
    "recovered": "stepping",
    "healed": "stepping",
}


def history(choices: list[tuple[int, int]]) -> list[Row]:
    """A run of five learners as it can happen: who of them, and which of the things possible."""
    state, rows = dict.fromkeys("abcde", ""), list[Row]()
    paused = 0
    # `e` joins, begins, and nothing befalls it. The run is paused now and then.
    for at, (who, which) in enumerate([(4, 0), (4, 0), *choices]):
        if at > 1 and who == 4:
            paused = 1 - paused
            rows.append(told("setting", float(at), name="paused", value=paused))
            continue
        learner = "abcde"[who]
        possible = NEXT[state[learner]]
        kind, *what = possible[which % len(possible)]
        if what:
            rows.append(fault(kind, float(at), what[0], learner))
        else:
            rows.append(told(kind, float(at), learner, learner=learner))
        again = "recovering" if state[learner] else "joining"
        state[learner] = (
            again if kind == "join" else BECOMES[what[-1] if kind == "applied" else kind]
        )
    return rows


def doing(spans: list[Span], at: float) -> str:
    return next((s.activity for s in spans if s.began <= at < s.ended), "")


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=60), st.data()
)
def test_what_is_left_of_a_runs_events_tells_the_same_of_the_time_since(
    choices: list[tuple[int, int]], data: st.DataObject
) -> None:
    """But of who joins first in it: whether it was there before, nobody knows."""
    events = history(choices)
    whole = lanes(events, until=100.0)
    left = events[data.draw(st.integers(0, len(events) - 1)) :]
    since = float(left[0]["at"])
    merged = {n: 99.0 for n, spans in whole.items() if doing(spans, 99.0) in ("stepping", "paused")}
    found = lanes(left, until=100.0, merged=merged)
    if whole_of(left, whole):
        assert since == 0.0 or all(spans[0].began >= since for spans in whole.values())
    assert merged.keys() <= found.keys()
    for name, spans in found.items():
        first = spans[0].began if spans else 0.0
        for at in range(int(max(since, first)), 100):
            now, then = doing(spans, at + 0.5), doing(whole[name], at + 0.5)
            if then == "paused" and not any(e["kind"] == "setting" for e in left):
                continue  # nothing that is left tells of the pause
            assert now == then or {now, then} == {"joining", "recovering"}
        if first > since:
            about = [e for e in left if name in (e["source"], e["data"].get("learner"))]
            assert about[0]["kind"] == "join"


def test_no_syncer_has_a_lane() -> None:
    events = [
        told("began", 1.0, "a", learner="a"),
        fault("applied", 2.0, "kill", "syncer-1"),
        told("leave", 3.0, "syncer-1"),
    ]
    assert list(lanes(events, until=5.0)) == ["a"]


def test_who_was_merged_before_the_oldest_event_alone_has_no_lane() -> None:
    events = [told("began", 10.0, "a", learner="a")]
    assert list(lanes(events, until=20.0, merged={"b": 5.0, "c": 15.0})) == ["a", "c"]


def test_events_are_whole_where_each_learner_joins_first() -> None:
    events = [
        fault("applied", 0.0, "kill", "syncer-1"),
        told("join", 1.0, learner="a"),
        told("join", 1.0, learner="b"),
        told("began", 2.0, "a", learner="a"),
        told("learner-lost", 5.0, learner="a"),
        told("join", 9.0, learner="a"),
    ]
    assert whole_of(events, ["a", "b"]) and whole_of([], [])
    assert not whole_of(events[5:], ["a", "b"]), "a comes back, and of b nothing is left"
    assert not whole_of(events[3:], ["a"])


def test_a_report_before_its_learner_joins_is_no_sign_of_what_was_before() -> None:
    """On a busy machine a learner is heard of before the syncer lets it in."""
    events = [
        told("learner-alive", 0.0, learner="a"),
        told("join", 1.0, learner="b"),
        told("learner-alive", 1.0, learner="b"),
        told("learner-alive", 2.0, learner="c"),
        told("join", 3.0, learner="c"),
        told("join", 4.0, learner="a"),
        told("began", 9.0, "c", learner="c"),
    ]
    assert whole_of(events, ["a", "b", "c"])
    found = lanes(events, until=20.0)
    assert activities(found["c"]) == [("joining", 3.0, 9.0), ("stepping", 9.0, 20.0)]
    assert activities(found["a"]) == [("joining", 4.0, 20.0)]
    back = [told("learner-alive", 0.0, learner="a"), told("began", 1.0, "a", learner="a")]
    assert not whole_of([*back, told("join", 2.0, learner="a")], ["a"]), "it was there before"


def test_who_was_lost_in_a_pause_whose_beginning_is_gone_was_paused() -> None:
    events = [
        told("join", 0.0, learner="c"),
        told("learner-lost", 10.0, learner="b"),
        told("setting", 20.0, name="paused", value=0),
    ]
    found = lanes(events, until=30.0, merged={"a": 25.0})
    assert activities(found["b"])[0] == ("paused", 0.0, 10.0)
    assert activities(found["a"]) == [("paused", 0.0, 20.0), ("stepping", 20.0, 30.0)]
