"""Whose end is overdue, and what may replace what: statuses are no last writer's to say."""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_coordinator.runs.statuses import (
    FORCE_S,
    FORCE_S_MAX,
    SETTLE_S,
    SILENT_S,
    UNWRITTEN_S,
    Standings,
    forced,
)
from diloco_shared.protocol.messages import Beat, Stamp
from diloco_shared.protocol.pace import LAST_EVALUATION_S
from diloco_shared.protocol.records import RunRecord, RunStatus, TokenCounts
from diloco_shared.protocol.run_states import GONE_BEFORE, keeps

Make = Callable[..., RunStatus]


def record(
    desired: str = "running", run_id: str = "one", shards: int = 1, fragments: int = 2
) -> RunRecord:
    return RunRecord.model_validate(
        {
            "name": "demo",
            "spec": {"id": run_id, "algorithm": {"shards": shards, "fragments": fragments}},
            "desired": desired,
            "quorum": 1,
            "created_at": 1.0,
        }
    )


def test_a_settled_end_stays_and_only_a_restore_takes_it_back(status: Make) -> None:
    """A standby that leads for a moment after the end knows less, and must not say so."""
    settled = status(state="finished", settled=True)
    assert keeps(settled, status(state="finished", settled=False)) == "the run is settled"
    assert keeps(settled, status(state="running")) == "the run is settled"
    assert keeps(settled, status(state="running", term=9)) == "the run is settled"
    assert keeps(settled, status(state="running", epoch=1)) == ""


def test_nothing_older_replaces_what_is_newer(status: Make) -> None:
    there = status(term=3, epoch=1)
    assert keeps(there, status(term=2, epoch=1)) == "it is of term 3, this one of 2"
    assert keeps(there, status(term=9, epoch=0)) == "it is of epoch 1, this one of 0"
    assert keeps(there, status(term=3, epoch=1)) == "", "its own leader renews it"
    assert keeps(there, status(term=4, epoch=1)) == ""
    ended = status(state="stopped", settled=False)
    assert keeps(ended, status(state="running")) == "the run is stopped"
    assert keeps(ended, status(state="stopped", settled=True)) == ""


def test_a_forced_end_gives_way_to_a_leader_that_has_settled_it(status: Make) -> None:
    there = forced(record("stopped"), 0, status(), "no syncer leads it", 5.0)
    assert (there.state, there.settled, there.forced) == ("stopped", True, True)
    assert keeps(there, status(state="running", term=5)) == "the run is settled"
    assert keeps(there, status(state="stopped", settled=False, term=5)) == "the run is settled"
    assert keeps(there, status(state="stopped", settled=True, term=5)) == ""


def test_one_that_nobody_ever_led_is_ended_too() -> None:
    end = forced(record("stopped"), 1, None, "no syncer leads it", 5.0)
    assert (end.run_id, end.shard, end.state, end.settled) == ("one", 1, "stopped", True)


def test_a_forced_end_of_one_shard_that_nobody_led_joins_the_others(status: Make) -> None:
    """Its leader never wrote a status, and the other shard has ended properly."""
    stopped, standings = record("stopped", shards=2), Standings()
    led = status(run_id="one", state="stopped", tokens_by_fragment=(TokenCounts(merged=7),) * 2)
    standings.take("demo", led, 1.0)
    standings.take("demo.1", forced(stopped, 1, None, "no syncer leads it", 5.0), 2.0)
    whole = standings.put_together("demo", stopped)
    assert whole is not None and (whole.state, whole.settled, whole.forced) == (
        "stopped",
        True,
        True,
    )
    assert (whole.versions, whole.tokens_by_fragment) == (
        (1, 0),
        (TokenCounts(merged=7), TokenCounts()),
    )


def test_a_run_that_was_begun_anew_has_none_of_the_one_before(status: Make) -> None:
    standings = Standings()
    standings.take("demo", status(run_id="one"), 1.0)
    assert standings.put_together("demo", record(run_id="one")) is not None
    assert standings.put_together("demo", record(run_id="two")) is None
    assert "demo" not in standings.statuses


def test_who_left_under_an_earlier_leader_is_not_shown(status: Make) -> None:
    """Leaders tell each other of it in what they show."""
    standings = Standings()
    learners = {"a": {"alive": True}, "b": {"alive": False, GONE_BEFORE: True}}
    standings.take("demo", status(run_id="one", learners=learners), 1.0)
    whole = standings.put_together("demo", record(run_id="one"))
    assert whole is not None and whole.learners == {"a": {"alive": True}}


def test_a_status_that_tells_of_no_fragment_is_padded(status: Make) -> None:
    """Those that were forced by an earlier version of the coordinator have none."""
    standings = Standings()
    standings.take("demo", status(run_id="one"), 1.0)
    standings.take("demo.1", status(run_id="one", shard=1, versions=()), 1.0)
    whole = standings.put_together("demo", record(shards=2))
    assert whole is not None and whole.versions == (1, 0)


@pytest.mark.parametrize(
    "more", [{"versions": (1, 0, 3)}, {"tokens_by_fragment": (TokenCounts(),)}, {"shard": 2}]
)
def test_a_status_that_cannot_be_put_together_is_left_out(
    status: Make, more: dict[str, Any]
) -> None:
    standings, two = Standings(), record(shards=2)
    standings.take("demo", status(run_id="one"), 1.0)
    other = status(run_id="one", **({"shard": 1} | more))
    standings.take(key := f"demo.{other.shard}", other, 1.0)
    whole = standings.put_together("demo", two)
    assert whole is not None and whole.reason == "1 of 2 syncer shards have a leader"
    assert standings.misfits == {key}
    standings.take(key, None, 2.0)
    assert not standings.misfits


def test_nothing_is_remembered_of_a_deleted_run(status: Make) -> None:
    standings = Standings()
    standings.take("demo", status(run_id="one"), 1.0)
    overdue(standings, "stopped", 2.0)
    standings.put_together("demo", record("stopped"))
    standings.forget("demo", "one")
    assert standings == Standings()


def overdue(standings: Standings, desired: str, now: float) -> str:
    stopped = record(desired)
    standings.watch_stop(stopped, now)
    return standings.overdue(stopped, 0, "demo", now)


def test_a_stop_without_a_leader_is_overdue_after_its_time(status: Make) -> None:
    standings = Standings()
    standings.take("demo", status(), 100.0)
    assert overdue(standings, "running", 500.0) == "", "nobody asked"
    assert overdue(standings, "stopped", 500.0) == ""
    assert overdue(standings, "stopped", 500.0 + FORCE_S - 0.1) == ""
    assert overdue(standings, "stopped", 500.0 + FORCE_S) == "no syncer leads it"
    # A standby took over and speaks: it has its own time.
    standings.take("demo", status(term=2), 500.0 + FORCE_S)
    assert overdue(standings, "stopped", 500.0 + FORCE_S + 1) == ""


def test_a_leader_that_speaks_and_cannot_end_it_is_not_waited_for_for_ever(status: Make) -> None:
    standings = Standings()
    for now in range(int(FORCE_S_MAX)):
        standings.take("demo", status(at=float(now)), float(now))
        assert overdue(standings, "stopped", float(now)) == ""
    assert "could not end it" in overdue(standings, "stopped", FORCE_S_MAX)


def test_a_stop_that_a_restored_hub_took_back_counts_no_more(status: Make) -> None:
    standings = Standings()
    overdue(standings, "stopped", 0.0)
    overdue(standings, "running", 1.0)
    standings.take("demo", status(), FORCE_S_MAX)
    assert overdue(standings, "stopped", FORCE_S_MAX) == "", "its leader has its time from now on"
    assert overdue(standings, "stopped", FORCE_S_MAX + FORCE_S) == "no syncer leads it"


def test_a_run_that_was_never_led_is_overdue_as_well() -> None:
    standings = Standings()
    overdue(standings, "stopped", 0.0)
    assert overdue(standings, "stopped", FORCE_S) == "no syncer leads it"


def test_an_end_that_its_leader_did_not_settle(status: Make) -> None:
    standings = Standings()
    standings.take("demo", status(state="finished", settled=False), 0.0)
    assert overdue(standings, "running", SETTLE_S - 1) == ""
    assert overdue(standings, "running", SETTLE_S) == "nobody settled its end for 30 s"
    end = forced(record(), 0, status(state="finished", settled=False), "", 1.0)
    assert (end.state, end.settled, end.forced) == ("finished", True, False)


def test_an_end_that_is_not_settled_waits_for_a_last_evaluation(status: Make) -> None:
    """A learner makes it, though no leader is left."""
    standings = Standings()
    standings.take("demo", status(state="finished", settled=False), 0.0)

    def why(now: float) -> str:
        return standings.overdue(record(), 0, "demo", now, evaluated=True)

    assert why(SETTLE_S) == why(LAST_EVALUATION_S - 1) == ""
    assert why(LAST_EVALUATION_S) == "nobody settled its end for 900 s"


def test_nobody_is_silent_before_anybody_listens(status: Make) -> None:
    """After the coordinator's own link was cut, a leader has its time from then on."""
    standings = Standings()
    standings.take("demo", status(state="finished", settled=False), 0.0)
    standings.listening_since = 100.0
    assert overdue(standings, "running", 99.0 + SETTLE_S) == ""
    assert overdue(standings, "running", 100.0 + SETTLE_S) == "nobody settled its end for 30 s"
    standings.take("demo", status(), 100.0)
    assert overdue(standings, "stopped", 150.0) == ""
    standings.listening_since = 200.0
    assert overdue(standings, "stopped", 200.0 + SILENT_S) == "", "it may have just heard the wish"
    assert overdue(standings, "stopped", 200.0 + FORCE_S) == "no syncer leads it"
    standings.take("demo", status(at=1.0), 199.0 + FORCE_S_MAX)
    assert overdue(standings, "stopped", 199.0 + FORCE_S_MAX) == ""
    assert "could not end it" in overdue(standings, "stopped", 200.0 + FORCE_S_MAX)


def test_what_a_deleted_run_of_the_same_name_shows_counts_for_nothing(status: Make) -> None:
    standings = Standings()
    standings.take("demo", status(state="stopped", run_id="other"), 0.0)
    assert standings.put_together("demo", record()) is None
    standings.take("demo", status(run_id="one"), 0.0)
    whole = standings.put_together("demo", record())
    assert whole is not None and whole.state == "running"


@pytest.mark.parametrize("again", [True, False])
def test_a_repeat_by_the_watch_is_no_sign_of_life(status: Make, again: Any) -> None:
    standings = Standings()
    standings.take("demo", status(at=1.0), 0.0)
    standings.take("demo", status(at=1.0 if again else 2.0), 9.0)
    assert standings.silent_s("demo", 10.0) == (10.0 if again else 1.0)


def beat(**more: Any) -> Beat:
    fields: dict[str, Any] = {"run": "demo", "run_id": "one", "epoch": 0, "term": 1, "live": ()}
    stamp = Stamp(round=1, steps=8, fraction=0.1, fraction_per_step=0.01)
    told: dict[str, Any] = {"state": "full", "reason": "the hub's disk is full", "versions": ()}
    return Beat.model_validate({**fields, **told, "stamp": stamp, **more})


def state(standings: Standings) -> tuple[str, str]:
    whole = standings.put_together("demo", record())
    assert whole is not None
    return whole.state, whole.reason


def test_what_a_leader_cannot_write_is_heard_from_its_beats(status: Make) -> None:
    """No key takes anything on a full disk; beats are passed on all the same."""
    standings = Standings()
    standings.take("demo", status(run_id="one"), 10.0)
    written = state(standings)
    assert not standings.hear(beat(), 10.0 + UNWRITTEN_S / 2), "it still writes"
    assert state(standings) == written
    assert standings.hear(beat(), 10.0 + UNWRITTEN_S)
    assert state(standings) == ("full", "the hub's disk is full")
    assert not standings.hear(beat(), 14.0), "no news"
    assert standings.hear(beat(reason="still full"), 15.0)
    standings.take("demo", status(run_id="one"), 16.0)
    assert state(standings) == ("full", "still full"), "a repeat by the watch"
    standings.take("demo", status(run_id="one", term=2), 17.0)
    assert state(standings) == written, "a leader writes again"


def test_a_run_is_without_a_word_where_its_leader_neither_writes_nor_beats(status: Make) -> None:
    standings = Standings()
    assert standings.wordless_s("demo", 99.0) == 0.0, "nobody has said anything yet"
    standings.take("demo", status(run_id="one"), 10.0)
    standings.take("demo.1", status(run_id="one", shard=1), 12.0)
    assert standings.wordless_s("demo", 15.0) == 5.0, "of the shard that is silent"
    standings.hear(beat(), 14.0)
    assert standings.wordless_s("demo", 15.0) == 3.0
    standings.listening_since = 14.5
    assert standings.wordless_s("demo", 15.0) == 0.5, "what came before was not heard"
    standings.forget("demo", "one")
    assert standings.wordless_s("demo", 99.0) == 0.0


@pytest.mark.parametrize(
    "more", [{"term": 0}, {"run_id": "two"}, {"state": "finished"}, {"shard": 1}, {"run": "other"}]
)
def test_beats_that_say_nothing_of_what_is_shown_are_passed_over(
    status: Make, more: dict[str, Any]
) -> None:
    standings = Standings()
    standings.take("demo", status(run_id="one", term=1), 0.0)
    assert not standings.hear(beat(**more), 100.0)
    assert state(standings) == ("running", "2 of 2 ready")


def test_a_run_that_is_over_stays_so_whatever_is_heard(status: Make) -> None:
    standings = Standings()
    standings.take("demo", status(run_id="one", state="stopped"), 0.0)
    assert not standings.hear(beat(term=9), 100.0)
    assert state(standings)[0] == "stopped"
