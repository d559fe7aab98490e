"""What the API says of runs, members and faults."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_coordinator.api import views
from diloco_coordinator.api.views import (
    BEFORE,
    MEND,
    brief_view,
    fault_views,
    full,
    jsonable,
    over_view,
    quorum_consequence,
    recovery_views,
    releases,
    round_json,
    syncer_views,
    unfit,
)
from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.reasons import UNLED_S, Why
from diloco_shared import VERSION
from diloco_shared.protocol.messages import Verdict
from diloco_shared.protocol.records import Event, MemberRecord, RecoveryRecord, RunRecord, boot_of
from diloco_shared.spec import quorum
from diloco_shared.spec.quorum import QuorumAnswer

RECORD = RunRecord(name="r", spec={}, desired="running", quorum=1, created_at=1.0)
FREE = Why("learners-missing", "queued: 1 of 2 learners free")


def test_floats_that_json_cannot_say_become_null() -> None:
    assert jsonable({"a": [math.nan, math.inf, 1.5], 2: (None,)}) == {
        "a": [None, None, 1.5],
        "2": [None],
    }


def test_a_run_says_who_is_of_which_release() -> None:
    said = {"role": "learner", "host": "h", "pid": 1, "lock": "l", "started_at": 1.0}
    notes = [
        MemberNote(record=MemberRecord.model_validate({**said, "id": name, "boot": boot}))
        for name, boot in (("a", boot_of("9.9.0", "x")), ("b", "1"), ("c", boot_of(VERSION, "y")))
    ]
    gone = notes[0].model_copy(update={"gone_since": 1.0})
    assert releases([*notes, gone]) == {
        VERSION: ["coordinator", "c"],
        "9.9.0": ["a"],
        BEFORE: ["b"],
    }


def test_a_run_in_the_queue_says_what_it_waits_for() -> None:
    view = brief_view(RECORD, None, [FREE], [])
    assert (view["state"], view["reason"], view["waiting"]) == ("queued", FREE.text, FREE.text)
    assert view["reason_codes"] == ["learners-missing"]
    two = (Why("syncers-gone", "syncer s is gone"), Why("syncers-unfit", "t cannot lead"))
    view = brief_view(RECORD, None, two, ["s", "t"])
    assert view["reason"] == view["waiting"] == "syncer s is gone; t cannot lead"
    assert view["reason_codes"] == ["syncers-gone", "syncers-unfit"]


@pytest.mark.parametrize(
    ("changes", "members", "state", "code", "words"),
    [
        ({}, [], "queued", "unassigned", "members are being assigned"),
        ({"desired": "stopped"}, [], "stopped", "not-begun", "stopped before it began"),
        ({"phase": "submitting"}, [], "queued", "submitting", "submit it again or delete it"),
        ({"phase": "deleting"}, ["s"], "stopped", "deleting", "delete it again"),
    ],
)
def test_a_run_without_a_status_says_why_in_a_word(
    changes: dict[str, Any], members: list[str], state: str, code: str, words: str
) -> None:
    view = brief_view(RECORD.model_copy(update=changes), None, (), members)
    assert (view["state"], view["reason_codes"]) == (state, [code])
    assert words in view["reason"] and view["waiting"] is None


def test_a_leading_syncer_speaks_for_its_run(status: Callable[..., Any]) -> None:
    alive = Why("learners-missing", "1 of 2 learners alive")
    view = brief_view(RECORD, status(run="r"), [alive], ["s"])
    assert (view["state"], view["reason"]) == ("running", "2 of 2 ready")
    assert (view["waiting"], view["reason_codes"]) == (alive.text, ["running"])
    assert not over_view(view)


def test_a_run_stopped_in_the_queue_is_over() -> None:
    stopped = RECORD.model_copy(update={"desired": "stopped"})
    assert over_view(brief_view(stopped, None, (), []))
    assert not over_view(brief_view(stopped, None, (), ["s"])), "its syncer has to end it"


def test_a_round_is_written_as_its_record_says_and_no_number_is_json_cannot_say(
    closed: Callable[..., Any],
) -> None:
    verdict = Verdict(learner="a", incarnation=0, outcome="merged", reason="in time", weight=0.5)
    record = closed(7, verdict).model_copy(update={"sync_s": math.nan})
    shown = jsonable(record.model_dump(mode="json")) | {"seq": 9, "shard": 1}
    assert json.loads(round_json(9, 1, record)) == shown and shown["sync_s"] is None


def test_syncers_show_what_they_do_and_how_far_behind_they_are() -> None:
    def note(name: str, state: str, seq: int, **more: Any) -> MemberNote:
        gone = more.pop("gone_since", None)
        fields: dict[str, Any] = {"boot": "b", "host": "h", "pid": 1, "lock": name}
        record = MemberRecord(
            id=name, role="syncer", started_at=1.0, state=state, tape_seq=seq, **fields, **more
        )
        return MemberNote(record=record, gone_since=gone)

    notes = [
        note("s2", "standby", 40),
        note("s1", "leading", 43),
        note("s3", "ineligible", 7, reason="record 8"),
        note("s4", "standby", 5, gone_since=1.0),
    ]
    assert [(v["id"], v["state"], v["lag_records"]) for v in syncer_views(notes)] == [
        ("s1", "leading", 0),
        ("s2", "standby", 3),
        ("s3", "ineligible", 36),
        ("s4", "gone", 38),
    ]
    assert syncer_views(notes)[2]["reason"] == "record 8"
    assert syncer_views(notes[:1])[0]["lag_records"] is None


def member(name: str, role: str = "learner", *, gone: bool = False, **more: Any) -> MemberNote:
    process: dict[str, Any] = {"boot": "b", "host": "h", "pid": 1, "lock": name}
    told = {"id": name, "role": role, "started_at": 1.0, **process, **more}
    record = MemberRecord.model_validate(told)
    return MemberNote(record=record, gone_since=1.0 if gone else None)


def test_members_whose_disks_are_full_are_named() -> None:
    notes = [
        member("s", "syncer", state="leading", full="/d takes nothing more"),
        member("b", state="working"),
        member("c", gone=True, full="/c takes nothing more"),
    ]
    assert full(notes) == "s: /d takes nothing more"
    many = [member(f"x{n}", full="none left") for n in range(5)]
    assert full(many).endswith("x2: none left; and 2 more")
    view = brief_view(RECORD, None, [FREE], [], beside=[Why("members-full", full(notes))])
    assert view["reason"] == f"{FREE.text}; {full(notes)}"
    assert view["reason_codes"] == ["learners-missing", "members-full"]
    view = brief_view(RECORD, None, [FREE], [], beside=[Why("members-full", "")])
    assert view["reason_codes"] == ["learners-missing"], "all of them have room"


def test_learners_that_cannot_work_are_named_with_why_and_what_to_do() -> None:
    no_model = "model.factory 'm:f' cannot be loaded"
    notes = [
        member("b", state="unfit", reason=no_model),
        member("a", state="unfit", reason="there is no /text"),
        member("c", state="working"),
        member("d", gone=True, state="unfit", reason="of a process that is gone"),
        member("s", "syncer", state="unfit", reason="of no learner"),
    ]
    assert unfit(notes) == f"a cannot work: there is no /text; b cannot work: {no_model} ({MEND})"
    assert "diloco check" in MEND
    alike = [member(f"x{n}", state="unfit", reason=no_model) for n in range(5)]
    assert unfit(alike) == f"x0, x1, x2 and 2 more cannot work: {no_model} ({MEND})"
    different = [member(f"x{n}", state="unfit", reason=f"reason {n}") for n in range(5)]
    assert unfit(different).count("cannot work") == 3 and "; and 2 more (" in unfit(different)
    assert unfit([member("a"), member("b", state="working")]) == ""


def test_a_run_that_waits_for_learners_says_first_which_of_them_cannot_work(
    status: Callable[..., Any],
) -> None:
    cannot = unfit([member("a", state="unfit", reason="there is no /text")])
    waits = status(run="r", state="waiting", reason="1 of 2 learners have joined")
    view = brief_view(RECORD, waits, (), ["a", "b"], cannot=cannot)
    assert (view["state"], view["reason"]) == ("waiting", f"{cannot}; 1 of 2 learners have joined")
    assert view["reason_codes"] == ["learners-unfit", "waiting"]
    view = brief_view(RECORD, None, [FREE], ["a"], cannot=cannot)
    assert view["reason"] == f"{cannot}; {FREE.text}"
    assert view["reason_codes"] == ["learners-unfit", "learners-missing"]


def test_a_run_goes_on_without_those_that_cannot_work_and_says_so(
    status: Callable[..., Any],
) -> None:
    cannot = unfit([member("c", state="unfit", reason="there is no /text")])
    view = brief_view(RECORD, status(run="r"), (), ["a", "b", "c"], cannot=cannot)
    assert (view["state"], view["reason"]) == ("running", f"2 of 2 ready; {cannot}")
    assert view["reason_codes"] == ["running", "learners-unfit"]
    over = brief_view(RECORD, status(run="r", state="finished"), (), ["c"], cannot=cannot)
    assert over["reason_codes"] == ["finished"]


def test_faults_are_told_from_plan_to_healing() -> None:
    def event(seq: int, kind: str, **data: Any) -> tuple[int, Event]:
        shown = {"id": "f", "kind": "hang", "target": "a", "at_step": 3, "duration_s": 2.0}
        told = Event(run="r", kind=kind, source="a", text="", data=shown | data, at=float(seq))
        return seq, told

    events = [
        event(1, "fault-planned", when="at step 3 (now 1)"),
        event(2, "fault-applied"),
        event(3, "fault-healed"),
        event(4, "join"),
        (5, Event(run="r", kind="fault-applied", source="a", text="", data={}, at=5.0)),
    ]
    (fault,) = fault_views(events)
    # What is no fault, or has no name, is none of its moments.
    told = {key for key in fault if key.endswith("_at")}
    assert told == {"planned_at", "applied_at", "healed_at"}
    assert (fault["planned_at"], fault["applied_at"], fault["healed_at"]) == (1.0, 2.0, 3.0)
    assert (fault["kind"], fault["target"], fault["when"]) == ("hang", "a", "at step 3 (now 1)")


def test_recoveries_are_those_told_of_then_those_under_way(status: Callable[..., Any]) -> None:
    done = RecoveryRecord(
        learner="a", incarnation=1, lost_at=10.0, detected_at=12.0, contributed_at=20.0, rounds=4
    )
    begun = RecoveryRecord(learner="b", incarnation=2, lost_at=30.0, detected_at=35.0)
    told = Event(run="r", kind="returned", source="s", text="", data=done.model_dump(), at=20.0)
    other = Event(run="r", kind="join", source="s", text="", data={}, at=21.0)
    now = status(run="r", recoveries=(done, begun))
    views = recovery_views([(1, told), (2, other)], now)
    assert [(v["learner"], v["complete"], v["rounds"]) for v in views] == [
        ("a", True, 4),
        ("b", False, None),
    ]
    assert views[0]["phases_s"]["total"] == 10.0 and views[1]["phases_s"]["detected"] == 5.0
    assert recovery_views([], None) == []


def test_a_run_that_nobody_leads_does_not_say_that_it_runs(status: Callable[..., Any]) -> None:
    def syncer(name: str, state: str, shard: int = 0) -> dict[str, Any]:
        return {"id": name, "state": state, "shard": shard, "reason": "no snapshot"}

    def shown(
        *syncers: dict[str, Any], state: str = "running", wordless_s: float = 0.0
    ) -> tuple[str, str]:
        said = status(run="r", state=state)
        view = brief_view(RECORD, said, (), ["s1"], list(syncers), wordless_s=wordless_s)
        sentences.append(view["reason"])
        (code,) = view["reason_codes"]
        return view["state"], code

    sentences: list[str] = []
    nothing = "learners step on, nothing is merged"
    gone = f"s1 is gone and nobody else leads: {nothing} until you start it again"
    assert shown(syncer("s1", "gone")) == ("leaderless", "syncers-gone")
    assert sentences[-1] == gone
    assert shown(syncer("s1", "gone"), syncer("s2", "standby")) == ("running", "running")
    assert shown(syncer("s0", "leading"), syncer("s1", "gone", 1)) == ("leaderless", "syncers-gone")
    assert sentences[-1] == gone
    without = (syncer("s1", "ineligible"), syncer("s2", "gone"))
    assert shown(*without) == ("leaderless", "syncers-unfit")
    assert sentences[-1] == "cannot go on, no syncer has its state: no snapshot"
    assert shown(syncer("s1", "gone"), state="finished") == ("finished", "finished")
    assert shown(syncer("s1", "gone"), syncer("s2", "gone")) == ("leaderless", "syncers-gone")
    assert sentences[-1].startswith("s1, s2 are gone")
    both = (syncer("s1", "standby"), syncer("s2", "standby"))
    assert shown(*both, wordless_s=UNLED_S) == ("running", "running"), "one may lead soon"
    assert shown(*both, wordless_s=UNLED_S + 0.1) == ("leaderless", "leader-silent")
    assert sentences[-1].startswith("no syncer has led it for more than 12 s")
    assert "the logs of s1, s2, and at the message server's disk" in sentences[-1]
    assert shown(*both, state="full", wordless_s=99.0) == ("full", "full"), "it says why itself"
    assert shown(*both, state="finished", wordless_s=99.0) == ("finished", "finished")
    assert shown(wordless_s=99.0) == ("leaderless", "syncers-missing")
    assert sentences[-1] == f"no syncer is assigned to it: {nothing} until you start one"


def test_what_a_learner_makes_up_about_its_return_is_passed_over() -> None:
    for data in ({"contributed_at": 1}, {"contributed_at": "x", "learner": [], "incarnation": 1}):
        made_up = Event(run="r", kind="returned", source="l", text="", data=data, at=20.0)
        assert recovery_views([(1, made_up)], None) == []


def test_what_another_quorum_means_is_the_policys_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def wants_b(k: int) -> Any:
        """K learners, `b` among them."""

        def answer(learners: list[str]) -> QuorumAnswer:
            short = max(k - len(learners), int("b" not in learners))
            return QuorumAnswer(not short, short, "")

        return SimpleNamespace(answer=answer)

    assert quorum_consequence("r", 2, None) == ""
    assert quorum_consequence("r", 2, {"alive": ["a", "c"]}) == ""
    monkeypatch.setattr(views, "policy", wants_b)
    monkeypatch.setattr(quorum, "policy", wants_b)
    there = "no round opens until 1 more join"
    assert (
        quorum_consequence("r", 2, {"alive": ["a", "c"]}) == f"2 of 2 learners are there: {there}"
    )
    assert quorum_consequence("r", 3, {"alive": ["a", "b"]}) == (
        f"2 of 3 learners are there: {there}, or 'diloco quorum r 2'"
    )
