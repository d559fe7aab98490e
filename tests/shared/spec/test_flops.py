"""Operations per token, counted by hand for shapes small enough."""

import math
from dataclasses import replace

import pytest

from diloco_shared.spec.shapes import (
    SHAPES,
    Shape,
    active_parameters,
    computed_flops_per_token,
    flops_per_token,
    tensors,
)

TINY = Shape(vocabulary=10, width=4, layers=2, heads=2, kv_heads=1, head_width=2, hidden=6)
# Query, key, value and output matrices, gate, up and down; two layers; and the head.
WEIGHTS = 2 * (4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 6) + 4 * 10


def test_weights_and_what_tokens_see_are_counted() -> None:
    # Of three tokens the first sees one, the second two, the third three: two on average.
    seen = 2
    assert flops_per_token(TINY, 3) == 3 * (2 * WEIGHTS + 2 * 2 * 2 * (2 * 2) * seen)


def test_a_window_is_seen_and_no_more() -> None:
    # Windows of two tokens: one, two, two, two; in the second of two layers all: 2.5 on average.
    local, whole = 7 / 4, 10 / 4
    shape = replace(TINY, window=2, global_every=2)
    assert flops_per_token(shape, 4) == pytest.approx(3 * (2 * WEIGHTS + 4 * 4 * (local + whole)))


def test_biases_norms_and_looking_up_cost_nothing() -> None:
    more = replace(TINY, qkv_bias=True, qk_norm=True, post_norms=True, tied=True)
    assert flops_per_token(more, 3) == flops_per_token(TINY, 3)


def test_a_billion_parameters_need_six_operations_each() -> None:
    assert flops_per_token(SHAPES["1b"], 1) == pytest.approx(6 * 1.236e9, rel=0.01)


def test_of_experts_those_that_a_token_takes_are_counted() -> None:
    sparse = replace(TINY, experts=5, experts_per_token=2)
    # A router, and two experts in place of the MLP, which is as large as one of them.
    more = 2 * (4 * 5 + 3 * 4 * 6)
    assert flops_per_token(sparse, 3) == flops_per_token(TINY, 3) + 6 * more
    assert active_parameters(sparse) == active_parameters(TINY) + more
    # With room for all tokens every expert computes them all; else as many as there is room for.
    assert computed_flops_per_token(sparse, 3) == flops_per_token(TINY, 3) + 6 * 2 * (20 + 4 * 72)
    tight = replace(sparse, expert_capacity=1.0)
    assert tight.room(10) == 4 and tight.room(1) == 1
    assert computed_flops_per_token(tight, 10) == pytest.approx(flops_per_token(sparse, 10))


def test_a_published_mixture_has_the_parameters_that_its_name_tells() -> None:
    shape = SHAPES["30b-a3b"]
    assert sum(math.prod(t.shape) for t in tensors(shape)) == pytest.approx(30.5e9, rel=0.002)
    assert active_parameters(shape) == pytest.approx(3.3e9, rel=0.02)
