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
from coordinator.web.browser import VIEWER, WEB, Page, again

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
    syncers = answers[f"GET /v1/runs/{run}"]["syncers"]
    first, second = sorted(syncers, key=lambda s: s["state"] != "leading")
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


def test_each_kill_that_was_confirmed_is_one_request(page: Page) -> None:
    """Something on the way may send it twice."""
    page.answers["POST /v1/chaos"] = {}
    page.second()
    for _ in range(2):
        page.do('press("learners", "Kill learner-1"); id("ask").answered("yes")')
    first, second = (asked["key"] for asked in page.asked("POST"))
    assert first != second and all(re.fullmatch("[0-9a-f]{32}", key) for key in (first, second))


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


def test_what_was_done_is_not_said_to_have_failed(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    """The look after it may fail, as while the coordinator is asked for much."""
    page.answers = answers | {f"POST /v1/runs/{run}/pause": {}}
    page.answers["GET /v1/members"] = (503, {"detail": "in a while"})
    page.do(f'{page._server()} press("verbs", "Pause run {run}")')
    assert len(page.asked("POST")) == 1 and page.ask('seen("banner")') is None
    page.second()
    assert page.ask('seen("link")') == "in a while"


@pytest.mark.parametrize("how", ["away", "torn", "a page"])
def test_what_may_have_been_done_is_said_to_be_so(page: Page, run: str, how: str) -> None:
    place = f"POST /v1/runs/{run}/stop"
    lost = f"server.{how} = true" if how != "a page" else "0"
    page.do(f'server.answers["{place}"] = [200, "<h1>sign in</h1>"]; {lost}')
    page.do(f'press("verbs", "Stop run {run}"); id("ask").answered("yes")')
    assert "may have been done all the same" in page.ask('seen("banner")')


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


def test_an_answer_that_breaks_off_is_of_a_coordinator_that_is_away(page: Page, run: str) -> None:
    page.do("server.torn = true")
    page.second()
    assert "does not answer; training goes on" in page.ask('seen("link")')
    page.do(f'press("verbs", "Pause run {run}")')
    page.do("server.torn = false; server.away = true")
    page.do(f'press("verbs", "Pause run {run}")')
    assert page.ask('seen("banner")').startswith("the coordinator does not answer: ")
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
