"""The live page where a run or its hub went back, and where a part of a run cannot be read."""

import json
from copy import deepcopy
from typing import Any

import pytest
from coordinator.web.browser import Page, again, evaluation, losses


def test_a_hub_that_was_put_back_shows_what_came_since_in_place_of_what_is_lost(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    """It counts its events and rounds anew: others have the numbers of those that are shown."""
    told = deepcopy(answers)
    events = told["GET /v1/events"]["events"]
    assert page.ask('items("events").length') == len(events) > 3 and losses(page)
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


def test_two_coordinators_that_differ_send_the_page_back_once(
    page: Page, answers: dict[str, Any]
) -> None:
    """One of them has not seen yet what the hub lost; a proxy asks the one and then the other."""
    told = deepcopy(answers)
    told["GET /v1/events"]["events"] = [
        evaluation(n, steps=n, val_loss=1.5) for n in range(1, 1501)
    ]
    page.answers = told
    page.do("server.differ = server.asked.length + 20")
    page.second()
    assert page.ask('items("events").length') == 100
    assert page.ask('items("events")[0]').endswith("told as 1500")


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


def test_a_run_that_was_submitted_again_under_its_name_is_another_one(
    page: Page, answers: dict[str, Any], run: str
) -> None:
    assert losses(page)
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


AWAY = (503, {"title": "The tape's archive cannot be read", "detail": "it does not answer"})
STRANGE = (409, {"title": "Written by another release", "detail": "record 7 cannot be read"})


@pytest.mark.parametrize(("refusal", "now"), [(AWAY, " now"), (STRANGE, "")])
def test_rounds_that_cannot_be_read_take_nothing_else_from_the_page(
    answers: dict[str, Any], run: str, refusal: tuple[int, dict[str, str]], now: str
) -> None:
    """The coordinator reads them elsewhere, and tells all else by itself."""
    whole = Page(answers)
    page = Page(answers | {f"GET /v1/runs/{run}/rounds": refusal})
    for place in ("link", "name", "state", "reason", "figures", "learners", "services", "losses"):
        shown = page.ask(f"seen({json.dumps(place)})")
        assert shown == whole.ask(f"seen({json.dumps(place)})") and shown is not None
    why = f"The rounds cannot be read{now}: {refusal[1]['detail']}"
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
