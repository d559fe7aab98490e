"""Samples on the live page: as they come, and where they end before their end."""

import json
from typing import Any

from coordinator.web.browser import VIEWER, Page, again

from diloco_coordinator.exports.sampling_io import SECONDS_MAX

RUNNING = {"bytes_done": 1, "bytes_total": 4}
EXPORT = {"id": "ab", "state": "complete", "steps": 48, "ended_at": 0.0, "progress": None}


def sampled(answers: dict[str, Any], run: str, *exports: dict[str, Any]) -> Page:
    """A page whose form for samples is open."""
    page = Page(answers | {f"GET /v1/runs/{run}/exports": {"exports": list(exports)}})
    page.do('id("sample").open = true')
    page.second()
    return page


def test_a_sample_is_shown_as_it_comes(answers: dict[str, Any], run: str) -> None:
    page = sampled(answers, run, EXPORT)
    assert page.ask('seen("sampled")').startswith("Of the export at step 48, made ")
    events = [
        'data: {"begun": true, "export": "ab", "steps": 48}\n\ndata: {"te',
        'xt": "b\\n"}\n\n',
        'data: {"text": "<i>"}\n\ndata: {"done": true, "pieces": 2}\n\n',
    ]
    told = json.dumps([200, {"pieces": events}])
    page.do(f'server.answers["POST /v1/runs/{run}/samples"] = {told}')
    page.do('id("sample-prompt").value = "a "; id("sample-tokens").value = "9"')
    page.do('id("sampling").happens("submit")')
    sent = page.asked("POST")[-1]
    assert sent["path"] == f"/v1/runs/{run}/samples" and sent["token"] == "Bearer t"
    seed = sent["body"].pop("seed")
    assert 0 <= seed < 2**32
    assert sent["body"] == {"prompt": "a ", "chat": False, "temperature": 0.8, "tokens": 9}
    assert "Sample" not in page.ask('buttons("sampling")'), "one at a time"
    page.do("more()")
    assert page.ask('seen("written")') == "a "
    page.do("more()")
    assert page.ask('seen("written")') == "a b\n"
    page.do("more()")
    page.do("more()")
    assert page.ask('seen("written")') == "a b\n<i>", "text is no markup"
    assert "Sample" in page.ask('buttons("sampling")') and page.ask('seen("unsampled")') == ""


def test_exports_that_cannot_be_read_are_said_where_they_are_shown(
    answers: dict[str, Any], run: str
) -> None:
    page = sampled(answers, run, EXPORT)
    made = page.answers[f"GET /v1/runs/{run}/exports"]
    page.answers[f"GET /v1/runs/{run}/exports"] = (503, {"detail": "its disk is away"})
    page.second()
    assert page.ask('seen("sampled")') == "The exports cannot be read now: its disk is away"
    assert page.ask('seen("link")') == "connected"
    page.answers[f"GET /v1/runs/{run}/exports"] = made
    page.second()
    assert page.ask('seen("sampled")').startswith("Of the export at step 48, made ")


def test_without_an_export_the_page_offers_to_make_one(answers: dict[str, Any], run: str) -> None:
    page = sampled(answers, run)
    assert page.ask('seen("sampled")').startswith("There is no export yet")
    assert page.ask('buttons("sampling")') == ["Export the newest weights"]
    page.do('server.away = true; press("sampling", "Export the newest weights")')
    assert "may have been done all the same" in page.ask('seen("unsampled")')
    page.answers[f"POST /v1/runs/{run}/exports"] = {}
    page.do("server.away = false")
    page.second()
    page.do('press("sampling", "Export the newest weights")')
    assert page.asked("POST")[-1]["path"] == f"/v1/runs/{run}/exports"
    making = EXPORT | {"state": "running", "progress": RUNNING}
    page.answers[f"GET /v1/runs/{run}/exports"] = {"exports": [making]}
    page.second()
    assert "An export is being made, 25.0 %." in page.ask('seen("sampled")')
    assert page.ask('buttons("sampling")') == []
    failed = EXPORT | {"state": "failed", "reason": "the disk is full"}
    page.answers[f"GET /v1/runs/{run}/exports"] = {"exports": [failed]}
    page.second()
    assert page.ask('seen("sampled")').endswith("The last export failed: the disk is full")


def test_what_becomes_of_a_sample_is_said_in_the_servers_words(
    answers: dict[str, Any], run: str
) -> None:
    page = sampled(answers, run, EXPORT)
    path = f"POST /v1/runs/{run}/samples"
    page.do(f'server.answers["{path}"] = [429, {{ detail: "another one goes on" }}]')
    page.do('id("sampling").happens("submit")')
    assert page.ask('seen("unsampled")') == "another one goes on"
    events = ['data: {"begun": true}\n\ndata: {"failed": "no more memory"}\n\n']
    page.do(f'server.answers["{path}"] = {json.dumps([200, {"pieces": events}])}')
    page.do('id("sampling").happens("submit")')
    page.do("more()")
    page.do("more()")
    assert page.ask('seen("unsampled")') == "no more memory"
    assert "Sample" in page.ask('buttons("sampling")')


def sampling(page: Page, run: str, *pieces: str) -> None:
    """One that has begun and written so far."""
    told = json.dumps([200, {"pieces": ['data: {"begun": true}\n\n', *pieces]}])
    page.do(f'server.answers["POST /v1/runs/{run}/samples"] = {told}')
    page.do('id("sampling").happens("submit")')
    for _ in range(1 + len(pieces)):
        page.do("more()")


NOT_ALL = "What is written here is not all of it."


def test_a_sample_whose_link_died_is_given_up_once_the_coordinator_has_ended_it(
    answers: dict[str, Any], run: str
) -> None:
    page = sampled(answers, run, EXPORT)
    sampling(page, run, 'data: {"text": "so far"}\n\n')
    page.do(f"pass({SECONDS_MAX * 1000})")
    assert "Sample" not in page.ask('buttons("sampling")'), "it may still tell why it failed"
    page.do(f"pass({SECONDS_MAX * 1000 + 60_000})")
    assert page.ask('seen("unsampled")') == f"the coordinator does not answer. {NOT_ALL}"
    assert page.ask('seen("written")') == "so far"
    assert "Sample" in page.ask('buttons("sampling")') and page.ask("console.said") == []
    sampling(page, run, 'data: {"text": "all"}\n\n', 'data: {"done": true}\n\n')
    assert page.ask('seen("written")') == "all" and page.ask('seen("unsampled")') == ""


def test_a_sample_that_ends_without_a_word_is_not_taken_for_a_whole_one(
    answers: dict[str, Any], run: str
) -> None:
    """As where the token is revoked meanwhile."""
    page = sampled(answers, run, EXPORT)
    sampling(page, run, 'data: {"text": "so far"}\n\n')
    page.do("more()")
    said = page.ask('seen("unsampled")')
    assert said.startswith("the coordinator told no end of it") and said.endswith(NOT_ALL)
    assert page.ask('seen("written")') == "so far" and "Sample" in page.ask('buttons("sampling")')


def test_a_sample_is_over_as_soon_as_its_end_is_told(answers: dict[str, Any], run: str) -> None:
    """The link may stay open, or break then: nothing of the sample is missing."""
    page = sampled(answers, run, EXPORT)
    sampling(page, run, 'data: {"text": "all"}\n\ndata: {"done": true}\n\n')
    assert "Sample" in page.ask('buttons("sampling")')
    page.do("pass(1e9)")
    assert page.ask('seen("unsampled")') == "" and page.ask('seen("written")') == "all"


def test_a_sample_of_a_deleted_run_is_not_shown_beside_a_later_one_of_its_name(
    answers: dict[str, Any], run: str
) -> None:
    page = sampled(answers, run, EXPORT)
    sampling(page, run, 'data: {"text": "of the old one"}\n\n')
    page.answers = again(page.answers, run)
    page.second()
    assert page.ask('seen("written")') == "" and page.ask('seen("unsampled")') == ""
    assert "Sample" in page.ask('buttons("sampling")')


def test_a_viewer_may_not_sample(answers: dict[str, Any]) -> None:
    page = Page(answers | {"GET /v1/access": VIEWER})
    page.do('id("sample").open = true')
    page.second()
    assert page.ask('seen("sample")') is None
    assert not [a for a in page.asked("GET") if a["path"].endswith("/exports")]
