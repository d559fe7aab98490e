"""The report: every figure by hand."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import pytest
from cli.conftest import closed, happened, verdict

from diloco_cli.page import page as page_of
from diloco_cli.report import data_parallel_bytes
from diloco_cli.report import report as figures_of
from diloco_cli.report_lines import OVERWRITTEN, report_lines
from diloco_cli.tally import POINTS_MAX, Tally, Thinned
from diloco_shared.protocol.records import RecoveryRecord

Row = dict[str, Any]


def report(run: Row, rounds: list[Row], events: list[Row]) -> Row:
    return figures_of(run, Tally.of(run, rounds, events), events)


def page(figures: Row, run: Row, rounds: list[Row], events: list[Row], *more: Any) -> str:
    return page_of(figures, run, Tally.of(run, rounds, events), events, *more)


def test_figures_of_a_run_with_a_kill(run: Row, rounds: list[Row], events: list[Row]) -> None:
    figures = report(run, rounds, events)
    assert (figures["val_loss_start"], figures["val_loss_end"]) == (6.0, 1.5)
    assert (figures["rounds_committed"], figures["rounds_skipped"]) == (4, 1)
    assert figures["victim"] == "b"
    # Down from 20 until it steps again at 30: the rounds at 22 and 28.
    assert figures["rounds_committed_while_down"] == 2
    assert figures["victim_contributions_after_return"] == 1
    assert figures["seconds_kill_to_contributing"] == 50.0 - 20.0
    # Nine of a and c, all in time; the victim was late once.
    assert (figures["others_asked"], figures["others_late"]) == (9, 0)
    # The victim's own waiting does not count.
    assert figures["survivor_wait_s"] == 0.02
    # Three learners from 10 to 50; b stepped 10 to 20 and 30 to 50; 240 of 300 steps were merged.
    assert figures["goodput"] == pytest.approx((40 + 30 + 40) / (3 * 40) * 240 / 300)
    assert figures["bytes_data_parallel_equivalent"] == round(2 * 2 / 3 * 1000 * 2 * 300)
    assert figures["bytes_socket"] == {"data_up": 300, "control_down": 7}
    assert (figures["seed"], figures["bytes_up"], figures["bytes_down"]) == (7, 1500, 2_500_000)


def test_a_victim_that_does_not_return_has_no_contributions(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    figures = report(run, rounds[:3], [e for e in events if e["at"] < 26])
    assert figures["victim_contributions_after_return"] == 0
    assert figures["seconds_kill_to_contributing"] is None
    assert figures["rounds_committed_while_down"] == 2


def test_a_contribution_sent_before_the_kill_is_no_return(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    rounds[1]["verdicts"][1]["outcome"] = "merged"  # closed at 22, while b was dead
    assert report(run, rounds, events)["victim_contributions_after_return"] == 1


def test_a_run_without_a_fault_has_survivors_only(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    figures = report(run, rounds, [e for e in events if not e["kind"].startswith("fault")])
    assert figures["victim"] is None
    assert figures["rounds_committed_while_down"] is None
    assert figures["survivor_wait_s"] == 9.0
    assert (figures["others_asked"], figures["others_late"]) == (12, 1), "those of b count too"


def test_a_syncer_that_was_killed_is_not_the_learner_that_was_taken_away(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    """It is killed first: the figures are of the learner all the same."""
    of_learner = report(run, rounds, events)
    killed = {"id": "s", "kind": "kill", "target": "syncer-1"}
    events.insert(7, happened("fault-applied", 12.0) | {"data": killed})
    assert report(run, rounds, events) == of_learner | {"story": ANY}
    alone = [e for e in events if e["data"].get("target") != "b"]
    assert report(run, rounds, alone)["victim"] is None


def test_who_was_not_asked_is_not_late(run: Row, rounds: list[Row], events: list[Row]) -> None:
    for n, outcome in ((1, "missed"), (2, "ineligible")):
        rounds[n]["verdicts"][0] = rounds[n]["verdicts"][0] | {"outcome": outcome}
    figures = report(run, rounds, events)
    assert (figures["others_asked"], figures["others_late"]) == (8, 1)


def test_a_run_that_has_not_begun_has_no_figures_and_no_error(run: Row) -> None:
    run |= {"status": None, "state": "queued"}
    figures = report(run, [], [])
    assert figures["rounds_committed"] == 0
    assert figures["goodput"] is None
    assert figures["val_loss_end"] is None
    assert "queued" in page(figures, run, [], [])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_what_is_thinned_lies_evenly_from_the_beginning_on(count: int) -> None:
    found = Thinned[int](8)
    for n in range(count):
        found.add(n)
    assert found.kept == [*range(0, count, found.every)] and len(found.kept) <= 8
    assert (found.seen, found.every > 1) == (count, count > 8)


def test_of_a_long_run_counters_are_kept_and_some_points(run: Row, events: list[Row]) -> None:
    many = 2 * POINTS_MAX + 10

    def rounds() -> Iterator[Row]:
        """They are in memory one at a time."""
        for n in range(many):
            late = verdict("c", "missed") if n == many // 2 else verdict("c")
            yield closed(n, 60.0 + n, verdict("a"), verdict("b"), late)

    tally = Tally.of(run, rounds(), events)
    figures = figures_of(run, tally, events)
    assert (figures["rounds_committed"], figures["rounds_skipped"]) == (many, 0)
    assert (figures["others_asked"], figures["others_late"]) == (2 * many, 1)
    assert figures["victim_contributions_after_return"] == many
    assert figures["seconds_kill_to_contributing"] == 60.0 - 20.0
    commits = figures["story"]["commits"]
    assert len(commits) <= POINTS_MAX and commits[1] - commits[0] == 4.0
    assert len(tally.verdicts["merged"].kept) <= POINTS_MAX
    assert len(tally.verdicts["missed"].kept) == 1, "what is rare is not lost among the others"
    shown = page_of(figures, run, tally, events)
    assert "the chart shows one in 8 of those merged.</p>" in shown


def test_a_page_with_every_point_says_nothing_of_that(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    assert "the chart shows" not in page(report(run, rounds, events), run, rounds, events)


def test_a_learner_whose_beginning_is_not_told_any_more_is_named(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    """A run goes on for longer than what a learner said is kept."""
    more = {"command": "c", "machine": "m", "versions": {}}
    figures = report(run, rounds, events)
    assert figures["goodput_without"] == []
    assert not any("no event tells" in line for line in report_lines(figures | more))
    told = [e for e in events if (e["kind"], e["source"]) != ("began", "c")]
    assert len(told) == len(events) - 1
    figures = report(run, rounds, told)
    assert figures["goodput_without"] == ["c"]
    assert "  without c: no event tells any more when they trained" in report_lines(figures | more)
    many = figures | more | {"goodput_without": [*"abcdefg"]}
    assert any("without a, b, c, d, e and 2 more: " in line for line in report_lines(many))


def test_of_a_long_run_goodput_is_of_the_time_that_events_still_tell_of(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    """Of `a` and `c`, which have stepped all along, no event is left."""
    figures = report(run, rounds, events)
    assert figures["goodput_since"] is None, "all events are there"
    left = [e for e in events if e["at"] >= 20.0]
    figures = report(run, rounds, left)
    assert figures["goodput_since"] == 20.0 and figures["goodput_without"] == []
    assert figures["goodput"] == pytest.approx((30 + 20 + 30) / (3 * 30) * 240 / 300)
    more = {"command": "c", "machine": "m", "versions": {}}
    assert any(
        "no events are left of what was before" in line for line in report_lines(figures | more)
    )


def test_losses_are_told_with_their_steps(run: Row, rounds: list[Row], events: list[Row]) -> None:
    """The first that is kept is not the run's first, once it has run for long."""
    more = {"command": "c", "machine": "m", "versions": {}}
    figures = report(run, rounds, events)
    steps = [e["data"]["steps"] for e in events if e["kind"] == "evaluation"]
    assert [figures[f"val_loss_{end}_steps"] for end in ("start", "end")] == [steps[0], steps[-1]]
    line = (
        f"validation loss: 6.0000 after {steps[0]} steps, 1.5000 after {steps[-1]} (nats per token)"
    )
    assert line in report_lines(figures | more)


def test_data_parallel_alone_sends_nothing() -> None:
    assert data_parallel_bytes(100, 1, 1000) == 0
    assert data_parallel_bytes(1, 2, 1000) == 2000


def test_the_page_is_whole_and_escapes_what_it_is_told(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    rounds[0]["verdicts"][0]["reason"] = "</script><script>alert(1)</script>"
    figures = report(run, rounds, events) | {"run": "<b>demo"}
    text = page(figures, run, rounds, events, [("a <promise>", True), ("another", False)])
    assert "&lt;b&gt;demo" in text
    assert "a &lt;promise&gt;" in text
    assert "<script>alert" not in text
    # Nothing is fetched from elsewhere.
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", text)


def test_the_report_says_what_became_of_every_token_and_how_learners_came_back(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    tokens = {"merged": 70, "refused": 5, "overwritten": 10, "lost": 14, "in_flight": 1}
    run["status"] |= {"tokens": tokens, "tokens_by_fragment": [tokens], "tokens_reread": 6}
    back = RecoveryRecord(
        learner="b",
        incarnation=1,
        lost_at=20.0,
        detected_at=25.0,
        restarted_at=22.0,
        joined_at=26.0,
        donor_at=26.0,
        transferred_at=27.5,
        stepping_at=30.0,
        contributed_at=50.0,
        donor="<a>",
        source="donor",
        rounds=3,
    )
    told = {"kind": "returned", "source": "s", "at": 50.0, "data": back.model_dump()}
    told |= {"text": "b is back", "seq": 99}
    figures = report(run, rounds, [*events, told])
    assert (figures["tokens"], figures["tokens_reread"]) == (tokens, 6)
    brief = told | {"data": {"learner": "c", "incarnation": 0}}  # of an older release
    shown, other = report(run, rounds, [*events, told, brief])["recoveries"]
    assert (other["learner"], other["donor"], other["rounds"]) == ("c", "", None)
    assert shown["rounds"] == 3 and shown["phases_s"]["transferred"] == 1.5
    assert "lost_at" not in shown
    text = page(figures, run, rounds, events)
    assert "What became of every token" in text and "<td>fragment 0<td>70" in text
    assert "Recoveries" in text and "&lt;a&gt;" in text and "first contribution s" in text


def test_a_page_of_a_run_without_recoveries_has_no_empty_tables(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    assert "<h2>" not in page(report(run, rounds, events), run, rounds, events)


def test_a_report_in_sentences_says_what_each_figure_means(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    figures = report(run, rounds, events) | {
        "tokens": {"merged": 800, "overwritten": 150, "in_flight": 50},
        "tokens_processed": 1000,
        "tokens_useful": 800,
        "tokens_reread": 10,
        "command": "diloco report demo",
        "machine": "Linux, 2 cores",
        "versions": {"python": "3.11"},
    }
    lines = report_lines(figures)
    assert lines[0] == "run demo: finished, seed 7"
    assert "tokens: 1,000 processed, 80.0% of them useful" in lines
    assert "  merged 800, overwritten 150, in flight 50, read again 10" in lines
    assert OVERWRITTEN in lines
    assert any(line.startswith("fault: b was taken away; 2 rounds went on") for line in lines)
    assert lines[-1] == "versions: python 3.11"
    few = figures | {"tokens": {"merged": 950, "overwritten": 50}}
    assert OVERWRITTEN not in report_lines(few), "only where it is much"


def test_a_report_in_sentences_leaves_out_what_a_run_cannot_have(run: Row) -> None:
    run |= {"status": None, "state": "queued"}
    figures = report(run, [], []) | {"command": "c", "machine": "m", "versions": {}}
    lines = report_lines(figures)
    assert "tokens: none yet" in lines
    assert not any("None" in line for line in lines)


def test_a_recovery_is_told_with_its_phases(run: Row, rounds: list[Row], events: list[Row]) -> None:
    back = {"learner": "b", "incarnation": 1, "donor": "a", "source": "donor"}
    back |= {"phases_s": {"detected": 5.0, "donor_chosen": 0.0, "total": 17.5}}
    more = {"command": "c", "machine": "m", "versions": {}}
    figures = report(run, rounds, events) | more | {"recoveries": [back]}
    told = "recovery: b (life 1), moments of a, 17.5 s in all: detected 5.0 s"
    assert told in report_lines(figures)
    fresh = back | {"donor": "", "source": "fresh"}
    assert any("fresh moments" in x for x in report_lines(figures | {"recoveries": [fresh]}))


def test_the_story_of_a_run_is_what_its_picture_needs(
    run: Any, rounds: list[Any], events: list[Any]
) -> None:
    found = report(run, rounds, events)["story"]
    assert found["lanes"]["b"][2] == ["down", 20.0, 26.0]
    assert found["faults"] == [[20.0, "kill", "b"]]
    assert len(found["commits"]) == sum(r["outcome"] == "committed" for r in rounds)
    assert all(at >= 0 for at, _ in found["losses"])


def test_the_loss_on_each_corpus_of_a_mixture_is_reported(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    told = {"command": "x", "machine": "y", "versions": {}}
    figures = report(run, rounds, events)
    assert figures["val_loss_by_corpus"] == {}
    assert "corpus" not in "\n".join(report_lines(figures | told))
    for n, event in enumerate(e for e in events if e["kind"] == "evaluation"):
        event["data"] |= {"each": {"code": 5.0 - n, "talk": 7.0 - n}}
    figures = report(run, rounds, events)
    assert figures["val_loss_by_corpus"] == {"code": 4.0, "talk": 6.0}
    lines = report_lines(figures | told)
    assert "  by corpus at the end: code 4.0000, talk 6.0000" in lines
    shown = page(figures, run, rounds, events)
    assert "validation loss, code" in shown and "validation loss, talk" in shown
