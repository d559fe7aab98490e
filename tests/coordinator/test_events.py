"""What one learner says pushes out what it said itself, and nothing of others (I12)."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from diloco_coordinator.runs import events
from diloco_coordinator.runs.events import (
    BY_ONE_MAX,
    DEPTH_MAX,
    EVENT_BYTES_MAX,
    Events,
    _unsayable,
)
from diloco_coordinator.runs.registry_io import events_stream
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Event
from diloco_shared.protocol.telling import OF_THE_HUB
from diloco_shared.protocol.wire import encode

ROOT = Path(__file__).parents[2]
KIND = re.compile(r"[a-z][a-z0-9-]{0,40}")
RUNS = ("r",)


class Told:
    """A stream of events, and what is shown of it."""

    def __init__(self) -> None:
        self.events = Events()
        self.seq = 0

    def tell(self, subject: str, event: Event, now: float = 0.0) -> bool:
        self.seq += 1
        return self.events.take(self.seq, subject, encode(event), now, RUNS)

    def by(self, learner: str, now: float = 0.0, **changes: object) -> bool:
        told = said(learner).model_copy(update=changes)
        return self.tell(subjects.event_by(learner), told, now)

    @property
    def sources(self) -> list[str]:
        return [e.source for _, e in self.events.kept]


def said(source: str, kind: str = "note", run: str = "r") -> Event:
    return Event(run=run, kind=kind, source=source, text="t", at=1.0)


def test_a_learners_own_subject_is_told_from_those_of_runs() -> None:
    assert subjects.told_by(subjects.event_by("oslo")) == "oslo"
    assert subjects.told_by(subjects.event("by", "join")) == ""


def test_an_event_stands_where_it_says() -> None:
    told = Told()
    assert told.by("oslo")
    assert not told.by("oslo", source="rome")
    assert not told.tell(subjects.event("r", "join"), said("s", "leave"))
    assert told.tell(subjects.event("r", "join"), said("s", "join"))
    assert told.sources == ["oslo", "s"]


def test_only_the_hub_says_whose_request_it_was() -> None:
    told = Told()
    told.by("oslo", data={"actor": "admin", "more": 1})
    assert told.events.kept[0][1].data == {"more": 1}


def test_a_flood_of_one_learner_is_left_out_and_others_stay() -> None:
    told = Told()
    told.tell(subjects.event("r", "join"), said("s", "join"))
    told.by("rome")
    taken = sum(told.by("oslo") for _ in range(3 * BY_ONE_MAX))
    assert taken == BY_ONE_MAX
    assert {*told.sources} == {"s", "rome", "oslo"}
    assert told.by("rome") and told.by("oslo", now=60.0)


def test_of_one_learner_the_newest_are_kept() -> None:
    told = Told()
    told.tell(subjects.event("r", "join"), said("s", "join"))
    for n in range(BY_ONE_MAX + 5):
        assert told.by("oslo", now=float(n))
    assert told.sources.count("oslo") == BY_ONE_MAX
    assert told.sources[0] == "s"
    assert told.events.kept[1][0] == 7  # the first five are gone


def evaluated(told: Told, step: int, run: str = "r", now: float = 0.0) -> bool:
    data = {"steps": step, "val_loss": 1.0}
    return told.by("oslo", now=now, kind="evaluation", run=run, data=data)


def steps_of(told: Told, run: str = "r") -> list[int]:
    """Of the evaluations that are kept."""
    kept = (e for _, e in told.events.kept if (e.kind, e.run) == ("evaluation", run))
    return [e.data["steps"] for e in kept]


def test_many_evaluations_are_thinned_evenly_and_push_out_nothing_else() -> None:
    """Who evaluates does so from beginning to end, and began to train before all of it."""
    told, newest = Told(), 5 * BY_ONE_MAX
    told.by("oslo", kind="began", data={"learner": "oslo"})
    for step in range(newest + 1):
        assert evaluated(told, step, now=float(step))
        assert told.sources.count("oslo") <= BY_ONE_MAX
    kept = steps_of(told)
    assert told.events.kept[0][1].kind == "began"
    assert (kept[0], kept[-1]) == (0, newest) and len(kept) > BY_ONE_MAX / 3
    before = kept[: kept.index(next(s for s in kept if s >= newest // 2))]
    assert len(before) > len(kept) / 4, "the first half has its part of the points"
    assert told.by("oslo", now=float(newest + 1)), "and it is heard on"


def test_a_run_with_few_evaluations_keeps_them_beside_one_with_many() -> None:
    told = Told()
    for n in range(events.THINNED_MIN - 1):
        evaluated(told, n, "r", now=float(n))
    for n in range(2 * BY_ONE_MAX):
        evaluated(told, n, "cluster", now=1000.0 + n)
    assert steps_of(told) == [*range(events.THINNED_MIN - 1)]
    assert steps_of(told, "cluster")[0] == 0


def test_evaluations_that_cannot_be_thinned_give_way_as_they_came() -> None:
    """All of one step, which no learner of the product tells."""
    told = Told()
    told.by("oslo")
    for n in range(BY_ONE_MAX + 5):
        evaluated(told, 7, now=float(n))
    assert steps_of(told) == [7] * BY_ONE_MAX


def test_steps_that_go_back_to_a_checkpoint_are_thinned_too() -> None:
    told = Told()
    for n in range(BY_ONE_MAX + 1):
        evaluated(told, n if n < 700 else n - 600, now=float(n))
    kept = steps_of(told)
    assert 3 < len(kept) < BY_ONE_MAX and kept[0] == 0
    assert max(kept) > 650 and kept[-1] == BY_ONE_MAX - 600, "both ways are there"


def test_a_learner_whose_events_were_pushed_out_is_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What others pushed out is not kept any more, and takes no place of what it says now."""
    monkeypatch.setattr(events, "EVENTS_MAX", 5)
    monkeypatch.setattr(events, "BY_ONE_MAX", 3)
    told = Told()
    for n in range(3):
        assert told.by("oslo", now=float(n))
    for kind in ("join", "init", "epoch", "end", "term"):
        told.tell(subjects.event("r", kind), said("s", kind))
    assert told.sources == ["s"] * 5
    for n in range(3, 8):
        assert told.by("oslo", now=float(n))
    assert told.sources == ["s", "s", "s", "oslo", "oslo"]
    assert [seq for seq, _ in told.events.kept] == [6, 7, 8, 12, 13]


def test_one_kind_of_events_in_great_numbers_pushes_out_none_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learner brings about what the leader tells of it: joins, say."""
    monkeypatch.setattr(events, "EVENTS_MAX", 50)
    told = Told()
    told.by("oslo")
    told.tell(subjects.event("r", "end"), said("s", "end"))
    told.tell(subjects.event("q", "join"), said("s", "join", run="q"))
    for n in range(500):
        event = said("s", "join").model_copy(update={"at": float(n)})
        told.tell(subjects.event("r", "join"), event)
    kept = [event for _, event in told.events.kept]
    assert [(e.run, e.kind) for e in kept[:3]] == [("r", "note"), ("r", "end"), ("q", "join")]
    assert [e.at for e in kept[3:]] == [float(n) for n in range(453, 500)], "the newest of them"


@pytest.mark.parametrize("own", [False, True])
def test_a_beginning_goes_with_the_losses_after_it(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Else a lane would show all the time of the losses that are gone as stepping. `own`: the
    learner tells in a subject of its own."""
    monkeypatch.setattr(events, "EVENTS_MAX", 50)
    told, data = Told(), {"learner": "oslo"}
    if own:
        told.by("oslo", kind="began", data=data)
    else:
        told.tell(subjects.event("r", "began"), said("oslo", "began"))
    told.tell(subjects.event("q", "began"), said("rome", "began", run="q"))
    told.tell(subjects.event("r", "restored"), said("s", "restored"))
    for n in range(500):
        kind = ("learner-lost", "learner-alive")[n % 2]
        told.tell(subjects.event("r", kind), said("s", kind).model_copy(update={"data": data}))
    kept = [event for _, event in told.events.kept]
    assert [(e.run, e.kind) for e in kept[:2]] == [("q", "began"), ("r", "restored")]
    assert {e.kind for e in kept[2:]} == {"learner-lost", "learner-alive"}


def test_a_reader_beyond_the_end_goes_on_where_the_stream_began_anew() -> None:
    told = Told()
    for n in range(10):
        told.by("oslo", at=float(n))
    assert [told.events.going_on(after) for after in (0, 7, 10)] == [0, 7, 10]
    assert told.events.going_on(5000) == 0, "nobody here saw what came before"
    told.seq = 7
    told.by("rome", at=100.0)
    assert [told.events.going_on(after) for after in (5, 8, 10)] == [5, 8, 7]


def test_a_reader_begins_anew_where_another_event_stands_at_its_cursor() -> None:
    told = Told()
    for n in range(10):
        told.by("oslo", at=float(n))
    marks = {seq: told.events.mark(seq) for seq in range(1, 12)}
    assert len(set(marks.values())) == 11 and marks[11] == "", "nobody knows it here"
    told.seq = 7
    for n in range(9):
        told.by("rome", at=100.0 + n)
    assert told.events.newest == 16
    assert [told.events.going_on(seq, marks[seq]) for seq in (7, 8, 10, 11)] == [7, 0, 0, 11]
    assert told.events.going_on(10, told.events.mark(10)) == 10
    assert told.events.going_on(10) == 10, "it does not say what it has read"


def test_a_mark_is_the_same_in_every_process() -> None:
    """Another coordinator may be asked next, or one that was started anew."""
    events = Events()
    events.take(3, "ev.r.join", b"of no release", 0.0, RUNS)
    assert events.mark(3) == "d9b14bd88b28a939"


def test_events_of_a_run_that_is_deleted_are_not_told_again() -> None:
    told = Told()
    assert told.by("oslo") and told.by("oslo", run="cluster")
    assert not told.by("oslo", run="gone")
    told.events.forget("r")
    assert [e.run for _, e in told.events.kept] == ["cluster"]
    assert told.events.newest == 3


def test_what_a_run_told_stays_also_where_its_first_event_was_lost() -> None:
    """A message server that was killed has lost it, and another run had the name before."""
    told = Told()
    for at in (10.0, 20.0, 30.0):
        told.by("oslo", at=at)
    told.by("oslo", run="cluster", at=5.0)
    told.events.forget("r", 20.0)
    assert [e.at for _, e in told.events.kept] == [20.0, 30.0, 5.0]
    # By an event of the one before nobody tells where this one began.
    told = Told()
    for kind, at in (("run-created", 10.0), ("join", 11.0), ("init", 30.0)):
        told.tell(subjects.event("r", kind), said("s", kind).model_copy(update={"at": at}))
    told.events.forget("r", 20.0)
    assert [e.kind for _, e in told.events.kept] == ["init"]


def test_a_repeat_is_no_news() -> None:
    told = Told()
    told.by("oslo")
    told.seq = 0
    assert not told.by("oslo")


def test_what_a_killed_server_lost_gives_way_to_what_has_its_sequences() -> None:
    """It acknowledges events that its disk has not, and gives their sequences again."""
    told = Told()
    for n in range(10):
        told.by("oslo", at=float(n))
    told.seq = 7
    assert [told.by("rome", at=100.0), told.by("oslo", at=101.0)] == [True, True]
    assert [(seq, e.at) for seq, e in told.events.kept][6:] == [(7, 6.0), (8, 100.0), (9, 101.0)]
    assert (told.events.newest, told.events.lost, told.events.again_from) == (9, 1, 8)
    for seq, learner, at in ((7, "rome", 100.0), (3, "oslo", 3.0)):
        told.seq = seq
        assert not told.by(learner, at=at), "a repeat"
    assert told.events.lost == 1


def test_the_place_of_an_event_that_was_left_out_may_be_lost_too() -> None:
    told = Told()
    told.by("oslo", source="rome")  # it is not shown: it stands elsewhere than it says
    told.by("oslo")
    told.seq = 0
    assert told.by("rome")
    assert told.sources == ["rome"]


def test_a_learner_whose_events_were_lost_has_room_for_others() -> None:
    told = Told()
    for n in range(BY_ONE_MAX):
        told.by("oslo", now=float(n))
    told.seq = 0
    for n in range(BY_ONE_MAX):
        assert told.by("oslo", now=2000.0 + n, at=2.0)
    assert told.sources.count("oslo") == BY_ONE_MAX


@pytest.mark.parametrize("named", [False, True])
def test_the_stream_bounds_each_writer_where_it_knows_who_writes(named: bool) -> None:
    spec = events_stream(named=named)
    assert spec.drop_oldest
    bounds = (spec.subject_messages_max, spec.message_bytes_max)
    assert bounds == ((BY_ONE_MAX, EVENT_BYTES_MAX) if named else (0, 0))
    if named:
        assert spec.bytes_max >= 16 * BY_ONE_MAX * EVENT_BYTES_MAX


def test_a_time_that_no_clock_shows_is_not_kept() -> None:
    """Pages and terminals fall over it."""
    told = Told()
    late = said("oslo").model_copy(update={"at": 1e13})
    assert not told.tell(subjects.event_by("oslo"), late)
    assert told.tell(subjects.event_by("oslo"), said("oslo"))


def test_what_was_told_of_a_deleted_run_of_that_name_is_not_the_next_ones() -> None:
    """The stream keeps what learners told until they say more, and a coordinator that is started
    anew reads it. A syncer that was cut off tells its own once the run's events are gone."""
    told = Told()
    told.by("oslo", text="of the deleted run")
    told.tell(subjects.event("r", "deposed"), said("syncer-1", "deposed"))
    told.tell(subjects.event("cluster", "note"), said("s", run="cluster"))
    told.tell(subjects.event("r", "run-created"), said("coordinator", "run-created"))
    told.by("oslo", text="of this one")
    assert [(e.source, e.text) for _, e in told.events.kept] == [
        ("s", "t"),
        ("coordinator", "t"),
        ("oslo", "of this one"),
    ]
    assert not told.by("oslo", kind="run-created"), "a learner begins no run"
    assert len(told.events.kept) == 3


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("evaluation", {"steps": 8}),
        ("evaluation", {"val_loss": 2.0}),
        ("evaluation", {"steps": 8, "val_loss": float("nan")}),
        ("evaluation", {"steps": 8, "val_loss": "low"}),
        ("evaluation", {"steps": 8, "val_loss": 2.0, "each": {"code": None}}),
        ("evaluation", {"steps": 8, "val_loss": 2.0, "each": "code"}),
        ("fault-applied", {"kind": "kill", "id": "f"}),
        ("fault-healed", {"target": ["a"], "kind": "kill", "id": "f"}),
        ("setting", {"name": "paused"}),
        ("setting", {"name": "paused", "value": "no"}),
        ("setting", {"value": 1}),
        ("returned", {}),
        ("returned", {"learner": "a", "incarnation": 1, "rounds": "x"}),
        ("returned", {"learner": "a", "incarnation": 1, "lost_at": None}),
        ("restored", {"serial": 1, "shard": [0]}),
        ("restore-failed", {"serial": "1"}),
    ],
)
def test_an_event_without_what_is_shown_of_its_kind_is_left_out(
    kind: str, data: dict[str, Any]
) -> None:
    """Pages, reports and screens of everybody would stumble over it for as long as it is kept."""
    told = Told()
    assert not told.by("oslo", kind=kind, data=data)
    assert not told.tell(
        subjects.event("r", kind), said("s", kind).model_copy(update={"data": data})
    )
    whole = {"steps": 8, "val_loss": 2.0, "each": {"code": 1}}
    whole |= {"id": "f", "kind": "kill", "target": "s", "learner": "s", "incarnation": 1}
    whole |= {"name": "paused", "value": 1, "serial": 1, "shard": 0}
    event = said("s", kind).model_copy(update={"data": whole})
    assert told.tell(subjects.event("r", kind), event)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("setting", {"name": "paused", "value": 1}),
        ("restored", {"serial": 1, "shard": 0}),
        ("restore-failed", {"serial": 1, "shard": 0}),
        ("returned", {"learner": "oslo", "incarnation": 1}),
        ("learner-lost", {"learner": "rome"}),
        ("fault-planned", {"id": "f", "kind": "kill", "target": "oslo"}),
        ("fault-applied", {"id": "f", "kind": "kill", "target": "rome"}),
        ("began", {"learner": "rome"}),
        ("end", {}),
    ],
)
def test_a_learner_tells_of_itself_alone(kind: str, data: dict[str, Any]) -> None:
    """Else `diloco watch` shows everybody as paused, and `diloco checkpoint restore` has failed."""
    told = Told()
    assert not told.by("oslo", kind=kind, data=data)
    event = said("s", kind).model_copy(update={"data": data})
    assert told.tell(subjects.event("r", kind), event), "the hub's own processes may"


def test_what_befalls_a_learner_it_tells_itself() -> None:
    told = Told()
    fault = {"id": "f", "kind": "kill", "target": "oslo"}
    for kind, data in (("fault-applied", fault), ("began", {"learner": "oslo"}), ("leave", {})):
        assert told.by("oslo", kind=kind, data=data)


def kinds_told(*parts: str) -> set[str]:
    """Kinds of events as these parts of the tree say them, word for word."""
    found = set[str]()
    for file in (f for part in parts for f in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
                name = name.id if isinstance(name, ast.Name) else name
                if name in ("Tell", "tell", "tell_soon", "_tell", "event_now"):
                    said = (a.value for a in node.args[:2] if isinstance(a, ast.Constant))
                    found |= {s for s in said if isinstance(s, str) and KIND.fullmatch(s)}
    return found


def test_every_kind_is_known_as_the_hubs_or_as_a_learners() -> None:
    learners = kinds_told("services/learner/diloco_learner", "shared/diloco_shared/process")
    assert {"evaluation", "leave", "unfit", "fault-applied"} <= learners
    assert not learners & OF_THE_HUB, "they would not be shown"
    told = kinds_told("services/syncer/diloco_syncer", "services/coordinator/diloco_coordinator")
    assert {"setting", "returned", "run-created", "fault-planned"} <= told
    # A leader says `recovered` too, and the others are why it has `refused`.
    told -= {*learners, "recovered", "malformed", "incarnation"}
    assert told <= OF_THE_HUB, "add them to protocol/telling.py: a learner could tell them"


def nested(depth: int) -> Any:
    """A list in a list, so deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "data",
    [
        {"x": b"\xff"},
        {"x": b"text"},
        {"x": {b"a": 1}},
        {"x": [1, {"y": b""}]},
        {"x": nested(300)},
        {"x": nested(DEPTH_MAX)},
        {"x": "a" * EVENT_BYTES_MAX},
    ],
)
def test_an_event_that_json_cannot_say_is_left_out(data: dict[str, Any]) -> None:
    """One of them would leave everybody without the list, and a restart would read it again."""
    told = Told()
    assert not told.by("oslo", data=data)
    where = subjects.event("r", "note")
    assert not told.tell(where, said("s").model_copy(update={"data": data}))
    assert told.events.newest == 2, "it is read, and passed over"


def test_half_a_character_is_not_kept() -> None:
    """Msgpack gives none such, and a bus in memory might."""
    assert _unsayable({"x": "\ud800"}) and _unsayable({"\udfff": 1})
    assert _unsayable({"x": 2**64}) and not _unsayable({"x": 2**64 - 1})


def test_whatever_is_plain_is_kept() -> None:
    told = Told()
    assert told.by("oslo", data={"loss": float("nan")}), "a run whose loss is none may say so"
    data = {"x": None, "y": [True, -(2**63), 2**64 - 1, 0.5, "\u00e9"], "z": nested(DEPTH_MAX - 1)}
    assert told.by("oslo", data=data)
