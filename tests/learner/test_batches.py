"""Batches across shards: never waiting, every sequence in its turn."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.data.batches_io import AHEAD_MAX, FINISHED_TOLD, IN_HAND_MAX, Batches
from diloco_learner.data.left_out import LEFT_OUT_MAX
from diloco_learner.data.shards import Cut, MixedCut, ShardCut, ShardReader
from diloco_shared.corpora.mix import Interleave
from diloco_shared.corpora.sequences import Tokens, WrongToken
from diloco_shared.corpora.token_files import token_file
from diloco_shared.protocol.messages import Cursor
from diloco_syncer.messages.data_leases_io import HELD_MAX

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
    assert batches.repeats == 1
    assert batches.cursor == Cursor(shard=3, sequences=5, passes=3, finished=((3, 2),))
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
    assert batches.close(0, 0) and not batches.close(0, 0)
    assert batches.finished == ((1, 0),)


def test_so_much_is_leased_ahead_that_steps_need_no_more() -> None:
    """Of shards with less than a batch, a step reads several."""
    batches = Batches(CUT, 4)
    for shard in (0, 1):  # ten sequences: more than two batches
        assert batches.wants
        batches.grant(shard, 0, 0)
    assert not batches.wants
    batches.take()
    assert batches.wants, "five ahead"
    batches.grant(2, 2, 0)
    assert not batches.wants, "eight ahead"


def test_no_more_is_leased_ahead_than_others_can_spare() -> None:
    batches = Batches(CUT, 1000)
    for n in range(AHEAD_MAX):
        assert batches.wants
        batches.grant(n % 4, 0, n)
    assert not batches.wants


def test_no_more_is_in_hand_than_the_leader_lets_anybody_have() -> None:
    assert IN_HAND_MAX == HELD_MAX
    batches = Batches(CUT, 5)
    for n in range(IN_HAND_MAX):
        assert batches.wants
        batches.grant(n % 4, 0, n)
        batches.take()
    assert not batches.granted and not batches.wants
    batches.close(0, 0)
    assert batches.wants


def test_a_shard_that_was_leased_goes_before_what_is_only_repeated() -> None:
    batches = Batches(CUT, 2)
    batches.grant(0, 0, 4)
    for _ in range(3):
        batches.take()
    assert batches.repeating and batches.cursor == Cursor(
        shard=0, sequences=1, passes=5, finished=((0, 4),)
    )
    batches.grant(1, 0, 0)
    np.testing.assert_array_equal(batches.take(), shard_rows(1)[:2])
    # What was repeated is finished as before: nobody knows of a part of a pass.
    assert batches.finished == ((0, 4),) and not batches.repeating


def test_all_that_is_held_is_repeated_in_turn() -> None:
    """A batch of more than a shard has no sequence twice."""
    batches = Batches(CUT, 15)
    for shard in (2, 0, 3):
        batches.grant(shard, 0, 0)
    np.testing.assert_array_equal(
        batches.take(), np.concatenate([shard_rows(s) for s in (2, 0, 3)])
    )
    again = batches.take()
    np.testing.assert_array_equal(again, np.concatenate([shard_rows(s, 0, 1) for s in (2, 0, 3)]))
    assert len(np.unique(again[:, 0])) == 15
    assert batches.finished == ((2, 1), (0, 1), (3, 0)) and batches.repeats == 3


def test_what_was_repeated_in_part_comes_behind_the_others() -> None:
    batches = Batches(CUT, 5)
    for shard in (0, 1):
        batches.grant(shard, 0, 0)
        batches.take()
    batches.sequences = 2
    np.testing.assert_array_equal(batches.take(), shard_rows(0, 0, 1)[:2])
    batches.grant(2, 3, 0)
    batches.take()
    np.testing.assert_array_equal(batches.take(), shard_rows(1, 0, 1)[:2])


def test_a_shard_that_is_read_again_is_not_given_back_under_its_reader() -> None:
    """Its end was merged meanwhile: others would read it too."""
    batches = Batches(CUT, 5)
    batches.grant(0, 0, 0)
    batches.take()
    batches.sequences = 2
    batches.take()
    assert batches.repeating and not batches.close(0, 0)
    batches.grant(1, 0, 0)
    batches.take()
    assert batches.close(0, 0), "left for another"


def test_a_lost_shard_is_not_repeated() -> None:
    batches = Batches(CUT, 5)
    for shard in (0, 1, 2):
        batches.grant(shard, 0, 0)
        batches.take()
    batches.revoke(0)
    np.testing.assert_array_equal(batches.take(), shard_rows(1, 0, 1))
    batches.revoke(1)
    np.testing.assert_array_equal(batches.take(), shard_rows(2, 0, 1))
    batches.revoke(2)
    np.testing.assert_array_equal(batches.take(), shard_rows(2, 0, 2))
    assert batches.unleased == 5 and batches.finished == ()


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


def damaged(places: list[int], sequences: int = 20) -> Tokens:
    """Tokens of sequences of eight, of which those at these places have a number that is none."""
    numbers = np.arange(sequences * 8 + 1) % 256
    numbers[np.array(places, np.int64) * 8 + 3] = 300
    return Tokens([numbers.astype(np.uint16)], 256, "c")


def sound_rows(cut: Cut, shard: int) -> list[list[int]]:
    """Those of a shard's sequences that are one, read one by one."""
    found = []
    for place in cut.places(shard, 0, 0, cut.size(shard)):
        with suppress(WrongToken):
            found += cut.at(np.array([place])).tolist()
    return found


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_a_sequence_with_a_number_that_is_no_token_is_left_out(mixed: bool, size: int) -> None:
    """It counts as read, batches are full all the same, and all who read it do alike."""
    tokens = damaged([2, 3, 11])
    cut: Cut = ShardCut(tokens, 4, 8, 0)
    if mixed:
        cut = MixedCut((damaged([], 20), tokens), Interleave((1, 1)), 4, 8, 0)
    expected = [row for shard in range(4) for row in sound_rows(cut, shard)]
    assert len(expected) == cut.sequences - 3
    for _ in ("one learner", "another"):
        batches = Batches(cut, size)
        for shard in range(4):
            batches.grant(shard, 0, 0)
        read: list[list[int]] = []
        while len(read) + size <= len(expected):
            batch = batches.take()
            assert batch.shape == (size, 9)
            read += batch.tolist()
        assert read == expected[: len(read)] and batches.repeats == 0
        cursor = batches.cursor
        assert cursor is not None and cursor.shard == 3
        assert batches.left_out.total == 3 and "300, which is no" in batches.left_out.why


@pytest.mark.parametrize("size", [1, 3])
def test_a_sequence_that_cannot_be_read_is_left_out(tmp_path: Path, size: int) -> None:
    """As where a block of a disk is bad: here all behind the middle of a file is gone."""
    np.arange(161, dtype="<u2").tofile(tmp_path / "c.bin")
    tokens = Tokens([token_file(tmp_path / "c.bin", "uint16", 161)], 256, "c")
    batches = Batches(ShardCut(tokens, 1, 8, 0), size)
    batches.grant(0, 0, 0)
    os.truncate(tmp_path / "c.bin", 2 * 75)  # nine sequences, and a bit of the next one
    read = [row for _ in range(9 // size) for row in batches.take().tolist()]
    assert sorted(row[0] for row in read) == list(range(0, 72, 8))
    assert batches.left_out.total and batches.repeats == 0
    assert "c.bin ends at byte" in batches.left_out.why


def test_a_corpus_of_another_vocabulary_is_not_read_for_ever() -> None:
    cut = ShardCut(damaged(list(range(20))), 4, 8, 0)
    batches = Batches(cut, 2)
    batches.grant(0, 0, 0)
    with pytest.raises(WrongToken, match="made with another tokenizer"):
        batches.take()
    assert batches.left_out.total == LEFT_OUT_MAX


def test_wrong_numbers_here_and_there_never_end_it() -> None:
    cut = ShardCut(damaged(list(range(0, 200, 2)), 200), 1, 8, 0)
    batches = Batches(cut, 100)
    batches.grant(0, 0, 0)
    assert batches.take().shape == (100, 9)
    assert batches.left_out.total > LEFT_OUT_MAX


def test_what_counts_no_damage_reads_none() -> None:
    """Of a check, and of a measurement, every sequence is one."""
    with pytest.raises(WrongToken):
        ShardReader(ShardCut(damaged([0]), 1, 8, 0), 0).take(20)
