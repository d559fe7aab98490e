"""The curve of the live page: what it shows of evaluations, and of how many."""

from copy import deepcopy
from typing import Any

import pytest
from coordinator.web.browser import Page, evaluation, losses


def test_the_loss_on_each_corpus_of_a_mixture_is_shown(answers: dict[str, Any]) -> None:
    told = deepcopy(answers)
    made = [e for e in told["GET /v1/events"]["events"] if e["kind"] == "evaluation"]
    made[-1]["data"] |= {"val_loss": 2.0, "each": {"code": 1.5, "talk": 2.25}}
    page = Page(told)
    assert "nats per token, newest; code 1.5000, talk 2.2500" in page.ask('seen("figures")')
    table = page.ask('seen("values")')
    assert table.count("2.0000 (code 1.5000, talk 2.2500)") == table.count(" (code") == 1


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
    before = len(losses(Page(told)))
    told["GET /v1/events"]["events"] += [
        evaluation(seq, steps=300, val_loss=1.5) for seq in (1000, 1001)
    ]
    page = Page(told)
    for _ in range(3):
        assert losses(page)[:2] == [["300", "1.5000"]] * 2 and len(losses(page)) == before + 2
        page.second()
    told["GET /v1/events"]["events"].append(evaluation(1002, steps=300, val_loss=1.5, versions=[7]))
    page.answers = told
    page.second()
    versions = page.ask('lines(id("values").querySelector("tbody")).map((row) => row[2])')
    assert versions[:3] == ["7", "–", "–"], "each has a row of its own"


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
