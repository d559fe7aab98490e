"""The live page's own script, run by a JavaScript engine on a browser as small as can be (dom.js).

What the coordinator answers was recorded from a live one (tests/cli/record.py); the planner answers
for itself. How the page looks is for eyes: this is about what it says and does.
"""

import json
import re
import time
from copy import deepcopy
from typing import Any

import pytest
from coordinator.web.browser import VIEWER, WEB, Page, again, evaluation

from diloco_coordinator.api.plans_io import _planned
from diloco_coordinator.api.views import unfit
from diloco_coordinator.runs.membership import MemberNote
from diloco_planner.plan_request import PlanRequest
from diloco_shared.protocol.records import MemberRecord


def test_it_shows_the_run_its_members_its_rounds_and_events(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    status = answers[f"GET /v1/runs/{run}"]["status"]
    members = answers["GET /v1/members"]["members"]
    assert page.ask('seen("link")') == "connected"
    assert page.ask('seen("name")') == run
    assert page.ask('seen("state")') == answers[f"GET /v1/runs/{run}"]["state"]
    figures = page.ask('seen("figures")')
    assert f"Rounds committed{status['rounds_committed']}" in figures
    assert f"{len(status['alive'])} of {len(status['learners'])}" in figures
    learners = [m["id"] for m in members if m["role"] == "learner"]
    assert [row[0] for row in page.ask('rows("learners")')] == learners
    assert {row[0] for row in page.ask('rows("services")')} == {m["id"] for m in members} - {
        *learners
    }
    rounds = answers[f"GET /v1/runs/{run}/rounds"]["rounds"]
    shown = page.ask('items("rounds")')
    assert shown[0].startswith(f"Round {rounds[-1]['round']}") and len(shown) == len(rounds) <= 30
    events = answers["GET /v1/events"]["events"]
    assert events[-1]["text"] in page.ask('items("events")')[0]
    assert "Validation loss from" in page.ask(
        'id("chart").firstElementChild.getAttribute("aria-label")'
    )


def test_the_loss_on_each_corpus_of_a_mixture_is_shown(answers: dict[str, Any]) -> None:
    told = deepcopy(answers)
    made = [e for e in told["GET /v1/events"]["events"] if e["kind"] == "evaluation"]
    made[-1]["data"] |= {"val_loss": 2.0, "each": {"code": 1.5, "talk": 2.25}}
    page = Page(told)
    assert "nats per token, newest; code 1.5000, talk 2.2500" in page.ask('seen("figures")')
    table = page.ask('seen("values")')
    assert table.count("2.0000 (code 1.5000, talk 2.2500)") == table.count(" (code") == 1


def losses(page: Page) -> list[list[str]]:
    """Of the table below the chart: steps and loss, newest first."""
    table = 'lines(id("values").querySelector("tbody"))'
    return [row[:2] for row in page.ask(table)]


def test_an_evaluation_without_its_figures_is_left_out(answers: dict[str, Any]) -> None:
    """Of another release, say: in the list of events its words stand, and the rest is drawn."""
    before = Page(answers)
    told = deepcopy(answers)
    strange: list[dict[str, Any]] = [
        {"val_loss": 2.0},
        {"steps": 300},
        {"steps": None, "val_loss": 2.0},
        {"steps": "300", "val_loss": 2.0},
        {"steps": 300, "val_loss": None},
        {},
    ]
    told["GET /v1/events"]["events"] += [
        evaluation(1000 + n, **data) for n, data in enumerate(strange)
    ]
    page = Page(told)
    assert page.ask('seen("link")') == "connected" and page.ask("console.said") == []
    label = 'id("chart").firstElementChild.getAttribute("aria-label")'
    assert page.ask(label) == before.ask(label) and losses(page) == losses(before)
    assert page.ask('seen("figures")') == before.ask('seen("figures")'), "the newest with figures"
    assert page.ask('items("events")')[0].endswith("told as 1005")
    odd = {"steps": 300, "val_loss": 1.25, "each": [None], "versions": {"toString": 1}}
    told["GET /v1/events"]["events"].append(evaluation(1006, **odd))
    page.answers = told
    page.second()
    assert page.ask('seen("link")') == "connected" and losses(page)[0] == ["300", "1.2500"]


def test_a_hub_that_was_put_back_shows_what_came_since_in_place_of_what_is_lost(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    """It counts its events and rounds anew: others have the numbers of those that are shown."""
    told = deepcopy(answers)
    events = told["GET /v1/events"]["events"]
    assert page.ask('items("events").length') == len(events) > 3 and len(losses(page)) == 3
    told["GET /v1/events"]["events"] = [
        {**events[0], "text": "submitted anew"},
        evaluation(2, steps=12, val_loss=5.0),
        {**events[2], "text": "joined anew"},
    ]
    rounds = told[f"GET /v1/runs/{run}/rounds"]
    rounds["rounds"] = [{**r, "round": 9000 + r["round"]} for r in rounds["rounds"][:2]]
    page.answers = told
    for _ in range(2):
        page.second()
        shown = page.ask('items("events")')
        assert [text.endswith("anew") for text in shown] == [True, False, True]
        assert losses(page) == [["12", "5.0000"]]
        assert all(text.startswith("Round 90") for text in page.ask('items("rounds")'))
    told["GET /v1/events"]["events"] = [{**events[0], "text": "submitted anew"}]
    page.second()
    assert page.ask('seen("losses")') is None and losses(page) == [], "nothing is evaluated yet"
    assert page.ask('id("chart").children.length') == 0


def test_events_that_have_overtaken_what_is_shown_are_shown_in_its_place(
    page: Page, answers: dict[str, Any]
) -> None:
    """The tab was hidden while the hub lost its newest events, and as many others came."""
    told = deepcopy(answers)
    events = told["GET /v1/events"]["events"]
    newest = events[-1]["seq"]
    events[-2:] = [evaluation(newest + n, steps=600 + n, val_loss=1.5) for n in range(-1, 4)]
    page.answers = told
    for _ in range(2):
        page.second()
        assert page.ask('items("events").length') == len(events)
        lines = [text.split("learner-9")[-1] for text in page.ask('items("events")')[:5]]
        assert lines == [f"told as {newest + n}" for n in range(3, -2, -1)]


@pytest.mark.parametrize("back", ["fewer committed", "another epoch", "not begun"])
def test_rounds_of_a_run_that_went_back_are_read_anew(
    page: Page, answers: dict[str, Any], run: str, back: str
) -> None:
    """Others have their numbers then, and those that were shown may be lost."""
    told = deepcopy(answers)
    view = told[f"GET /v1/runs/{run}"]
    if back == "fewer committed":  # and as many more were skipped
        view["status"]["rounds_committed"] -= 1
        view["status"]["rounds_skipped"] += 1
    elif back == "another epoch":
        view["status"]["epoch"] += 1
    else:
        view |= {"status": None, "state": "queued"}
    rounds = told[f"GET /v1/runs/{run}/rounds"]
    rounds["rounds"] = [{**r, "round": 9000 + r["round"]} for r in rounds["rounds"][:2]]
    page.answers = told
    for _ in range(2):
        page.second()
        shown = page.ask('items("rounds")')
        assert len(shown) == (0 if back == "not begun" else 2)
        assert all(text.startswith("Round 90") for text in shown)
    assert page.ask('seen("unread")') == ""


def test_the_curve_is_drawn_when_an_evaluation_comes_and_else_stays(
    page: Page, answers: dict[str, Any]
) -> None:
    """What is shown while one hovers over a point would vanish with it."""
    page.do('var kept = id("chart").firstElementChild')
    page.second()
    assert page.ask('id("chart").firstElementChild === kept')
    told = deepcopy(answers)
    newest = told["GET /v1/events"]["events"][-1]["seq"]
    told["GET /v1/events"]["events"].append(evaluation(newest + 1, steps=600, val_loss=1.25))
    page.answers = told
    page.second()
    assert not page.ask('id("chart").firstElementChild === kept')
    assert losses(page)[0] == ["600", "1.2500"]


def test_the_curve_of_a_long_run_is_thinned_evenly_and_keeps_both_ends() -> None:
    page = Page({}, address="")
    page.do("var curve = new modules.views.Thinned(10), after = []")
    page.do("for (let n = 0; n < 1000; n += 1) { curve.add(n); after.push(curve.all.length); }")
    assert page.ask("Math.max(...after)") == 11
    kept = page.ask("curve.all")
    assert kept == [*range(0, 1000, 128), 999] and page.ask("curve.newest") == 999
    assert page.ask("new modules.views.Thinned(10).all") == []


def test_a_page_keeps_no_more_evaluations_than_its_curve_shows(answers: dict[str, Any]) -> None:
    told = deepcopy(answers)
    told["GET /v1/events"]["events"] = [
        evaluation(n, steps=n, val_loss=1.0) for n in range(1, 2503)
    ]
    page = Page(told)
    assert len(losses(page)) == 1252 and losses(page)[0] == ["2502", "1.0000"]
    assert losses(page)[-1] == ["1", "1.0000"]


def test_a_curve_may_have_more_points_than_a_browser_takes_arguments() -> None:
    page = Page({}, address="")
    page.do(
        "var box = new Element('p');"
        "var points = Array.from({ length: 100000 }, (_, n) => ({ x: n, y: 1 + n }));"
        "modules.chart.lineChart(box, points, { xLabel: 'steps', describe: 'many' })"
    )
    assert page.ask("box.children.length") == 1


def test_two_evaluations_that_say_the_same_are_two_rows_at_every_look(
    answers: dict[str, Any],
) -> None:
    told = deepcopy(answers)
    told["GET /v1/events"]["events"] += [
        evaluation(seq, steps=300, val_loss=1.5) for seq in (1000, 1001)
    ]
    page = Page(told)
    for _ in range(3):
        assert losses(page)[:2] == [["300", "1.5000"]] * 2 and len(losses(page)) == 5
        page.second()
    told["GET /v1/events"]["events"].append(evaluation(1002, steps=300, val_loss=1.5, versions=[7]))
    page.answers = told
    page.second()
    versions = page.ask('lines(id("values").querySelector("tbody")).map((row) => row[2])')
    assert versions[:3] == ["7", "–", "–"], "each has a row of its own"


def test_children_of_equal_keys_stay_as_many_and_in_order() -> None:
    page = Page({}, address="")
    page.do(
        "var box = new Element('ol');"
        "var shown = (items) => { modules.dom.reconcile(box, items, (i) => i[0],"
        " () => modules.dom.make('li'), (node, i) => modules.dom.say(node, i));"
        " return box.children.map((n) => n.textContent); };"
    )
    for items in (["a1", "a2", "b"], ["a1", "a2", "b"], ["b", "a1", "a2", "a3"], ["a1"], []):
        page.do("var before = box.children")
        assert page.ask(f"shown({json.dumps(items)})") == items
        kept = min(len(items), page.ask("before.length"))
        assert page.ask("box.children.filter((n) => before.includes(n)).length") == kept
        page.do(f"before = box.children; shown({json.dumps(items)})")
        assert page.ask("box.children.every((node, n) => node === before[n])"), "none moved"


def test_nothing_that_is_missing_is_shown_as_the_script_calls_it(page: Page) -> None:
    for text in page.texts():
        assert not re.search(r"\bundefined\b|\bNaN\b|\[object|\bnull\b|Infinity", text), text


def test_a_second_look_at_the_same_adds_nothing(page: Page) -> None:
    before = page.texts()
    page.second()
    ages = re.compile(r"^(for )?\d+ (s|min|h|d)$")
    assert [t for t in page.texts() if not ages.match(t)] == [
        t for t in before if not ages.match(t)
    ]


def test_a_run_that_has_not_begun_and_a_cluster_without_one_are_shown(
    answers: dict[str, Any], run: str
) -> None:
    queued = deepcopy(answers)
    for record in (queued["GET /v1/runs"]["runs"][0], queued[f"GET /v1/runs/{run}"]):
        record |= {
            "status": None,
            "state": "queued",
            "syncers": [],
            "reason": "too few",
        }
    page = Page(queued)
    assert page.ask('seen("progressed")') == "not begun"
    assert page.ask('seen("reason")').startswith("too few")
    empty = {"GET /v1/runs": {"runs": [], "next": None}, "GET /v1/members": {"members": []}}
    page = Page(answers | empty | {"GET /v1/events": {"events": [], "next": None}})
    assert page.ask('seen("overview")') is None
    assert page.ask('seen("empty")').startswith("There is no run yet")
    page.second()


NO_RUNS: dict[str, Any] = {"GET /v1/runs": {"runs": [], "next": None}}


def test_without_a_run_nothing_is_fetched_or_built_again(answers: dict[str, Any]) -> None:
    """Else what a person selects and scrolls to would be gone a second later."""
    page = Page(answers | NO_RUNS)
    newest = answers["GET /v1/events"]["events"][-1]["seq"]
    page.do('var kept = id("events").children')
    assert page.ask("kept.length") > 0
    page.second()
    assert page.asked("GET")[-1]["path"].startswith(f"/v1/events?limit=1000&after={newest}&")
    assert page.ask('id("events").children.every((node, n) => node === kept[n])')


def test_another_token_shows_its_own_events(answers: dict[str, Any]) -> None:
    page = Page(answers | NO_RUNS)
    page.do('server.answers["GET /v1/members"] = [401, {}]; const act = due; due = null; act()')
    (event,) = [e for e in answers["GET /v1/events"]["events"] if e["seq"] == 1]
    page.answers = answers | NO_RUNS | {"GET /v1/events": {"events": [event], "next": None}}
    page.do(f'{page._server()} id("token").value = "other"; id("login").happens("submit")')
    (shown,) = page.ask('items("events")')
    assert shown.endswith(event["text"])


def test_a_run_that_was_submitted_again_under_its_name_is_another_one(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    assert len(losses(page)) == 3
    page.answers = again(answers, run)
    page.second()
    assert page.ask('seen("name")') == run
    assert [r.split("fragment")[0] for r in page.ask('items("rounds")')] == ["Round 1", "Round 0"]
    assert losses(page) == [["12", "5.0000"]], "no curve of both"
    (event,) = page.ask('items("events")')
    assert "told as" in event


def test_a_run_that_was_replaced_while_the_page_looked_is_another_one(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    """The list still told of the old one."""
    page.answers = again(answers, run) | {"GET /v1/runs": answers["GET /v1/runs"]}
    page.second()
    assert len(page.ask('items("rounds")')) == 2 and losses(page) == [["12", "5.0000"]]


def test_whoever_wanted_to_stop_a_run_stops_no_later_one_of_its_name(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    page.answers[f"POST /v1/runs/{run}/stop"] = {}
    page.second()
    page.do(f'press("verbs", "Stop run {run}")')
    page.answers = again(page.answers, run)
    page.second()
    page.do('id("ask").answered("yes")')
    assert page.asked("POST") == [] and "nothing was done" in page.ask('seen("banner")')
    page.do(f'press("verbs", "Stop run {run}"); id("ask").answered("yes")')
    assert [a["path"] for a in page.asked("POST")] == [f"/v1/runs/{run}/stop"]
    assert page.ask('seen("banner")') is None


def test_a_run_that_waits_says_which_learner_cannot_work_and_why(
    answers: dict[str, Any], run: str
) -> None:
    """As the coordinator tells it, and at the member itself; mended, nothing of it is left."""
    before = Page(answers)
    why = "there is no /text"
    record = {"id": "learner-2", "role": "learner", "boot": "b", "host": "h", "pid": 1, "lock": "l"}
    told = MemberRecord.model_validate(
        {**record, "started_at": 1.0, "state": "unfit", "reason": why}
    )
    cannot = unfit([MemberNote(record=told)])
    unmended = deepcopy(answers)
    for view in (unmended["GET /v1/runs"]["runs"][0], unmended[f"GET /v1/runs/{run}"]):
        waits = {"state": "waiting", "reason": f"{cannot}; 1 of 2 learners have joined"}
        view |= {**waits, "waiting": None}
    member = next(m for m in unmended["GET /v1/members"]["members"] if m["id"] == "learner-2")
    member |= {"state": "unfit", "reason": why, "alive": True}
    page = Page(unmended)
    assert page.ask('seen("state")') == "waiting"
    shown = page.ask('seen("reason")')
    assert shown.startswith(f"learner-2 cannot work: {why}") and "diloco check" in shown
    (row,) = [row for row in page.ask('rows("learners")') if row[0] == "learner-2"]
    assert row[1] == f"unfit{why}"
    page.answers = answers
    page.second()
    assert page.ask('seen("reason")') == before.ask('seen("reason")')


def test_a_learner_shows_how_fast_it_trains_and_no_made_up_number(
    page: Page, answers: dict[str, Any]
) -> None:
    table = (WEB / "index.html").read_text("utf-8").split('id="learners"')[1].split("</thead>")[0]
    assert {len(row) for row in page.ask('rows("learners")')} == {table.count("<th ")}
    first, second, third = (m for m in answers["GET /v1/members"]["members"] if m["speed"])
    first["speed"] |= {"tokens_per_s": 123456.7, "mfu": 0.412, "data_wait_ratio": 0.0123}
    first["speed"] |= {"memory_bytes": 61_200_000_000, "devices": 8, "device": "NVIDIA H100"}
    second["speed"] |= {"mfu": 0.25, "flops_estimated": True, "tokens_per_s": None}
    third["speed"] = None
    page.answers = answers
    page.second()
    rows = {row[0]: row for row in page.ask('rows("learners")')}
    assert rows[first["id"]][4:8] == ["123457", "41.2 %", "1.2 %", "61.2 GB8 × NVIDIA H100"]
    assert rows[second["id"]][5] == "~25.0 %"
    counted = str(round(second["learner"]["tokens_per_s"]))
    assert rows[second["id"]][4] == counted, "as its syncer counts"
    assert rows[third["id"]][5:8] == ["–", "–", "–"]


def test_who_is_gone_is_told_and_can_be_forgotten(page: Page, answers: dict[str, Any]) -> None:
    gone = next(m for m in answers["GET /v1/members"]["members"] if m["id"] == "learner-2")
    gone |= {"alive": False, "gone_since": 0.0}
    page.answers["DELETE /v1/members/learner-2"] = {}
    page.second()
    assert page.ask('buttons("learners")').count("Forget learner-2") == 1
    assert "Kill learner-2" not in page.ask('buttons("learners")')
    page.do('press("learners", "Forget learner-2")')
    assert [a["path"] for a in page.asked("DELETE")] == ["/v1/members/learner-2"]


@pytest.mark.parametrize("fast_s", [0, 86_400, -86_400])
def test_ages_are_by_the_coordinators_clock_whatever_the_browsers_says(
    answers: dict[str, Any], run: str, fast_s: int
) -> None:
    now = time.time() + fast_s
    gone = next(m for m in answers["GET /v1/members"]["members"] if m["id"] == "learner-2")
    gone |= {"alive": False, "gone_since": now - 7200}
    answers["GET /v1/members"]["now"] = now
    made = {"id": "ab", "state": "complete", "steps": 48, "ended_at": now - 7200, "progress": None}
    page = Page(answers | {f"GET /v1/runs/{run}/exports": {"exports": [made]}})
    page.do('id("sample").open = true')
    page.second()
    (row,) = [row for row in page.ask('rows("learners")') if row[0] == "learner-2"]
    assert row[1] == "gonefor 2 h"
    assert page.ask('seen("sampled")').startswith("Of the export at step 48, made 2 h ago.")


def test_a_syncer_that_drains_says_what_it_waits_for(answers: dict[str, Any]) -> None:
    members = answers["GET /v1/members"]["members"]
    syncer = next(m for m in members if m["role"] == "syncer")
    for stays in ("", "hands over run r to syncer-2"):
        syncer |= {"draining": True, "stays": stays}
        page = Page(answers)
        (row,) = [row for row in page.ask('rows("services")') if row[0] == syncer["id"]]
        assert row[2].endswith(f"draining: {stays}" if stays else "draining")


def test_a_leader_that_is_gone_is_not_shown_as_one(answers: dict[str, Any], run: str) -> None:
    """Its last status still names it."""
    first, second = answers[f"GET /v1/runs/{run}"]["syncers"]
    term = answers[f"GET /v1/runs/{run}"]["status"]["term"]
    assert f"Syncer{first['id']}term {term}; 1 standing by" in Page(answers).ask('seen("figures")')
    first["state"] = "gone"
    gone = f"{first['id']} led in term {term} and is gone"
    assert f"Syncer–{gone}; 1 standing by" in Page(answers).ask('seen("figures")')
    second["state"] = "leading"
    taken_over = f"Syncer{second['id']}takes over; {gone}; nobody stands by"
    assert taken_over in Page(answers).ask('seen("figures")')


def test_a_kill_is_asked_about_first(page: Page) -> None:
    page.answers["POST /v1/chaos"] = {}
    page.second()
    page.do('press("learners", "Kill learner-1")')
    assert page.ask('id("ask").open') and "learner-1" in page.ask('seen("question")')
    page.do('id("ask").answered("no")')
    assert page.asked("POST") == []
    page.do('press("learners", "Kill learner-1")')
    page.do('id("ask").answered("yes")')
    assert page.asked("POST")[-1]["body"] == {"kind": "kill", "target": "learner-1"}


def test_verbs_of_a_run_follow_its_state(page: Page, run: str) -> None:
    page.answers[f"POST /v1/runs/{run}/pause"] = {}
    assert f"Pause run {run}" in page.ask('buttons("verbs")')
    assert f"Resume run {run}" not in page.ask('buttons("verbs")')
    page.second()
    page.do(f'press("verbs", "Pause run {run}")')
    assert page.asked("POST")[-1]["path"] == f"/v1/runs/{run}/pause"
    for record in (page.answers["GET /v1/runs"]["runs"][0], page.answers[f"GET /v1/runs/{run}"]):
        record |= {"state": "stopped", "desired": "stopped"}
    page.second()
    assert page.ask('buttons("verbs")') == []


@pytest.mark.parametrize(
    ("limits", "verbs", "drain"),
    [
        ({}, True, True),
        ({"runs": ["other"]}, False, False),
        ({"runs": ["RUN"]}, True, False),
        ({"sites": ["learner-*"]}, False, True),
        ({"runs": ["RUN"], "sites": ["learner-*"]}, True, True),
        ({"runs": ["other"], "sites": ["*"]}, False, False),
    ],
)
def test_a_limited_token_is_offered_what_it_may_change(
    answers: dict[str, Any], run: str, limits: dict[str, list[str]], verbs: bool, drain: bool
) -> None:
    named = {kind: [p.replace("RUN", run) for p in found] for kind, found in limits.items()}
    access = VIEWER | {"scopes": ["read", "operate"]} | named
    for member in answers["GET /v1/members"]["members"]:
        member |= {"alive": True, "draining": False, "assigned": run}
    page = Page(answers | {"GET /v1/access": access})
    assert (page.ask('seen("verbs")') is not None) is verbs
    buttons = page.ask('buttons("learners")')
    assert any("Drain" in text for text in buttons) is drain
    assert not any("Kill" in text for text in buttons)


def test_a_syncer_can_be_drained_and_a_supervisor_not(answers: dict[str, Any]) -> None:
    """It hands the run over, if another one can take it (docs/how-to/recover.md)."""
    members = answers["GET /v1/members"]["members"]
    syncer = next(m for m in members if m["role"] == "syncer")
    members.append({**syncer, "id": "machine-1", "role": "supervisor"})
    place = f"POST /v1/members/{syncer['id']}/drain"
    page = Page(answers | {place: {}})
    page.do(f'press("services", "Drain {syncer["id"]}")')
    assert page.asked("POST")[-1]["path"] == f"/v1/members/{syncer['id']}/drain"
    assert not any("machine-1" in b for b in page.ask('buttons("services")') if "Drain" in b)


def test_a_viewer_is_offered_nothing(answers: dict[str, Any]) -> None:
    page = Page(answers | {"GET /v1/access": VIEWER})
    assert page.ask('buttons("learners")') == [] and page.ask('seen("verbs")') is None


def test_what_the_coordinator_refuses_is_said_in_its_words(page: Page, run: str) -> None:
    page.do(f'server.answers["POST /v1/runs/{run}/pause"] = [409, {{ detail: "it is over" }}]')
    page.do(f'press("verbs", "Pause run {run}")')
    assert page.ask('seen("banner")') == "it is over"


def test_a_coordinator_that_is_away_is_said_and_comes_back(page: Page) -> None:
    page.do("server.away = true")
    page.second()
    assert "does not answer; training goes on" in page.ask('seen("link")')
    page.do("server.away = false")
    page.second()
    assert page.ask('seen("link")') == "connected"


def test_a_coordinator_that_is_cut_off_is_said_and_its_members_look_old(
    page: Page, answers: dict[str, Any]
) -> None:
    told = "the coordinator cannot reach the message server, and this is what it heard last"
    page.answers = answers | {"GET /v1/members": answers["GET /v1/members"] | {"cut_off": told}}
    page.second()
    assert page.ask('seen("link")') == told and page.ask('id("link").className') == "link down"
    assert {page.ask(f'id("{t}").className') for t in ("learners", "services")} == {"folding old"}
    page.answers = answers
    page.second()
    assert page.ask('seen("link")') == "connected"
    assert page.ask('id("learners").className') == "folding"


def test_the_newest_rounds_are_asked_for_by_their_number_and_then_those_after_them(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    """Where a round lies on the tape nobody knows."""
    place = f"/v1/runs/{run}/rounds"

    def asked() -> list[str]:
        paths = [a["path"].partition("?") for a in page.asked("GET")]
        return [query for path, _, query in paths if path == place]

    assert asked() == ["newest=30&after=0"]
    page.second()
    assert len(asked()) == 1, "no round has closed since"
    told = deepcopy(answers)
    told[f"GET /v1/runs/{run}"]["status"]["rounds_committed"] += 1
    rounds = told[f"GET {place}"]["rounds"]
    last = rounds[-1]["seq"]
    told[f"GET {place}"]["rounds"] = [rounds[-1] | {"seq": last + 3, "round": 7777}]
    page.answers = told
    page.second()
    assert asked()[1:] == [f"newest=30&after={last}"]
    assert page.ask('items("rounds")')[0].startswith("Round 7777")


AWAY = (503, {"title": "The tape's archive cannot be read", "detail": "it does not answer"})
STRANGE = (409, {"title": "Written by another release", "detail": "record 7 cannot be read"})


@pytest.mark.parametrize("refusal", [AWAY, STRANGE])
def test_rounds_that_cannot_be_read_take_nothing_else_from_the_page(
    answers: dict[str, Any], run: str, refusal: tuple[int, dict[str, str]]
) -> None:
    """The coordinator reads them elsewhere, and tells all else by itself."""
    whole = Page(answers)
    page = Page(answers | {f"GET /v1/runs/{run}/rounds": refusal})
    for place in ("link", "name", "state", "reason", "figures", "learners", "services", "losses"):
        shown = page.ask(f"seen({json.dumps(place)})")
        assert shown == whole.ask(f"seen({json.dumps(place)})") and shown is not None
    why = f"The rounds cannot be read now: {refusal[1]['detail']}"
    assert page.ask('seen("unread")') == why and page.ask('items("rounds")') == []
    told = deepcopy(answers)
    told[f"GET /v1/runs/{run}"]["reason"] = "as it is a second later"
    page.answers = told | {f"GET /v1/runs/{run}/rounds": refusal}
    page.second()
    assert page.ask('seen("reason")').startswith("as it is a second later")
    page.answers = told
    page.second()
    assert page.ask('seen("unread")') == ""
    assert page.ask('items("rounds")') == whole.ask('items("rounds")')


def test_a_token_that_is_refused_for_rounds_alone_is_asked_for_anew(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    """It was revoked between two answers of one look."""
    told = deepcopy(answers)
    told[f"GET /v1/runs/{run}"]["status"]["rounds_committed"] += 1
    page.answers = told | {f"GET /v1/runs/{run}/rounds": (401, {})}
    page.do(f"{page._server()} const act = due; due = null; act()")
    assert page.ask('seen("refused")') == "This token is not accepted."
    assert page.ask('seen("run")') is None


def test_an_answer_that_breaks_off_is_of_a_coordinator_that_is_away(page: Page, run: str) -> None:
    page.do("server.torn = true")
    page.second()
    assert "does not answer; training goes on" in page.ask('seen("link")')
    page.do(f'press("verbs", "Pause run {run}")')
    page.do("server.torn = false; server.away = true")
    page.do(f'press("verbs", "Pause run {run}")')
    assert page.ask('seen("banner")') == "the coordinator does not answer"
    assert page.ask("console.said") == []


def test_a_fault_of_the_page_is_not_laid_upon_the_coordinator(
    page: Page, answers: dict[str, Any]
) -> None:
    """A browser throws a TypeError for both."""
    page.answers = answers | {"GET /v1/members": {"members": 5}}
    page.second()
    link = page.ask('seen("link")')
    assert link.startswith("this page has made a mistake") and "does not answer" not in link
    assert page.ask("console.said") and page.ask("console.said")[0].startswith("TypeError")
    page.answers = answers
    page.second()
    assert page.ask('seen("link")') == "connected"


def test_an_answer_that_nobody_can_read_is_said_and_the_page_looks_again(
    page: Page, answers: dict[str, Any]
) -> None:
    """A proxy between that wants a login answers 200 with a page of its own."""
    page.answers = answers | {"GET /v1/members": "<html>Log in</html>"}
    page.second()
    assert "cannot show what was answered" in page.ask('seen("link")')
    page.answers = answers
    page.second()
    assert page.ask('seen("link")') == "connected"


def test_a_token_is_asked_for_and_never_stays_in_the_address(answers: dict[str, Any]) -> None:
    assert Page(answers).ask("location.hash") == ""
    page = Page(answers, address="")
    assert page.ask('seen("login")') is not None and page.ask('seen("run")') is None
    page.do('id("token").value = " secret "; id("login").happens("submit")')
    assert page.ask('seen("run")') is not None and page.ask('id("token").value') == ""
    assert page.asked("GET")[-1]["token"] == "Bearer secret"
    page.do('server.answers["GET /v1/members"] = [401, {}]; const act = due; due = null; act()')
    assert page.ask('seen("refused")') == "This token is not accepted."


def test_a_plan_is_asked_for_in_the_servers_own_words(answers: dict[str, Any]) -> None:
    wish = {"params": 5e9, "chips": 4096}
    planner = {
        "GET /v1/plan": PlanRequest.model_json_schema(),
        "POST /v1/plan": _planned(PlanRequest.model_validate(wish)),
    }
    page = Page(answers | planner)
    page.do('id("plan").open = true; id("plan").happens("toggle")')
    assert "Link, Gbit/s" in page.ask('seen("wishes")')
    page.do('id("wish-params").value = "5e9"; id("wish-chips").value = "4096"')
    page.do('id("wish").happens("submit")')
    sent = page.asked("POST")[-1]["body"]
    assert wish.items() <= sent.items()
    assert PlanRequest.model_validate(sent) == PlanRequest.model_validate(wish), "defaults go along"
    planned = page.ask('seen("planned")')
    assert "Sync every steps" in planned and "In other circumstances" in planned
    assert "undefined" not in planned and "NaN" not in planned


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (1.4, 5.3), (0.0, 123_456.0), (2.0, 2.0), (1e16, 1e16 + 2), (1e300, 1e300)],
)
def test_ticks_are_round_and_lie_within(low: float, high: float) -> None:
    page = Page({}, address="")
    ticks = page.ask(f"modules.chart.ticks({low}, {high}, 5)")
    assert 1 <= len(ticks) <= 7 and all(low - 1e-9 <= t <= high * (1 + 1e-9) + 1e-9 for t in ticks)


@pytest.mark.parametrize(
    ("low", "high"), [(1e16, 1e16 + 2), (1e300, 1.5e300), (1e-200, 2e-200), (-1e308, 1e308), (0, 0)]
)
def test_a_curve_of_any_finite_figures_is_drawn(
    answers: dict[str, Any], low: float, high: float
) -> None:
    """A learner whose numbers overflow may tell of such."""
    told = deepcopy(answers)
    told["GET /v1/events"]["events"] = [
        evaluation(1, steps=1, val_loss=low),
        evaluation(2, steps=2, val_loss=high),
    ]
    page = Page(told)
    assert page.ask('seen("link")') == "connected" and page.ask("console.said") == []
    assert page.ask('id("chart").children.length') == 1
