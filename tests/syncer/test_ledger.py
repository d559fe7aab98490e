"""Accounting of tokens (I5): exact, and each token once per fragment."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_syncer.ledger import Ledger

quick = settings(derandomize=True, max_examples=80, deadline=None)

spans = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda ab: (min(ab), max(ab)))


@quick
@given(st.lists(st.tuples(st.sampled_from("abc"), spans), max_size=20))
def test_no_token_is_counted_twice_i5(merges: list[tuple[str, tuple[int, int]]]) -> None:
    """Whatever overlaps, in whatever order: never more than the tokens there are."""
    ledger = Ledger.empty(1)
    told: dict[str, set[int]] = {}
    counted = 0
    for learner, (start, stop) in merges:
        new = ledger.tokens_new(0, learner, 0, start, stop)
        ledger.merge(0, learner, 0, start, stop)
        told.setdefault(learner, set()).update(range(start, stop))
        counted += new
        assert ledger.merged_P[0] == counted <= sum(len(tokens) for tokens in told.values())


@quick
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 20)), max_size=20))
def test_in_order_the_sum_is_exactly_what_is_covered_i5(
    merges: list[tuple[int, int, int]],
) -> None:
    """Each contribution reaches back over some of the last one and on over new tokens."""
    ledger, covered, reached = Ledger.empty(2), [set(), set()], [0, 0]
    for p, back, ahead in merges:
        start, stop = max(reached[p] - back, 0), reached[p] + ahead
        ledger.merge(p, "a", 0, start, stop)
        covered[p] |= set(range(start, stop))
        reached[p] = stop
    assert ledger.merged_P == [len(tokens) for tokens in covered]


def test_an_overlap_adds_only_its_new_part() -> None:
    ledger = Ledger.empty(2)
    ledger.merge(0, "a", 0, 0, 100)
    assert ledger.tokens_new(0, "a", 0, 50, 150) == 50
    assert ledger.tokens_new(0, "a", 0, 50, 90) == 0
    # Another fragment, learner or life has counted none of them.
    assert ledger.tokens_new(1, "a", 0, 50, 150) == 100
    assert ledger.tokens_new(0, "b", 0, 50, 150) == 100
    assert ledger.tokens_new(0, "a", 1, 50, 150) == 100


def test_a_mark_never_goes_back() -> None:
    ledger = Ledger.empty(1)
    for start, stop in ((0, 100), (20, 60), (50, 100)):
        ledger.merge(0, "a", 0, start, stop)
    assert ledger.merged_P == [100]


def test_processed_adds_the_lives_of_every_learner() -> None:
    ledger = Ledger.empty(1)
    ledger.saw("a", 0, 10)
    ledger.saw("b", 3, 5)
    ledger.saw("a", 0, 7)  # a report that was overtaken
    assert ledger.processed == 15
    ledger.saw("a", 1, 4)
    ledger.saw("a", 0, 1000)  # of a life that is over
    assert ledger.processed == 19


def test_useful_is_the_mean_over_fragments_by_size() -> None:
    ledger = Ledger.empty(2)
    ledger.merge(0, "a", 0, 0, 100)
    assert ledger.useful([30, 10]) == 75
    assert ledger.useful([0, 0]) == 0


@quick
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), spans), max_size=10))
def test_it_survives_json(merges: list[tuple[str, int, tuple[int, int]]]) -> None:
    ledger = Ledger.empty(1)
    for learner, incarnation, (start, stop) in merges:
        ledger.merge(0, learner, incarnation, start, stop)
    assert Ledger.restore(json.loads(json.dumps(ledger.meta()))) == ledger
