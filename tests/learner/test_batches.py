"""Batches across shards: never waiting, every sequence in its turn."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.data.batches_io import FINISHED_TOLD, Batches
from diloco_learner.data.shards import ShardCut, ShardReader
from diloco_shared.protocol.messages import Cursor

CUT = ShardCut(np.arange(4 * 5 * 8 + 1), shards=4, context=8, seed=0)  # five sequences each


def shard_rows(shard: int, sequences: int = 0, passes: int = 0) -> np.ndarray:
    return ShardReader(CUT, shard, sequences, passes).take(100)


def test_it_is_ready_with_its_first_lease_and_wants_one_ahead() -> None:
    batches = Batches(CUT, 2)
    assert not batches.ready and batches.wants and batches.cursor is None
    batches.grant(1, 0, 0)
    assert batches.ready and not batches.wants
    batches.take()
    assert batches.wants and batches.cursor == Cursor(shard=1, sequences=2)
    with pytest.raises(AssertionError, match="before the first lease"):
        Batches(CUT, 2).take()


def test_a_batch_goes_on_into_the_next_shard() -> None:
    batches = Batches(CUT, 3)
    batches.grant(2, 1, 0)  # four sequences left
    batches.grant(0, 0, 7)
    rows = np.concatenate([batches.take() for _ in range(3)])
    expected = np.concatenate([shard_rows(2, 1), shard_rows(0, 0, 7)])
    np.testing.assert_array_equal(rows, expected)
    assert batches.finished == ((2, 0),)
    assert batches.cursor == Cursor(shard=0, sequences=5, passes=7, finished=((2, 0),))
    assert batches.repeats == 0


def test_without_a_lease_in_time_the_shard_is_read_again_in_another_order() -> None:
    batches = Batches(CUT, 5)
    batches.grant(3, 0, 2)
    first, second = batches.take(), batches.take()
    np.testing.assert_array_equal(first, shard_rows(3, 0, 2))
    np.testing.assert_array_equal(second, shard_rows(3, 0, 3))
    assert batches.repeats == 1 and batches.finished == ()
    # The lease comes at last: the repeated shard is given back once.
    batches.grant(1, 0, 0)
    np.testing.assert_array_equal(batches.take(), shard_rows(1))
    assert batches.finished == ((3, 3),)


@examples(8)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6))
def test_batches_are_always_full(size: int, grants: list[tuple[int, int]]) -> None:
    batches = Batches(CUT, size)
    batches.grant(0, 0, 0)
    for shard, consumed in grants:
        assert batches.take().shape == (size, 9)
        batches.grant(shard, consumed, 0)
    assert batches.take().shape == (size, 9)


def test_a_lease_of_a_shard_at_its_end_is_passed_through() -> None:
    batches = Batches(CUT, 2)
    batches.grant(0, 5, 0)
    batches.grant(1, 0, 0)
    np.testing.assert_array_equal(batches.take(), shard_rows(1)[:2])
    assert batches.finished == ((0, 0),)


def test_a_finished_shard_stays_in_the_cursor_until_it_is_closed() -> None:
    batches = Batches(CUT, 5)
    for shard in (0, 1, 2):
        batches.grant(shard, 0, 0)
        batches.take()
    cursor = batches.cursor
    assert cursor is not None and cursor.finished == ((0, 0), (1, 0))
    batches.close(0, 0)
    assert batches.finished == ((1, 0),)


def test_a_shard_that_was_taken_away_is_left_as_soon_as_there_is_another() -> None:
    batches = Batches(CUT, 2)
    batches.grant(0, 0, 0)
    batches.take()
    batches.revoke(0)
    np.testing.assert_array_equal(batches.take(), shard_rows(0, 2)[:2])  # never waits
    assert batches.unleased == 2
    batches.grant(1, 0, 0)
    np.testing.assert_array_equal(batches.take(), shard_rows(1)[:2])
    assert batches.unleased == 2 and batches.finished == (), "not ours to call finished"


def test_a_lease_ahead_that_was_taken_away_is_not_begun() -> None:
    batches = Batches(CUT, 5)
    batches.grant(0, 0, 0)
    batches.take()
    batches.grant(1, 0, 0)
    batches.revoke(1)
    assert batches.wants
    batches.grant(2, 0, 0)
    np.testing.assert_array_equal(batches.take(), shard_rows(2))


def test_a_first_lease_that_was_taken_away_is_read_until_there_is_another() -> None:
    """Lost between the lease and the first step: the train thread counts on something to read."""
    batches = Batches(CUT, 2)
    batches.grant(0, 0, 0)
    batches.revoke(0)
    assert batches.ready
    np.testing.assert_array_equal(batches.take(), shard_rows(0)[:2])
    assert batches.unleased == 2 and batches.wants
    batches.grant(1, 0, 0)
    np.testing.assert_array_equal(batches.take(), shard_rows(1)[:2])
    assert batches.unleased == 2 and batches.finished == ()


def test_a_shard_that_is_only_shared_is_left_for_a_leased_one() -> None:
    batches = Batches(CUT, 2)
    batches.grant(0, 0, 0, leased=False)
    batches.take()
    batches.grant(1, 0, 0)
    np.testing.assert_array_equal(batches.take(), shard_rows(1)[:2])
    assert batches.unleased == 2


def test_a_cursor_is_never_too_long_for_a_message() -> None:
    batches = Batches(CUT, 5)
    for n in range(2 * FINISHED_TOLD):
        batches.grant(n % 4, 0, n)
        batches.take()
    cursor = batches.cursor
    assert cursor is not None
    assert len(Cursor.model_validate(cursor.model_dump()).finished) == FINISHED_TOLD
