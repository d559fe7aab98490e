"""A run whose syncer has shards is shown as one run."""

from typing import Any

from diloco_coordinator.runs.shards import merged
from diloco_shared.protocol.messages import Stamp
from diloco_shared.protocol.records import RecoveryRecord, TokenCounts


def stamp(steps: int) -> Stamp:
    return Stamp(round=1, steps=steps, fraction=0.1, fraction_per_step=0.01)


def test_one_shard_is_the_run(status: Any) -> None:
    alone = status()
    assert merged([alone], 1) is alone
    assert merged([], 1) is None
    assert merged([status(shard=1)], 2) is None, "the first shard has not spoken yet"


def test_a_run_is_the_sum_of_its_shards_and_as_far_as_the_slowest(status: Any) -> None:
    none, some = TokenCounts(), TokenCounts(merged=7)
    first = status(
        epoch=2,
        at=50.0,
        bytes_up=5,
        bytes_down=7,
        versions=(3, -1),
        stamp=stamp(24),
        parameters=300,
        tokens_processed=1000,
        tokens=TokenCounts(merged=800, overwritten=100, in_flight=100),
        tokens_by_fragment=(some, none),
        alive=("a",),
        refused={"late": 1},
        restores=2,
        leader="syncer-1",
    )
    second = status(
        shard=1,
        epoch=1,
        at=40.0,
        bytes_up=6,
        bytes_down=8,
        versions=(-1, 2),
        stamp=stamp(16),
        parameters=100,
        tokens_processed=1008,
        tokens=TokenCounts(merged=400, lost=8, in_flight=600),
        tokens_by_fragment=(none, TokenCounts(merged=5)),
        alive=("a", "b"),
        refused={"late": 2, "stale": 1},
        restores=1,
        settled=True,
    )
    whole = merged([first, second], 2)
    assert whole is not None
    assert (whole.versions, whole.stamp.steps, whole.parameters) == ((3, 2), 16, 400)
    assert (whole.rounds_committed, whole.alive) == (2, ("a", "b"))
    assert (whole.epoch, whole.at) == (2, 50.0), "the newest that any shard tells of"
    assert (whole.bytes_up, whole.bytes_down) == (11, 15)
    assert whole.refused == {"late": 3, "stale": 1}
    assert whole.tokens_by_fragment == (some, TokenCounts(merged=5))
    assert whole.tokens == TokenCounts(merged=700, overwritten=75, lost=2, in_flight=231)
    assert sum(whole.tokens.model_dump().values()) == whole.tokens_processed == 1008, "I5"
    assert (whole.restores, whole.settled, whole.leader) == (1, False, "syncer-1")


def test_its_state_is_that_of_the_shard_that_keeps_it_waiting(status: Any) -> None:
    def state_of(*parts: Any, shards: int = 2) -> tuple[str, str]:
        whole = merged(list(parts), shards)
        assert whole is not None
        return whole.state, whole.reason

    running, over = status(), status(state="finished", reason="its budget is used up")
    starved = status(shard=1, state="starved", reason="starved (0 of 1)")
    assert state_of(running, starved) == ("starved", "shard 1: starved (0 of 1)")
    assert state_of(running) == ("waiting", "1 of 2 syncer shards have a leader")
    assert state_of(over, status(shard=1))[0] == "finishing"
    ended = status(shard=1, state="finished")
    assert state_of(over, ended) == ("finished", "its budget is used up")
    whole = merged([over, ended], 2)
    assert whole is not None and whole.settled
    stopped = status(shard=1, state="stopped", reason="as asked")
    assert state_of(over, stopped) == ("stopped", "as asked")
    # The first shard has gone back, and waits for the second one without knowing why.
    starved = status(state="starved", reason="0 train")
    back = status(shard=1, state="starved", reason="starved: restoring kept/5")
    assert state_of(starved, back)[1] == "shard 0: 0 train; shard 1: restoring kept/5"
    failed = status(shard=1, reason="restoring kept/5: it is damaged; and more")
    assert state_of(running, failed)[1].endswith("; shard 1: restoring kept/5: it is damaged")


def test_learners_and_their_returns_are_those_of_all_shards(status: Any) -> None:
    def back(learner: str, contributed_at: float, rounds: int = -1) -> RecoveryRecord:
        return RecoveryRecord(
            learner=learner,
            incarnation=1,
            restarted_at=5.0,
            contributed_at=contributed_at,
            rounds=rounds,
        )

    def seen(silent_s: float, step: int, *, participating: bool = False) -> dict[str, Any]:
        shown = {"incarnation": 1, "silent_s": silent_s, "step": step}
        return {**shown, "participating": participating}

    first = status(
        tokens_reread=300,
        recoveries=(back("a", 0.0), back("b", 9.0, 4)),
        learners={"a": seen(3.0, 4), "b": seen(0.1, 9, participating=True)},
    )
    second = status(
        shard=1,
        tokens_reread=200,
        recoveries=(back("b", 8.0, 3), back("a", 7.0, 2), back("c", 0.0)),
        learners={"a": seen(0.2, 6, participating=True), "b": seen(0.3, 8), "c": seen(0.0, 0)},
    )
    whole = merged([first, second], 2)
    assert whole is not None
    returns = [(r.learner, r.contributed_at, r.rounds) for r in whole.recoveries]
    assert returns == [("a", 7.0, 2), ("b", 8.0, 3), ("c", 0.0, -1)]
    assert whole.tokens_reread == 200
    assert {n: v["step"] for n, v in whole.learners.items()} == {"a": 6, "b": 9, "c": 0}
    assert [n for n, v in whole.learners.items() if v["participating"]] == ["a", "b"]


def test_a_run_of_which_a_part_was_ended_by_force_waits_for_no_other_part(status: Any) -> None:
    """Its learners hear of no end, so that whoever leads the other part waits for them."""
    ended = status(state="finished").model_copy(update={"settled": False})
    by_force = status(state="stopped", shard=1).model_copy(update={"forced": True})
    there = merged([ended, by_force], 2)
    assert there is not None and there.settled
    for other in (status(shard=1, state="stopped"), by_force):
        going_on = merged([status(), other], 2)
        assert going_on is not None and not going_on.settled
    well = merged([ended, status(state="finished", shard=1)], 2)
    assert well is not None and not well.settled, "its leader publishes the last merges"


def test_the_quorum_is_that_of_the_shards_that_go_on(status: Any) -> None:
    """One that is over does not take a new one any more."""
    over, on = status(state="finished", quorum=1), status(shard=1, state="starved", quorum=2)
    for parts, quorum in (((over, on), 2), ((over,), 1)):
        whole = merged(parts, 2)
        assert whole is not None and whole.quorum == quorum


def test_the_newest_round_is_that_of_the_shard_that_closed_none_for_the_longest(
    status: Any,
) -> None:
    def since_s(*parts: Any) -> float:
        told = [status(shard=n, state=state, since_round_s=s) for n, (state, s) in enumerate(parts)]
        whole = merged(told, len(told))
        assert whole is not None
        return whole.since_round_s

    assert since_s(("running", 2.0), ("running", 90.0)) == 90.0
    assert since_s(("running", 2.0), ("finished", 90.0)) == 2.0, "it has no more rounds to close"
    assert since_s(("finished", 80.0), ("finished", 90.0)) == 80.0
