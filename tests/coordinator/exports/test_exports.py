"""Which exports may begin, begin by themselves and go; how fast one is. Pure."""

from typing import Any

import pytest

from diloco_coordinator.exports.exports import (
    CUT_OFF,
    CUT_OFF_MAX,
    FAILED_MAX,
    RATE_S,
    Asked,
    ExportPace,
    ExportRecord,
    due,
    hindrance,
    surplus,
)
from diloco_shared.protocol.exports import ExportMoved


def record(name: str, **more: Any) -> ExportRecord:
    """One of the run `r`, begun at the time that its name says."""
    fields = {"run": "r", "run_id": "a", "folder": "r.a", "asked": Asked(), "state": "complete"}
    return ExportRecord.model_validate({"id": name, "begun_at": float(name), **fields, **more})


def names(records: list[ExportRecord]) -> list[str]:
    return [r.id for r in records]


def test_one_of_a_run_at_a_time() -> None:
    running = record("1", state="running")
    assert "export 1 of 'r' is being made" in hindrance([running], "a", 2)
    assert hindrance([running], "b", 2) == ""
    assert hindrance([record("1"), record("2", state="failed")], "a", 1) == ""
    full = hindrance([running], "b", 1)
    assert "no more than 1 at a time" in full
    assert "'r'" not in full, "whoever asks may not see it"


CUT = {"state": "failed", "reason": CUT_OFF}


@pytest.mark.parametrize(
    ("done", "committed", "over", "says"),
    [
        ([], 9, False, False),
        ([], 10, False, True),
        ([], 3, True, True),
        ([], 0, True, False),
        ([{"rounds": 10}], 19, False, False),
        ([{"rounds": 10}], 20, False, True),
        ([{"rounds": 10}], 11, True, True),
        ([{"rounds": 10}], 10, True, False),
        ([{"rounds": 12, "final": True}], 12, True, False),
        ([{"rounds": 10, "state": "failed"}], 19, False, False),
        ([{"rounds": 10, "state": "running"}], 20, False, True),
        ([{"rounds": 10, "run_id": "b"}], 19, False, True),
        ([{"rounds": 10, "asked": Asked(checkpoint="r.a/000001")}], 19, False, True),
        # The run went back from round 100: what it did since is no part of it.
        ([{"rounds": 10}, {"rounds": 100}], 19, False, False),
        ([{"rounds": 10}, {"rounds": 100}], 20, False, True),
        ([{"rounds": 100, "final": True}], 20, False, True),
        # Its coordinator ended meanwhile: it is begun again, but not for ever.
        ([{"rounds": 10, **CUT}], 11, False, True),
        ([{"rounds": 10}, {"rounds": 20, **CUT}], 21, False, True),
        ([{"rounds": 12, "final": True, **CUT}], 12, True, True),
        ([{"rounds": 12, "final": True, **CUT}] * 2, 12, True, True),
        ([{"rounds": 12, "final": True, **CUT}] * CUT_OFF_MAX, 12, True, False),
        ([{"rounds": 10, **CUT}] * CUT_OFF_MAX, 19, False, False),
        ([{"rounds": 10, **CUT}] * CUT_OFF_MAX, 20, False, True),
        ([{"rounds": 10, **CUT}] * CUT_OFF_MAX, 12, True, True),
        ([{"rounds": 10, **CUT}] * CUT_OFF_MAX + [{"rounds": 12}], 12, True, False),
        ([{"rounds": 12, "final": True, "state": "failed"}], 12, True, False),
    ],
)
def test_which_begin_by_themselves(
    done: list[dict[str, Any]], committed: int, over: bool, says: bool
) -> None:
    found = [record(str(n), **fields) for n, fields in enumerate(done)]
    assert due(found, "a", 10, committed, over) is says
    assert not due(found, "a", None, committed, over), "unless it is asked for"


@pytest.mark.parametrize(
    ("done", "committed", "over", "says"),
    [
        ([{"in_epoch": 1, "rounds": 12, "final": True}], 12, True, False),
        ([{"in_epoch": 0, "rounds": 12, "final": True}], 12, True, True),
        # While it trains, what there was counts as far as the run has come again.
        ([{"in_epoch": 0, "rounds": 10}], 12, False, False),
        ([{"in_epoch": 0, "rounds": 10}], 20, False, True),
        ([{"in_epoch": 0, "rounds": 30}], 12, False, True),
        ([{"in_epoch": 0, "rounds": 10}, {"in_epoch": 1, "rounds": 11}], 20, False, False),
        # Its fragments are of another epoch than the run's newest shard was in.
        ([{"in_epoch": 1, "epoch": 0, "rounds": 12, "final": True}], 12, True, False),
        # An older build wrote only of which epoch the parameters are.
        ([{"epoch": 1, "rounds": 12, "final": True}], 12, True, False),
        ([{"epoch": 0, "rounds": 12, "final": True}], 12, True, True),
    ],
)
def test_what_was_made_of_a_history_that_the_run_has_lost_counts_no_more(
    done: list[dict[str, Any]], committed: int, over: bool, says: bool
) -> None:
    """A restored checkpoint, and a hub that was put back from a backup, begin an epoch."""
    found = [record(str(n), **fields) for n, fields in enumerate(done)]
    assert due(found, "a", 10, committed, over, 1) is says


@pytest.mark.parametrize(
    ("done", "committed", "says"),
    [
        # It went back from beyond round 60 to round 50, and was exported at 20, 40 and 60.
        ([20, 40, 60], 59, False),
        ([20, 40, 60], 60, True),
        ([20, 40, 60], 79, True),
        ([20, 40, 50], 69, False),
        ([20, 40, 50], 70, True),
    ],
)
def test_what_was_made_beyond_where_the_run_went_back_to_never_counts_again(
    done: list[int], committed: int, says: bool
) -> None:
    found = [record(str(n), in_epoch=0, rounds=rounds) for n, rounds in enumerate(done)]
    assert due(found, "a", 20, committed, False, 1, since=50) is says
    found.append(record("9", in_epoch=1, rounds=55))
    assert not due(found, "a", 20, min(committed, 74), False, 1, since=50)


RUNS = ("a", "b", "c")


def test_the_oldest_go_and_those_that_nobody_asked_for_before_others() -> None:
    found = [record("1"), record("2", automatic=True), record("3"), record("4", automatic=True)]
    assert names(surplus(found, 4, None, "a", RUNS)) == []
    assert names(surplus(found, 2, None, "a", RUNS)) == ["2", "4"]
    assert names(surplus(found, 1, None, "a", RUNS)) == ["2", "4", "1"]
    assert names(surplus(found, 4, 1, "a", RUNS)) == ["2"]
    assert names(surplus(found, 4, 1, "b", RUNS)) == [], "only of the run itself"
    assert names(surplus([record("1", state="running"), *found], 1, None, "a", RUNS))[:2] == [
        "2",
        "4",
    ]


def test_what_was_begun_with_a_clock_that_was_ahead_is_no_newer() -> None:
    """An older build wrote no number of it; one of before that time has its time alone."""
    ahead = [record(str(900 + n), automatic=True, serial=n) for n in (0, 1, 2)]
    now = record("5", automatic=True, serial=3)
    assert names(surplus([*ahead, now], 9, 2, "a", RUNS)) == ["900", "901"]
    assert names(surplus([*ahead, now], 2, None, "a", RUNS)) == ["900", "901"]
    older = record("4", automatic=True)
    assert names(surplus([ahead[0], older, now], 9, 1, "a", RUNS)) == ["4", "900"]
    # Those that were cut off are not the newest in a row, whatever the clock said.
    cut = [record(str(900 + n), serial=n, rounds=15, **CUT) for n in range(1, CUT_OFF_MAX + 1)]
    after_it_went_back = record("5", serial=CUT_OFF_MAX + 1, rounds=5)
    assert due([*cut, after_it_went_back], "a", 10, 20, False)


def test_no_run_pushes_out_the_only_export_of_another() -> None:
    """Whoever may operate one run alone could else remove everybody's."""
    others = [record("1", run_id="b"), record("2", run_id="c", automatic=True)]
    mine = [record("3"), record("4"), record("5")]
    assert names(surplus([*others, *mine], 3, None, "a", RUNS)) == ["3", "4"]
    assert names(surplus([*others, *mine], 1, None, "a", RUNS)) == ["3", "4"]
    assert names(surplus([*others, record("3")], 1, None, "a", RUNS)) == [], "one of each run"
    assert names(surplus([*others, *mine], 3, None, "d", RUNS)) == ["3", "4"], "older ones may go"
    more = [record("0", run_id="b"), *others, *mine]
    assert names(surplus(more, 2, None, "a", RUNS)) == ["3", "4", "0"], "the run's own go first"


def test_what_a_hub_put_back_does_not_know_goes_before_all_others() -> None:
    """Nobody can ask for it."""
    lost, mine = record("1", run_id="lost"), record("2")
    assert names(surplus([lost, mine], 2, None, "a", RUNS)) == []
    assert names(surplus([lost, mine], 1, None, "a", RUNS)) == ["1"]
    kept = [record("0", run_id="b"), record("3")]
    assert names(surplus([lost, mine, *kept], 2, None, "a", RUNS)) == ["1", "2"]


def test_few_that_failed_are_listed() -> None:
    found = [record(str(n), state="failed") for n in range(FAILED_MAX + 2)]
    assert names(surplus(found, 1, 1, "a", RUNS)) == ["0", "1"]


def moved(done: int, stage: str = "fetching") -> ExportMoved:
    return ExportMoved.model_validate({"stage": stage, "done": done, "total": 1000})


def test_the_rate_is_that_of_the_last_seconds() -> None:
    pace = ExportPace()
    assert pace.view() == {
        "stage": "starting",
        "bytes_done": 0,
        "bytes_total": 0,
        "bytes_per_s": None,
        "seconds_left": None,
    }
    pace.moved(moved(0), 0.0)
    assert pace.view()["seconds_left"] is None
    pace.moved(moved(100), 1.0)
    assert pace.view() | {"stage": ""} == {
        "stage": "",
        "bytes_done": 100,
        "bytes_total": 1000,
        "bytes_per_s": 100.0,
        "seconds_left": 9.0,
    }
    for n in range(1, 101):
        pace.moved(moved(100 + n, "writing"), 1.0 + n)
    assert pace.view()["bytes_per_s"] == 1.0, "the quick beginning is forgotten"
    assert len(pace._seen) <= RATE_S + 2


def test_what_stands_still_has_no_end_in_sight() -> None:
    pace = ExportPace()
    for n in range(30):
        pace.moved(moved(100), float(n))
    assert (pace.view()["bytes_per_s"], pace.view()["seconds_left"]) == (None, None)
