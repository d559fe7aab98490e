"""The checker of what is read, by itself: what it is shown of leases and steps, it sees."""

from typing import Any

import pytest

from diloco_learner.events import Contribute
from diloco_shared.protocol.messages import Cursor
from diloco_shared.protocol.records import ShardLease
from diloco_simulator.checkers.data import (
    BEAT_S,
    GOING_BACK_S,
    HELD_MAX,
    OLD_S,
    SEEN_S,
    TOLD_S,
    DataRead,
)
from diloco_simulator.checkers.promises import Report
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.tiny import spec_of

SIZE = 4


class Seen:
    """A run of 64 data shards of four sequences each."""

    def __init__(self) -> None:
        self.told: list[str] = []
        report = Report(lambda promise, text: self.told.append(text))
        spec = spec_of(Options.calm(), 1)
        self.data = DataRead(report, spec, lambda shard: SIZE, lambda *words: None)

    def leased(self, shard: int, life: str, at: tuple[int, int] = (0, 0), now: float = 1.0) -> None:
        self.data.leased(lease(shard, life, at), now)

    def reads(self, life: str, *sequences: tuple[int, int, int], now: float = 2.0) -> None:
        self.data.reads(life, sequences, now, able=True)

    def led(self, until: int, term: int = 1) -> None:
        """Its leader has spoken until then."""
        for now in range(until):
            self.data.beat(["a", "b"], float(now), term=term)

    def says(self, life: str, cursor: Cursor | None) -> None:
        place: dict[str, Any] = {"epoch": 0, "term": 1, "round": 0, "fragment": 0, "base": 0}
        steps = {"step_from": 0, "step_to": 1, "tokens_from": 0, "tokens_to": 64, "deadline": 9.0}
        self.data.contributed(life, Contribute(**place, **steps, cursor=cursor))

    def named(self, text: str) -> bool:
        """Whether that was said, and nothing else."""
        said, self.told[:] = list(self.told), []
        return len(said) == 1 and text in said[0]


def lease(shard: int, life: str, at: tuple[int, int] = (0, 0)) -> ShardLease:
    holder, _, incarnation = life.rpartition("/")
    passes, sequences = at
    number = int(incarnation or -1)
    return ShardLease(
        shard=shard, holder=holder, incarnation=number, sequences=sequences, passes=passes
    )


@pytest.fixture
def seen() -> Seen:
    """Learner `a` reads shard 5."""
    found = Seen()
    found.leased(5, "a/0")
    found.reads("a/0", (5, 0, 0), (5, 0, 1))
    assert found.told == []
    return found


def test_a_shard_is_taken_only_from_who_is_said_to_be_gone(seen: Seen) -> None:
    seen.data.beat(["a", "b"], 9.0)
    seen.leased(5, "b/0", now=10.0)
    seen.data.beat(["b"], 11.0)
    seen.data.beat(["a", "b"], 15.0)
    assert seen.told == [], "the leader knew it before its next beat"
    seen.leased(5, "a/0", now=16.0)
    seen.data.beat(["a", "b"], 16.5)
    assert seen.told == []
    seen.data.beat(["a", "b"], 16.5 + BEAT_S)
    assert seen.named("a takes data shard 5 from b, which lives")


def test_a_shard_is_not_lost_to_an_older_life(seen: Seen) -> None:
    seen.leased(5, "a/1")
    assert seen.told == []
    seen.leased(5, "a/0")
    assert seen.named("a/1 loses data shard 5 to an older life")


def test_one_process_holds_so_many_shards_at_most(seen: Seen) -> None:
    for shard in range(6, 5 + HELD_MAX):
        seen.leased(shard, "a/0")
    assert seen.told == []
    seen.leased(50, "a/0")
    assert seen.named(f"a/0 holds {HELD_MAX + 1} data shards")


def test_who_holds_a_shard_reads_on_to_its_end(seen: Seen) -> None:
    seen.leased(6, "a/0")
    seen.reads("a/0", (6, 0, 0))
    assert seen.named("a/0 leaves data shard 5 from 2 in pass 0, which it has leased")


def test_what_was_read_to_its_end_may_be_read_once_more_for_want_of_another(seen: Seen) -> None:
    seen.reads("a/0", (5, 0, 2), (5, 0, 3), (5, 1, 0), (5, 1, 1))
    assert seen.told == []
    seen.leased(6, "a/0")
    seen.reads("a/0", (6, 0, 0))
    assert seen.told == [], "it reads on where there is something new"
    seen.reads("a/0", (6, 0, 1), (6, 0, 2), (6, 0, 3), (5, 2, 0))
    assert seen.named("a/0 reads data shard 5 from 0 in pass 2, its lease begins at (0, 0)")


def test_a_lease_that_was_lost_is_not_that_of_what_is_read_on_for_want_of_another(
    seen: Seen,
) -> None:
    """A run that goes back puts its leases back, and the same shard may be leased again."""
    seen.reads("a/0", (5, 0, 2))
    seen.leased(5, "")
    seen.leased(5, "a/0", now=1.5)
    seen.reads("a/0", (5, 0, 3), (5, 1, 0))
    assert seen.told == []


def test_it_reads_once_more_only_while_nothing_is_free(seen: Seen) -> None:
    seen.data.healed_at = 0.0
    seen.reads("a/0", (5, 0, 2), (5, 0, 3), (5, 1, 0), now=40.0)
    seen.reads("a/0", (5, 1, 1), now=41.0 + SEEN_S)
    assert seen.told == [], "nobody leads who could give it another"
    seen.led(42 + int(SEEN_S))
    seen.reads("a/0", (5, 1, 2), now=40.0 + SEEN_S)
    assert seen.told == []
    seen.reads("a/0", (5, 1, 3), now=41.0 + SEEN_S)
    assert seen.named("a/0 reads data shard 5 from 4 in pass 1 once more")


def test_by_an_old_word_nobody_takes_a_shard(seen: Seen) -> None:
    seen.data.beat(["b"], 2.0)
    seen.data.beat(["a", "b"], 5.0)
    seen.leased(5, "b/0", now=6.0 + OLD_S)
    seen.data.beat(["a", "b"], 9.0 + OLD_S)
    assert seen.named("b takes data shard 5 from a, which lives")


def test_a_lease_begins_where_all_before_it_was_read(seen: Seen) -> None:
    seen.leased(5, "", (1, 0))
    assert seen.named("leaves out what nobody had merged")
    seen.leased(7, "a/0")
    seen.reads("a/0", (5, 0, 2), (5, 0, 3), (7, 0, 0), (7, 0, 1), (7, 0, 2), (7, 0, 3))
    seen.leased(7, "", (1, 0))
    assert seen.told == [], "it is given up, and was read"


def test_a_shard_that_was_read_less_comes_first(seen: Seen) -> None:
    seen.reads("a/0", (5, 0, 2), (5, 0, 3))
    seen.leased(5, "", (1, 0), now=3.0)
    seen.leased(5, "b/0", (1, 0), now=3.0 + SEEN_S)
    assert seen.named("b reads data shard 5 in pass 1, and data shard 0 was free in pass 0")


def test_a_contribution_says_how_far_its_learner_has_read(seen: Seen) -> None:
    seen.says("a/0", Cursor(shard=5, sequences=2))
    assert seen.told == []
    seen.says("a/0", Cursor(shard=5, sequences=3))
    assert seen.named("it reads on data shard 5 from 3 in pass 0, and that is 5 from 2 in pass 0")
    seen.says("a/0", Cursor(shard=5, sequences=2, finished=((9, 0),)))
    assert seen.named("a/0 says that it has read data shard 9 to its end in pass 0")
    seen.says("a/0", None)
    assert seen.named("has read nothing")


@pytest.mark.parametrize("goes_back", [True, False])
def test_what_is_merged_is_read_again_only_where_the_run_is_going_back(
    seen: Seen, *, goes_back: bool
) -> None:
    """Its leader gives the data shards back as they were, and then writes down that it does."""
    seen.data.merged[0].merged[7] = {(0, 0): (1.0, True), (0, 1): (1.0, True)}
    at = int(2 * TOLD_S)
    seen.led(at)
    seen.leased(7, "b/0", now=at)
    seen.reads("b/0", (7, 0, 0), now=at)
    assert seen.told == []
    if goes_back:
        seen.data.went_back()
    for _ in range(2):
        seen.data.look(at + GOING_BACK_S)
    text = "b/0 reads data shard 7 from 0 in pass 0 again, which is merged up to (0, 2)"
    assert seen.told == ([] if goes_back else [text])


def test_of_what_was_merged_only_what_the_hub_has_lost_may_be_left_out(seen: Seen) -> None:
    """And not what its tape still has."""
    merged, known = seen.data.merged[0], seen.data.known
    kept = {(0, 0): (1.0, True)}
    merged.merged[5] = {**kept, (0, 1): (2.0, True)}
    merged.lost()
    merged.merged[5] = dict(kept)  # as it is read again
    merged.read_again()
    assert known.excused == {(5, 0, 1)}
    merged.merged.clear()  # the run goes back to before both
    merged._follows("b/0", (5, 0, 2))
    assert seen.told == []
    merged._follows("b/0", (5, 0, 1))
    assert seen.named("b/0 is merged from (5, 0, 1) on, and what comes before it is not")


def test_whoever_leases_a_shard_at_its_end_says_that_it_is_read_ever_after(seen: Seen) -> None:
    """Also once it is somebody else's, since it is merged: it may hear of that late."""
    seen.reads("a/0", (5, 0, 2), (5, 0, 3))
    seen.leased(5, "", (0, 4), now=3.0)
    seen.leased(5, "a/1", (0, 4), now=4.0)
    seen.leased(7, "a/1", now=4.0)
    seen.reads("a/1", (7, 0, 0))
    seen.leased(5, "", (1, 0), now=5.0)
    seen.says("a/1", Cursor(shard=7, sequences=1, finished=((5, 0),)))
    assert seen.told == []


def test_of_leases_from_a_backup_nobody_knows_how_far_they_were_read(seen: Seen) -> None:
    seen.data.put_back([lease(5, "a/0")], 3.0)
    seen.reads("a/0", (5, 0, 2), (5, 0, 3), (5, 1, 0))
    assert seen.told == []
