"""Which data shard to lease: own ones first, then the least read, never a living learner's."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.data.leases import choose, given_back, order, place, taken
from diloco_shared.protocol.records import ShardLease


def lease(shard: int, holder: str = "", incarnation: int = -1, passes: int = 0) -> ShardLease:
    return ShardLease(
        shard=shard, holder=holder, incarnation=incarnation, sequences=5, passes=passes
    )


def pick(
    leases: dict[int, ShardLease],
    merged: dict[int, tuple[int, int]] | None = None,
    **change: object,
) -> int | None:
    settings: dict[str, object] = {
        "learner": "a",
        "incarnation": 2,
        "live": ("a", "b"),
        "holding": (),
    }
    return choose(leases, merged or {}, [3, 1, 0, 2], **{**settings, **change})  # type: ignore[arg-type]


def test_a_new_run_is_read_in_the_learners_own_order() -> None:
    assert pick({}) == 3
    assert pick({}, holding={3}) == 1


def test_a_restarted_learner_goes_on_with_its_own_shards() -> None:
    leases = {0: lease(0, "a", 1), 3: lease(3)}
    assert pick(leases) == 0
    # Taken by this very life, with the answer lost on the way.
    assert pick({0: lease(0, "a", 2), 3: lease(3)}) == 0
    # A newer life has it: this process is superseded and does not know yet.
    assert pick({0: lease(0, "a", 3)}) == 3


def test_a_living_learners_shard_is_never_taken() -> None:
    assert pick({3: lease(3, "b", 0)}) == 1
    assert pick({s: lease(s, "b", 0) for s in range(4)}) is None


def test_a_shard_whose_holder_is_gone_is_taken_over_behind_what_is_merged() -> None:
    leases = {3: lease(3, "gone", 7)}
    assert pick(leases) == 3
    assert place(leases, {}, 3) == (0, 5), "nothing of it was merged since its holder began"
    assert place(leases, {3: (0, 9)}, 3) == (0, 9)
    assert place(leases, {3: (1, 2)}, 3) == (1, 2), "merged to its end, and once more from there"
    assert place({}, {}, 3) == (0, 0)
    mine = taken(3, "a", 2, (1, 2))
    assert (mine.holder, mine.incarnation, mine.passes, mine.sequences) == ("a", 2, 1, 2)


def test_a_restarted_learner_goes_on_where_it_was_before_what_it_had_leased_ahead() -> None:
    ahead = ShardLease(shard=3, holder="a", incarnation=1, sequences=0, passes=0)
    leases = {3: ahead, 0: lease(0, "a", 1)}
    assert pick(leases) == 0
    assert pick({3: ahead}) == 3


def test_who_is_not_known_to_be_live_takes_nobody_for_gone() -> None:
    """Before the first beat `live` is empty: nobody's shard may be taken on that ground."""
    assert pick({3: lease(3, "b", 0)}, live=()) is None
    assert pick({}, live=("b",)) is None


def test_the_least_read_comes_first() -> None:
    leases = {3: lease(3, passes=2), 1: lease(1, passes=1), 0: lease(0, passes=1)}
    assert pick(leases) == 2  # never read
    assert pick(leases, {2: (4, 0)}) == 1, "whatever the lease says, the tape knows better"
    assert pick(leases, holding={2}) == 1


def test_a_shard_read_to_its_end_is_free_and_begins_anew() -> None:
    back = given_back(3, 1)
    assert (back.holder, back.incarnation, back.sequences, back.passes) == ("", -1, 0, 2)


@given(shards=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_the_order_is_a_seeded_permutation(shards: int, seed: int) -> None:
    mine = order(shards, "learner-1", seed)
    assert sorted(mine) == list(range(shards))
    assert mine == order(shards, "learner-1", seed)


def test_learners_have_orders_of_their_own() -> None:
    assert order(64, "learner-1", 0) != order(64, "learner-2", 0)
    assert order(64, "learner-1", 0) != order(64, "learner-1", 1)


@given(
    holders=st.lists(st.sampled_from(["", "a", "b", "gone"]), min_size=4, max_size=4),
    incarnations=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    holding=st.sets(st.integers(0, 3)),
)
def test_whatever_is_chosen_may_be_taken(
    holders: list[str], incarnations: list[int], holding: set[int]
) -> None:
    leases = {s: lease(s, holders[s], incarnations[s] if holders[s] else -1) for s in range(4)}
    shard = pick(leases, holding=holding)
    free = {
        s
        for s in range(4)
        if s not in holding
        and (holders[s] in ("", "gone") or (holders[s] == "a" and incarnations[s] <= 2))
    }
    if shard is None:
        assert not free
    else:
        assert shard in free
        own = {s for s in free if holders[s] == "a"}
        assert not own or shard in own
