"""Evaluation: the same held-out sequences every time, and the mean over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.models import ModelDef
from diloco_learner.training.evaluate import (
    SEQUENCES_MAX,
    TOKENS_MAX,
    at_once,
    held_out,
    make_evaluate,
    targets,
)
from diloco_shared.corpora.mix import Mixed
from diloco_shared.corpora.sequences import Tokens

TOKENS = np.arange(1001)


def test_sequences_are_seeded_and_distinct() -> None:
    chosen = held_out(TOKENS, 10, 20, seed=3)
    assert chosen.shape == (20, 11) and chosen.dtype == np.int32
    np.testing.assert_array_equal(chosen, held_out(TOKENS, 10, 20, seed=3))
    assert not np.array_equal(chosen, held_out(TOKENS, 10, 20, seed=4))
    assert len({row[0] for row in chosen}) == 20
    np.testing.assert_array_equal(chosen - chosen[:, :1], np.tile(np.arange(11), (20, 1)))


def test_more_sequences_begin_with_the_fewer() -> None:
    np.testing.assert_array_equal(held_out(TOKENS, 10, 40, 3)[:20], held_out(TOKENS, 10, 20, 3))


def test_of_very_many_windows_few_are_drawn_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_learner.training.evaluate.ORDERED_MAX", 10)
    chosen = held_out(TOKENS, 10, 60, seed=3)
    assert len({row[0] for row in chosen}) == 60
    np.testing.assert_array_equal(chosen[:20], held_out(TOKENS, 10, 20, seed=3))
    assert len({row[0] for row in held_out(TOKENS, 10, 10**6, 0)}) == 100


def test_windows_of_mapped_tokens_are_those_of_an_array() -> None:
    parts = Tokens(np.split(TOKENS.astype(np.uint16), [3, 500]), 1001)
    np.testing.assert_array_equal(held_out(parts, 10, 20, 3), held_out(TOKENS, 10, 20, 3))


def test_no_more_than_there_are() -> None:
    assert len(held_out(TOKENS, 10, 10**6, 0)) == 100
    with pytest.raises(ValueError, match="has 10 tokens, a sequence 11"):
        held_out(np.arange(10), 10, 5, 0)


@pytest.mark.parametrize("sequences", [1, SEQUENCES_MAX, 2 * SEQUENCES_MAX + 3])
def test_every_sequence_counts_alike_in_whatever_batch(sequences: int) -> None:
    model = ModelDef(
        init=lambda key: (),
        loss=lambda params, batch: params * jnp.mean(batch.astype(jnp.float32)),
        is_embedding=lambda name: False,
    )
    rows = np.random.default_rng(0).integers(0, 100, (sequences, 5)).astype(np.int32)
    assert make_evaluate(model)(2.0, rows) == pytest.approx(2 * rows.mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("context", "trained", "wanted"),
    [
        (8, 1, SEQUENCES_MAX),
        (TOKENS_MAX // 8, 1, 8),
        (10 * TOKENS_MAX, 1, 1),
        (10 * TOKENS_MAX, 3, 3),  # what a step holds, an evaluation may hold too
    ],
)
def test_long_sequences_are_evaluated_few_at_a_time(
    context: int, trained: int, wanted: int
) -> None:
    assert at_once(context, trained) == wanted


def masked_mean(params: float, batch: jax.Array) -> jax.Array:
    """A loss like the transformer's: over the targets, of which a token below 0 is none."""
    counts = batch[:, 1:] >= 0
    total = jnp.sum(jnp.where(counts, batch[:, 1:].astype(jnp.float32), 0.0))
    return params * total / jnp.maximum(jnp.sum(counts), 1)


def test_the_loss_is_the_mean_over_all_targets_however_they_lie_in_batches() -> None:
    """A sequence with few of them weighs little."""
    model = ModelDef(lambda key: (), masked_mean, lambda name: False, masked_tokens=True)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 100, (2 * SEQUENCES_MAX + 3, 9)).astype(np.int32)
    share = np.linspace(0, 1, len(rows))[:, None]  # the first have none, the last all
    rows = np.where(rng.random(rows.shape) < share, rows, ~rows)
    rows[:SEQUENCES_MAX] = np.where(rows[:SEQUENCES_MAX] < 0, rows[:SEQUENCES_MAX], ~5)
    wanted = rows[:, 1:][rows[:, 1:] >= 0]
    assert targets(rows) == len(wanted) > 0
    assert make_evaluate(model)(2.0, rows) == pytest.approx(2 * wanted.mean(), rel=1e-5)
    assert make_evaluate(model)(2.0, rows[:SEQUENCES_MAX]) == 0.0, "and no number without any"


def test_held_out_sequences_without_a_target_are_refused() -> None:
    """The first token of a sequence is no target."""
    read = Tokens([np.full(101, ~1, np.int32)], 9, masked=True)
    with pytest.raises(ValueError, match="none of the 5 held-out sequences has a token to be pred"):
        held_out(read, 10, 5, 0)
    plain = Tokens([np.ones(101, np.uint16)], 9)
    assert targets(held_out(Mixed((read, plain), (1, 1), ("a", "b")), 10, 4, 0)) == 20
