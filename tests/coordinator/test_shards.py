"""A run whose syncer has shards is shown as one run."""

from typing import Any

from diloco_coordinator.shards import merged
from diloco_shared.protocol.messages import Stamp
from diloco_shared.protocol.records import TokenCounts


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

    running, over = status(), status(state="finished", reason="run finished")
    starved = status(shard=1, state="starved", reason="starved (0 of 1)")
    assert state_of(running, starved) == ("starved", "shard 1: starved (0 of 1)")
    assert state_of(running) == ("waiting", "1 of 2 syncer shards have a leader")
    assert state_of(over, status(shard=1))[0] == "finishing"
    ended = status(shard=1, state="finished")
    assert state_of(over, ended) == ("finished", "run finished")
    whole = merged([over, ended], 2)
    assert whole is not None and whole.settled
