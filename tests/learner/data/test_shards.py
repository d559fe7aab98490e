"""Shards: every sequence once per pass, in an order of the pass, resumable anywhere."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.data.shards import ShardCut, ShardReader
from diloco_shared.corpora.sequences import Tokens

quick = examples(8)


def cut(tokens: int = 1000, shards: int = 3, context: int = 8, seed: int = 0) -> ShardCut:
    """Tokens that are their own places."""
    return ShardCut(np.arange(tokens), shards, context, seed)


def starts(reader: ShardReader, batch: int = 7) -> list[int]:
    """Where each remaining sequence begins."""
    seen: list[int] = []
    while reader.left:
        seen += [int(row[0]) for row in reader.take(batch)]
    return seen


@quick
@given(
    st.integers(1, 5), st.integers(1, 10), st.integers(0, 300), st.integers(0, 3), st.integers(0, 9)
)
def test_a_pass_over_all_shards_reads_every_sequence_once(
    shards: int, context: int, more: int, passes: int, seed: int
) -> None:
    c = cut(shards * context + 1 + more, shards, context, seed)
    each = [starts(ShardReader(c, shard, passes=passes)) for shard in range(shards)]
    seen = [start for its in each for start in its]
    assert sorted(seen) == [n * context for n in range(c.sequences)]
    # What is left over is less than a sequence, and no shard has two more than another.
    assert len(c.tokens) - 1 - len(seen) * context < context
    assert {len(its) - c.sequences_per_shard for its in each} <= {0, 1}
    assert [len(its) for its in each] == [c.size(shard) for shard in range(shards)]


def test_the_end_of_a_small_corpus_is_read() -> None:
    """Of 244 sequences in 64 shards each is dealt three, and 52 are left over."""
    c = cut(244 * 8 + 1, shards=64)
    seen = {start for shard in range(64) for start in starts(ShardReader(c, shard))}
    assert len(seen) == 244 and max(seen) == 243 * 8
    # They are read behind what each shard is dealt, whose order does not know of them.
    even = cut(192 * 8 + 1, shards=64)
    for shard in (0, 51, 52, 63):
        whole = starts(ShardReader(c, shard, passes=1))
        assert whole[:3] == starts(ShardReader(even, shard, passes=1))
        assert whole[3:] == [(192 + shard) * 8] * (shard < 52)


def test_a_sequence_is_context_plus_one_tokens_in_a_row() -> None:
    batch = ShardReader(cut(), 1).take(5)
    assert batch.shape == (5, 9) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch - batch[:, :1], np.tile(np.arange(9), (5, 1)))


@quick
@given(st.integers(0, 45), st.integers(1, 9))
def test_reading_goes_on_at_a_cursor(consumed: int, batch: int) -> None:
    c = cut()
    whole = starts(ShardReader(c, 2, passes=1))
    reader = ShardReader(c, 2, passes=1)
    reader.take(consumed)
    again = ShardReader(c, reader.cursor.shard, reader.cursor.sequences, passes=1)
    assert again.cursor == reader.cursor
    assert starts(again, batch) == whole[consumed:]


def test_orders_are_seeded_and_differ_by_pass_shard_and_seed() -> None:
    c = cut()
    first = starts(ShardReader(c, 0))
    assert starts(ShardReader(cut(), 0)) == first != sorted(first)
    assert starts(ShardReader(c, 0, passes=1)) != first
    assert starts(ShardReader(cut(seed=1), 0)) != first
    one = starts(ShardReader(c, 1))
    assert [s - min(one) for s in one] != first


def test_a_shard_is_a_sample_of_the_whole_corpus() -> None:
    c = cut(tokens=4000 * 8 + 1, shards=4)
    halves = [np.mean(np.array(starts(ShardReader(c, s), 100)) < 16000) for s in range(4)]
    # Binomial with 1000 draws: 0.5 +- 0.016. A stretch of the corpus would give 0 or 1.
    assert all(0.42 < half < 0.58 for half in halves), halves


def test_the_end_gives_fewer_and_then_none() -> None:
    reader = ShardReader(cut(), 0)
    total = reader.left
    assert len(reader.take(total - 2)) == total - 2
    assert len(reader.take(5)) == 2
    assert reader.take(5).shape == (0, 9)
    assert reader.cursor.sequences == total
    # A cursor beyond the end, of a run with a longer corpus, is the end.
    assert ShardReader(cut(), 0, 10**6).left == 0


def test_what_cannot_be_cut_or_read_is_said() -> None:
    with pytest.raises(ValueError, match=r"24 training tokens are too few for 3 shards.*lower"):
        cut(tokens=24)
    assert cut(tokens=25).sequences_per_shard == 1
    for shard in (-1, 3):
        with pytest.raises(ValueError, match=f"shard {shard} of 3"):
            ShardReader(cut(), shard)


def test_the_order_is_that_of_every_release() -> None:
    """Else a run that goes on under a new release reads some data twice and some never."""
    reader = ShardReader(cut(seed=5), 1, sequences=2, passes=1)
    assert starts(reader)[:8] == [776, 160, 272, 248, 792, 936, 24, 840]


def test_mapped_tokens_are_read_as_an_array_is() -> None:
    whole = np.arange(1000, dtype=np.uint16)
    mapped = Tokens(np.split(whole, [1, 300, 777]), 1000)
    for shard in range(3):
        np.testing.assert_array_equal(
            ShardReader(ShardCut(mapped, 3, 8, 0), shard).take(100),
            ShardReader(ShardCut(whole, 3, 8, 0), shard).take(100),
        )
